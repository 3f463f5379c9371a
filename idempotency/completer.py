"""The completer: finishes requests whose client has gone away.

It claims an abandoned key by its row, builds the request again from what the claim wrote down, and calls the view that the path
leads to: the view itself, not the middleware chain, so that no header, token or URL leads here from outside.
Source: Brandur Leach, "Implementing Stripe-like Idempotency Keys in Postgres" (the completer).
"""

import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from inspect import isawaitable
from io import BytesIO
from typing import Any
from urllib.parse import unquote

from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth import get_user_model
from django.contrib.auth.models import AnonymousUser
from django.core.handlers.wsgi import WSGIRequest
from django.db import Error, connections, router
from django.http import HttpRequest
from django.urls import Resolver404
from django.utils import timezone, translation
from django.utils.module_loading import import_string

from idempotency import claims, conf, keys, signals
from idempotency.abandonment import on_abandon_of
from idempotency.exceptions import LockLost
from idempotency.execution import CLAIMED_KEY_ATTRIBUTE
from idempotency.http import REDACTED_MARK
from idempotency.models import IdempotencyKey, IdempotencyKeyQuerySet
from idempotency.options import URLCONF, match_of, options_of
from idempotency.transactions import connection_lost

logger = logging.getLogger("idempotency")

#: The stuck code of a key that the completer has run often enough.
ATTEMPTS_EXHAUSTED = "attempts_exhausted"
#: The longest wait between two runs of one key. With it 25 attempts last for three days: from Friday to Monday.
_MAX_DELAY_SECONDS = 4 * 3600


@dataclass(frozen=True, slots=True)
class CompletePass:
    """What one pass did with the keys that it took: finished them, will try them again, or handed them to a person."""

    finished: int = 0
    failed: int = 0
    stuck: int = 0


class _CannotRun(Exception):
    """This request cannot be run again as it was; ``code`` is the stuck code."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def complete_once(
    *,
    batch_size: int = 100,
    concurrency: int = 1,
    dry_run: bool = False,
    using: str | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> CompletePass:
    """Run each abandoned key on from its recovery point, as its own user; several completers may run at once.

    On return each key that was taken is finished, stuck, or released and due again after a wait that doubles with each run.
    What a view raises is logged and kept on its key. ``batch_size``: how many keys are read at a time. ``concurrency``: how
    many run at once, each in a thread with connections of its own, which are closed on return; a single one runs in the
    caller's thread. ``stop`` is asked before each key. ``dry_run`` only counts, as failed, those that would be run.
    """
    alias = using or router.db_for_write(IdempotencyKey)
    if dry_run:
        return CompletePass(failed=_abandoned(alias).count())
    waiting, one_at_a_time = _waiting(alias, batch_size), threading.Lock()

    def run_keys() -> Counter[str]:
        counts: Counter[str] = Counter()
        while not stop():
            with one_at_a_time:
                key = next(waiting, None)
            if key is None:
                break
            if outcome := _complete(*key, alias):
                counts[outcome] += 1
        return counts

    def run_keys_and_disconnect() -> Counter[str]:
        try:
            return run_keys()
        finally:
            connections.close_all()

    if concurrency == 1:
        return CompletePass(**run_keys())
    with ThreadPoolExecutor(concurrency, thread_name_prefix="completer") as pool:
        runs = [pool.submit(run_keys_and_disconnect) for _ in range(concurrency)]
    return CompletePass(**sum((run.result() for run in runs), Counter()))


def complete_key(pk: int, *, using: str | None = None) -> str | None:
    """Run one unlocked key that is not stuck on from its recovery point, now, however young it is.

    Return "finished", "stuck", or "failed" for a key that was released with its error, and is due again after
    COMPLETER_IDLE_SECONDS; None, with nothing done, when a run holds it, a person has it, it has its response, or its next run
    is not due. What the view raises is logged and kept on the key; a lost database is raised. Not for use in a transaction.
    """
    return _complete(pk, 0, using or router.db_for_write(IdempotencyKey))


def _abandoned(alias: str) -> IdempotencyKeyQuerySet:
    return IdempotencyKeyQuerySet(IdempotencyKey, using=alias).abandoned()


def _waiting(alias: str, batch_size: int) -> Iterator[tuple[int, int]]:
    """Yield the id of each abandoned key and the number of its runs, each key once."""
    last = 0
    while batch := list(
        _abandoned(alias).filter(pk__gt=last).order_by("pk").values_list("pk", "completer_attempts")[:batch_size]
    ):
        yield from batch
        last, _ = batch[-1]


def _complete(pk: int, attempts: int, alias: str) -> str | None:
    """Run one key; return what became of it, None if somebody else has it."""
    limits = conf.get()
    if attempts >= limits.COMPLETER_MAX_ATTEMPTS and _give_up(pk, alias):
        return "stuck"  # A run that ended this process could not do it.
    delay = min(limits.COMPLETER_IDLE_SECONDS * 2**attempts, _MAX_DELAY_SECONDS)
    key = claims.claim_by_id(pk, delay_seconds=delay, using=alias)
    if key is None:
        return None
    keys.emit(signals.key_claimed, key, None)
    try:
        _run(key)
    except _CannotRun as error:
        with suppress(LockLost):  # Somebody has settled it from the admin meanwhile.
            keys.mark_stuck(key, error.code, str(error), using=alias)
            keys.emit(signals.key_stuck, keys.read(pk, using=alias), None)
    except Exception as error:
        if connection_lost(error, alias) and not _answers(alias):
            raise  # The next key would fare no better. This one's lock expires.
        logger.exception("the completer could not finish key %s", key.key_hash, extra=keys.about(key))
    # The status returned says little (a 409 may mean that a client came back): the row says what became of the key.
    after = keys.read(pk, using=alias)
    if after is None or after.finished_at is not None:
        return "finished"
    if after.stuck_at is None and after.completer_attempts >= limits.COMPLETER_MAX_ATTEMPTS and _give_up(pk, alias):
        return "stuck"
    return "failed" if after.stuck_at is None else "stuck"


def _answers(alias: str) -> bool:
    """Tell whether the database of the keys is there; a view may have lost another one."""
    try:
        connections[alias].ensure_connection()
        return bool(connections[alias].is_usable())
    except Error:
        return False


def _give_up(pk: int, alias: str) -> bool:
    """Hand a key to a person after its last attempt; return whether this call did it.

    Not one whose view has an ``on_abandon``: that settles it when the retention is over, and until then it is tried.
    """
    key = keys.read(pk, using=alias)
    if key is None or on_abandon_of(key) is not None:
        return False
    reason = f"The completer ran it {key.completer_attempts} times without success. Its last error and its history say why."
    if not keys.give_up(pk, ATTEMPTS_EXHAUSTED, reason, using=alias):
        return False
    logger.warning("key %s is stuck (%s): %s", key.key_hash, ATTEMPTS_EXHAUSTED, reason, extra=keys.about(key))
    keys.emit(signals.key_stuck, keys.read(pk, using=alias), None)
    return True


def _run(key: IdempotencyKey) -> None:
    """Call the view of a claimed key. The view leaves the key finished, stuck or released. Raises what the view raises."""
    request = _request(key)
    try:
        match = match_of(key)
    except Resolver404:
        raise _CannotRun("view_missing", f"No view answers {request.path_info} any more.") from None
    if options_of(match.func, key.request_method) is None:
        # An undecorated view would run its effects without the key.
        raise _CannotRun(
            "view_missing", f"The view that answers {request.path_info} is not protected with @idempotent any more."
        )
    request.resolver_match = match
    if urlconf := key.request_headers.get(URLCONF):
        request.urlconf = urlconf
    setattr(request, CLAIMED_KEY_ATTRIBUTE, key)
    if (prepare := conf.get().PREPARE_REQUEST) is not None:
        (import_string(prepare) if isinstance(prepare, str) else prepare)(request, key)
    language = translation.get_language_from_request(request)
    with translation.override(language), timezone.override(None):
        response = match.func(request, *match.args, **match.kwargs)
        if isawaitable(response):
            async_to_sync(_awaited)(response)


async def _awaited(response: Awaitable[Any]) -> None:
    await response


def _request(key: IdempotencyKey) -> HttpRequest:
    """Build the request again. Raises _CannotRun if that is not possible."""
    if REDACTED_MARK in key.request_headers:
        raise _CannotRun("body_redacted", "Parts of the request were redacted, so it cannot be run again without its client.")
    if key.request_body is None:
        raise _CannotRun("body_not_kept", "The body of the request was not kept, so it cannot be run again without its client.")
    body = bytes(key.request_body)
    path, _, query = key.request_path.partition("?")
    headers = dict(key.request_headers)
    host = headers.pop("Host", "")
    headers.pop(URLCONF, None)
    environ = {
        "REQUEST_METHOD": key.request_method,
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote(path, "latin-1"),
        "QUERY_STRING": query,
        "CONTENT_TYPE": key.request_content_type,
        "CONTENT_LENGTH": str(len(body)),
        "REMOTE_ADDR": key.remote_addr,
        "SERVER_NAME": host.rpartition(":")[0] or host or "localhost",
        "SERVER_PORT": "443" if headers.get("scheme") == "https" else "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "wsgi.url_scheme": headers.pop("scheme", "http"),
        "wsgi.input": BytesIO(body),
    }
    if host:
        environ["HTTP_HOST"] = host
    environ |= {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in headers.items()}
    request = WSGIRequest(environ)
    # As if it had been read: a run that meets a serialization failure is made again, and the stream can be read only once.
    request._body = body
    # Cross-site forgery is a matter of the request that came in; it passed, or there would be no key.
    request._dont_enforce_csrf_checks = True  # type: ignore[attr-defined]
    request.user = _user(key)
    # Django REST framework takes this user without asking an authenticator, as in its own force_authenticate().
    request._force_auth_user = request.user  # type: ignore[attr-defined]
    request.auser = sync_to_async(lambda: request.user)
    return request


def _user(key: IdempotencyKey) -> Any:
    if key.user_id is None:
        return AnonymousUser()
    user = get_user_model()._default_manager.filter(pk=key.user_id).first()
    if user is None or not getattr(user, "is_active", True):
        raise _CannotRun("user_missing", f"The user {key.user_id}, who sent the request, is gone or not active any more.")
    return user
