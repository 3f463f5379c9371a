"""djangorestframework-idempotency-key: its middleware, and its decorator for views with one step.

The decorator is applied to a method of an APIView. The middleware claims in one transaction. The
decorator runs the work and stores the response in a second transaction, and the middleware releases
the lock in a third one. Keys have no scope: all callers share them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework_idempotency_key.decorators import simple_idempotency_key_method
from rest_framework_idempotency_key.middleware import IdempotencyKeyMiddleware

from benchmarks import views
from benchmarks.peers import rest
from benchmarks.peers.around import behind

DISTRIBUTION = "djangorestframework-idempotency-key"
MISMATCH = 409
BARE = rest.bare


class _View(rest.View):
    @simple_idempotency_key_method
    def post(self, request: Request) -> Response:
        """Do the work; the decorator opens the transaction."""
        return Response({"id": views.work()}, status=201)


@contextmanager
def _held(key: str) -> Iterator[None]:
    IdempotencyKeyMiddleware(None)._prepare_idempotency_key(views.request(key))
    yield


VIEWS = {"plain": behind(IdempotencyKeyMiddleware, _View.as_view())}
HELD = {"plain": _held}
