"""Calls to downstream services: each begins with one fenced statement, which renews the lock.

The intent of an at-most-once call is committed before the call, and its result at the end of the
block. An intent without a result is a call in doubt: it may have taken effect.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast
from uuid import UUID

from django.db import Error, InterfaceError, InternalError, OperationalError, connections
from django.db.models import Case, F, QuerySet, When
from django.db.models.functions import Now

from idempotency._async import NeverEntered, either_context
from idempotency._engine import fence, replication
from idempotency._engine.call_handles import AtMostOnceCall, KeyedCall
from idempotency._engine.claimed_key import ClaimedKey
from idempotency._engine.database_product import psycopg_connection
from idempotency._engine.errors import drop_connection, drop_if_lost, session_timed_out
from idempotency._engine.outer_transactions import require_no_transaction, roll_back_unknown
from idempotency._engine.sessions import Sessions
from idempotency._engine.transactions import durable_transaction
from idempotency.exceptions import CallInDoubt, CallNotRecorded, IdempotencyError, LockLost
from idempotency.models import FINISHED, DownstreamCall, IdempotencyKey

#: The number of failures to write the result of a call, out of 20, that do not end the session.
#: Then a new session tries, because a limit such as ``lock_timeout`` may belong to the session. It
#: is the last resort: without what a middleware has set, it may not find the row.
_FAILURES_IN_SESSION = 16
#: A refused key that has begun something expires no more; a finished key does.
_EXPIRY = Case(When(finished_at=None, then=None), default=F("expires_at"))

_CURE = " Check the downstream service for the result, then answer the key in the admin."
_LEFT_OPEN = (
    "The block of the call {!r} has begun a transaction and left it open, so its writes were rolled"
    " back, and no result was recorded: a retry would not repeat the writes. Write in"
    " atomic_phase(), outside the block." + _CURE
)


class Calls:
    """The calls of one attempt at a claimed key, or of ``on_abandon``, whose key is stuck with
    ``stuck_code``, and which has no ``sessions``."""

    def __init__(
        self,
        key: ClaimedKey,
        *,
        using: str,
        sessions: Sessions | None = None,
        stuck_code: str = "",
    ) -> None:
        self._key, self._using, self._stuck_code = key, using, stuck_code
        self._sessions = sessions
        #: The names of keyed calls of this attempt, and of at-most-once calls with a result of an
        #: earlier attempt, that have ended, and whose block is open.
        self._keyed: set[str] = set()
        self._recorded: set[str] = set()
        self._ended: set[str] = set()
        self._open: set[str] = set()
        #: At-most-once calls without a recorded result, with the error that a later phase raises.
        self._unsettled: dict[str, IdempotencyError] = {}

    @either_context(holds_transaction=False)
    def keyed(self, name: str, valid_seconds: int | None) -> Iterator[KeyedCall]:
        """Open the block of a call that a retry repeats with the same downstream key."""
        call = KeyedCall(self._key.derive(name, valid_seconds))
        require_unfinished(self._key)
        if name in self._recorded | self._ended | self._open:
            raise _other_mode(name)
        self.require_no_doubt()
        require_no_transaction(self._using)
        self.require_session()
        self._keyed.add(name)
        try:
            self._begin(name)
        except Error as error:
            if not session_timed_out(error, self._using):
                raise
            self._begin(name)  # on a new connection
        self._key.begun = True
        yield call

    @either_context(holds_transaction=False)
    def at_most_once(self, name: str) -> Iterator[AtMostOnceCall]:
        """Open the block of a call that is not repeated once it may have taken effect."""
        call, key = AtMostOnceCall(self._key.derive(name)), self._key
        require_unfinished(key)
        if name in self._ended:
            raise RuntimeError(
                f"This run has already made the call {name!r}, and would reuse its result. Use"
                " another name."
            )
        if name in self._keyed:
            raise _other_mode(name)
        self.require_no_doubt(name)
        self.require_session()
        row = self._commit_intent(name)
        key.begun = True
        call.due = due = row.recorded_at is None
        call.result = row.result
        if not due:  # An earlier run has recorded it, perhaps late.
            replication.confirm(self._using)
            self._unsettled.pop(name, None)
        self._open.add(name)
        try:
            yield call
            if due and not (call.recorded or call.may_be_repeated):
                raise CallNotRecorded
            self._ended.add(name)
        except NeverEntered:
            call.retryable()  # The block did not run. EitherContext raises the cancellation.
        finally:
            self._open.discard(name)
            left_open = due and roll_back_unknown(self._using) and not call.took_no_effect
            if left_open:  # A retry would not repeat the writes, so the call stays in doubt.
                self._unsettled[name] = CallInDoubt(_LEFT_OPEN.format(name))
            elif due:
                self._write(row, call)
        if left_open:
            raise self._unsettled[name]
        if not self._open:  # Else the open call could not record its result.
            self.require_session()

    def _commit_intent(self, name: str) -> DownstreamCall:
        """Commit the intent of a call, or find its result. Raises CallInDoubt for an intent without
        a result."""
        key = self._key
        with durable_transaction(None, using=self._using):
            if name in self._recorded:
                fence.renew(key, using=self._using)  # No call begins.
            else:
                self._begin(name)
            # This locks the row of the key, so no other run writes this call meanwhile.
            calls = DownstreamCall.objects.using(self._using)
            begun = calls.filter(key_id=key.pk, name=name).first()
            if begun is None or begun.recorded_at is None:
                self._unsettled[name] = _call_in_doubt(name)
            if begun is not None and begun.recorded_at is None:
                # The rollback removes the event of a call that does not begin.
                raise self._unsettled[name]
            return begun or _insert(
                DownstreamCall(key_id=key.pk, name=name, token=cast(UUID, key.fence)), self._using
            )

    def _begin(self, name: str) -> None:
        if self._key.begun_call == name:
            self._key.begun_call = ""
            return
        fence.begin_call(self._key, name, using=self._using, stuck_code=self._stuck_code)

    def _write(self, row: DownstreamCall, call: AtMostOnceCall) -> None:
        """Write the result of a call, or delete its intent if it took no effect."""
        name, using = row.name, self._using
        if call.took_no_effect:
            _write_through_outage(partial(_delete_intent, row, using=using), using)
            self._unsettled[name] = CallNotRecorded()
            self._ended.discard(name)
            return
        _write_through_outage(partial(_write_outcome, self._key, row, call, using=using), using)
        if call.recorded:
            self._unsettled.pop(name, None)

    def read_doubts(self) -> None:
        """Read the calls of earlier attempts: those with a result, and those in doubt, which this
        attempt may not reach."""
        calls = DownstreamCall.objects.using(self._using).filter(key_id=self._key.pk)
        for name, recorded_at in calls.values_list("name", "recorded_at"):
            if recorded_at is None:
                self._unsettled[name] = _call_in_doubt(name)
            else:
                self._recorded.add(name)

    def require_session(self) -> None:
        """Raise OperationalError if the connection was lost during the run, also if Django has
        opened a new one. ``on_abandon`` continues on a new connection, because nobody would run it
        again."""
        connection = connections[self._using]
        if self._sessions is not None:
            if connection.vendor == "postgresql":
                psycopg_connection(connection)
            self._sessions.require_all()
            self._sessions.note()
        else:
            drop_if_lost(connection)

    def require_no_open_call(self) -> None:
        """Raise RuntimeError inside the block of an at-most-once call."""
        if self._open:
            raise RuntimeError(
                "A phase cannot begin inside a block of key.call(name, at_most_once=True): end the "
                "block first, so that its result is stored."
            )

    def require_no_doubt(self, name: str | None = None) -> None:
        """Raise CallInDoubt if a call other than ``name`` is in doubt. Another call could repeat
        its work, and a response that no phase stored would ignore it."""
        for other, obstacle in self._unsettled.items():
            if isinstance(obstacle, CallInDoubt) and other != name and other not in self._open:
                raise obstacle

    def require_results(self) -> None:
        """Raise CallInDoubt or CallNotRecorded if a call has no recorded result."""
        for obstacle in self._unsettled.values():
            raise obstacle


def require_unfinished(key: ClaimedKey) -> None:
    """Raise RuntimeError if the key is finished."""
    if key.recovery_point == FINISHED:
        raise RuntimeError("This key is finished: no phase or call can follow the stored response.")


def _other_mode(name: str) -> RuntimeError:
    return RuntimeError(
        f"The call {name!r} was made with another at_most_once= for this key, so this call could "
        "repeat its work. Use another name."
    )


def _call_in_doubt(name: str) -> CallInDoubt:
    return CallInDoubt(
        f"The call {name!r} was begun, and its result was never recorded. It may have taken effect,"
        f" and another call could repeat the work.{_CURE}"
    )


def _intent(row: DownstreamCall, *, using: str) -> QuerySet[DownstreamCall]:
    return DownstreamCall.objects.using(using).filter(
        key_id=row.key_id, name=row.name, token=row.token, recorded_at__isnull=True
    )


def _delete_intent(row: DownstreamCall, *, using: str) -> None:
    """Delete the intent of a call that took no effect. If the run has lost its lock, an operator
    may be looking at the key: the time of the last call shows the change."""
    intent = _intent(row, using=using)
    keys = IdempotencyKey.objects.using(using).filter(pk__in=intent.values("key"))
    keys.update(call_begun_at=Now())
    intent._raw_delete(using)  # without signals, as in _insert


def _insert(row: DownstreamCall, using: str) -> DownstreamCall:
    """Insert the row without signals: a receiver that catches an error of its own would roll the
    transaction back unnoticed."""
    return DownstreamCall.objects.using(using).bulk_create([row])[0]


def _write_outcome(
    key: ClaimedKey, row: DownstreamCall, call: AtMostOnceCall, *, using: str
) -> None:
    """Write the result of a call, or only that it was begun. Raises LockLost if the key is gone."""
    recorded = {"result": call.result, "recorded_at": Now()} if call.recorded else {}
    if recorded and _intent(row, using=using).update(**recorded):
        return
    # Nothing was recorded, another run has recorded the call, or a failover has lost the intent,
    # perhaps also phases before it, and perhaps the key: its id may be that of another key. The
    # update locks the row of the key, so no other run begins this call meanwhile.
    with durable_transaction(None, using=using):
        # Find the row by its seed. A failover that lost the intent has often lost the claim too.
        own = IdempotencyKey.objects.using(using).filter(pk=row.key_id, seed=bytes(key.seed))
        if not own.update(begun=True, refused_at=None, expires_at=_EXPIRY):
            raise LockLost
        calls = DownstreamCall.objects.using(using)
        if not calls.filter(key_id=row.key_id, name=row.name).exists():
            made = DownstreamCall(key_id=row.key_id, name=row.name, token=row.token, **recorded)
            _insert(made, using)


def _write_through_outage(write: Callable[[], object], using: str, *, retries: int = 20) -> None:
    """Run ``write``, and retry for ten seconds while the database is unavailable or read-only.

    Only this process knows the outcome of the call. If it cannot be written, the key requires
    manual intervention.
    """
    for left in reversed(range(retries + 1)):
        try:
            write()
            return
        except (OperationalError, InterfaceError, InternalError) as error:
            connection = connections[using]
            keeps = connection.vendor == "postgresql" and retries - left < _FAILURES_IN_SESSION
            if not session_timed_out(error, using):
                (drop_if_lost if keeps else drop_connection)(connection)
            if not left:
                raise
            time.sleep(0.5)
