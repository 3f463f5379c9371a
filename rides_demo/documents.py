"""The OpenAPI document of Rocket Rides: the file ``openapi.json``, which is written by hand."""

from pathlib import Path

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

OPENAPI = Path(__file__).with_name("openapi.json")


@require_safe
def openapi(request: HttpRequest) -> HttpResponse:
    """Return the OpenAPI document."""
    return HttpResponse(OPENAPI.read_bytes(), content_type="application/json")
