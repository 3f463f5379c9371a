"""The run of a rebuilt request: the completer calls its view through the decorators of the
project."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from django.http import HttpRequest

from idempotency._engine.claimed_key import ClaimedKey
from idempotency._engine.phased_run import PhasedRun


@dataclass(slots=True, eq=False, repr=False)
class RebuiltRun:
    """The claimed key of a rebuilt request, and its run once ``@idempotent`` is reached."""

    key: ClaimedKey
    #: A view runs for the key only if it is called with this object.
    request: HttpRequest
    run: PhasedRun | None = None

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this run visible to ``rebuilt_run_of`` in the block."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[RebuiltRun | None] = ContextVar("idempotency_rebuilt", default=None)


def rebuilt_run_of(request: HttpRequest) -> RebuiltRun | None:
    """Return the run of the completer for this request; None for a request of a client."""
    rebuilt = _current.get()
    return rebuilt if rebuilt is not None and rebuilt.request is request else None
