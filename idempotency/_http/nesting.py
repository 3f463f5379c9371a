"""A protected view that another protected view calls with the same key: it becomes a part of the
outer run.

For example, ``partial_update()`` of Django REST framework calls ``update()``, and a project has
decorated both.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest

from idempotency import scopes
from idempotency._engine.adapter import Run
from idempotency._engine.claimed_key import ClaimedKey
from idempotency._engine.errors import effective_isolation
from idempotency._engine.phased_run import current_key
from idempotency._hidden import Hidden
from idempotency._http import key_header
from idempotency._http.options import Options
from idempotency._http.view import Call

#: The attribute of a request with the run of its view. Copies of the request have it too, in each
#: thread.
_RUN = "_idempotency_run"
#: The options that a part of a run cannot have for itself, because they concern the key.
_OF_KEY = ("validate", "retention_hours", "lease_seconds")

_running: ContextVar["ViewRun | None"] = ContextVar("idempotency_run", default=None)


@dataclass(slots=True, eq=False, repr=False)
class ViewRun:
    """A protected view that runs, and the run of its key."""

    call: Call
    options: Options
    run: Run
    is_over: bool = False
    _before: "ViewRun | None" = None
    _tokens: tuple[Any, ...] = ()

    @property
    def key(self) -> ClaimedKey:
        key: ClaimedKey = self.run.key
        return key

    @property
    def is_in_transaction(self) -> bool:
        """Return whether this thread is in the transaction of the run."""
        own = self.run.transaction
        return own is not None and own.is_open

    def __enter__(self) -> None:
        """Set the attribute ``idempotency_key`` of the request, and make the run known to views
        that its view calls."""
        request, key = vars(self.call.request), self.run.key
        self._before = request.get(_RUN)
        self._tokens = _running.set(self), current_key.set(key)
        request[_RUN], request["idempotency_key"] = self, key

    def __exit__(self, *error: object) -> None:
        request, before = vars(self.call.request), self._before
        running, key = self._tokens
        self.is_over = True
        current_key.reset(key)
        _running.reset(running)
        request.pop(_RUN, None)
        # That of another key, whose view has called this one.
        if before is not None and not before.is_over:
            request[_RUN], request["idempotency_key"] = before, before.key


def outer_run(request: HttpRequest) -> ViewRun | None:
    """Return the run from which a view was called with this request; None outside of runs."""
    found: ViewRun | None = vars(request).get(_RUN)
    if found is None or found.is_over:
        found = _running.get()
    return None if found is None or found.is_over else found


def join(outer: ViewRun, call: Call, options: Options) -> bool:
    """Return whether a view becomes a part of the outer run, and give its request the key of the
    run. Return False if its request has no key or another one.

    Raises RuntimeError if the view names the key of the outer run, but cannot be a part of it; and
    if it has another key, but runs in the transaction of the outer run.
    """
    key = _key_of(outer, call, options)
    if key is None or key.value != outer.key.idempotency_key:
        is_inside = key is not None and outer.is_in_transaction
        if is_inside and options.alias(call.request) == outer.run.using:
            raise _refused(outer, call, "another idempotency key, inside its transaction")
        return False
    if (difference := _difference(outer, call, options)) is not None:
        raise _refused(outer, call, f"the same idempotency key, but {difference}")
    call.request.idempotency_key = outer.key  # type: ignore[attr-defined]
    return True


def _refused(outer: ViewRun, call: Call, how: str) -> RuntimeError:
    return RuntimeError(
        f"The protected view {outer.call.name} has called the protected view {call.name} with"
        f" {how}. Call a function without @idempotent from both views."
    )


def _key_of(outer: ViewRun, call: Call, options: Options) -> Hidden[str] | None:
    if call.request is outer.call.request and options.key_from == outer.options.key_from:
        return Hidden(outer.key.idempotency_key)
    key = key_header.key_of(call.request, call.view_request, options.key_from)
    if key is None and outer.run.work.by_completer and vars(call.request).get(_RUN) is outer:
        # The rebuilt request has no header, and neither has a copy of it.
        return Hidden(outer.key.idempotency_key)
    return key


def _difference(outer: ViewRun, call: Call, options: Options) -> str | None:
    """Return why a view with the same key cannot be a part of the run."""
    if options.recovery_points is not None:
        return "it is phased"
    if not outer.is_in_transaction:
        return (
            "outside the transaction of the outer view, in which its work must be committed. Call"
            " it in the same thread; in a phased view, inside a phase"
        )
    if options.alias(call.request) != outer.run.using:
        return "with another database (using=)"
    if not _has_scope(outer, call, options):
        return "with another scope="
    for name in _OF_KEY:
        if getattr(options, name) != getattr(outer.options, name):
            return f"with another {name}="
    levels = {options.level(), outer.run.level}
    if len(levels) > 1 and len({effective_isolation(each, outer.run.using) for each in levels}) > 1:
        return "with another isolation level"
    return None


def _has_scope(outer: ViewRun, call: Call, options: Options) -> bool:
    by_completer = outer.run.work.by_completer
    if options.scope == outer.options.scope and (
        call.request is outer.call.request or by_completer
    ):
        return True
    found = scopes.scope_of(call.view_request, options.scope)
    # Data from which a scope is read may be missing in the rebuilt request.
    return found == outer.key.scope or (by_completer and not found)
