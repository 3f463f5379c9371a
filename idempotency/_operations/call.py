"""Call an operation: claim its key, run it, and tell the caller how it ended."""

from typing import Any

from django.db.utils import Error

from idempotency._engine.errors import connection_lost, exceeded_time_limit
from idempotency._engine.outer_transactions import in_outer_transaction
from idempotency._engine.run import run_phased, run_plain
from idempotency._hidden import Hidden
from idempotency._operations.definition import Definition, find
from idempotency._operations.results import encoded, restored
from idempotency._operations.work import OperationWork
from idempotency.exceptions import (
    InProgress,
    InterventionRequired,
    KeyReused,
    Unavailable,
    Unfinished,
)

#: The rest of the column is for the name of the operation.
MAX_SCOPE = 99

_IN_TRANSACTION = (
    "The operation {0} commits its own transactions, so it cannot run in an open one. Call"
    " {0}.stage(key, ...) here, which calls it after the COMMIT, or leave the transaction first."
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
) -> Any:
    """Run an operation, continue it, or return its stored result; see ``Operation.once``."""
    refuse_key(key.value)
    if definition.steps.is_phased and find(definition.name) is not definition:
        raise RuntimeError(_LATE.format(definition.name))
    work = OperationWork(definition, _body(definition, named))
    request = work.claimed_request(key.value, scope, user_id)
    using, phased = using or definition.alias, definition.steps.is_phased
    is_nested = in_outer_transaction(using)
    if phased and is_nested:
        raise RuntimeError(_IN_TRANSACTION.format(definition.name))
    try:
        done = (run_phased if phased else run_plain)(work, request, using=using)
    except (InProgress, KeyReused, InterventionRequired, Unavailable):
        raise
    except Exception as error:
        if isinstance(error, Error) and not is_nested and connection_lost(error, using):
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
    return restored(done.code, done.body)


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
