"""Manual interventions: actions of an operator on unfinished keys and on failed jobs, for the admin
and shells.

The functions ``release_lock``, ``hand_back``, ``answer``, ``acknowledge`` and ``unacknowledge``
change a key with one conditional UPDATE, which also writes the history. Of two operators who act at
once, one succeeds.
Common arguments:

- ``seen``: the ``claim_token`` that the operator saw. If a run has claimed the key since, nothing
  changes.
- ``at``: the recovery point that the operator saw. If a run has committed a phase since, nothing
  changes. With None, the recovery point is not compared.
- ``by``: the name of the operator, for the history.
- ``note``: the finding of the operator, or the number of a ticket, for the history, which keeps the
  first line. The event, with the name and the note, is cut at 300 characters.
"""

import uuid
from collections.abc import Collection
from contextlib import suppress
from contextvars import Context
from typing import Any

from django.db import IntegrityError, router, transaction
from django.db.models import QuerySet
from django.db.models.functions import Now

from idempotency import signals
from idempotency._engine import decisions, events, replication, rows
from idempotency._engine.adapter import HTTP, adapter_of
from idempotency._engine.decisions import Decision
from idempotency._engine.errors import hide_row
from idempotency._engine.outer_transactions import require_no_transaction
from idempotency._key_completion import complete_by_id
from idempotency._records import HOOKS_FAILED
from idempotency.exceptions import MessageInProgress
from idempotency.inbox import STAGED_JOBS, process_once
from idempotency.models import IdempotencyKey, ProcessedMessage, StagedJob


def release_lock(
    pk: int,
    seen: uuid.UUID | None,
    *,
    by: str,
    at: str | None = None,
    note: str = "",
    using: str | None = None,
) -> bool:
    """Release the lock of a running key; return whether this call did it.

    On return the key is unlocked at its last recovery point. A retry of the client continues there
    at once; the completer does so when the key is old and idle enough. The former run can commit
    nothing more for the key, but its calls to other services continue. The lock thus ends as if it
    had expired early.
    """
    return decisions.decide("release_lock", Decision(pk, seen, at, by, note, _alias(using)))


def hand_back(
    pk: int,
    seen: uuid.UUID | None,
    *,
    by: str,
    at: str | None = None,
    note: str = "",
    using: str | None = None,
) -> bool:
    """Hand a key back to the completer and reset its count of completer attempts; return whether
    this call did it.

    On return the key is due and neither locked nor stuck, and its retention counts from this time.
    Nothing changes if a run holds the key, if it is finished or refused, or if its ``on_abandon``
    was begun. A key whose ``on_abandon`` was begun can only be answered, because ``on_abandon`` may
    have undone its work.
    """
    return decisions.decide("hand_back", Decision(pk, seen, at, by, note, _alias(using)))


def complete_now(
    pk: int,
    seen: uuid.UUID | None,
    *,
    by: str,
    at: str | None = None,
    note: str = "",
    using: str | None = None,
) -> str | None:
    """Hand a key back as ``hand_back`` does, and run it in this process; return the result of
    ``complete_key``.

    Return "handed back" if another run claimed the key first. Return None, without any change, if
    the key could not be handed back. If this process dies, the completer runs the key. The call
    lasts as long as the view. The view does not see the context variables of the operator's
    request, such as a tenant that a middleware has set. It sees thread-locals, and the session of
    the database.
    Raises RuntimeError in a transaction.
    """
    require_no_transaction(_alias(using))
    handed_back = hand_back(pk, seen, by=by, at=at, note=note, using=using)
    del seen  # A token is no local variable while the view runs; see idempotency._hidden.
    if not handed_back:
        return None
    # The completer has no context of a request either.
    outcome = Context().run(complete_by_id, pk, 0, _alias(using), by)
    return outcome or "handed back"


def calls_of(pk: int, *, using: str | None = None) -> str:
    """Return a text that changes with each ``key.call()`` of the key, and with each recorded
    result. Pass it to ``answer`` as ``calls``."""
    return decisions.calls_of(pk, using=_alias(using))


def answer(
    pk: int,
    seen: uuid.UUID | None,
    response: Any,
    *,
    by: str,
    at: str | None = None,
    calls: str | None = None,
    note: str = "",
    using: str | None = None,
) -> bool:
    """Finish an unlocked key, stuck or not, with the answer of the operator; return whether this
    call did it.

    The argument ``response`` is an ``HttpResponse`` for the key of a request. For the key of an
    operation it is the result, a JSON value, or ``Rejected(code, message)``. On return each retry
    of the caller gets it. Work that is committed, in this database or elsewhere, is not changed.
    The argument ``calls`` is the former result of ``calls_of``: nothing changes if a call was begun
    or recorded since.
    Raises NotReplicated if the answer is stored, but the standbys do not confirm it
    (CONFIRM_REPLICATED).
    Raises ValueError for an answer that ``answer_problem`` rejects, and for the response to a
    request in place of the result of an operation, or the reverse.
    """
    alias = _alias(using)
    keys = IdempotencyKey.objects.using(alias).filter(pk=pk)
    if (method := keys.values_list("request_method", flat=True).first()) is None:
        return False
    stored = adapter_of(method).answer(response)
    if done := decisions.answer(Decision(pk, seen, at, by, note, alias), stored, calls=calls):
        replication.confirm(alias)
        if (key := rows.read(pk, using=alias)) is not None:
            events.emit(signals.key_finished, key, None)
    return done


def answer_problem(response: Any, *, key: IdempotencyKey | None = None) -> str:
    """Return the reason why ``response`` cannot finish the key, or an empty string. Without
    ``key``, the function assumes the key of a request. Clients stop retrying only after a stored
    2xx or 4xx."""
    try:
        adapter_of(key.request_method if key is not None else HTTP).answer(response)
    except ValueError as error:
        return str(error)
    return ""


def acknowledge(
    pk: int,
    seen: uuid.UUID | None,
    *,
    by: str,
    at: str | None = None,
    note: str = "",
    using: str | None = None,
) -> bool:
    """Remove a stuck key from the list of keys that require intervention; return whether this call
    did it.

    On return the key is still stuck and has no response. Retries and the completer treat it as
    before, and the reaper does not delete it. The key is in ``QuerySet.acknowledged()``. If it
    becomes stuck again, it is back on the list.
    """
    return decisions.decide("acknowledge", Decision(pk, seen, at, by, note, _alias(using)))


def unacknowledge(
    pk: int,
    seen: uuid.UUID | None,
    *,
    by: str,
    at: str | None = None,
    note: str = "",
    using: str | None = None,
) -> bool:
    """Undo ``acknowledge``; return whether this call did it.

    On return the stuck key is back on the list of keys that require intervention. Nothing else
    changes.
    """
    return decisions.decide("unacknowledge", Decision(pk, seen, at, by, note, _alias(using)))


def retry_jobs(ids: Collection[uuid.UUID] | None = None, *, using: str | None = None) -> int:
    """Make failed jobs due again, with new counts of hand-overs and refusals; return their number.
    None means all."""
    fresh = {"hand_overs": 0, "refusals": 0, "run_at": Now(), "handed_over_at": None}
    try:
        return _failed(ids, using).update(failed_at=None, **fresh)
    except IntegrityError as error:
        hide_row(error)
        raise


def discard_jobs(ids: Collection[uuid.UUID] | None = None, *, using: str | None = None) -> int:
    """Delete failed jobs; return their number. None means all.

    On return the inbox has their ids, so they never run, even if a queue still has a message for
    them. A job that is running now is kept. The job of an operation is deleted even if the
    operation is running, because the key of the operation gets the result.
    """
    alias, discarded = using or router.db_for_write(StagedJob), 0
    for pk in list(_failed(ids, alias).values_list("pk", flat=True)):
        with suppress(MessageInProgress), transaction.atomic(using=alias):
            deleted, _ = _failed([pk], alias).delete()  # One of two concurrent calls deletes it.
            if deleted:
                with process_once(STAGED_JOBS, str(pk), using=alias):
                    discarded += 1
    return discarded


def forget_hook_errors(ids: Collection[str] | None = None, *, using: str | None = None) -> int:
    """Remove jobs from the list of those whose on_commit hooks raised; return their number. None
    means all.

    The ids are those of the jobs or Celery tasks. On return the inbox still has the jobs, without
    the errors.
    """
    messages = ProcessedMessage.objects.using(using or router.db_for_write(ProcessedMessage))
    failed = messages.filter(HOOKS_FAILED, source=STAGED_JOBS)
    return (failed if ids is None else failed.filter(message_id__in=ids)).update(hook_error="")


def _failed(ids: Collection[uuid.UUID] | None, using: str | None) -> QuerySet[StagedJob]:
    failed = StagedJob.objects.using(using or router.db_for_write(StagedJob)).filter(
        failed_at__isnull=False
    )
    return failed if ids is None else failed.filter(pk__in=ids)


def _alias(using: str | None) -> str:
    return using or router.db_for_write(IdempotencyKey)
