"""The run of a job in a worker of RQ, Celery or Django Tasks: the inbox, the hooks of the job, and
outages of the database."""

import logging
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from django.db import Error, InterfaceError, connections, router

from idempotency._engine.errors import connection_lost, drop_lost_connections, sqlstate_of
from idempotency._hidden import Hidden
from idempotency._records import STAGED_OPERATION
from idempotency._text import error_text, storable
from idempotency.exceptions import InProgress, Unavailable, Unfinished
from idempotency.inbox import STAGED_JOBS, process_once, took_effect
from idempotency.models import ProcessedMessage

logger = logging.getLogger("idempotency")

#: The exceptions of operations after which the same call may succeed.
RETRIED = (InProgress, Unavailable, Unfinished)
#: The SQLSTATEs of a session that the server ended at a limit of time, and of limits of memory and
#: of temporary files. The same run of the same job exceeds them again.
_LIMITS = ("25P03", "25P04", "53200", "53400")


@contextmanager
def job_run(
    name: str, job_id: str, using: str | None, trace: list[Any] | None = None
) -> Iterator[bool]:
    """Open ``process_once`` for a delivery of a job. The variable of the block is True for the
    first delivery. The argument ``trace`` is for a tracer, which replaces this function.

    On return the work is committed, and each on_commit hook of the job was called once. A hook that
    raised is recorded in the row of the inbox and logged, and the others were called too. The next
    delivery would call none of them.

    The job of a staged operation runs outside of that transaction, because the operation commits
    its own ones, and its key makes a repeat harmless. The row is inserted after it.
    """
    alias = using or router.db_for_write(ProcessedMessage)
    try:
        if name == STAGED_OPERATION:
            first = not took_effect(STAGED_JOBS, [job_id], using=alias)
            yield first
            if first:
                with process_once(STAGED_JOBS, job_id, using=alias):
                    pass
            return
        own = not connections[alias].in_atomic_block
        with process_once(STAGED_JOBS, job_id, using=alias) as first:
            yield first
            if own:  # Otherwise the hooks belong to the transaction around this block.
                _guard_hooks(name, job_id, alias)
    finally:
        drop_lost_connections()  # Otherwise the next job would fail on them.


def is_uncounted(error: BaseException, using: str | None) -> bool:
    """Return whether the run of a job does not count as a try: the database was unavailable, or an
    operation asks for a retry. An operation that exceeds a time limit would exceed it again."""
    if isinstance(error, RETRIED):
        return getattr(error, "code", "") != "time_limit_exceeded"
    return is_outage(error, using)


def is_outage(error: BaseException, using: str | None) -> bool:
    """Return whether the database was unavailable."""
    if not isinstance(error, Error) or isinstance(error, InterfaceError):
        return False
    if (sqlstate_of(error) or "").startswith(_LIMITS):
        return False
    alias = using or router.db_for_write(ProcessedMessage)
    # A job that closes its own connection would do so in each run.
    return not connections[alias].closed_in_transaction and connection_lost(error, alias)


def _guard_hooks(name: str, job_id: str, alias: str) -> None:
    connection = connections[alias]
    errors: list[str] = []

    def guarded(hook: Hidden[Callable[[], object]]) -> Callable[[], None]:
        def call() -> None:
            try:
                hook.value()
            except BaseException as error:
                errors.append(f"{name}: {error_text(error)}")
                _record(job_id, errors, alias)
                text = "an on_commit hook of the job %s (%s) failed, and is not called again"
                with suppress(Exception):  # Otherwise the other hooks would not be called.
                    logger.exception(text, job_id, name)
                if not isinstance(error, (Exception, CancelledError)):
                    raise

        return call

    # The stubs know two of the three values of an entry.
    hooks: list[Any] = connection.run_on_commit
    hooks[:] = [(savepoints, guarded(Hidden(hook)), robust) for savepoints, hook, robust in hooks]


def _record(job_id: str, errors: list[str], alias: str) -> None:
    with suppress(Error):  # The log has the error.
        connections[alias].close_if_unusable_or_obsolete()
        row = ProcessedMessage.objects.using(alias).filter(source=STAGED_JOBS, message_id=job_id)
        row.update(hook_error=storable("\n".join(errors)))
