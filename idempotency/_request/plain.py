"""A plain view: one transaction contains the claim, the writes of the view and the stored response.

In a transaction that a middleware or a decorator has opened, they are a savepoint of it.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from http import HTTPStatus

from django.db import transaction
from django.db.transaction import TransactionManagementError
from django.db.utils import Error
from django.http import HttpResponseBase

from idempotency import signals
from idempotency._request import problems, replays, responses
from idempotency._request.nesting import Run
from idempotency._request.options import Options
from idempotency._request.retry import Attempts, RequestState
from idempotency._request.view_call import Call
from idempotency._request.wait import Patience
from idempotency._store import claims, events, fence, savepoints
from idempotency._store.claims import Claim, ClaimedRequest, Outcome
from idempotency._store.several_databases import OtherTransactions, atomic_aliases
from idempotency._store.transactions import First, OwnTransaction, durable_transaction, in_outer_transaction
from idempotency._text import first_line
from idempotency.http import keeps_writes
from idempotency.models import IdempotencyKey

logger = logging.getLogger("idempotency")

Respond = Callable[[], HttpResponseBase]


def run_plain(call: Call, options: Options, captured: ClaimedRequest, *, using: str) -> HttpResponseBase:
    """Claim the key and run the view. A rollback also restores the request, its session and its messages."""
    run = _PlainRun(call, options, captured, using)
    try:
        claim, response = run.attempt(call.response)
    except Exception as error:
        answer = responses.answer_to(error, call)
        if run.before.committed and (answer is not None or isinstance(error, responses.HTTP_EXCEPTIONS)):
            raise RuntimeError(
                "A hook of transaction.on_commit() raised this exception after the response was stored."
            ) from error
        if answer is None:
            raise
        if keeps_writes(answer):
            raise RuntimeError(
                f"The writes of the view {call.name} are rolled back, because it raised an exception or marked its transaction "
                f"for rollback. It cannot respond with not_stored(keep_writes=True)."
            ) from error
        if not responses.is_stored(answer):
            return answer
        # The writes of a view that raised are rolled back, as under ATOMIC_REQUESTS; its response is stored.
        claim, response = run.attempt(lambda: answer)
    if response is None:
        return replays.answer_without_running(claim, call, using=using)
    if responses.is_stored(response):
        events.emit_committed(signals.key_claimed, claim.key, call.request)
        events.emit_committed(signals.key_finished, claim.key, call.request)
    return response


class _PlainRun:
    def __init__(self, call: Call, options: Options, captured: ClaimedRequest, using: str) -> None:
        self._call, self._options, self._captured, self._using = call, options, captured, using
        self._patience = Patience(options.wait_seconds, using=using)
        self.before = RequestState(call)
        self._nested = in_outer_transaction(using)
        if self._nested:
            _refuse_atomic_requests(call, using)
            savepoints.refuse_savepoint(options.level(), using=using)

    def attempt(self, respond: Respond) -> tuple[Claim, HttpResponseBase | None]:
        """Claim the key and respond; repeat after a serialization failure, and wait while another request holds the key. The
        response is None if the key could not be claimed. In an outer transaction nothing is repeated, and nothing waits: its
        snapshot and its locks stay."""
        try:
            if self._nested:
                return self._in_transaction(respond)
            for attempt in Attempts(self.before, self._options.level, using=self._using):
                with attempt:
                    while True:
                        claim, response = self._in_transaction(respond)
                        if claim.outcome is not Outcome.IN_PROGRESS or not self._patience.waited():
                            return claim, response
            raise problems.conflict()
        except BaseException:
            self.before.put_back()
            raise

    def _in_transaction(self, respond: Respond) -> tuple[Claim, HttpResponseBase | None]:
        """Claim the key and respond in one transaction.

        Other databases with ATOMIC_REQUESTS commit before the key, so that no response is stored if another COMMIT fails.
        Raises Problem ``database_unavailable`` if the COMMIT of the key fails after another COMMIT. A retry in the process
        would repeat the other writes unnoticed.
        """
        call, using, before = self._call, self._using, self.before
        others = OtherTransactions(call.view, last=using)
        try:
            first = claims.first_of_plain(self._captured, using=using)
            with self._block(first) as own:
                claim = claims.claim_plain(self._captured, using=using, first=first)
                if claim.outcome is not Outcome.CLAIMED:
                    return claim, None
                if self._nested:
                    savepoints.hold(claim.key, using=using)
                # Registered first: an exception in a hook of the view must not skip it.
                transaction.on_commit(before.note_committed, using=using)
                with others.opened():
                    with Run(call, self._options, claim.key, False, self._options.level, lambda: own).bound():
                        response = respond()
                    commits = self._end(claim.key, response, own, others)
        except Error as error:
            if not others.committed or before.committed:
                raise
            logger.error("COMMIT succeeded in %r, but failed for the key in %r: %s", others.committed, using, first_line(error))
            raise problems.database_unavailable() from None  # Attempts would retry an error with a cause.
        if not commits:
            before.put_back()
        return claim, response

    def _end(self, key: IdempotencyKey, response: HttpResponseBase, own: OwnTransaction, others: OtherTransactions) -> bool:
        """Write the response with the last statement of the transaction, or mark it for rollback; return whether it commits."""
        if responses.is_stored(response) or keeps_writes(response):
            self._refuse_rollback(response, others)
        ends = None if others.used else own  # Other databases commit before this one.
        if responses.is_stored(response):
            fence.finish(key, responses.stored_parts(response), using=self._using, ends=ends)
        elif keeps_writes(response):
            fence.set_free(key, response.status_code, using=self._using, ends=ends)
        else:
            others.set_rollback()
            return False
        others.prepare_commits()
        return True

    def _refuse_rollback(self, response: HttpResponseBase, others: OtherTransactions) -> None:
        """Raise RolledBack for an error response, or TransactionManagementError for a success, if the view has marked a
        transaction for rollback. After a serialization failure, the caller runs the view again."""
        for connection in others.marked_for_rollback():
            if response.status_code >= HTTPStatus.BAD_REQUEST:
                raise responses.RolledBack(response) from connection.rollback_exc
            raise TransactionManagementError(
                f"The view {self._call.name} responded with status {response.status_code}, but its transaction on "
                f"{connection.alias!r} was marked for rollback: by set_rollback(True), by the exception handler of Django REST "
                f"framework, or by a database error that the view has caught. Nothing is stored. Respond with an error, raise "
                f"an exception, or put the statements that may fail into a transaction.atomic() of their own."
            ) from connection.rollback_exc

    def _block(self, first: First) -> AbstractContextManager[OwnTransaction]:
        if self._nested:
            return savepoints.savepoint(using=self._using)
        return durable_transaction(self._options.level(), using=self._using, first=first)


def _refuse_atomic_requests(call: Call, using: str) -> None:
    """Raise RuntimeError in the transaction of ATOMIC_REQUESTS. Django opened it around an unprotected view that has called
    this one. The protection would depend on that view, and retries in the process would be lost unnoticed."""
    match = call.request.resolver_match
    if using in atomic_aliases(match.func if match is not None else None):
        raise RuntimeError(
            f"The view {call.name} was entered inside the transaction of ATOMIC_REQUESTS. Exclude the view that calls it: "
            "transaction.non_atomic_requests(view)."
        )
