"""Number 7: what is logged of keys."""

import logging
from collections.abc import Callable

import pytest
from django.http import HttpRequest, HttpResponseBase

from idempotency.completer import complete_once
from idempotency.exceptions import KeyStuck
from idempotency.models import IdempotencyKey
from idempotency.reaper import reap_once
from tests.kit.ageing import make_older
from tests.kit.serving import Sender, View
from tests.kit.views import Counted, both_kinds, create, phased, plain, two_phases

Serve = Callable[..., None]

SECRET = "sk-0d9f4b1c-this-is-the-key"


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Return all that is logged, by whomever, down to the smallest thing."""
    caplog.set_level(logging.DEBUG)
    return caplog


def shows_no_key(logged: pytest.LogCaptureFixture) -> bool:
    """Whether the key is neither in a line, a traceback included, nor in what a formatter could
    make one of."""
    assert logged.records
    return SECRET not in logged.text and not any(
        SECRET in repr(vars(record)) for record in logged.records
    )


def failing(request: HttpRequest) -> HttpResponseBase:
    raise RuntimeError("the work cannot be done")


@both_kinds
def test_07_requests_of_all_outcomes_are_logged_without_the_key(
    serve: Serve, sender: Sender, logged: pytest.LogCaptureFixture, kind: Callable[..., View]
) -> None:
    serve(view=kind(create), failing=kind(failing))

    first, again, other = (
        sender.send(key=SECRET, body=body) for body in ({"a": 1}, {"a": 1}, {"a": 2})
    )
    failed = sender.send("/failing/", key=f"{SECRET}-2")
    bad = sender.send(key=f'"{SECRET}')

    statuses = [answer.status_code for answer in (first, again, other, failed, bad)]
    assert statuses == [201, 201, 422, 500, 400]
    assert "the work cannot be done" in logged.text
    assert shows_no_key(logged)


@pytest.mark.postgres
def test_07_a_resumed_key_is_logged_by_its_hash(
    serve: Serve, sender: Sender, logged: pytest.LogCaptureFixture
) -> None:
    work = Counted(failing)
    serve(view=two_phases(lambda request: None, work))
    assert sender.send(key=SECRET).status_code == 500
    assert "is resumed" not in logged.text
    work.work = create

    assert sender.send(key=SECRET).status_code == 201

    assert f"key {IdempotencyKey.objects.get().key_hash} is resumed" in logged.text
    assert shows_no_key(logged)


@pytest.mark.postgres
def test_07_a_key_for_a_person_is_logged_by_its_hash(
    serve: Serve, sender: Sender, logged: pytest.LogCaptureFixture
) -> None:
    def stuck(request: HttpRequest) -> HttpResponseBase:
        raise KeyStuck("nobody knows")

    serve(view=phased(stuck))

    assert [sender.send(key=SECRET).status_code for _ in range(2)] == [409, 409]

    assert f"key {IdempotencyKey.objects.get().key_hash} is stuck" in logged.text
    assert shows_no_key(logged)


@pytest.mark.postgres
def test_07_completer_and_reaper_log_no_key(
    serve: Serve, sender: Sender, logged: pytest.LogCaptureFixture
) -> None:
    serve(view=phased(failing), finished=plain(create))
    assert sender.send(key=SECRET).status_code == 500
    assert sender.send("/finished/", key=f"{SECRET}-2").status_code == 201
    make_older(1000, "created_at", "last_run_at")
    complete_once()
    make_older(100 * 3600, "created_at", "finished_at", "last_run_at")
    reap_once()

    assert IdempotencyKey.objects.count() == 1
    assert IdempotencyKey.objects.get().key_hash in logged.text
    assert shows_no_key(logged)
