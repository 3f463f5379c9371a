"""Call an operation: claim its key, run it, and return or raise the result for the caller."""

import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

from django.db.utils import Error

from idempotency._engine import events
from idempotency._engine.adapter import ClaimedRequest
from idempotency._engine.errors import (
    connection_lost,
    drop_lost_connections,
    exceeded_time_limit,
    name_missing_migration,
)
from idempotency._engine.fence import StoredResponse
from idempotency._engine.outer_transactions import in_outer_transaction
from idempotency._engine.run import run_phased, run_plain
from idempotency._hidden import Hidden
from idempotency._operations.definition import Definition, find
from idempotency._operations.results import encoded, restored
from idempotency._operations.work import OperationWork
from idempotency.exceptions import CONFLICTS, Unavailable, Unfinished
from idempotency.reaper import MESSAGE_RETENTION
from idempotency.signals import RequestOutcome

#: The name of the operation is stored in the same column.
MAX_SCOPE = 99
#: The callers get these errors as they are.
_UNCHANGED = (*CONFLICTS, Unavailable)
_STAGED_HOURS = MESSAGE_RETENTION // timedelta(hours=1)

_IN_TRANSACTION = (
    "The operation {0} commits its own transactions, so it cannot run in an open transaction. Call"
    " {0}.stage(key, ...) here, which calls the operation after the COMMIT. Or leave the"
    " transaction first."
    " Under ATOMIC_REQUESTS, decorate the view with django.db.transaction.non_atomic_requests."
)
_LATE = (
    "The operation {0} was registered after the start of the project, so the completer of another"
    " process could not continue it. Move it to the module operations.py of its app."
)


def run(
    definition: Definition,
    key: Hidden[str],
    named: Hidden[dict[str, Any]],
    scope: str,
    user_id: Any,
    using: str | None = None,
    staged: bool = False,
) -> Any:
    """Run an operation, continue it, or return its stored result; see ``Operation.once``.

    A new key of a staged operation is kept for as long as the inbox keeps the message of its job.
    Without the message, only the key prevents that a second delivery runs the operation again.
    """
    refuse_key(key.value)
    if definition.steps.is_phased and find(definition.name) is not definition:
        raise RuntimeError(_LATE.format(definition.name))
    work = OperationWork(definition, _body(definition, named))
    start, outcome = time.monotonic(), RequestOutcome.FAILED
    try:
        claim = work.claimed_request(key.value, scope, user_id)
        if staged and claim.retention_hours is not None:
            claim = replace(claim, retention_hours=max(claim.retention_hours, _STAGED_HOURS))
        done = _done(work, claim, using or definition.alias)
        outcome = RequestOutcome.REPLAYED if work.is_replayed else RequestOutcome.RAN
    except CONFLICTS:
        outcome = RequestOutcome.CONFLICT
        raise
    except Unavailable as error:
        if error.code == "conflict":
            outcome = RequestOutcome.CONFLICT
        raise
    finally:
        if outcome in (RequestOutcome.FAILED, RequestOutcome.CONFLICT):
            drop_lost_connections()
        claimed = work.run.key if work.run is not None else None
        events.emit_answered(claimed, None, outcome, time.monotonic() - start)
    return restored(done.code, done.body)


def _done(work: OperationWork, request: ClaimedRequest, using: str) -> StoredResponse:
    phased, is_nested = work.definition.steps.is_phased, in_outer_transaction(using)
    if phased and is_nested:
        raise RuntimeError(_IN_TRANSACTION.format(work.name))
    try:
        done: StoredResponse = (run_phased if phased else run_plain)(work, request, using=using)
        return done
    except _UNCHANGED:
        raise
    except Exception as error:
        if isinstance(error, Error):
            name_missing_migration(error, using)
            if not is_nested and connection_lost(error, using):
                limit = exceeded_time_limit(error)
                code = "time_limit_exceeded" if limit else "database_unavailable"
                raise Unavailable(code=code) from error
        if work.is_finished:
            raise RuntimeError(
                "A hook of transaction.on_commit() raised this exception after the result was"
                " stored. The next call returns the result."
            ) from error
        if work.is_unfinished:
            raise Unfinished from error
        raise


def _body(definition: Definition, named: Hidden[dict[str, Any]]) -> bytes:
    try:
        return encoded(named.value, f"The arguments of {definition.name}")
    except TypeError:
        for argument, value in named.value.items():
            encoded(value, f"The argument {argument!r} of {definition.name}")
        raise


def refuse_key(key: Any) -> None:
    if not isinstance(key, str) or not 0 < len(key) <= 255 or "\0" in key:
        shown = f"{len(key)} characters" if isinstance(key, str) else f"a {type(key).__name__}"
        raise ValueError(
            f"The key of an operation must be a string of 1 to 255 characters without NUL, not"
            f" {shown}."
        )
