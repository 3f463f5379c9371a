"""Decisions about a key from outside its run: the key becomes stuck, or an operator changes it.

Each change is one conditional UPDATE in autocommit. A decision contains the claim token, and
optionally the recovery point, that the operator saw. If a run has claimed or moved the key since
then, nothing changes. A decision that moves the key also writes a new token. If two operators
decide at the same time, only one decision takes effect. A late run cannot commit after such a
decision.
"""

# ruff: noqa: S608 - only names and conditions are formatted into statements

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from logging import WARNING
from typing import Any

from idempotency._engine.claimed_key import ClaimedKey
from idempotency._engine.events import announce_stuck, log, log_committed
from idempotency._engine.fence import StoredResponse, stuck_parameters
from idempotency._engine.history import HistoryEvent
from idempotency._engine.rows import execute, fetch, statements_for, token_parameter
from idempotency._engine.updates import CLEAR_STUCK, TABLE, one_line
from idempotency._hidden import Hidden, Parameters
from idempotency._text import storable, summary
from idempotency.exceptions import StuckCode
from idempotency.models import DownstreamCall, IdempotencyKey

#: The number of runs that hang before a key becomes stuck. Each such run ends the process of a
#: loop.
MOST_HANGS = 3
#: A name of 100 characters and a note of 150 fit.
_MAX_DETAIL_LENGTH = 300


@dataclass(frozen=True, slots=True, repr=False)
class Decision:
    """The decision of an operator about a key, and the state that the operator saw. The recovery
    point ``at`` is compared unless it is None."""

    pk: int
    seen: uuid.UUID | None
    at: str | None
    by: str
    note: str
    using: str

    @property
    def signed(self) -> str:
        return f"by {self.by}: {self.note}" if self.note else f"by {self.by}"


def calls_expression(using: str, key: str = "k") -> str:
    """Return an expression whose value changes with each ``key.call()``, and with each at-most-once
    call whose result is recorded or whose intent is deleted. The table of keys is named ``key``."""
    between = statements_for(using).dialect.seconds_between
    begun = between.format(f"{key}.created_at", f"{key}.call_begun_at")
    return one_line(f"""
        (SELECT count(*) || '/' || count(c.recorded_at) || '/' || COALESCE(max(c.id), 0)
            || '/' || COALESCE(CAST({begun} AS text), '')
        FROM {DownstreamCall._meta.db_table} AS c WHERE c.key_id = {key}.id)
    """)


def give_up(pk: int, code: str, reason: str, *, using: str, request: Any = None) -> bool:
    """If no run holds a key, mark it as stuck and announce it. Return whether this call marked the
    key."""
    if not _give_up(pk, code, reason, using):
        return False
    announce_stuck(pk, request, using=using)
    return True


def _give_up(pk: int, code: str, reason: str, using: str) -> bool:
    parameters: Parameters = Hidden({"id": pk, **stuck_parameters(code, reason)})
    return execute(statements_for(using).give_up, parameters, using) > 0


def mark_hung(key: ClaimedKey, location: str, *, delay_seconds: float, using: str) -> bool:
    """End the claim of a run that hangs at ``location``. The completer claims the key again after
    ``delay_seconds`` at the earliest. After the last of ``MOST_HANGS`` hangs, mark the key as
    stuck. Return whether this call marked the key. Nothing changes if the run has renewed its lock,
    or another run has claimed the key."""
    text, error = statements_for(using), storable(f"The run hung at {location}.")
    statement = one_line(f"""
        UPDATE {TABLE} AS k
        SET claim_token = %(new_token)s, locked_until = NULL, hangs = k.hangs + 1,
            next_run_at = {text.dialect.later.format("%(delay)s")}, last_error = %(error)s,
            stuck_reason = CASE WHEN k.stuck_code = '{StuckCode.ON_ABANDON}'
                THEN %(error)s ELSE k.stuck_reason END,
            history = {text.history}
        WHERE k.id = %(id)s AND k.claim_token = %(token)s AND k.finished_at IS NULL
        AND {text.unlocked} RETURNING hangs
    """)
    parameters: Parameters = Hidden({"id": key.pk, "delay": delay_seconds, "error": error})
    parameters.value |= {"event": HistoryEvent.HUNG, "detail": summary(location)}
    parameters.value["token"] = token_parameter(key.fence, using)
    parameters.value["new_token"] = token_parameter(uuid.uuid4(), using)
    row = fetch(statement, parameters, using)
    if row is None or row[0] < MOST_HANGS:
        return False
    return _give_up(
        key.pk, StuckCode.HUNG, f"{row[0]} runs hung. The last one hung at {location}.", using
    )


def decide(name: str, decision: Decision) -> bool:
    """Change a key by the name of the decision; return whether it was changed."""
    return _change(decision, **_CHANGES[name](decision.signed, decision.using))


def answer(decision: Decision, response: StoredResponse, *, calls: str | None) -> bool:
    text = statements_for(decision.using)
    return _change(
        decision,
        f"{text.finished}, refused_at = NULL",
        text.unlocked
        + (f" AND {calls_expression(decision.using)} = %(calls)s" if calls is not None else ""),
        event=HistoryEvent.ANSWERED,
        detail=f"{response.event_detail}, {decision.signed}",
        calls=calls,
        **response.parameters(),
    )


def _release_lock(signed: str, using: str) -> dict[str, Any]:
    return {
        "changes": "locked_until = NULL",
        "condition": "k.locked_until IS NOT NULL",
        "event": HistoryEvent.LOCK_RELEASED,
        "detail": signed,
    }


def _hand_back(signed: str, using: str) -> dict[str, Any]:
    text = statements_for(using)
    return {
        "changes": "locked_until = NULL, next_run_at = NULL, completer_attempts = 0, hangs = 0, "
        f"handed_back_at = {text.now}, {CLEAR_STUCK}",
        "condition": f"{text.unlocked} AND k.refused_at IS NULL"
        f" AND k.stuck_code <> '{StuckCode.ON_ABANDON}'",
        "event": HistoryEvent.HANDED_BACK,
        "detail": f"to the completer, {signed}",
    }


def _acknowledge(signed: str, using: str) -> dict[str, Any]:
    return {
        "changes": f"acknowledged_at = {statements_for(using).now}",
        "condition": "k.stuck_at IS NOT NULL"
        " AND (k.acknowledged_at IS NULL OR k.acknowledged_at < k.stuck_at)",
        "event": HistoryEvent.ACKNOWLEDGED,
        "detail": signed,
        "moves": False,
    }


def _unacknowledge(signed: str, using: str) -> dict[str, Any]:
    return {
        "changes": "acknowledged_at = NULL",
        "condition": "k.stuck_at IS NOT NULL AND k.acknowledged_at >= k.stuck_at",
        "event": HistoryEvent.UNACKNOWLEDGED,
        "detail": signed,
        "moves": False,
    }


#: The changes by the name of the decision.
_CHANGES: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "release_lock": _release_lock,
    "hand_back": _hand_back,
    "acknowledge": _acknowledge,
    "unacknowledge": _unacknowledge,
}


def calls_of(pk: int, *, using: str) -> str:
    """Return a text that changes with each ``key.call()``. It is empty if there is no such key."""
    statement = f"SELECT {calls_expression(using)} FROM {TABLE} AS k WHERE k.id = %(id)s"
    row = fetch(statement, Hidden({"id": pk}), using)
    return row[0] if row else ""


def _change(
    decision: Decision, changes: str, condition: str, *, moves: bool = True, **values: Any
) -> bool:
    """Change an unfinished key if no run has claimed it since the operator saw it. Write the event
    into the history, and return whether the key was changed."""
    using = decision.using
    parameters: Parameters = Hidden(values)
    del values
    same = "k.claim_token = %(seen)s" if decision.seen else "k.claim_token IS NULL"
    if decision.at is not None:
        same += " AND k.recovery_point = %(at)s"
    if moves:
        changes = f"claim_token = %(token)s, {changes}"
    statement = one_line(f"""
        UPDATE {TABLE} AS k SET {changes}, history = {statements_for(using).history}
        WHERE k.id = %(id)s AND {same} AND k.finished_at IS NULL AND {condition}
        RETURNING scope, idempotency_key
    """)
    event = parameters.value["event"]
    detail = summary(parameters.value["detail"], _MAX_DETAIL_LENGTH)
    parameters.value |= {
        "id": decision.pk,
        "at": decision.at,
        "seen": token_parameter(decision.seen, using),
        "token": token_parameter(uuid.uuid4(), using),
        "detail": detail,
    }
    if (row := Hidden(fetch(statement, parameters, using))).value is None:
        return False
    changed = IdempotencyKey(scope=row.value[0], idempotency_key=row.value[1])
    log_committed(partial(log, WARNING, "key %s: %s %s", changed, event, detail), using=using)
    return True
