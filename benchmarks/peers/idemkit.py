"""idemkit: its mixin for Django REST Framework with its PostgreSQL backend (asyncpg, with a pool in
a separate thread).

The record is outside the transaction of the view. ``wait_timeout_seconds=0`` rejects a duplicate at
once, like the views of this app by default. All other settings have their defaults.
"""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from idemkit import HttpConfig
from idemkit.backends.postgres import PostgresBackend, init_pg
from idemkit.contrib.drf import idempotent_view

from benchmarks import views
from benchmarks.peers import rest

DISTRIBUTION = "idemkit"
MISMATCH = 422
#: The status of a duplicate while the first request runs.
CONFLICT = 423
BARE = rest.bare


def _scope(request: Any) -> str:
    return f"user:{request.user.pk}"


_backend = PostgresBackend.from_url(os.environ["DATABASE_URL"])
_Idempotent = idempotent_view(
    backend=_backend, config=HttpConfig(scope=_scope, wait_timeout_seconds=0)
)


class _View(_Idempotent, rest.View):
    pass


def prepare() -> None:
    """Create the table of idemkit."""
    asyncio.run(init_pg(os.environ["DATABASE_URL"]))


@contextmanager
def _held(key: str) -> Iterator[None]:
    view = _View()
    view.args, view.kwargs, view.headers = (), {}, {}
    request = view.initialize_request(views.request(key))
    view.initial(request)
    yield


VIEWS = {"plain": _View.as_view()}
HELD = {"plain": _held}
