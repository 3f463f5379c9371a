"""Repeats in the process: how often, after which waits, and what the log says."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.http import HttpRequest, HttpResponse

from idempotency._engine import attempts
from idempotency.exceptions import Unavailable
from idempotency.models import IdempotencyKey
from tests.kit.outages import time_out_this_session
from tests.kit.serving import Sender
from tests.kit.views import phased

pytestmark = pytest.mark.postgres


def conflict() -> None:
    """Raise a serialization failure of PostgreSQL."""
    with connection.cursor() as cursor:
        cursor.execute("DO $$ BEGIN RAISE EXCEPTION 'conflict' USING ERRCODE = '40001'; END $$")


def time_out() -> None:
    """Let the server end the session, and use it."""
    time_out_this_session()
    conflict()


@pytest.mark.parametrize(
    ("fail", "code"), [(conflict, "conflict"), (time_out, "database_unavailable")]
)
@pytest.mark.django_db(transaction=True)
def test_a_statement_is_repeated_as_often_as_the_setting_says(
    fail: Callable[[], None], code: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.IDEMPOTENCY = {"SERIALIZATION_RETRIES": 2}
    course: list[Any] = []

    def wait(attempt: int) -> float:
        course.append(attempt)
        return 0

    def write() -> None:
        course.append("write")
        fail()

    monkeypatch.setattr(attempts, "_backoff_seconds", wait)
    with pytest.raises(Unavailable) as caught:
        attempts.repeat(write, using="default")
    assert caught.value.code == code
    assert course == ["write", 1, "write", 2, "write"]


def test_the_line_of_a_repeat_names_the_key_by_its_hash(
    serve: Any, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    runs: list[int] = []

    def work(request: HttpRequest) -> HttpResponse:
        runs.append(1)
        if len(runs) == 1:
            conflict()
        return HttpResponse(status=201)

    serve(view=phased(work))
    with caplog.at_level(logging.INFO, "idempotency"):
        assert sender.send().status_code == 201
    key = IdempotencyKey.objects.get()
    (record,) = (each for each in caplog.records if "run again" in each.getMessage())
    assert f"a view of key {key.key_hash} is run again" in record.getMessage()
    assert vars(record)["key_hash"] == key.key_hash
