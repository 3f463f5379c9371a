"""django-idempotency-key: its middleware with opt-in, responses in a Redis cache (django-redis), its lock in Redis.

The README's set-up for several processes (``benchmarks/settings.py``). The lock is held while the cache is asked, not while
the view runs: two duplicates at the same time both run. There is one lock for all keys, and who does not get it within 0.1 s
is answered 423. The encoded key has the body in it, so another body is another key.
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
