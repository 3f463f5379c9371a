"""The first line of Murphy's list for views that do not count the bytes of their body, as those of
the demo do."""

from io import BytesIO

import pytest
from django.core.handlers.wsgi import WSGIRequest
from django.http import HttpRequest, JsonResponse
from django.test.client import encode_multipart

from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.processes]

FORM = b"to=joe&amount=2000"
MULTIPART = encode_multipart("x", {"to": "joe", "amount": "2000"})


@idempotent(scope=lambda request: "joe")
def pay(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"amount": request.POST["amount"]}, status=201)


def arrived(body: bytes, length: int, content_type: str) -> WSGIRequest:
    """Return the request of which so much arrived before the connection broke, as a server hands it
    on."""
    return WSGIRequest(
        {
            "REQUEST_METHOD": "POST",
            "PATH_INFO": "/pay",
            "SERVER_NAME": "testserver",
            "SERVER_PORT": "80",
            "wsgi.url_scheme": "http",
            "wsgi.input": BytesIO(body),
            "CONTENT_TYPE": content_type,
            "CONTENT_LENGTH": str(length),
            "HTTP_IDEMPOTENCY_KEY": "key-1",
        }
    )


@pytest.mark.parametrize(
    ("form", "content_type"),
    [(FORM, "application/x-www-form-urlencoded"), (MULTIPART, "multipart/form-data; boundary=x")],
    ids=["urlencoded", "multipart"],
)
def test_a_body_that_ended_too_early_spends_no_key_and_the_retry_succeeds(
    form: bytes, content_type: str
) -> None:
    for length in range(len(form)):
        assert pay(arrived(form[:length], len(form), content_type)).status_code == 400
    assert IdempotencyKey.objects.count() == 0

    whole = pay(arrived(form, len(form), content_type))
    assert (whole.status_code, whole.content) == (201, b'{"amount": "2000"}')
