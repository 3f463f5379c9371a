"""Parts of the peers' views: the work of the bare view, and a middleware around one view."""

from collections.abc import Callable
from typing import Any

from django.db import transaction
from django.http import HttpRequest, HttpResponseBase

from benchmarks import views


def work() -> dict[str, int]:
    """Do the work in a separate transaction, like the bare view; return the JSON of the
    response."""
    with transaction.atomic():
        return {"id": views.work()}


def behind(middleware: Callable[..., Any], view: views.View) -> views.View:
    """Return ``view`` with one middleware around it, which is called as in Django."""

    def get_response(request: HttpRequest) -> HttpResponseBase:
        process_view = getattr(layer, "process_view", None)
        response = process_view(request, view, (), {}) if process_view else None
        return response or view(request)

    layer = middleware(get_response)
    return layer
