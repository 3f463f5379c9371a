"""SQLite has one writer at a time: a request during a plain view waits for it once, then gets a 503
with Retry-After."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection
from django.http import HttpRequest, HttpResponseBase
from pytest_django import Settings

from idempotency.models import IdempotencyKey
from tests.kit.database import statements
from tests.kit.serving import Sender, another_client, problem
from tests.kit.threads import WAIT_SECONDS, Gate, in_background
from tests.kit.views import create, phased, plain
from tests.models import Entry

pytestmark = pytest.mark.skipif("connection.vendor != 'sqlite'", reason="needs SQLite")

Serve = Callable[..., None]


def waits_for_a_writer(verb: str, seen: Any) -> int:
    """Return the number of statements that begin with ``verb``."""
    return sum(query["sql"].startswith(verb) for query in seen)


@pytest.fixture(params=[None, "IMMEDIATE"], ids=["deferred", "immediate"])
def waits(
    request: pytest.FixtureRequest, transactional_db: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Let connections wait for a writer for at most a second; yield the statement that waits."""
    connection.close()
    options = connection.settings_dict["OPTIONS"]
    monkeypatch.setitem(options, "timeout", 1)
    monkeypatch.setitem(options, "transaction_mode", request.param)
    yield "BEGIN" if request.param else "INSERT"
    connection.close()


@pytest.mark.parametrize(
    ("url", "key"), [("/plain/", "key-1"), ("/plain/", "key-2"), ("/phased/", "key-3")]
)
def test_who_meets_a_plain_run_waits_once_and_is_told_to_come_back(
    url: str, key: str, waits: str, serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"SERIALIZATION_RETRIES": 15}
    gate = Gate()

    def work(request: HttpRequest) -> HttpResponseBase:
        response = create(request)
        gate.wait_here()
        return response

    serve(plain=plain(work), phased=phased(work))
    running = in_background(lambda: another_client(sender).send("/plain/"))
    gate.wait_until_reached()
    with statements() as seen:
        refused = sender.send(url, key=key)
    gate.open()
    assert (
        refused.status_code,
        problem(refused)["retryable"],
        int(refused["Retry-After"]) >= 1,
    ) == (503, True, True)
    assert waits_for_a_writer("INSERT" if url == "/phased/" else waits, seen) == 1
    assert running.result(WAIT_SECONDS).status_code == 201
    assert sender.send(url, key=key).status_code == 201
    assert (Entry.objects.count(), IdempotencyKey.objects.count()) == (
        (1, 1) if key == "key-1" else (2, 2)
    )


def test_who_waits_for_a_run_that_fails_runs(
    serve: Serve, sender: Sender, transactional_db: None
) -> None:
    gate, failures = Gate(), [True]

    def work(request: HttpRequest) -> HttpResponseBase:
        response = create(request)
        gate.wait_here()
        if failures:
            failures.clear()
            raise RuntimeError("out of luck")
        return response

    serve(view=plain(work))
    running = in_background(another_client(sender).send)
    gate.wait_until_reached()
    waiting = in_background(another_client(sender).send)
    gate.open()
    assert [running.result(WAIT_SECONDS).status_code, waiting.result(WAIT_SECONDS).status_code] == [
        500,
        201,
    ]
    assert Entry.objects.count() == 1
