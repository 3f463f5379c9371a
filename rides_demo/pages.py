"""The web page: sign in as a demo user, book rides with a form, break Stripe, and watch what becomes of the booking.

The page is a client of the API like any other: its script sends the form with the user's token, and with the key that the form
carries in a hidden field, so that a double click, or a reload of what was sent, books once. What it shows beyond the answers
comes from two routes of its own, which the session authenticates and which book nothing.
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
from rides_demo import stripe_switch
from rides_demo.models import Receipt, Ride, User
from rides_demo.parameters import RIDE_PARAMETERS

#: Where the token of the signed-in user is kept in the session.
TOKEN = "rides_token"
#: The demo users, by token: name, and what becomes of their payments.
DEMO_RIDERS = {
    "demo-jane": ("Jane", "Her card works."),
    "demo-joe": ("Joe", "His card is declined, and that answer is kept too."),
    "demo-max": ("Max", "His card works. He sees none of the others' rides."),
}
SHOWN_RIDES = 50
#: From the Ferry Building to the Golden Gate.
EXAMPLE = dict(zip(RIDE_PARAMETERS, (37.7955, -122.3937, 37.8199, -122.4783), strict=True))
LABELS = dict(zip(RIDE_PARAMETERS, ("From latitude", "From longitude", "To latitude", "To longitude"), strict=True))
#: The recovery points of a booking, and what is committed when it stands there.
STEPS = {
    STARTED: "request noted",
    "ride_created": "ride saved",
    "charge_created": "card charged",
    FINISHED: "answer stored",
}


@require_GET
@never_cache
def home(request: HttpRequest) -> HttpResponse:
    """Show the page; each showing has a form with a key of its own."""
    rider = _rider(request)
    rides = Ride.objects.filter(user=rider).select_related("receipt", "idempotency_key").order_by("-pk")[:SHOWN_RIDES]
    context = {
        "rider": rider,
        "token": request.session.get(TOKEN, ""),
        "demo_riders": DEMO_RIDERS.items(),
        "rides": rides,
        "fields": [(name, LABELS[name], value) for name, value in EXAMPLE.items()],
        "steps": STEPS.items(),
        "behaviours": stripe_switch.BEHAVIOURS.items(),
        "behaviour": stripe_switch.behaviour() if rider else None,
        "completer_minutes": max(1, round(conf.get().COMPLETER_MIN_AGE_SECONDS / 60)),
        "idempotency_key": uuid.uuid4(),
    }
    return render(request, "rides_demo/home.html", context)


@require_GET
@never_cache
def booking(request: HttpRequest) -> HttpResponse:
    """Show what the server knows of the rider's booking under ``?key=``; null for none, and for another rider's."""
    rider = _rider(request)
    if rider is None:
        return JsonResponse({"error": "Sign in first."}, status=HTTPStatus.FORBIDDEN)
    sent = request.GET.get("key", "").replace("\x00", "")
    key = IdempotencyKey.objects.filter(scope=f"user:{rider.pk}", idempotency_key=sent).first()
    return JsonResponse({"booking": None if key is None else _booking_json(key)})


@require_POST
def stripe(request: HttpRequest) -> HttpResponse:
    """Put the switch of Stripe's sandbox to the ``behaviour`` that was posted; 404 where there is no sandbox."""
    name = request.POST.get("behaviour", "")
    if _rider(request) is None:
        return JsonResponse({"error": "Sign in first."}, status=HTTPStatus.FORBIDDEN)
    if name not in stripe_switch.BEHAVIOURS:
        return JsonResponse({"error": "Stripe does not do that."}, status=HTTPStatus.BAD_REQUEST)
    try:
        stripe_switch.set_behaviour(name)
    except stripe_switch.NoSandbox:
        return JsonResponse({"error": "There is no Stripe sandbox to switch."}, status=HTTPStatus.NOT_FOUND)
    return JsonResponse({"behaviour": name})


@require_POST
def sign_in(request: HttpRequest) -> HttpResponse:
    """Keep the token in the session, so that the page can hand it to its script."""
    token = request.POST.get("token", "")
    if User.objects.filter(api_token_hash=User.hash_token(token), is_active=True).exists():
        request.session.cycle_key()  # whoever has planted the session that was there does not know the new one
        request.session[TOKEN] = token
    return redirect("home")


@require_POST
def sign_out(request: HttpRequest) -> HttpResponse:
    """Forget the token."""
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
        "charges": stripe_switch.charges_of(ride.pk) if ride else 0,
        "receipts": int(receipt is not None),
        "admin": reverse("admin:idempotency_idempotencykey_change", args=[key.pk]),
    }


def _state(key: IdempotencyKey) -> str:
    if key.finished_at is not None:
        return "finished"
    if key.stuck_at is not None:
        return "stuck"
    return "running" if key.locked_at is not None else "waiting"
