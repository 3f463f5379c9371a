"""The web page: sign in as a demo user, book rides, inject Stripe faults, follow the booking.

The page is an ordinary client of the API. Its script sends the form with the user's token and the
idempotency key of a hidden field, so a double click books one ride. Two more routes return the
state of the booking and set the behaviour of Stripe. The session authenticates these routes, and
they book nothing.
"""

import uuid
from http import HTTPStatus

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_POST

from idempotency import conf
from idempotency.models import FINISHED, STARTED, IdempotencyKey
from rides_demo.models import Receipt, Ride, User
from rides_demo.parameters import RIDE_PARAMETERS
from rides_demo.sandbox import switch

#: The session key of the token of the signed-in user.
TOKEN = "rides_token"
#: The demo users by token: name, and the result of their payments.
DEMO_RIDERS = {
    "demo-jane": ("Jane", "Her card works."),
    "demo-joe": ("Joe", "His card is declined; that response is stored too."),
    "demo-max": ("Max", "His card works. He cannot see the rides of the others."),
}
SHOWN_RIDES = 50
#: From the Ferry Building to the Golden Gate.
EXAMPLE = dict(zip(RIDE_PARAMETERS, (37.7955, -122.3937, 37.8199, -122.4783), strict=True))
LABELS = dict(zip(RIDE_PARAMETERS, ("From latitude", "From longitude", "To latitude", "To longitude"), strict=True))
#: The recovery points of a booking, and what each one has committed.
STEPS = {
    STARTED: "request recorded",
    "ride_created": "ride saved",
    "charge_created": "card charged",
    FINISHED: "response stored",
}


@require_GET
@never_cache
def home(request: HttpRequest) -> HttpResponse:
    """Return the page; each rendering contains a new idempotency key."""
    rider = _rider(request)
    rides = Ride.objects.filter(user=rider).select_related("receipt", "idempotency_key").order_by("-pk")[:SHOWN_RIDES]
    context = {
        "rider": rider,
        "token": request.session.get(TOKEN, ""),
        "demo_riders": DEMO_RIDERS.items(),
        "rides": rides,
        "fields": [(name, LABELS[name], value) for name, value in EXAMPLE.items()],
        "steps": STEPS.items(),
        "behaviours": switch.BEHAVIOURS.items(),
        "behaviour": switch.behaviour() if rider else None,
        "completer_minutes": max(1, round(conf.get().COMPLETER_MIN_AGE_SECONDS / 60)),
        "idempotency_key": uuid.uuid4(),
    }
    return render(request, "rides_demo/home.html", context)


@require_GET
@never_cache
def booking(request: HttpRequest) -> HttpResponse:
    """Return the state of the rider's booking with the key ``?key=``, or null."""
    rider = _rider(request)
    if rider is None:
        return JsonResponse({"error": "Sign in first."}, status=HTTPStatus.FORBIDDEN)
    sent = request.GET.get("key", "").replace("\x00", "")
    key = IdempotencyKey.objects.filter(scope=f"user:{rider.pk}", idempotency_key=sent).first()
    return JsonResponse({"booking": None if key is None else _booking_json(key)})


@require_POST
def stripe(request: HttpRequest) -> HttpResponse:
    """Set the Stripe sandbox to the posted ``behaviour``; return 404 without a sandbox."""
    name = request.POST.get("behaviour", "")
    if _rider(request) is None:
        return JsonResponse({"error": "Sign in first."}, status=HTTPStatus.FORBIDDEN)
    if name not in switch.BEHAVIOURS:
        return JsonResponse({"error": "There is no such behaviour."}, status=HTTPStatus.BAD_REQUEST)
    try:
        switch.set_behaviour(name)
    except switch.NoSandbox:
        return JsonResponse({"error": "No Stripe sandbox is in use."}, status=HTTPStatus.NOT_FOUND)
    return JsonResponse({"behaviour": name})


@require_POST
def sign_in(request: HttpRequest) -> HttpResponse:
    """Store the token in the session; the page passes it to its script."""
    token = request.POST.get("token", "")
    if User.objects.filter(api_token_hash=User.hash_token(token), is_active=True).exists():
        request.session.cycle_key()  # prevents session fixation
        request.session[TOKEN] = token
    return redirect("home")


@require_POST
def sign_out(request: HttpRequest) -> HttpResponse:
    """Remove the token from the session."""
    request.session.pop(TOKEN, None)
    return redirect("home")


def _rider(request: HttpRequest) -> User | None:
    token = request.session.get(TOKEN, "")
    return User.objects.filter(api_token_hash=User.hash_token(token), is_active=True).first()


def _booking_json(key: IdempotencyKey) -> dict[str, object]:
    ride = Ride.objects.filter(idempotency_key=key).first()
    receipt = Receipt.objects.filter(ride=ride).first() if ride else None
    return {
        "recovery_point": key.recovery_point,
        "state": _state(key),
        "stuck_reason": key.stuck_reason,
        "response_code": key.response_code,
        "history": key.history,
        "rides": int(ride is not None),
        "charges": switch.charges_of(ride.pk) if ride else 0,
        "receipts": int(receipt is not None),
        "admin": reverse("admin:idempotency_idempotencykey_change", args=[key.pk]),
    }


def _state(key: IdempotencyKey) -> str:
    if key.finished_at is not None:
        return "finished"
    if key.stuck_at is not None:
        return "stuck"
    return "running" if key.locked_at is not None else "waiting"
