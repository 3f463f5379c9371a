"""The cases that ``benchmarks.sizes`` measures at each size: claims, replays, completer, reaper,
admin, doctor.

Import this module after Django is set up. A case is the number of its calls in a round, and a
function. The function receives the alias of the database and its number of keys, and returns the
seconds of one call, or of one key of a call. These seconds do not include the preparation.
"""

import hashlib
import json
import random
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from django.conf import settings
from django.contrib import admin
from django.contrib.auth import get_user_model
from django.db import connections
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.test import RequestFactory, override_settings
from django.urls import path, resolve

from benchmarks import views
from idempotency._engine import claims
from idempotency._engine.adapter import ClaimedRequest
from idempotency._hidden import Hidden
from idempotency._http import bodies, stored_request
from idempotency._http.view import Call
from idempotency.completer import CompletePass, complete_once
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from idempotency.monitoring.doctor import diagnose
from idempotency.phases import atomic_phase
from idempotency.reaper import reap_once

#: Abandoned keys that a measured pass of the completer finishes, and expired keys that a pass of
#: the reaper deletes.
ABANDONED, EXPIRED = 10, 300
SCOPES = 1000
POINTS = ("started",)
ADMIN = "/admin/idempotency/idempotencykey/"

Case = tuple[int, Callable[[str, int], float]]

#: Insert the rows ``first`` to ``last`` of a run of keys, finished or abandoned. Creation times are
#: evenly spaced.
FILL = """
INSERT INTO idempotency_idempotencykey (
    scope, idempotency_key, created_at, last_run_at, finished_at, expires_at, attempts,
    completer_attempts, request_method, request_path, request_body, request_content_type,
    request_headers, remote_addr, request_fingerprint, seed, recovery_point, response_code,
    response_headers, response_body, stuck_code, stuck_reason, last_error, lease_seconds, history)
SELECT 'scope=user:' || n %% %(scopes)s, md5(%(run)s || n)::uuid::text, created_at, created_at,
    CASE WHEN %(finished)s THEN created_at END,
    CASE WHEN %(finished)s THEN created_at + interval '72 hours' END, 1,
    0, 'POST', '/bench/', %(body)s, 'application/json', %(headers)s, '127.0.0.1',
    %(fingerprint)s, decode(repeat(md5(n::text), 2), 'hex'),
    CASE WHEN %(finished)s THEN 'finished' ELSE 'started' END,
    CASE WHEN %(finished)s THEN 201 END,
    CASE WHEN %(finished)s THEN '{"Content-Type": "application/json"}'::jsonb END,
    CASE WHEN %(finished)s THEN %(response)s::bytea END, '', '', '', 90, jsonb_build_array(
        jsonb_build_object('at', created_at, 'event', 'claimed', 'detail', 'client'),
        jsonb_build_object('at', created_at, 'event', 'finished', 'detail', 'status 201'))
FROM (SELECT n, now() - make_interval(hours => %(oldest_hours)s) * (1 - n::float / %(of)s)
    - make_interval(hours => %(at_least_hours)s) AS created_at
    FROM generate_series(%(first)s, %(last)s) AS n) AS numbered
"""


def caller(request: HttpRequest) -> str:
    """Return the scope, which is an attribute of the request."""
    scope: str = request.caller  # type: ignore[attr-defined]
    return scope


def name_caller(request: HttpRequest, key: IdempotencyKey) -> None:
    """Set the caller of a request that the completer runs."""
    request.auth = request.caller = key.scope.removeprefix("scope=")  # type: ignore[attr-defined]


@idempotent(scope=caller)
def plain(request: HttpRequest) -> HttpResponse:
    """Do no work, so that only the cost of the key is measured."""
    return JsonResponse({"id": 1}, status=201)


@idempotent(recovery_points=[], scope=caller)
def phased(request: HttpRequest) -> HttpResponseBase:
    """Finish in one phase."""
    key = request.idempotency_key  # type: ignore[attr-defined]
    for _ in key.phases():
        with atomic_phase(key) as phase:
            phase.set_response(JsonResponse({"id": 1}, status=201))
    response: HttpResponseBase = key.response()
    return response


#: The completer finds the view of an abandoned key here.
urlpatterns = [path("bench/", phased)]


def cases() -> dict[str, Case]:
    """Return each case by its name."""
    return {
        "plain claim": (20, lambda alias, keys: answered(ask(), plain)),
        "phased claim": (20, claim),
        "plain replay": (40, lambda alias, keys: answered(stored(keys), plain, replayed=True)),
        "phased replay": (40, lambda alias, keys: answered(stored(keys), phased, replayed=True)),
        "completer, idle pass": (5, lambda alias, keys: seconds(complete_once)),
        "completer, a key": (1, complete),
        "reaper, a key": (1, reap),
        "admin, the list": (1, lambda alias, keys: page("")),
        "admin, stuck ones": (1, lambda alias, keys: page("?state=stuck")),
        "admin, by path": (1, lambda alias, keys: page("?path=/bench/")),
        "admin, by status": (1, lambda alias, keys: page("?status=4xx")),
        "admin, search": (1, lambda alias, keys: page("?q=deadbeef")),
        "admin, dashboard": (1, lambda alias, keys: page("dashboard/", "dashboard_view")),
        "doctor": (1, lambda alias, keys: seconds(diagnose)),
    }


def seconds(call: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def ask(key: str = "", scope: str = "") -> HttpRequest:
    """Return a request with ``key`` (default: a new key) of ``scope`` (default: a random scope)."""
    request = views.request(key)
    request.caller = scope or f"user:{random.randrange(SCOPES)}"  # type: ignore[attr-defined]
    return request


def stored(keys: int) -> HttpRequest:
    """Return a request with a random key of the filled table."""
    number = random.randint(1, keys)
    text = hashlib.md5(f"fill{number}".encode(), usedforsecurity=False).hexdigest()
    return ask(
        "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:])),
        f"user:{number % SCOPES}",
    )


def answered(request: HttpRequest, view: views.View, *, replayed: bool = False) -> float:
    """Return the seconds of a request; raise RuntimeError if the response is no 201, or not
    ``replayed`` as expected."""
    start = time.perf_counter()
    response = view(request)
    taken = time.perf_counter() - start
    if response.status_code != 201 or ("Idempotent-Replayed" in response) != replayed:
        raise RuntimeError(f"{response.status_code} {response.headers}")
    return taken


def _captured(request: HttpRequest, scope: str, key: str, view: Any) -> ClaimedRequest:
    bodies.note_stream(request)
    call = Call.of(view, (request,), {})
    return stored_request.capture(call, scope, Hidden(key), view.idempotency)


def claim(alias: str, keys: int) -> float:
    """Return the seconds of a claim as in a phased view, without the view."""
    request = ask()
    described = _captured(request, caller(request), str(uuid4()), phased)
    return seconds(lambda: claims.claim_phased(described, POINTS, using=alias))


def complete(alias: str, keys: int) -> float:
    """Let the completer finish abandoned keys; return the seconds of one key."""
    insert(alias, uuid4().hex, ABANDONED, finished=False, at_least_hours=1)
    found = []
    named = {**getattr(settings, "IDEMPOTENCY", {}), "PREPARE_REQUEST": f"{__name__}.name_caller"}
    with override_settings(IDEMPOTENCY=named):
        taken = seconds(lambda: found.append(complete_once()))
    if found != [CompletePass(finished=ABANDONED)]:
        raise RuntimeError(f"The completer did something else: {found}")
    return taken / ABANDONED


def reap(alias: str, keys: int) -> float:
    """Let the reaper delete keys past their retention; return the seconds of one key."""
    insert(alias, uuid4().hex, EXPIRED, at_least_hours=100)
    found = []
    taken = seconds(lambda: found.append(reap_once()))
    if found[0].deleted != EXPIRED:
        raise RuntimeError(f"The reaper did something else: {found}")
    return taken / EXPIRED


def page(query: str, name: str = "changelist_view") -> float:
    """Return the seconds of the admin's list of keys, or of another page of the admin, without the
    middleware."""
    request = RequestFactory().get(ADMIN + query)
    request.resolver_match = resolve(ADMIN)
    request.user = get_user_model()(pk=1, is_staff=True, is_superuser=True)
    view = getattr(admin.site._registry[IdempotencyKey], name)

    def show() -> None:
        response = view(request)
        if response.status_code != 200:
            raise RuntimeError(f"The page answers {response.status_code}.")
        response.render()  # type: ignore[attr-defined]

    return seconds(show)


def insert(alias: str, run: str, last: int, *, first: int = 1, of: int = 0, **values: Any) -> None:
    """Insert the keys ``first`` to ``last`` of a run of ``of`` keys, as the views of this module
    store them."""
    described = _captured(ask(), "", "", plain if values.get("finished", True) else phased)
    headers = described.request_headers
    parameters = {
        "run": run,
        "first": first,
        "last": last,
        "of": of or last,
        "scopes": SCOPES,
        "finished": True,
        "oldest_hours": 0,
        "at_least_hours": 0,
        "body": described.request_body,
        "headers": json.dumps(headers and headers | {"urlconf": __name__}),
        "fingerprint": described.request_fingerprint,
        "response": b'{"id": 1}',
    }
    with connections[alias].cursor() as cursor:
        cursor.execute(FILL, parameters | values)
