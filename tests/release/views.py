"""Views and work whose keys a release freezes, and a later release continues."""

from typing import Any

from django.http import HttpRequest, JsonResponse
from django.urls import path

from idempotency.decorators import idempotent
from idempotency.phases import atomic_phase

#: Whether the phased view fails after its first phase.
fails = False


def everybody(request: HttpRequest) -> str:
    return "everybody"


@idempotent(scope=everybody)
def plain(request: Any) -> JsonResponse:
    return JsonResponse({"made": request.POST["name"]}, status=201)


@idempotent(scope=everybody, recovery_points=["ordered"])
def phased(request: Any) -> JsonResponse:
    key = request.idempotency_key
    for recovery_point in key.phases():
        match recovery_point:
            case "started":
                with atomic_phase(key) as phase:
                    phase.set_recovery_point("ordered")
            case "ordered":
                if fails:
                    raise OSError("The connection to the bank was lost.")
                with atomic_phase(key) as phase:
                    body = {"continued": request.POST["name"]}
                    phase.set_response(JsonResponse(body, status=201))
    response: JsonResponse = key.response()
    return response


urlpatterns = [path("plain", plain), path("phased", phased)]
