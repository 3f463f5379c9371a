"""Authentication: ``Authorization: Bearer <token>`` for the API, the session for the web page."""

from collections.abc import Callable
from functools import wraps

from django.db import InterfaceError, OperationalError
from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt

from idempotency.models import IdempotencyKey
from rides_demo import sharding
from rides_demo.models import User
from rides_demo.responses import database_unavailable, error_response

View = Callable[..., HttpResponse]

#: The name under which the session stores the token of the rider who is signed in on the web page.
SESSION_TOKEN = "rides_token"


def token_required(view: View) -> View:
    """Set ``request.user`` to the rider of the token.

    Return 401 if the token is missing or unknown, and 503 if the database is unavailable.

    Apply it outside ``@idempotent``, so that replays stay authenticated. The view ignores cookies,
    so another site cannot make a browser send an authenticated request. CSRF protection is
    therefore switched off.
    """

    @csrf_exempt
    @wraps(view)
    def authenticated(request: HttpRequest, *args: object, **kwargs: object) -> HttpResponse:
        try:
            rider = getattr(request, "rider_of_key", None) or _rider(request)
            if isinstance(rider, HttpResponse):
                return rider
            request.user = rider
            return view(request, *args, **kwargs)
        except (OperationalError, InterfaceError):
            return database_unavailable()

    return authenticated


def rider_of_session(request: HttpRequest) -> User | None:
    """Return the rider who is signed in on the web page, or None."""
    token = request.session.get(SESSION_TOKEN, "")
    return User.objects.filter(api_token_hash=User.hash_token(token), is_active=True).first()


def prepare_request(request: HttpRequest | None, key: IdempotencyKey) -> None:
    """Select the database of the key, and authenticate a request of the completer as its user.

    ``IDEMPOTENCY["PREPARE_REQUEST"]`` names this function. The completer has no token, so
    the function sets an attribute of the request object, which a client cannot set. An operation
    has no request.
    """
    sharding.prepare_request(request, key)
    if request is not None:
        request.rider_of_key = request.user


def _rider(request: HttpRequest) -> User | HttpResponse:
    scheme, _, token = request.headers.get("Authorization", "").strip().partition(" ")
    if not scheme:
        return _refusal("auth_required", "Please specify credentials in the Authorization header.")
    if scheme.lower() != "bearer" or not token.strip():
        return _refusal(
            "auth_invalid", "Please specify the Authorization header as 'Bearer' and your token."
        )
    try:
        return User.objects.with_token(token.strip())
    except User.DoesNotExist:
        return _refusal("auth_invalid", "Credentials in the Authorization header were invalid.")


def _refusal(code: str, message: str) -> HttpResponse:
    response = error_response(401, code, message)
    response.headers["WWW-Authenticate"] = 'Bearer realm="rides"'
    return response
