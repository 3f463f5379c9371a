"""The environment of a stored request: its rebuilt request, its URLs and language, and what
PREPARE_REQUEST sets."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from django.http import HttpRequest
from django.urls import get_script_prefix, get_urlconf, set_script_prefix, set_urlconf
from django.utils import translation

from idempotency._engine.claimed_key import ClaimedKey
from idempotency._environment import Environment, prepare
from idempotency._http.stored_request import language_of, rebuild

#: The attributes in which PREPARE_REQUEST may set the sender; the last two are those of Django REST
#: framework.
_SENDER = ("user", "auth", "_force_auth_user", "_force_auth_token")


def enter_request(stack: ExitStack, environment: Environment, key: ClaimedKey) -> None:
    """Rebuild the request of a key, and set its URLs, its language, and what PREPARE_REQUEST
    sets."""
    environment.request = request = rebuild(key)
    stack.enter_context(_urls_of(request))
    stack.enter_context(translation.override(language_of(key)))
    before = {name: getattr(request, name, None) for name in _SENDER}
    prepare(stack, request, key)
    environment.sender_set = any(
        getattr(request, name, None) is not value for name, value in before.items()
    )


@contextmanager
def _urls_of(request: HttpRequest) -> Iterator[None]:
    """Set the script prefix and the URLconf of the request, so that reverse() returns the same
    URLs."""
    prefix, urlconf = get_script_prefix(), get_urlconf()
    set_script_prefix(request.META["SCRIPT_NAME"])
    set_urlconf(getattr(request, "urlconf", None))
    try:
        yield
    finally:
        set_script_prefix(prefix)
        set_urlconf(urlconf)
