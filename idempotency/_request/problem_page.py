"""The page that a browser gets instead of a problem document. A project replaces ``idempotency/problem.html``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from django.http import HttpRequest
from django.template import Context, Engine, TemplateDoesNotExist, loader

_TEMPLATE = "idempotency/problem.html"
_FOLDER = Path(__file__).parents[1] / "templates"
#: In the order of preference for a client that accepts them alike.
_TYPES = ("application/problem+json", "application/json", "text/html")


def prefers_html(request: HttpRequest) -> bool:
    """Return whether the client prefers HTML to JSON. A client that accepts everything does not."""
    # Django compares types slowly, and most clients of an API name none of these.
    return "text/" in request.META.get("HTTP_ACCEPT", "").lower() and request.get_preferred_type(_TYPES) == "text/html"


def page(request: HttpRequest, context: Mapping[str, Any]) -> str:
    """Return the page. Without the database no context processor is called, because it may read it."""
    try:
        template = loader.get_template(_TEMPLATE)
    except TemplateDoesNotExist:  # The project has no engine that looks into apps.
        return Engine(dirs=[str(_FOLDER)]).get_template(_TEMPLATE).render(Context(context))
    rendered: str = template.render(dict(context), None if context["code"] == "database_unavailable" else request)
    return rendered
