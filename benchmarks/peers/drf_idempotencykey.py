"""drf-idempotencykey: its mixin on an APIView, for an authenticated user, as its README shows."""

from collections.abc import Iterator
from contextlib import contextmanager

from drf_idempotencykey.mixins import DrfIdempotencyKeyMixin

from benchmarks import views
from benchmarks.peers import rest

DISTRIBUTION = "drf-idempotencykey"
MISMATCH = 409
BARE = rest.bare


class _View(DrfIdempotencyKeyMixin, rest.View):
    pass


def prepare() -> None:
    """Create the user to which the keys refer."""
    rest.create_user()


@contextmanager
def _held(key: str) -> Iterator[None]:
    view = _View()
    view._prepare_idempotency_key(view.initialize_request(views.request(key)))
    yield


VIEWS = {"plain": _View.as_view()}
HELD = {"plain": _held}
