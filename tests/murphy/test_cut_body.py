"""The first line of Murphy's list for views that do not count the bytes of their body, as those of the demo do."""

from io import BytesIO

import pytest
from django.core.handlers.wsgi import WSGIRequest
from django.http import HttpRequest, JsonResponse

from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey

pytestmark = pytest.mark.django_db(transaction=True)

FORM = b"to=joe&amount=2000"


@idempotent(scope=lambda request: "joe")
def pay(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"amount": request.POST["amount"]}, status=201)


def arrived(body: bytes) -> WSGIRequest:
    """Return the request of which so much arrived before the connection broke, as a server hands it on."""
    return WSGIRequest(
        {
            "REQUEST_METHOD": "POST",
            "PATH_INFO": "/pay",
            "SERVER_NAME": "testserver",
            "SERVER_PORT": "80",
            "wsgi.url_scheme": "http",
            "wsgi.input": BytesIO(body),
            "CONTENT_TYPE": "application/x-www-form-urlencoded",
            "CONTENT_LENGTH": str(len(FORM)),
            "HTTP_IDEMPOTENCY_KEY": "key-1",
        }
    )


@pytest.mark.xfail(
    strict=True,
    reason="the library takes a body that ended too early: it pays 20 instead of 2000, and refuses the retry with 422",
)
def test_a_body_that_ended_too_early_spends_no_key_and_the_retry_succeeds():
    cut = pay(arrived(FORM[:-2]))
    assert cut.status_code == 400
    assert IdempotencyKey.objects.count() == 0

    whole = pay(arrived(FORM))
    assert (whole.status_code, whole.content) == (201, b'{"amount": "2000"}')
