"""Which responses are stored, described or taken for a redirect to a login page."""

from typing import Any

import pytest
from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.http import Http404, HttpResponse
from django.test import RequestFactory
from pytest_django import Settings

from idempotency._http import responses


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Http404(), 404),
        (PermissionDenied(), 403),
        (SuspiciousOperation(), 400),
        (BadRequest(), 400),
        (OSError(), 500),
    ],
)
def test_the_status_of_an_exception_is_that_of_django(error: Exception, status: int) -> None:
    assert responses.status_of(error) == status


@pytest.mark.parametrize(("status", "is_stored"), [(200, True), (499, True), (500, False)])
def test_a_5xx_is_not_stored(status: int, is_stored: bool) -> None:
    assert responses.is_storable(HttpResponse(status=status)) is is_stored


@pytest.mark.parametrize(
    ("status", "location", "is_login"),
    [
        (299, "/login/", False),
        (300, "/login/", True),
        (302, "/login/?next=/elsewhere", True),
        (302, "https://id.example/login/", True),
        (302, "/rides/1", False),
        (302, "/sso?from=%2Frides%3Fa%3D1", True),
        (302, "/sso?from=https%3A%2F%2Ftestserver%2Frides%3Fa%3D1", True),
        (302, "/sso?from=%2Frides", False),
        (302, None, False),
        (399, "/login/", True),
        (400, "/login/", False),
    ],
)
def test_a_redirect_to_a_login_page_is_told_by_its_target(
    status: int, location: str | None, is_login: bool, settings: Settings
) -> None:
    settings.LOGIN_URL = "/login/"
    headers = {"Location": location} if location is not None else None
    answer = HttpResponse(status=status, headers=headers)
    assert responses.is_login_redirect(answer, RequestFactory().post("/rides?a=1")) is is_login


def test_a_login_url_that_does_not_resolve_is_no_target(settings: Settings) -> None:
    settings.LOGIN_URL = "no-such-name"
    answer = HttpResponse(status=302, headers={"Location": "/sso?next=%2Frides"})
    assert responses.is_login_redirect(answer, RequestFactory().post("/rides"))


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ("a" * 500, "text/plain", f"status 422: {'a' * 500}"),
        ("why\n" + "a" * 19_996, "text/plain", "status 422: why"),
        ("why\n" + "a" * 19_997, "text/plain", "status 422."),
        ('{"detail": "why"}', "application/problem+json", "status 422: why"),
        ('{"detail": "why"}', "text/html", "status 422."),
        ('{"detail": "why"', "application/json", "status 422."),
    ],
)
def test_a_response_is_described_by_the_message_in_its_body(
    body: str, kind: str, text: str
) -> None:
    answer: Any = HttpResponse(body, content_type=kind, status=422)
    assert responses.described(answer, withheld=False) == text


def test_a_message_is_cut_after_500_characters() -> None:
    answer = HttpResponse("a" * 501, content_type="text/plain", status=422)
    assert len(responses.described(answer, withheld=False)) == len("status 422: ") + 500
