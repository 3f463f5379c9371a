"""The run of plain work: one transaction contains the claim, the writes of the work and the stored
result.

In a transaction that the caller has opened, such as a middleware, they are a savepoint of it.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from django.db import connections
from django.db.transaction import TransactionManagementError
from django.db.utils import Error

from idempotency._engine import claims, fence, savepoints
from idempotency._engine.adapter import ClaimedRequest, Outcome, Work
from idempotency._engine.attempts import Attempts, Wait, conflict
from idempotency._engine.claims import Claim, ClaimOutcome
from idempotency._engine.outer_transactions import is_in_outer_transaction
from idempotency._engine.sessions import Sessions
from idempotency._engine.several_databases import OtherTransactions
from idempotency._engine.transactions import First, OwnTransaction, durable_transaction
from idempotency._text import first_line
from idempotency.conf import Isolation
from idempotency.exceptions import Unavailable

logger = logging.getLogger("idempotency")


class PlainRun:
    """One run of plain work. The key is None before its claim."""

    def __init__(self, work: Work, request: ClaimedRequest, using: str) -> None:
        self.work, self.using = work, using
        self.key: Any = None
        self.has_stored_result = True
        self.transaction: OwnTransaction | None = None
        self._request = request
        self._wait = Wait(work.wait_seconds)
        self._connection = connections[using]
        self.sessions = Sessions()
        self.is_nested = is_in_outer_transaction(self._connection)
        if self.is_nested:
            work.check_outer_transaction(using)
            savepoints.check_outer_transaction(work, using=using)

    @property
    def level(self) -> Isolation | None:
        return self.work.level()

    def attempt(self, call: Callable[[], Outcome]) -> tuple[Claim, Outcome | None]:
        """Claim the key and call; repeat after a serialization failure, and wait while another run
        holds the key. The outcome is None if the key could not be claimed. In an outer transaction
        nothing is repeated, and nothing waits: its snapshot and its locks stay."""
        try:
            if self.is_nested:
                return self._in_transaction(call)
            for attempt in Attempts(self):
                with attempt:
                    while True:
                        claim, outcome = self._in_transaction(call)
                        if claim.outcome is not ClaimOutcome.IN_PROGRESS or not self._wait.pause():
                            return claim, outcome
            raise conflict()
        except BaseException:
            self.work.put_back()
            raise

    def _in_transaction(self, call: Callable[[], Outcome]) -> tuple[Claim, Outcome | None]:
        """Claim the key and call in one transaction.

        Other databases with ATOMIC_REQUESTS commit before the key, so that no result is stored if
        another COMMIT fails.
        Raises Unavailable if the COMMIT of the key fails after another COMMIT. A retry in the
        process would repeat the other writes unnoticed.
        """
        work, using = self.work, self.using
        others: OtherTransactions | None = None
        try:
            first = claims.first_of_plain(self._request, self._connection)
            with self._block(first) as self.transaction:
                self.sessions.require_all()
                claim = claims.claim_plain(self._request, self._connection, first)
                self.transaction.may_roll_back = True
                if claim.outcome is not ClaimOutcome.CLAIMED:
                    return claim, None
                self.key = claim.key
                self.transaction.block.key_id = claim.key.id
                if self.is_nested:
                    savepoints.hold(claim.key, using=using)
                # Registered first: an exception in a hook of the work must not skip it.
                self._connection.on_commit(work.note_committed)
                others = OtherTransactions(work.other_databases(using), last=self._connection)
                with others.atomic():
                    self.sessions.note()
                    with work.bind(self):
                        outcome = call()
                    commits = self._store(outcome, others)
                self.transaction.may_roll_back = not commits
        except Error as error:
            if others is None or not others.committed or work.is_committed:
                raise
            logger.error(
                "COMMIT succeeded in %r, but failed for the key in %r: %s",
                others.committed,
                using,
                first_line(error),
            )
            # Attempts would retry an error with a cause.
            raise Unavailable(code="database_unavailable") from None
        if not commits:
            work.put_back()
        return claim, outcome

    def _block(self, first: First) -> AbstractContextManager[OwnTransaction]:
        if self.is_nested:
            return savepoints.savepoint(using=self.using)
        lease = self._request.lease_seconds
        return durable_transaction(
            self.work.level(), using=self.using, first=first, lease_seconds=lease
        )

    def _store(self, outcome: Outcome, others: OtherTransactions) -> bool:
        """Write the result with the last statement of the transaction, or mark it for rollback;
        return whether it commits."""
        if outcome.is_stored or outcome.keeps_writes:
            self.sessions.require_all(status=outcome.code, cause=outcome.cause)
            self._require_commit(outcome, others)
        # Other databases commit before this one.
        last_of = None if others.used else self.transaction
        self.has_stored_result = outcome.is_stored
        if outcome.is_stored:
            stored = self.work.stored(outcome.value)
            fence.finish(self.key, stored, using=self.using, last_of=last_of)
        elif outcome.keeps_writes:
            fence.set_free(self.key, outcome.code, using=self.using, last_of=last_of)
        else:
            others.set_rollback()
            return False
        others.prepare_commits()
        return True

    def _require_commit(self, outcome: Outcome, others: OtherTransactions) -> None:
        """Raise RolledBack for an error, or TransactionManagementError for a success, if the work
        has marked a transaction for rollback. After a serialization failure, the caller runs the
        work again."""
        for connection in others.marked_for_rollback():
            if outcome.code >= 400:
                raise RolledBack(outcome) from connection.rollback_exc
            work = self.work
            raise TransactionManagementError(
                f"The {work.kind} {work.name} succeeded with status {outcome.code}, but its"
                f" transaction on {connection.alias!r} was marked for rollback:"
                f" {work.rollback_causes} or by a database error that the {work.kind} has caught."
                " Nothing is stored. Return an error, raise an exception, or put the statements"
                " that may fail into a transaction.atomic() of their own."
            ) from connection.rollback_exc


class RolledBack(Exception):
    """The work returned an error, and had marked its transaction for rollback: the error is stored
    as if an exception had become it. ``handle_exception()`` of Django REST framework sets the mark
    under ATOMIC_REQUESTS."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome
