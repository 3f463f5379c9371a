"""What a person may do to a key that the machine does not get on with, and to a job that it gave up on.

A key is changed in one conditional UPDATE, in autocommit. ``seen`` is the ``claim_token`` that the person saw: when anything
has run the key since, nothing is changed and the person must look again. ``at`` is the recovery point that the person saw, and
does the same when a run that was thought dead has moved the key on under its old claim; None does not ask. What moves a key
writes a new token, as a claim does: of two people who press at once one succeeds, and a late run finds itself fenced off.
``by`` is a name for the key's history, which is written in the same UPDATE.

The admin calls these functions; they serve in a shell as well.
"""
# ruff: noqa: S608 - the names of columns and the conditions are this module's own; what a person types is always a parameter

import json
import logging
import uuid
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from django.db import connections, router, transaction
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.http import HttpResponse

from idempotency import conf, http, keys, signals, sql
from idempotency.abandonment import ON_ABANDON
from idempotency.completer import complete_key
from idempotency.exceptions import MessageInProgress
from idempotency.inbox import STAGED_JOBS, process_once
from idempotency.models import FINISHED, ForeignCall, IdempotencyKey, StagedJob
from idempotency.rows import fetch, statements, token_parameter
from idempotency.transactions import refuse_outer_transaction

logger = logging.getLogger("idempotency")

#: Changes with each foreign call of a key that is begun, recorded or taken back, and with each ``key.call()``.
_CALLS = (
    "(SELECT count(*) || '/' || count(c.recorded_at) || '/' || COALESCE(max(c.id), 0) "  # nosec B608  # see the noqa above
    "|| '/' || COALESCE(CAST(k.call_begun_at AS text), '') "
    f"FROM {ForeignCall._meta.db_table} AS c WHERE c.key_id = k.id)"
)


def release_lock(pk: int, seen: uuid.UUID | None, *, by: str, at: str | None = None, using: str | None = None) -> bool:
    """Take the lock away from the run that holds the key; return whether this call did it.

    On return the key is unlocked and stands at its last recovery point: a retry of its client goes on from there at once, the
    completer once the key is old and idle enough. The run that held it can commit nothing for it any more. What that run is
    doing elsewhere goes on: this is the expiry of its lock, only earlier.
    """
    return _change(
        pk,
        seen,
        at,
        "locked_at = NULL",
        "k.locked_at IS NOT NULL",
        using,
        event="lock released",
        detail=f"by {by}",
        rotate=True,
    )


def hand_back(pk: int, seen: uuid.UUID | None, *, by: str, at: str | None = None, using: str | None = None) -> bool:
    """Give a key back to the completer, with all its attempts; return whether this call did it.

    On return the key is neither locked nor stuck, and due, and the retention after which the reaper settles it counts anew.
    Not done for a key that a run holds, for a finished one, for a refused one, and for one whose ``on_abandon`` was begun:
    what that undid must not be built upon, so such a key can only be answered.
    """
    text = statements(_alias(using))
    return _change(
        pk,
        seen,
        at,
        f"locked_at = NULL, next_run_at = NULL, completer_attempts = 0, handed_back_at = {text.now}, {sql.CLEAR_STUCK}",
        f"{text.unlocked} AND NOT k.refused AND k.stuck_code <> '{ON_ABANDON}'",
        using,
        event="handed back",
        detail=f"to the completer, by {by}",
        rotate=True,
    )


def complete_now(pk: int, seen: uuid.UUID | None, *, by: str, at: str | None = None, using: str | None = None) -> str | None:
    """Give a key back as ``hand_back`` does, and run it in this very process; return what ``complete_key`` returns.

    "handed back" when another run was faster then; None, with nothing done, when it could not be handed back. A death in
    between leaves the key to the completer. Takes as long as the view takes. Raises RuntimeError in a transaction.
    """
    refuse_outer_transaction(_alias(using))
    if not hand_back(pk, seen, by=by, at=at, using=using):
        return None
    return complete_key(pk, using=_alias(using)) or "handed back"


def calls_of(pk: int, *, using: str | None = None) -> str:
    """Return what ``answer`` wants to know of a person: which calls of the key there were when they looked.

    Calls are those of ``foreign_call`` and of ``key.call()``.
    """
    with connections[_alias(using)].cursor() as cursor:
        cursor.execute(f"SELECT {_CALLS} FROM {sql.TABLE} AS k WHERE k.id = %s", [pk])  # nosec B608  # see the noqa above
        row = cursor.fetchone()
    return row[0] if row else ""


def answer(
    pk: int,
    seen: uuid.UUID | None,
    response: HttpResponse,
    *,
    by: str,
    at: str | None = None,
    calls: str | None = None,
    using: str | None = None,
) -> bool:
    """Finish an unlocked key with a response of the person's choice, stuck or not; return whether this call did it.

    On return each retry of the client is answered with ``response``. Nothing else is done or undone: what the request has
    committed, here and elsewhere, stays as it is. ``calls`` is what ``calls_of`` returned when the person looked: not done when
    a call was begun or recorded since. Raises ValueError for a response that ``answer_problem`` refuses.
    """
    if problem := answer_problem(response):
        raise ValueError(problem)
    code, headers, body = http.stored_parts(response)
    text = statements(_alias(using))
    done = _change(
        pk,
        seen,
        at,
        f"recovery_point = '{FINISHED}', finished_at = {text.now}, locked_at = NULL, refused_at = NULL, {sql.CLEAR_STUCK}, "
        "response_code = %(code)s, response_headers = %(headers)s, response_body = %(body)s",
        text.unlocked + (f" AND {_CALLS} = %(calls)s" if calls is not None else ""),
        using,
        event="answered",
        detail=f"status {code}, by {by}",
        rotate=True,
        calls=calls,
        code=code,
        headers=json.dumps(headers),
        body=body,
    )
    if done:
        keys.emit(signals.key_finished, keys.read(pk, using=_alias(using)), None)
    return done


def answer_problem(response: HttpResponse) -> str:
    """Return why ``response`` cannot be the end of a request, or nothing: only a stored 2xx or 4xx tells a client to stop."""
    code = response.status_code
    if not (200 <= code < 300 or 400 <= code < 500) or not http.is_stored(response):
        return f"Status {code} does not end a request for its client: choose a 2xx, or a 4xx such as 409, 410 or 422."
    if len(response.content) > conf.get().MAX_STORED_BODY_BYTES:
        return f"The body is longer than {conf.get().MAX_STORED_BODY_BYTES} bytes (MAX_STORED_BODY_BYTES)."
    if code in (204, 205) and response.content:
        return f"A response with status {code} has no body."
    return ""


def acknowledge(
    pk: int, seen: uuid.UUID | None, *, by: str, at: str | None = None, note: str = "", using: str | None = None
) -> bool:
    """Take a stuck key off the list of those that wait for a person; return whether this call did it.

    On return the key is as stuck as before: it has no response, its client gets 409, nothing runs or deletes it.
    ``QuerySet.acknowledged()`` finds it. Should it become stuck anew, it is on the list again.
    """
    text = statements(_alias(using))
    return _change(
        pk,
        seen,
        at,
        f"acknowledged_at = {text.now}",
        "k.stuck_at IS NOT NULL AND (k.acknowledged_at IS NULL OR k.acknowledged_at < k.stuck_at)",
        using,
        event="acknowledged",
        detail=f"by {by}{': ' if note else ''}{note}",
        rotate=False,
    )


def retry_jobs(ids: Collection[uuid.UUID] | None = None, *, using: str | None = None) -> int:
    """Make failed jobs due again, with all their attempts; return how many. ``None`` is all of them."""
    return _failed(ids, using).update(failed_at=None, attempts=0, run_at=Now())


def discard_jobs(ids: Collection[uuid.UUID] | None = None, *, using: str | None = None) -> int:
    """Delete failed jobs for good; return how many. ``None`` is all of them.

    They will never run, even if a queue still has a message of theirs: the inbox has them on return. One that a worker runs
    at this moment is left alone.
    """
    alias, discarded = using or router.db_for_write(StagedJob), 0
    for pk in list(_failed(ids, alias).values_list("pk", flat=True)):
        with suppress(MessageInProgress), transaction.atomic(using=alias):
            deleted, _ = _failed([pk], alias).delete()  # Of two persons who press at once, one does it.
            if deleted:
                with process_once(STAGED_JOBS, str(pk), using=alias):
                    discarded += 1
    return discarded


def _failed(ids: Collection[uuid.UUID] | None, using: str | None) -> QuerySet[StagedJob]:
    failed = StagedJob.objects.using(using or router.db_for_write(StagedJob)).filter(failed_at__isnull=False)
    return failed if ids is None else failed.filter(pk__in=ids)


def _alias(using: str | None) -> str:
    return using or router.db_for_write(IdempotencyKey)


def _change(
    pk: int,
    seen: uuid.UUID | None,
    at: str | None,
    changes: str,
    condition: str,
    using: str | None,
    *,
    rotate: bool,
    **parameters: Any,
) -> bool:
    """Change an unfinished key if nothing has claimed it since it was seen, and write down who did it."""
    alias = _alias(using)
    same = "k.claim_token = %(seen)s" if seen else "k.claim_token IS NULL"
    if at is not None:
        same += " AND k.recovery_point = %(at)s"
    if rotate:
        changes = f"claim_token = %(token)s, {changes}"
    statement = (
        f"UPDATE {sql.TABLE} AS k SET {changes}, history = {statements(alias).dialect.append_event} "  # nosec B608  # see the noqa above
        f"WHERE k.id = %(id)s AND {same} AND k.finished_at IS NULL AND {condition} RETURNING scope, idempotency_key"
    )
    parameters |= {
        "id": pk,
        "at": at,
        "seen": token_parameter(seen, alias),
        "token": token_parameter(uuid.uuid4(), alias),
        "detail": keys.summary(parameters["detail"]),
    }
    if (row := fetch(statement, parameters, alias)) is None:
        return False
    changed = IdempotencyKey(scope=row[0], idempotency_key=row[1])
    logger.warning("key %s: %s %s", changed.key_hash, parameters["event"], parameters["detail"], extra=keys.about(changed))
    return True
