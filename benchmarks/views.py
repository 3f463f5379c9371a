"""The work that is measured: one INSERT in a bare view, under ``@idempotent``, and as a ride of
four commits."""

import json
from collections.abc import Callable
from uuid import uuid4

from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.test import RequestFactory

from idempotency.decorators import idempotent
from idempotency.phases import atomic_phase

TABLE = "CREATE TABLE IF NOT EXISTS bench_row (id bigserial PRIMARY KEY, name text NOT NULL)"
BODY = json.dumps({"amount": 2000, "currency": "usd"})
#: The next recovery point of each phase of a ride, except the last phase.
NEXT = {"started": "ride_created", "ride_created": "charge_created"}
View = Callable[[HttpRequest], HttpResponseBase]


def caller(request: HttpRequest) -> str:
    """Return the scope of every request: one user."""
    return "user:1"


def work() -> int:
    """Insert one row; return its id."""
    with connections["default"].cursor() as cursor:
        cursor.execute("INSERT INTO bench_row (name) VALUES (%s) RETURNING id", ["x"])
        return int(cursor.fetchone()[0])


def answer() -> JsonResponse:
    """Do the work, and return the id of the row."""
    return JsonResponse({"id": work()}, status=201)


def charge() -> None:
    """Stand in for a downstream call. It does nothing, so that it costs the same, nothing, in all
    systems."""


def bare(request: HttpRequest) -> HttpResponse:
    """Do the work in a transaction, unprotected."""
    with transaction.atomic():
        return answer()


@idempotent(scope=caller)
def plain(request: HttpRequest) -> HttpResponse:
    """Do the work in a plain view."""
    return answer()


@idempotent(recovery_points=list(NEXT.values()), scope=caller)
def ride(request: HttpRequest) -> HttpResponseBase:
    """Do the work in each of three phases, with a call in between: four commits with the claim."""
    key = request.idempotency_key
    for recovery_point in key.phases():
        if recovery_point == "ride_created":
            charge()
        with atomic_phase(key) as phase:
            if recovery_point in NEXT:
                work()
                phase.set_recovery_point(NEXT[recovery_point])
            else:
                phase.set_response(answer())
    return key.response()


def request(key: str = "", body: str = BODY) -> HttpRequest:
    """Return a POST with ``key``, or with a new key."""
    headers = {"Idempotency-Key": key or str(uuid4())}
    return RequestFactory().post("/bench/", body, content_type="application/json", headers=headers)
