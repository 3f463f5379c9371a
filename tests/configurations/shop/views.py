"""The views of the shop: each kind of view, with an event that a test can let happen inside."""

import json
from collections.abc import Callable
from typing import Any

from asgiref.sync import sync_to_async
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.template import engines
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from ninja import NinjaAPI
from ninja.decorators import decorate_view
from rest_framework.authentication import SessionAuthentication
from rest_framework.permissions import IsAuthenticated
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency.contrib.ninja import idempotent as ninja_idempotent
from idempotency.decorators import idempotent
from idempotency.inbox import process_once
from idempotency.jobs import call_job, stage_job
from idempotency.phases import atomic_phase
from tests.configurations.shop.models import Elsewhere, Order

#: The functions that a test lets happen inside a view, by the place in the view.
EVENTS: dict[str, Callable[[], Any]] = {}
CALLS: list[str] = []


def happen(place: str) -> None:
    """Run the event of a test at this place, if there is one."""
    EVENTS.get(place, lambda: None)()


def ordered(request: Any, name: str) -> dict[str, Any]:
    """Write an order, and return its data."""
    order = Order.objects.create(name=name, idempotency_key=request.idempotency_key)
    happen("after write")
    return {"id": order.pk, "user": str(request.user.pk)}


def name_of(request: Any) -> str:
    """Return the name of the order in the body."""
    data = getattr(request, "data", None)
    return str((json.loads(request.body) if data is None else data)["name"])


@csrf_exempt
@login_required
@idempotent
def plain(request: HttpRequest) -> HttpResponse:
    """Write an order."""
    return JsonResponse(ordered(request, name_of(request)), status=201)


@csrf_exempt
@login_required
@idempotent
def both(request: HttpRequest) -> HttpResponse:
    """Write to both databases."""
    Elsewhere.objects.create(name=name_of(request))
    return JsonResponse(ordered(request, name_of(request)), status=201)


def _phases(request: Any, respond: Callable[[dict[str, Any]], Any]) -> Any:
    key = request.idempotency_key
    for recovery_point in key.phases():
        match recovery_point:
            case "started":
                with atomic_phase(key) as phase:
                    ordered(request, name_of(request))
                    phase.set_recovery_point("ordered")
            case "ordered":
                happen("before call")
                with key.call("charge", valid_seconds=3600) as call:
                    CALLS.append(str(call.key))
                happen("after call")
                with atomic_phase(key) as phase:
                    order = Order.objects.get(idempotency_key=key)
                    stage_job("tests.configurations.shop.jobs.send_receipt", {"name": order.name})
                    phase.set_response(respond({"id": order.pk, "user": str(request.user.pk)}))
    return key.response()


@csrf_exempt
@login_required
@idempotent(recovery_points=["ordered"])
def phased(request: HttpRequest) -> HttpResponse:
    """Order, charge, and send a receipt."""
    response: HttpResponse = _phases(request, lambda data: JsonResponse(data, status=201))
    return response


@method_decorator([csrf_exempt, login_required], name="dispatch")
class Method(View):
    """A class-based view."""

    @idempotent
    def post(self, request: HttpRequest) -> HttpResponse:
        """Write an order."""
        return JsonResponse(ordered(request, name_of(request)), status=201)


@csrf_exempt
@idempotent
async def coroutine(request: HttpRequest) -> HttpResponse:
    """Write an order."""
    user = await request.auser()
    order = await Order.objects.acreate(
        name=name_of(request), idempotency_key=request.idempotency_key
    )
    await sync_to_async(happen)("after write")
    return JsonResponse({"id": order.pk, "user": str(user.pk)}, status=201)


class _Session(SessionAuthentication):
    """Session authentication without the check for CSRF."""

    def enforce_csrf(self, request: Any) -> None:
        """Do not check."""


class Rest(APIView):
    """A view of Django REST framework."""

    authentication_classes = [_Session]
    permission_classes = [IsAuthenticated]

    @idempotent
    def post(self, request: Any) -> Response:
        """Write an order."""
        return Response(ordered(request, name_of(request)), status=201)


class RestPhased(APIView):
    """A phased view of Django REST framework."""

    authentication_classes = [_Session]
    permission_classes = [IsAuthenticated]

    @idempotent(recovery_points=["ordered"])
    def post(self, request: Any) -> Any:
        """Order, charge, and send a receipt."""
        return _phases(request, lambda data: Response(data, status=201))


api = NinjaAPI(auth=lambda request: request.user if request.user.is_authenticated else None)


@api.post("/orders")
@decorate_view(ninja_idempotent)
def ninja_order(request: HttpRequest) -> Any:
    """Write an order."""
    return ordered(request, name_of(request))


FORM = """{% load idempotency %}
<form method="post">{% csrf_token %}{% idempotency_key %}<input name="name"></form>
"""


@login_required
@idempotent(key_from="form:idempotency_key")
def form(request: HttpRequest) -> HttpResponse:
    """Show a form with a key, and take it."""
    if request.method == "POST":
        Order.objects.create(name=request.POST["name"], idempotency_key=request.idempotency_key)
        return HttpResponseRedirect("/thanks/")
    return HttpResponse(engines["django"].from_string(FORM).render({}, request))


@csrf_exempt
@login_required
@idempotent
def upload(request: HttpRequest) -> HttpResponse:
    """Take a file."""
    size = sum(len(chunk) for chunk in request.FILES["file"].chunks())
    Order.objects.create(name=f"{request.POST['name']} {size}")
    return HttpResponse(str(size), status=201)


@csrf_exempt
def webhook(request: HttpRequest) -> HttpResponse:
    """Process a message once."""
    with process_once("bank", name_of(request)) as first:
        if first:
            Order.objects.create(name=name_of(request))
    return HttpResponse("first" if first else "again")


def hand_over(job: Any) -> None:
    """Run a staged job in the process of the enqueuer, once."""
    with process_once("staged jobs", str(job.pk)) as first:
        if first:
            call_job(job.job_name, job.job_args)
