"""The operations of this app, called with the key of a request. The bare view calls a bare function
with the same work."""

from django.http import HttpRequest, HttpResponse, JsonResponse

from benchmarks.operations import call_work, plain_work

DISTRIBUTION = "django-idempotency"


def _plain(request: HttpRequest) -> HttpResponse:
    return JsonResponse(plain_work.once(request.headers["Idempotency-Key"]), status=201)


def _call(request: HttpRequest) -> HttpResponse:
    return JsonResponse(call_work.once(request.headers["Idempotency-Key"]), status=201)


VIEWS = {"plain": _plain, "call": _call}
