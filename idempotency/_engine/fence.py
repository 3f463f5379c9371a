"""The fence: conditional updates of a claimed key.

The WHERE clause of each UPDATE contains the random token of the claim. Most also compare the
recovery point, because a run may not know that its last COMMIT succeeded. If another claim has
taken over the key, the UPDATE changes no row, LockLost is raised, and the transaction is rolled
back.

The last UPDATE of a transaction is sent in one message with COMMIT (``OwnTransaction.set_last``),
so its number of rows cannot be checked before the COMMIT. The statement itself must therefore fail
if it changes no row. ``_or_fail`` divides one by the number of changed rows: PostgreSQL skips the
COMMIT after the division by zero, and rolls the transaction back. The error of the division means
LockLost.
Source: Brandur Leach, "Implementing Stripe-like Idempotency Keys in Postgres", whose lock has no
token.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from logging import INFO
from typing import Any

from django.db import connections
from psycopg.errors import DivisionByZero

from idempotency._engine import replication
from idempotency._engine.claimed_key import ClaimedKey
from idempotency._engine.cursors import is_instrumented
from idempotency._engine.events import log
from idempotency._engine.history import HistoryEvent
from idempotency._engine.round_trips import Meanings
from idempotency._engine.rows import execute, fetch, statements_for, token_parameter
from idempotency._engine.transactions import OwnTransaction
from idempotency._engine.updates import AT_CTID, RETURNING_CTID, one_line
from idempotency._hidden import Hidden, Parameters
from idempotency._text import storable, summary
from idempotency._watchdog import note_progress
from idempotency.exceptions import WAITS_FOR_DEPLOY, KeyStuck, LockLost
from idempotency.models import FINISHED

_MAX_CODE_LENGTH = 50
_LOST: Meanings = {DivisionByZero: LockLost}


@dataclass(frozen=True, slots=True, repr=False)
class StoredResponse:
    """The parts of a response to store."""

    code: int
    headers: dict[str, str]
    #: None: the body is not stored.
    body: bytes | None

    @property
    def event_detail(self) -> str:
        """The text of the event that the response is stored, for the history."""
        return f"status {self.code}"

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of a statement that stores the response."""
        return {"code": self.code, "headers": json.dumps(self.headers), "body": self.body}


def advance(
    key: ClaimedKey, recovery_point: str, *, using: str, last_of: OwnTransaction | None = None
) -> None:
    """Set the recovery point and renew the lock. Raises LockLost if another claim has taken over
    the key. This is the last statement of the transaction ``last_of``. If that sends it with
    COMMIT, LockLost is raised there."""
    values = {"recovery_point": recovery_point, "detail": recovery_point}
    _fenced("advance", key, using, last_of, event=HistoryEvent.RECOVERY_POINT, **values)


def renew(key: ClaimedKey, *, using: str, last_of: OwnTransaction | None = None) -> None:
    """Renew the lock, and mark that the request has begun something. Raises LockLost if another
    claim has taken over the key, or the key is stuck."""
    _fenced("renew", key, using, last_of)


def begin_call(key: ClaimedKey, name: str, *, using: str, stuck_code: str = "") -> None:
    """Renew the lock before a call to a downstream service, and write the call into the history.
    Raises LockLost if another claim has taken over the key, or it is stuck with another code than
    ``stuck_code``."""
    event, detail = HistoryEvent.CALL_BEGUN, summary(name)
    _fenced("begin_call", key, using, event=event, detail=detail, stuck_code=stuck_code)


def finish(
    key: ClaimedKey,
    response: StoredResponse,
    *,
    using: str,
    untouched: bool = False,
    last_of: OwnTransaction | None = None,
) -> None:
    """Store the response. Raises LockLost if another claim has taken over the
    key. With ``untouched``, raises LockLost also if something was begun: if the response to a
    COMMIT was lost, the run may not know of it."""
    statement = "finish_untouched" if untouched else "finish"
    if key.recovery_point == FINISHED:  # The row of a plain run was inserted as finished.
        statement = "finish_plain"
    event, detail = HistoryEvent.FINISHED, response.event_detail
    _fenced(statement, key, using, last_of, event=event, detail=detail, **response.parameters())


def set_free(
    key: ClaimedKey, code: int, *, using: str, last_of: OwnTransaction | None = None
) -> None:
    """Let the client of a plain run use its key again, although the writes of the work are
    committed. The row expires under another scope. It has the status of the response, but neither
    headers nor body."""
    event, detail = HistoryEvent.FINISHED, f"status {code}, not stored"
    _fenced("set_free", key, using, last_of, event=event, detail=detail, code=code)


def release(key: ClaimedKey, error: str, *, using: str) -> None:
    """Unlock an unfinished key and store ``error``; do nothing if it is finished, or another claim
    has taken it over.

    A failover may undo the release. The key would then be locked again. Raises NotReplicated in
    this case (CONFIRM_REPLICATED).
    """
    try:
        _fenced("release", key, using, event=HistoryEvent.ERROR, **_error_parameters(error))
    except LockLost:
        text = "key %s was finished or taken over by another run before it was released"
        log(INFO, text, key)
        replication.confirm(using)


def refuse(key: ClaimedKey, error: str, *, using: str) -> None:
    """Unlock a key whose client gets a refusal, and store ``error``.

    If nothing was begun, only a retry of the client runs the key from now on.
    Raises LockLost if another claim has taken over the key, because its response may be another
    one.
    """
    if key.untouched:
        _fenced("refuse", key, using, event=HistoryEvent.REFUSED, **_error_parameters(error))
    else:
        _fenced("release", key, using, event=HistoryEvent.ERROR, **_error_parameters(error))


def leave_to_client(key: ClaimedKey, error: str, *, using: str) -> None:
    """Unlock a key of which only the client can send the request again: ``refuse`` without
    LockLost, because no client gets a response now."""
    with suppress(LockLost):
        refuse(key, error, using=using)


def mark_stuck(key: ClaimedKey, code: str, reason: str, *, using: str) -> None:
    """Mark a claimed key as stuck. Raises LockLost if another claim has taken it over."""
    parameters = stuck_parameters(code, reason)
    _fenced("mark_stuck", key, using, **parameters)
    key.stuck_code = parameters["code"]


def _fenced(
    statement: str,
    key: ClaimedKey,
    using: str,
    last_of: OwnTransaction | None = None,
    **values: Any,
) -> None:
    text: str = getattr(statements_for(using), statement)
    parameters: Parameters = Hidden(values)
    del values
    parameters.value |= {"id": key.id, "position": key.ctid, "reached": key.recovery_point}
    parameters.value["token"] = token_parameter(key.fence, using)
    if last_of is not None:

        def note(row: tuple[Any, ...]) -> None:
            key.ctid = row[0]
            note_progress(key)

        if key.ctid is not None and last_of.set_last(_or_fail(text), parameters, note, _LOST):
            return
        last_of.require_open()
    if key.ctid is not None and not is_instrumented(connections[using]):
        # The row has another ctid after a rollback or an update.
        at_ctid, anywhere = text + AT_CTID, text + RETURNING_CTID
        row = fetch(at_ctid, parameters, using) or fetch(anywhere, parameters, using)
        if row is None:
            raise LockLost
        (key.ctid,) = row
    elif execute(text, parameters, using) != 1:
        raise LockLost
    note_progress(key)


@cache
def _or_fail(text: str) -> str:
    """Return a fenced statement that divides by zero if it changes no row, so that a COMMIT behind
    it does nothing."""
    return one_line(f"""
        WITH here AS ({text}{AT_CTID}),
        elsewhere AS ({text} AND NOT EXISTS (SELECT FROM here){RETURNING_CTID}),
        changed AS (SELECT ctid FROM here UNION ALL SELECT ctid FROM elsewhere)
        SELECT (SELECT ctid FROM changed), 1 / (SELECT count(*) FROM changed)
    """)  # noqa: S608 - the texts of updates


def _error_parameters(error: str) -> dict[str, Any]:
    return {"error": storable(error), "detail": summary(error)}


def storable_code(code: object) -> str:
    """Return a stuck code that the column accepts. A project's subclass of KeyStuck may have any
    value as its code."""
    printable = "".join(filter(str.isprintable, str(code or "")))
    return printable[:_MAX_CODE_LENGTH].strip() or KeyStuck.code


def stuck_parameters(code: str, reason: str) -> dict[str, Any]:
    code = storable_code(code)
    return {
        "code": code,
        "reason": storable(reason),
        # Reset the attempts, because the next deploy may declare the recovery point.
        "counting": 0 if code in WAITS_FOR_DEPLOY else 1,
        "event": HistoryEvent.STUCK,
        "detail": summary(reason),
    }
