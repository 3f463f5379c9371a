"""A process that answers one request and dies in it: at the n-th of all points before and after an
exchange with the server: a statement, a COMMIT, or both in one round trip.

Run as ``python -c "from tests.conformance.dying import main; main()"``. For each line ``SESSION
PATH KEY N`` on its standard input it forks a child that sends the request, and writes ``killed`` or
``answered STATUS`` for it. A child opens its own connection, and is killed by SIGKILL: nothing of
it cleans up.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from django.http import HttpRequest, HttpResponseBase, JsonResponse


def one_entry(request: HttpRequest) -> HttpResponseBase:
    """Write an entry."""
    from tests.models import Entry

    entry = Entry.objects.create(name=f"first of {request.headers['Idempotency-Key']}")
    return JsonResponse({"id": entry.pk}, status=201)


def another_entry(request: HttpRequest) -> HttpResponseBase:
    """Write another entry."""
    from tests.models import Entry

    entry = Entry.objects.create(name=f"second of {request.headers['Idempotency-Key']}")
    return JsonResponse({"id": entry.pk}, status=201)


def views() -> dict[str, Callable[..., HttpResponseBase]]:
    """Return the views by name: one of each kind, and one that keeps its writes without its
    response."""
    from idempotency.http import not_stored
    from tests.kit.views import plain, two_phases

    def both(request: HttpRequest) -> HttpResponseBase:
        one_entry(request)
        return another_entry(request)

    def kept(request: HttpRequest) -> HttpResponseBase:
        return not_stored(both(request), keep_writes=True)

    return {
        "plain": plain(both),
        "phased": two_phases(one_entry, another_entry),
        "kept": plain(kept),
    }


def signal_at(number: int, sent: int = signal.SIGKILL) -> Callable[[], None]:
    """Let this process get a signal at the ``number``-th point from now on. Return the function
    that is called at each point."""
    import psycopg

    passed = 0

    def point() -> None:
        nonlocal passed
        passed += 1
        if passed == number:
            os.kill(os.getpid(), sent)

    wait = psycopg.Connection.wait

    def around_exchange(*arguments: Any, **keywords: Any) -> Any:
        point()
        result = wait(*arguments, **keywords)
        point()
        return result

    psycopg.Connection.wait = around_exchange  # type: ignore[method-assign]
    return point


def _answer(session: str, path: str, key: str, number: str) -> int:
    from django.conf import settings
    from django.test import Client

    client = Client()
    client.cookies[settings.SESSION_COOKIE_NAME] = session
    signal_at(int(number))
    return client.post(
        path, {"a": 1}, content_type="application/json", headers={"Idempotency-Key": key}
    ).status_code


def main() -> None:
    """Answer what comes on standard input."""
    import django
    from django.conf import settings
    from django.urls import path

    django.setup()
    settings.ROOT_URLCONF = type(
        "Urls", (), {"urlpatterns": [path(f"{name}/", view) for name, view in views().items()]}
    )
    for line in sys.stdin:
        if not (child := os.fork()):
            os._exit(_answer(*line.split()) // 100)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        sys.stdout.write(
            "killed\n" if killed else f"answered {os.waitstatus_to_exitcode(status)}xx\n"
        )
        sys.stdout.flush()
