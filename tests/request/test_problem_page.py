"""Errors for browsers: the requests that get a page, its content, and how a project replaces it."""

import re
from typing import Any

import pytest
from django.core.checks import run_checks
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.test import RequestFactory
from pytest_django import Settings

from idempotency._http import problems
from idempotency._http.problems import problem_of
from idempotency.exceptions import (
    InProgress,
    InterventionRequired,
    KeyReused,
    NotReplicated,
    Unavailable,
)
from tests.kit.serving import Sender
from tests.kit.views import Counted, plain

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"
EVERY = [
    problems.key_missing(), problems.key_invalid("It is <b>bad</b>."),
    problems.Problem("body_incomplete"), problems.Problem("scope_missing"),
    problem_of(KeyReused()), problem_of(InProgress()),
    problem_of(InterventionRequired()), problem_of(Unavailable(code="conflict")),
    problem_of(Unavailable(code="unknown_recovery_point")), problem_of(Unavailable()),
    problem_of(NotReplicated()), problem_of(Unavailable(code="time_limit_exceeded")),
]  # fmt: skip


def asking(accept: str | None = BROWSER) -> HttpRequest:
    return RequestFactory().post("/", headers={"Accept": accept} if accept is not None else {})


@pytest.mark.parametrize(
    ("accept", "html"),
    [
        (BROWSER, True),
        ("text/html", True),
        ("text/html, */*", True),
        ("text/*", True),
        ("Text/HTML", True),
        ("application/json;q=0.5, text/html", True),
        (None, False),
        ("", False),
        ("*/*", False),
        ("image/png", False),
        ("application/json", False),
        ("application/problem+json", False),
        ("application/json, text/plain, */*", False),
        ("text/html;q=0.5, application/json", False),
        ("text/html;q=0, */*", False),
        ("application/problem+json, text/html;q=0.9", False),
        ("text/html;charset*=unknown''%ff", False),
        ("text/html;q*0*=unknown''1", False),
    ],
)
def test_html_is_for_those_who_prefer_it(accept: str | None, html: bool) -> None:
    response = problem_of(InProgress()).response(asking(accept))
    assert response["Content-Type"] == (
        "text/html; charset=utf-8" if html else "application/problem+json"
    )


@pytest.mark.parametrize("problem", EVERY, ids=lambda problem: problem.code)
def test_the_page_has_the_status_and_the_headers_and_loads_nothing(
    problem: problems.Problem,
) -> None:
    page, document = problem.response(asking()), problem.response(asking("application/json"))
    assert page.status_code == document.status_code == problem.status
    assert (page["Cache-Control"], page.get("Retry-After")) == (
        "no-store",
        document.get("Retry-After"),
    )
    html = page.content.decode()
    assert problem.code in html
    assert "<b>" not in html
    assert not re.search(r"https?:|src=|href=|url\(|@import|<script", html)
    assert ("Wait " in html) is ("Retry-After" in page)


def test_every_code_has_advice_of_its_own_kind() -> None:
    headings = {
        problem.code: re.findall("<h1>(.*?)</h1>", problem.response(asking()).content.decode())
        for problem in EVERY
    }
    assert all(len(found) == 1 and found[0] for found in headings.values()), headings
    assert len({found[0] for found in headings.values()}) > 4


@pytest.fixture
def template(settings: Settings) -> Any:
    """Return a function that replaces the template of the page, and adds a context processor."""

    def put(text: str, processor: str) -> None:
        loader = ("django.template.loaders.locmem.Loader", {"idempotency/problem.html": text})
        options = {"loaders": [loader], "context_processors": [f"{__name__}.{processor}"]}
        settings.TEMPLATES = [
            {"BACKEND": "django.template.backends.django.DjangoTemplates", "OPTIONS": options}
        ]

    return put


def of_the_shop(request: HttpRequest) -> dict[str, str]:
    return {"shop": "Ours"}


def failing(request: HttpRequest) -> dict[str, str]:
    raise OSError("It reads the database.")


def test_a_project_replaces_the_page(template: Any) -> None:
    template(
        "{{ shop }} {{ status }} {{ code }} {{ retryable }} {{ retry_after }} {{ detail }}",
        "of_the_shop",
    )
    page = problem_of(Unavailable(code="conflict")).response(asking())
    assert page.content.startswith(b"Ours 409 conflict True 1 Retry with the same key.")


def test_the_page_of_a_lost_database_asks_no_context_processor(template: Any) -> None:
    template("{{ shop }}{{ code }}", "failing")
    assert problem_of(Unavailable()).response(asking()).content == b"database_unavailable"


def test_a_project_without_templates_has_the_page_too(settings: Settings) -> None:
    settings.TEMPLATES = []
    assert b"<h1>" in problem_of(InProgress()).response(asking()).content


@pytest.mark.parametrize("accept", [BROWSER, "application/json"])
def test_a_renderer_gets_the_request(
    accept: str, settings: Settings, serve: Any, sender: Sender
) -> None:
    def render(*, request: HttpRequest, status: int, **members: object) -> HttpResponseBase:
        return HttpResponse(request.path + request.headers["Accept"], status=status)

    settings.IDEMPOTENCY = {"ERROR_RENDERER": render}
    serve(view=plain(Counted()))
    assert sender.send(key=None, headers={"Accept": accept}).content.decode() == f"/view/{accept}"


def old(
    *, status: int, code: str, title: str, detail: str, retryable: bool, headers: dict[str, str]
) -> HttpResponse:
    """Render an error without the request."""
    return HttpResponse(status=status)


@pytest.mark.parametrize("given", [f"{__name__}.old", old])
def test_a_renderer_that_takes_no_request_is_an_error(given: Any, settings: Settings) -> None:
    settings.IDEMPOTENCY = {"ERROR_RENDERER": given}
    [message] = [
        message for message in run_checks(databases=[]) if message.id == "idempotency.E012"
    ]
    assert "'request'" in message.msg


def test_a_browser_gets_the_page_from_a_view(serve: Any, sender: Sender) -> None:
    serve(view=plain(Counted()))
    refused = sender.send(key=None, headers={"Accept": BROWSER})
    assert (refused.status_code, refused["Content-Type"]) == (400, "text/html; charset=utf-8")
