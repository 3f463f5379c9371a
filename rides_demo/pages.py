"""The web page: sign in as a demo user, book rides, watch the state of a booking.

The page is an ordinary client of the API. Its script sends the form with the user's token and the
idempotency key of a hidden field, so a double click books one ride. Another route returns the state
of the booking. The session authenticates this route, which only reads.
"""

import uuid
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_POST

from idempotency import conf
from idempotency.models import FINISHED, STARTED, IdempotencyKey
from rides_demo import traces
from rides_demo.auth import SESSION_TOKEN, rider_of_session
from rides_demo.models import Receipt, Ride, User

#: The demo users by token: name, and the result of their payments.
DEMO_RIDERS = {
    "demo-jane": ("Jane", "Her card works."),
    "demo-joe": ("Joe", "His card is declined; that response is stored too."),
    "demo-max": ("Max", "His card works. He cannot see the rides of the others."),
}
SHOWN_RIDES = 50
#: The places of the page, with latitude and longitude.
PLACES = {
    "Ferry Building": (37.7955, -122.3937),
    "Golden Gate": (37.8199, -122.4783),
    "Twin Peaks": (37.7544, -122.4477),
    "Ocean Beach": (37.7594, -122.5107),
}
_NAMES = {place: name for name, place in PLACES.items()}
#: The recovery points of a booking, with the work that is committed at each of them.
STEPS = {
    STARTED: "request recorded",
    "ride_created": "ride saved",
    "charge_created": "card charged",
    FINISHED: "response stored",
}


#: The names of key states on the page. The page shows every other state as "waiting".
SHOWN_STATES = {
    "finished": "finished",
    "stuck": "stuck",
    "acknowledged": "stuck",
    "in flight": "running",
}
#: The page retries for this time after the earliest time at which the completer runs the booking.
PATIENCE_SECONDS = 60


@require_GET
@never_cache
def home(request: HttpRequest, switches: Callable[[], dict[str, Any]]) -> HttpResponse:
    """Return the page with its ``switches``; each rendering contains a new idempotency key."""
    rider, limits = rider_of_session(request), conf.get()
    rides = (
        Ride.objects.filter(user=rider)
        .select_related("receipt", "idempotency_key")
        .order_by("-pk")[:SHOWN_RIDES]
    )
    places = [(name, f"{latitude},{longitude}") for name, (latitude, longitude) in PLACES.items()]
    for ride in rides:
        ride.way = " → ".join(_place(point) for point in (ride.origin, ride.target))
    context = {
        "rider": rider,
        "token": request.session.get(SESSION_TOKEN, ""),
        "demo_riders": DEMO_RIDERS.items(),
        "rides": rides,
        "fields": [
            (name, label, chosen, places)
            for name, label, chosen in (
                ("origin", "From", "Ferry Building"),
                ("target", "To", "Golden Gate"),
            )
        ],
        "steps": STEPS.items(),
        "lock_seconds": limits.LOCK_TIMEOUT_SECONDS,
        "completer_seconds": limits.COMPLETER_MIN_AGE_SECONDS,
        "patience_seconds": (
            3 * limits.LOCK_TIMEOUT_SECONDS + limits.COMPLETER_MIN_AGE_SECONDS + PATIENCE_SECONDS
        ),
        "idempotency_key": uuid.uuid4(),
        "traces": settings.TRACES,
    } | (switches() if rider else {})
    return render(request, "rides_demo/home.html", context)


def _place(point: list[float]) -> str:
    """Return the name of a place, or its latitude and longitude."""
    return _NAMES.get((point[0], point[1]), ", ".join(map(str, point)))


@require_GET
@never_cache
def booking(request: HttpRequest) -> HttpResponse:
    """Return the state of the rider's booking with the key ``?key=``, or null."""
    rider = rider_of_session(request)
    if rider is None:
        return JsonResponse({"error": "Sign in first."}, status=HTTPStatus.FORBIDDEN)
    key = _key_of(request, rider)
    return JsonResponse({"booking": None if key is None else _booking_json(key)})


@require_GET
@never_cache
def booking_trace(request: HttpRequest) -> HttpResponse:
    """Return the picture of the trace of the rider's booking with the key ``?key=``."""
    rider = rider_of_session(request)
    key = _key_of(request, rider) if rider is not None and settings.TRACES else None
    if key is None:
        raise Http404
    return render(request, "rides_demo/trace.html", traces.picture(key.traceparent))


def _key_of(request: HttpRequest, rider: User) -> IdempotencyKey | None:
    sent = request.GET.get("key", "").replace("\x00", "")
    keys = IdempotencyKey.objects.with_state()
    return keys.filter(scope=f"user:{rider.pk}", idempotency_key=sent).first()


@require_POST
def sign_in(request: HttpRequest) -> HttpResponse:
    """Store the token in the session; the page passes it to its script."""
    token = request.POST.get("token", "")
    if User.objects.filter(api_token_hash=User.hash_token(token), is_active=True).exists():
        request.session.cycle_key()  # prevents session fixation
        request.session[SESSION_TOKEN] = token
    return redirect("home")


@require_POST
def sign_out(request: HttpRequest) -> HttpResponse:
    """Remove the token from the session."""
    request.session.pop(SESSION_TOKEN, None)
    return redirect("home")


def _booking_json(key: IdempotencyKey) -> dict[str, object]:
    ride = Ride.objects.filter(idempotency_key=key).first()
    state = SHOWN_STATES.get(key.state, "waiting")
    return {
        "state": state,
        "steps": _steps(key, state, ride),
        "runs": key.attempts,
        "lock_seconds": _lock_seconds(key) if state == "running" else None,
        "response_code": key.response_code,
        "history": key.history,
        "rides": int(ride is not None),
        "receipts": Receipt.objects.filter(ride=ride).count() if ride else 0,
        "admin": reverse("admin:idempotency_idempotencykey_change", args=[key.pk]),
        "trace": f"{reverse('page-trace')}?{urlencode({'key': key.idempotency_key})}",
    }


def _steps(key: IdempotencyKey, state: str, ride: Ride | None) -> dict[str, str]:
    """Return the state of each step, by the rows: the history has only the last events. A step
    before the recovery point of the key was skipped if it left nothing in the ride."""
    reached = {STARTED, key.recovery_point}
    if ride is not None:
        reached |= {"ride_created"} | ({"charge_created"} if ride.stripe_charge_id else set())
    order = list(STEPS)
    here = order.index(key.recovery_point)
    steps = {name: "done" if name in reached else "skipped" for name in order[: here + 1]}
    return steps | dict(zip(order[here + 1 :], [state, *["todo"] * len(order)], strict=False))


def _lock_seconds(key: IdempotencyKey) -> float:
    return max(0.0, (key.locked_until - timezone.now()).total_seconds())
