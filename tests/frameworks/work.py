"""What the views of the table do, said in no framework's words; each kind of view says it in its
own."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from django.http import HttpRequest

from tests.models import Entry


@dataclass(frozen=True)
class Reply:
    """An answer: a JSON object, or no body at all when ``data`` is None."""

    data: dict[str, Any] | None = None
    status: int = 201
    headers: dict[str, str] = field(default_factory=dict)
    cookies: dict[str, str] = field(default_factory=dict)


class Refusal(Exception):
    """Raised by work; a kind of view raises what its framework has for it."""


class Missing(Refusal):
    """There is no such thing: 404."""


class Invalid(Refusal):
    """The parameters are wrong: 400."""


class Forbidden(Refusal):
    """Not for this user: 403."""


def create(request: HttpRequest) -> Reply:
    """Write one entry that points at the key, and say which."""
    entry = Entry.objects.create(name="made", idempotency_key=request.idempotency_key)
    return Reply(
        {"id": entry.pk},
        headers={"Location": f"/entries/{entry.pk}", "ETag": '"v1"', "X-Custom": "kept"},
    )


class Work:
    """Work that counts its runs; by default it writes an entry."""

    def __init__(self, do: Callable[[HttpRequest], Reply] = create) -> None:
        self._do = do
        self._lock = threading.Lock()
        self.runs = 0

    def __call__(self, request: HttpRequest) -> Reply:
        with self._lock:
            self.runs += 1
        return self._do(request)


def failing_first(fail: Callable[[], Any]) -> Work:
    """Return work that writes an entry and then, in its first run, ends as ``fail`` does."""

    def do(request: HttpRequest) -> Reply:
        reply = create(request)
        return fail() if work.runs == 1 else reply

    work = Work(do)
    return work


def crash() -> Reply:
    """End as a mistake in a view does."""
    raise RuntimeError("out of luck")
