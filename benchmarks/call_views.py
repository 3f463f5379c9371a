"""The views whose function calls are counted. Each inserts one row, with the ORM and in a
transaction."""

from uuid import uuid4

from django.contrib.auth.models import Group
from django.db import transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse

from idempotency.decorators import idempotent
from idempotency.phases import atomic_phase


def answer() -> JsonResponse:
    """Insert a row; return the response with its id."""
    return JsonResponse({"id": Group.objects.create(name=uuid4().hex).pk}, status=201)


def bare(request: HttpRequest) -> HttpResponse:
    """Do the work, unprotected."""
    with transaction.atomic():
        return answer()


@idempotent
def plain(request: HttpRequest) -> HttpResponse:
    """Do the work in a plain view."""
    return answer()


@idempotent(recovery_points=["unused"])
def phased(request: HttpRequest) -> HttpResponseBase:
    """Do the work in the only phase of a phased view."""
    key = request.idempotency_key
    for _ in key.phases():
        with atomic_phase(key) as phase:
            phase.set_response(answer())
    return key.response()
