"""Answers to requests that do not run: the replay of a stored response, or a refusal."""

import logging

from django.http import HttpRequest, HttpResponse, HttpResponseBase

from idempotency import conf, signals
from idempotency._request import problems
from idempotency._request.problems import Problem
from idempotency._request.responses import stored_response
from idempotency._request.view_call import Call
from idempotency._store import events, replication, settlement
from idempotency._store.claims import Claim, Outcome
from idempotency.exceptions import StuckCode
from idempotency.models import IdempotencyKey

logger = logging.getLogger("idempotency")


def answer_without_running(claim: Claim, call: Call, *, using: str) -> HttpResponseBase:
    """Return the stored response for a key that could not be claimed, or raise Problem."""
    key = claim.key
    if claim.outcome is Outcome.FINISHED:
        return replay(key, call)
    problem = _conflict(claim)
    events.emit(signals.key_conflict, key, call.request, code=problem.code)
    if claim.outcome is Outcome.UNKNOWN_POINT:
        code, reason = StuckCode.UNKNOWN_RECOVERY_POINT, unknown_point(key)
        settlement.give_up(key.pk, code, reason, using=using, request=call.request)
    raise problem


def answer_of_other_run(key: IdempotencyKey | None, call: Call, sender: HttpRequest | None) -> HttpResponseBase:
    """Return the response of the run that has taken over the key. Raises Problem if it has stored none. If ``sender`` is
    None, the caller is the completer, and no replay is announced."""
    if key is not None and key.finished_at is not None:
        return replay(key, call) if sender is not None else _replayed(key)
    stuck_code = key.stuck_code if key is not None else ""
    problem = problems.key_stuck(stuck_code) if stuck_code else problems.key_in_use()
    events.emit(signals.key_conflict, key, sender, code=problem.code)
    raise problem


def replay(key: IdempotencyKey, call: Call) -> HttpResponseBase:
    """Return the stored response. Raises NotReplicated."""
    replication.confirm(str(key._state.db))
    response = _replayed(key)
    events.emit(signals.key_replayed, key, call.request)
    return response


def unknown_point(key: IdempotencyKey) -> str:
    return (
        f"The running code does not declare the recovery point {key.recovery_point!r}. Deploy code that declares it: the next "
        f"request or the completer then continues from there. Nothing is lost."
    )


def _replayed(key: IdempotencyKey) -> HttpResponse:
    if key.response_code is None:
        logger.error(
            "key %s was committed without a response, probably because its view ended the transaction with COMMIT. The writes "
            "before it are committed. The client gets 409.",
            key.key_hash,
            extra=events.about(key),
        )
        raise problems.key_stuck("")
    response = stored_response(key)
    response[conf.get().REPLAYED_HEADER] = "true"
    return response


def _conflict(claim: Claim) -> Problem:
    match claim.outcome:
        case Outcome.MISMATCH:
            return problems.key_reused()
        case Outcome.IN_PROGRESS:
            return problems.key_in_use(claim.lock_seconds)
        case Outcome.STUCK:
            return problems.key_stuck(claim.key.stuck_code)
    return problems.key_stuck(StuckCode.UNKNOWN_RECOVERY_POINT)
