"""The switches of the web page: set the behaviour of the Stripe sandbox, and kill a web worker.

The switches belong to the demo, and the service does not import them: ``urls`` passes ``shown`` to
the page. The session authenticates the routes, which book nothing.
"""

import os
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import psutil
from django.conf import settings
from django.core.exceptions import MiddlewareNotUsed
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_POST

from idempotency.models import IdempotencyKey
from rides_demo import payments, traces
from rides_demo.auth import SESSION_TOKEN, rider_of_session
from rides_demo.models import Ride
from rides_demo.processes import web_workers
from rides_demo.sandbox import switch

#: A slow sandbox responds within the timeout of the call, but late enough to press a button first.
SLOW_PART_OF_TIMEOUT = 0.75
LOOPBACK = ("127.0.0.1", "::1")

running = web_workers.RunningRequests(settings.RUN_FOLDER / "running")


def shown() -> dict[str, Any]:
    """Return the template variables of the switches."""
    return {
        "behaviours": switch.BEHAVIOURS.items(),
        "behaviour": switch.behaviour(),
        "can_kill": bool(web_workers.siblings()),
    }


@require_GET
@never_cache
def charges(request: HttpRequest) -> HttpResponse:
    """Return the number of charges at the sandbox for the rider's booking with the key ``?key=``;
    null without a sandbox."""
    rider = rider_of_session(request)
    if rider is None:
        return _refusal(HTTPStatus.FORBIDDEN, "Sign in first.")
    sent = request.GET.get("key", "").replace("\x00", "")
    key = IdempotencyKey.objects.filter(scope=f"user:{rider.pk}", idempotency_key=sent).first()
    ride = Ride.objects.filter(idempotency_key=key).first() if key else None
    return JsonResponse({"charges": switch.charges_of(ride.pk) if ride else 0})


@require_POST
def stripe(request: HttpRequest) -> HttpResponse:
    """Set the Stripe sandbox to the posted ``behaviour``; return 404 without a sandbox."""
    name = request.POST.get("behaviour", "")
    if rider_of_session(request) is None:
        return _refusal(HTTPStatus.FORBIDDEN, "Sign in first.")
    if name not in switch.BEHAVIOURS:
        return _refusal(HTTPStatus.BAD_REQUEST, "There is no such behaviour.")
    try:
        switch.set_behaviour(name, slow_seconds=SLOW_PART_OF_TIMEOUT * payments.timeout_seconds())
    except switch.NoSandbox:
        return _refusal(HTTPStatus.NOT_FOUND, "No Stripe sandbox is in use.")
    return JsonResponse({"behaviour": name})


class KillAfterResponse(JsonResponse):
    """A response that kills ``victim`` after it is sent, because the victim may be the process that
    sends it."""

    victim: psutil.Process

    def close(self) -> None:
        super().close()
        traces.note_kill(self.victim.pid)
        self.victim.kill()


@require_POST
def kill(request: HttpRequest) -> HttpResponse:
    """Send SIGKILL to the web worker that runs the rider's booking with the posted ``key``, or to
    this worker if none does.

    Return 404 unless ``make serve`` runs this worker and the request comes from this machine.
    """
    if rider_of_session(request) is None:
        return _refusal(HTTPStatus.FORBIDDEN, "Sign in first.")
    workers = web_workers.siblings() if request.META.get("REMOTE_ADDR") in LOOPBACK else {}
    if os.getpid() not in workers:
        return _refusal(HTTPStatus.NOT_FOUND, "Only `make serve` has this button.")
    runs_booking = running.worker_of(
        _bearer(request.session[SESSION_TOKEN]), request.POST.get("key", "")
    )
    victim = runs_booking or workers[os.getpid()]
    response = KillAfterResponse({"pid": victim.pid, "ran_booking": runs_booking is not None})
    response.victim = victim
    return response


def register_bookings(
    get_response: Callable[[HttpRequest], HttpResponse],
) -> Callable[[HttpRequest], HttpResponse]:
    """Return a middleware that registers the worker of each booking; only ``make serve`` uses
    it."""
    if not web_workers.siblings():
        raise MiddlewareNotUsed

    def middleware(request: HttpRequest) -> HttpResponse:
        if request.method != "POST" or "Idempotency-Key" not in request.headers:
            return get_response(request)
        with running.entered(
            request.headers.get("Authorization", ""), request.headers["Idempotency-Key"]
        ):
            return get_response(request)

    return middleware


def _bearer(token: str) -> str:
    return f"Bearer {token}"


def _refusal(status: HTTPStatus, text: str) -> HttpResponse:
    return JsonResponse({"error": text}, status=status)
