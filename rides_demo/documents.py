"""What Rocket Rides publishes about itself: its OpenAPI document, a file of its own that is kept by hand."""

from pathlib import Path

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

OPENAPI = Path(__file__).with_name("openapi.json")


@require_safe
def openapi(request: HttpRequest) -> HttpResponse:
    """Show the OpenAPI document."""
    return HttpResponse(OPENAPI.read_bytes(), content_type="application/json")
