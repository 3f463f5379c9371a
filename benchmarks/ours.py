"""The views of this app, with the same names as in a module of a peer (``benchmarks.peers``)."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from django.db import connections
from django.http import HttpRequest, HttpResponse

from benchmarks import views
from idempotency.decorators import idempotent

DISTRIBUTION = "django-idempotency"
MISMATCH = 422
VIEWS = {"plain": views.plain, "ride": views.ride}


@contextmanager
def _held(protect: Callable[[Any], views.View], key: str) -> Iterator[None]:
    """Hold the key with a request that runs in another thread. Its response is a 503, which is not
    stored."""
    entered, leave = threading.Event(), threading.Event()

    @protect
    def stand(request: HttpRequest) -> HttpResponse:
        entered.set()
        leave.wait()
        return HttpResponse(status=503)

    def run() -> None:
        try:
            stand(views.request(key))
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        if not entered.wait(10):
            raise RuntimeError("The request that should hold a key was not let in.")
        yield
    finally:
        leave.set()
        thread.join()


HELD = {
    "plain": partial(_held, idempotent(scope=views.caller)),
    "ride": partial(
        _held, idempotent(scope=views.caller, recovery_points=list(views.NEXT.values()))
    ),
}
