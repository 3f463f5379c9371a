"""The methods of middlewares around a protected view, as the reference describes them."""

from collections.abc import Callable
from typing import Any

import pytest
from django.http import Http404, HttpRequest, HttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.utils.deprecation import MiddlewareMixin
from pytest_django import Settings

from idempotency.decorators import idempotent
from tests.kit.serving import Sender

Serve = Callable[..., None]
CALLS: list[str] = []


class Watching(MiddlewareMixin):
    """Changes the context of templates, and notes its calls."""

    def process_template_response(self, request: HttpRequest, response: Any) -> Any:
        """Change the context."""
        CALLS.append("template")
        response.context_data["name"] = "middleware"
        return response

    def process_exception(self, request: HttpRequest, exception: Exception) -> None:
        """Leave the exception to Django."""
        CALLS.append(type(exception).__name__)


@pytest.fixture(autouse=True)
def watching(settings: Settings) -> None:
    """Install the middleware."""
    CALLS.clear()
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.Watching"]


def page(request: HttpRequest) -> TemplateResponse:
    """Return a page that is rendered late."""
    return TemplateResponse(
        request, engines["django"].from_string("Hello {{ name }}"), {"name": "view"}
    )


def test_a_template_is_rendered_before_the_middleware_changes_its_context(
    serve: Serve, sender: Sender
) -> None:
    serve(view=idempotent(page), other=page)
    assert sender.send("/other/").content == b"Hello middleware"
    assert [sender.send().content for _ in range(2)] == [b"Hello view"] * 2
    assert CALLS == ["template"] * 2, "a replay is no template"


def missing(request: HttpRequest) -> HttpResponse:
    """Find nothing."""
    raise Http404


def broken(request: HttpRequest) -> HttpResponse:
    """Make a mistake."""
    raise ZeroDivisionError


def test_an_exception_whose_response_is_stored_reaches_no_middleware(
    serve: Serve, sender: Sender
) -> None:
    serve(view=idempotent(missing), broken=idempotent(broken), other=missing)
    assert [sender.send(f"/{name}/", name).status_code for name in ("other", "view", "broken")] == [
        404,
        404,
        500,
    ]
    assert CALLS == ["Http404", "ZeroDivisionError"]


def test_the_reason_phrase_is_not_replayed(serve: Serve, sender: Sender) -> None:
    serve(view=idempotent(lambda request: HttpResponse(status=409, reason="Sold out")))
    assert [sender.send().reason_phrase for _ in range(2)] == ["Sold out", "Conflict"]
