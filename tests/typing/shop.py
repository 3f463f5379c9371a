"""A project of a user, type-checked by ``tests/docs/test_typing.py``: what mypy must reveal, or
refuse, stands at the line."""

from typing import Any, reveal_type

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from idempotency.decorators import ProtectedRequest, idempotent
from idempotency.inbox import process_once
from idempotency.phases import ClaimedKey, atomic_phase


@idempotent
def bare(request: HttpRequest, number: int) -> JsonResponse:
    return JsonResponse({"number": number})


@idempotent(wait_seconds=2, retention_hours=100)
def with_options(request: HttpRequest, *, name: str = "") -> HttpResponse:
    return HttpResponse(name)


@idempotent
async def asynchronous(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


class Payments(View):
    @idempotent
    def post(self, request: HttpRequest, number: int) -> HttpResponse:
        return HttpResponse(str(number))


@method_decorator(idempotent, name="dispatch")
class Refunds(View):
    pass


@idempotent(recovery_points=["charged"])
def phased(request: ProtectedRequest) -> HttpResponseBase:
    key = reveal_type(request.idempotency_key)  # R: "idempotency._engine.claimed_key.ClaimedKey"
    for point in key.phases():
        reveal_type(point)  # R: "str"
        with key.call("charge", valid_seconds=60) as charge:
            reveal_type(charge)  # R: "idempotency._engine.call_handles.KeyedCall"
            reveal_type(charge.key)  # R: "str"
            charge.record("paid")  # E: attr-defined
        with key.call("sms", at_most_once=True) as sms:
            reveal_type(sms)  # R: "idempotency._engine.call_handles.AtMostOnceCall"
            sms.record("sent")
        with atomic_phase(key, isolation="serializable") as phase:
            reveal_type(phase)  # R: "idempotency._engine.phase.AtomicPhase"
            phase.set_response(HttpResponse())
    return key.response()


@idempotent(recovery_points=["charged"])
async def phased_async(request: ProtectedRequest) -> HttpResponseBase:
    key = request.idempotency_key
    async for point in key.aphases():
        reveal_type(point)  # R: "str"
        async with key.call("sms", at_most_once=True) as call:
            call.record("sent")
        async with atomic_phase(key) as phase:
            reveal_type(phase)  # R: "idempotency._engine.phase.AtomicPhase"
            phase.set_recovery_point("charged")
    return key.response()


@csrf_exempt
@require_POST
@login_required
@idempotent(required=False)
def below_others(request: HttpRequest, number: int) -> JsonResponse:
    return JsonResponse({"number": number})


urlpatterns = [
    path("bare/<int:number>/", bare),
    path("phased/", login_required(require_POST(phased))),
    path("asynchronous/", asynchronous),
    path("payments/<int:number>/", Payments.as_view()),
]


def consume(message: dict[str, Any]) -> None:
    with process_once("orders", message["id"]) as first:
        reveal_type(first)  # R: "bool"


async def consume_async(message: dict[str, Any]) -> None:
    async with process_once("orders", message["id"]) as first:
        reveal_type(first)  # R: "bool"


def mistakes(request: HttpRequest, key: ClaimedKey) -> None:
    reveal_type(bare(request, 1))  # R: "django.http.response.JsonResponse"
    reveal_type(below_others(request, 1))  # R: "django.http.response.JsonResponse"
    below_others(request)  # E: call-arg
    reveal_type(with_options(request, name="a"))  # R: "django.http.response.HttpResponse"
    later = asynchronous(request)
    _ = reveal_type(later)  # R: "typing.Coroutine[Any, Any, django.http.response.HttpResponse]"
    reveal_type(Payments().post(request, 1))  # R: "django.http.response.HttpResponse"
    bare(request, "one")  # E: arg-type
    with_options(request, nome="a")  # E: call-arg
    atomic_phase(key, isolation="snapshot")  # E: arg-type
    key.call("sms", 60, at_most_once=True)  # E: call-overload
    idempotent(wait_second=2)  # E: call-overload
    process_once("orders", 7)  # E: arg-type
