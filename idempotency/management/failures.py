"""The failures of a pass that an operator can cure: an unavailable database or broker, and a
missing migration."""

import contextlib
import logging
from collections.abc import Iterator

from django.core.management.base import CommandError
from django.db import InterfaceError, OperationalError

from idempotency._engine import aliases
from idempotency._engine.errors import is_read_only, missing_migration
from idempotency.backends import BrokerUnavailable

logger = logging.getLogger("idempotency")

#: The errors of an unavailable database or broker, which a loop logs as warnings.
UNREACHABLE = (OperationalError, InterfaceError, BrokerUnavailable)


@contextlib.contextmanager
def exit_1_explained(name: str, using: str) -> Iterator[None]:
    """Exit with status 1 and one line for errors that ``one_line_of`` describes."""
    try:
        yield
    except Exception as error:
        if (line := one_line_of(error, using)) is None:
            raise
        raise CommandError(f"{name}: {line}", returncode=1) from error


def one_line_of(error: BaseException, using: str) -> str | None:
    """Return one line about an unavailable database or broker, or a missing migration; None for any
    other error."""
    return missing_migration(error, using) or (
        in_one_line(error) if is_unreachable(error) else None
    )


def is_unreachable(error: BaseException) -> bool:
    """Return whether the database or the broker is unavailable; a read-only database counts as
    unavailable."""
    return isinstance(error, UNREACHABLE) or is_read_only(error)


def refuse_second_alias(name: str, using: str) -> None:
    """Exit with status 2 if the router writes to this database under another alias. A database that
    cannot be reached does not stop the command, because the router may write to another
    database."""
    try:
        routed = aliases.routed_twin(using)
    except (OperationalError, InterfaceError) as error:
        text = "%s: cannot tell whether %r is a second alias of a database: %s"
        logger.warning(text, name, using, in_one_line(error))
        return
    if routed is not None:
        raise CommandError(
            f"{name}: the database {using!r} is also {routed!r}, to which the router writes. The"
            " work of this command and the queries of the project would not be in one transaction."
            f" Use --database {routed}.",
            returncode=2,
        )


def in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
