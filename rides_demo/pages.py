"""The web page: sign in as a demo user, book rides with a form, see them and their receipts.

The page is a client of the API like any other: its script sends the form with the user's token, and with the key that the form
carries in a hidden field, so that a double click, or a reload of what was sent, books once.
"""

import uuid

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_POST

from rides_demo.models import Ride, User
from rides_demo.parameters import RIDE_PARAMETERS

#: Where the token of the signed-in user is kept in the session.
TOKEN = "rides_token"
DEMO_TOKENS = ("demo-jane", "demo-joe", "demo-max")
SHOWN_RIDES = 50
#: From the Ferry Building to the Golden Gate.
EXAMPLE = dict(zip(RIDE_PARAMETERS, (37.7955, -122.3937, 37.8199, -122.4783), strict=True))


@require_GET
@never_cache
def home(request: HttpRequest) -> HttpResponse:
    """Show the page; each showing has a form with a key of its own."""
    token = request.session.get(TOKEN, "")
    rider = User.objects.filter(api_token_hash=User.hash_token(token), is_active=True).first()
    rides = Ride.objects.filter(user=rider).select_related("receipt").order_by("-pk")[:SHOWN_RIDES]
    context = {
        "rider": rider,
        "token": token,
        "tokens": DEMO_TOKENS,
        "rides": rides,
        "fields": EXAMPLE.items(),
        "idempotency_key": uuid.uuid4(),
    }
    return render(request, "rides_demo/home.html", context)


@require_POST
def sign_in(request: HttpRequest) -> HttpResponse:
    """Keep the token in the session, so that the page can hand it to its script."""
    token = request.POST.get("token", "")
    if User.objects.filter(api_token_hash=User.hash_token(token), is_active=True).exists():
        request.session[TOKEN] = token
    return redirect("home")


@require_POST
def sign_out(request: HttpRequest) -> HttpResponse:
    """Forget the token."""
    request.session.pop(TOKEN, None)
    return redirect("home")
