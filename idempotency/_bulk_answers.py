"""The answers of bulk work: one answer for all keys, with values of each key, or the answer that a
function of the project returns for each key."""

import json
import logging
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

from django.http import HttpResponse
from django.utils.translation import gettext_noop

from idempotency import conf
from idempotency._async import FAILURES
from idempotency._boundary import boundary
from idempotency._engine.adapter import adapter_of
from idempotency._engine.fence import StoredResponse
from idempotency._operations.definition import METHOD
from idempotency._states import HUNG_AFTER_LEASES
from idempotency._text import error_text
from idempotency._watchdog import watched
from idempotency.exceptions import Rejected
from idempotency.models import BulkRow, DownstreamCall, IdempotencyKey

logger = logging.getLogger("idempotency")

#: The content type of a body, by its kind.
CONTENT_TYPES = {"json": "application/json", "text": "text/plain; charset=utf-8"}
#: The value of ``kind`` for the function of the setting ``ANSWER_FOR_KEY``.
PROJECT = "project"
#: The reasons why a key gets no answer.
NO_FIELD = gettext_noop("a field of the answer is missing")
NO_ANSWER = gettext_noop("without an answer of the project")
RAISED = gettext_noop("ANSWER_FOR_KEY raised an error: see the log")
NOT_POSSIBLE = gettext_noop("the answer is not possible: see the log")
#: A field, as in "Ride {request.ride} of {key.user_id}".
_FIELD = re.compile(r"\{((?:key|request|calls)(?:\.[^{}.\s]+)+)\}")
_OF_KEY = (
    "scope",
    "idempotency_key",
    "user_id",
    "recovery_point",
    "request_path",
    "request_method",
)


class NoAnswer(Exception):
    """A key gets no answer. The argument is the reason, in English."""


def response_of(status: int, kind: str, body: str) -> HttpResponse:
    """Return the response to a request. An empty body is plain text."""
    return HttpResponse(body, status=status, content_type=CONTENT_TYPES[kind if body else "text"])


def prepare(
    answer: dict[str, Any],
    rows: Iterable[BulkRow],
    alias: str,
    seconds: float,
    deleted: str,
    mark_hung: Callable[[str], object],
) -> dict[str, StoredResponse | str]:
    """Prepare rows in order until ``seconds`` have passed. Return by key id what to store, or the
    reason why the key gets no answer; the reason for a deleted key is ``deleted``. Code of the
    project runs, so call this outside any transaction. If the code hangs in a loop, its watchdog
    calls ``mark_hung``."""
    keys = IdempotencyKey.objects.using(alias).in_bulk([int(row.row) for row in rows])
    prepared: dict[str, StoredResponse | str] = {}
    until = time.monotonic() + seconds
    for row in rows:
        key = keys.get(int(row.row))
        try:
            prepared[row.row] = deleted if key is None else _watched(key, answer, mark_hung)
        except NoAnswer as error:
            prepared[row.row] = str(error)
        if time.monotonic() > until:
            break
    return prepared


def _watched(
    key: IdempotencyKey, answer: dict[str, Any], mark_hung: Callable[[str], object]
) -> StoredResponse:
    text, limit = f"the answer of key {key.key_hash}", HUNG_AFTER_LEASES * key.lease_seconds
    with watched(
        text, limit_seconds=limit, mark=lambda place: mark_hung(f"{text} hangs at {place}")
    ):
        return stored_answer(key, answer)


def stored_answer(key: IdempotencyKey, answer: dict[str, Any]) -> StoredResponse:
    """Return what to store for a key. Raises NoAnswer."""
    try:
        return adapter_of(key.request_method).answer(answer_of(key, answer))
    except (TypeError, ValueError) as error:
        logger.warning("key %s cannot get its answer: %s", key.key_hash, error_text(error))
        raise NoAnswer(NOT_POSSIBLE) from error


def answer_of(key: IdempotencyKey, answer: dict[str, Any]) -> Any:
    """Return the answer of a key: an ``HttpResponse``, or for an operation its result or
    ``Rejected``. Raises NoAnswer."""
    if answer["kind"] == PROJECT:
        return _answer_of_project(key)
    if key.request_method != METHOD:
        return response_of(answer["status"], answer["kind"], _filled_body(key, answer))
    value = json.loads(_filled_body(key, answer) or "null")
    if answer["kind"] == "rejected":
        fill = _filler(key)
        return Rejected(fill(answer["code"]), fill(answer["message"]), value)
    return value


def _answer_of_project(key: IdempotencyKey) -> Any:
    named = conf.get().ANSWER_FOR_KEY
    found = None
    if named is not None:
        try:
            with boundary():
                found = conf.named(named)(key)
        except FAILURES as error:
            logger.exception("ANSWER_FOR_KEY failed for key %s", key.key_hash)
            raise NoAnswer(RAISED) from error
    if found is None:
        raise NoAnswer(NO_ANSWER)
    return found


def _filled_body(key: IdempotencyKey, answer: dict[str, Any]) -> str:
    """Return the body with the values of the key. A body without fields is not changed."""
    body = str(answer["body"])
    if not _FIELD.search(body):
        return body
    fill = _filler(key)
    if answer["kind"] == "text":
        return str(fill(body, as_text=True))
    return json.dumps(_filled(json.loads(body), fill), ensure_ascii=False)


def _filled(value: Any, fill: Callable[..., Any]) -> Any:
    if isinstance(value, dict):
        return {name: _filled(each, fill) for name, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, fill) for each in value]
    return fill(value) if isinstance(value, str) else value


def _filler(key: IdempotencyKey) -> Callable[..., Any]:
    """Return a function that replaces the fields in a text. A text that is one field becomes the
    value of the field, which may be any JSON value."""
    roots: dict[str, Any] = {}

    def value(path: str) -> Any:
        root, *names = path.split(".")
        found = roots.setdefault(root, _ROOTS[root](key)) if root not in roots else roots[root]
        for name in names:
            try:
                found = found[int(name) if isinstance(found, list) else name]
            except (LookupError, TypeError, ValueError):
                raise NoAnswer(NO_FIELD) from None
        return found

    def text_of(field: re.Match[str]) -> str:
        found = value(field[1])
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)

    def fill(text: str, *, as_text: bool = False) -> Any:
        whole = None if as_text else _FIELD.fullmatch(text)
        return value(whole[1]) if whole else _FIELD.sub(text_of, text)

    return fill


def _of_key(key: IdempotencyKey) -> dict[str, Any]:
    values = {name: getattr(key, name) for name in _OF_KEY}
    return values | {"id": key.pk, "created_at": key.created_at.isoformat()}


def _calls(key: IdempotencyKey) -> dict[str, Any]:
    """Return the recorded results of the at-most-once calls, by the names of the calls."""
    calls = DownstreamCall.objects.using(key._state.db).filter(key=key, recorded_at__isnull=False)
    results = dict(calls.values_list("name", "result"))
    if key.request_method != METHOD:
        return results
    return {
        name: result.get("value", result) if isinstance(result, dict) else result
        for name, result in results.items()
    }


_ROOTS: dict[str, Callable[[IdempotencyKey], Any]] = {
    "key": _of_key,
    "request": lambda key: key.request_params,
    "calls": _calls,
}
