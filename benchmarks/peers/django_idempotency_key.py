"""django-idempotency-key: its middleware with opt-in, with responses in a Redis cache
(django-redis), and its lock in Redis.

It is configured as its README describes for several processes (``benchmarks/settings.py``). The
lock is held during the cache lookup, not during the view: two concurrent duplicates both run. There
is one lock for all keys. A request that does not get the lock within 0.1 s is answered 423. The
encoded key contains the body, so a request with another body has another key.
"""

from django.http import HttpRequest, HttpResponse, JsonResponse
from idempotency_key.decorators import idempotency_key
from idempotency_key.middleware import ExemptIdempotencyKeyMiddleware

from benchmarks.peers.around import behind, work

DISTRIBUTION = "django-idempotency-key"


@idempotency_key
def _view(request: HttpRequest) -> HttpResponse:
    return JsonResponse(work(), status=201)


VIEWS = {"plain": behind(ExemptIdempotencyKeyMiddleware, _view)}
