"""Small promises that no other file is about: what is read of a stored request, and what goes on when a helper fails."""

import io
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.sessions.backends.db import SessionStore
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.models.functions import Now
from django.http import HttpRequest
from django.template import engines
from django.test import RequestFactory

from idempotency.heartbeats import Heartbeat
from idempotency.models import IdempotencyKey, ProcessHeartbeat
from tests.factories import IdempotencyKeyFactory
from tests.kit.claims import claim


@pytest.mark.parametrize(
    ("content_type", "body", "read"),
    [
        ("application/json", b'{"a": 1}', {"a": 1}),
        ("application/json", b'{"a": ', '{"a": '),
        ("application/json", b"\xff", "\ufffd"),
        ("application/x-www-form-urlencoded", b"a=1&a=2&b=", {"a": ["1", "2"], "b": [""]}),
        ("text/plain", "é".encode(), "é"),
        ("application/json", None, None),
    ],
)
def test_a_stored_request_is_read_by_its_content_type(content_type: str, body: bytes | None, read: Any) -> None:
    assert IdempotencyKey(request_content_type=content_type, request_body=body).request_params == read


def test_a_claimed_key_is_not_saved_past_its_fence(db: None) -> None:
    key = claim().key
    key.recovery_point = "elsewhere"
    with pytest.raises(RuntimeError, match="bypass its fence"):
        key.save()
    assert IdempotencyKey.objects.get().recovery_point == "started"
    IdempotencyKeyFactory().save()  # a row that nobody runs


def test_a_form_is_given_a_new_key_each_time_and_a_stranger_a_session(db: None) -> None:
    template = engines["django"].from_string('{% load idempotency %}{% idempotency_key %}{% idempotency_key "second" %}')
    request: HttpRequest = RequestFactory().get("/")
    request.session = SessionStore()
    first = template.render({}, request)
    kept = request.session.session_key
    assert kept
    assert 'type="hidden" name="idempotency_key" value="' in first
    assert 'name="second"' in first
    assert template.render({}, request) != first
    assert request.session.session_key == kept


class NoTable:
    """While it is open, the table of heartbeats cannot be found."""

    def __enter__(self) -> None:
        self._rename(ProcessHeartbeat._meta.db_table, "elsewhere")

    def __exit__(self, *_: object) -> None:
        self._rename("elsewhere", ProcessHeartbeat._meta.db_table)

    def _rename(self, name: str, to: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {name} RENAME TO {to}")


def test_a_process_works_on_when_its_heart_cannot_be_heard(transactional_db: None) -> None:
    heartbeat = Heartbeat("complete_keys", using="default")
    with NoTable():
        heartbeat.beat()
        heartbeat.remove()
    Heartbeat("complete_keys", using="default").beat()
    assert ProcessHeartbeat.objects.get().name == "complete_keys"


@pytest.mark.parametrize("hours", ["0", "-1", "1000001", "soon"])
def test_the_reaper_refuses_an_age_that_cannot_be_meant(hours: str) -> None:
    with pytest.raises(CommandError, match="older-than"):
        call_command("reap_keys", "--older-than", hours)


class Terminal(io.StringIO):
    """A terminal, at which somebody waits."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("out", "counts"), [(Terminal(), True), (io.StringIO(), False)], ids=["terminal", "log"])
def test_the_reaper_counts_for_somebody_who_waits(transactional_db: None, out: io.StringIO, counts: bool) -> None:
    IdempotencyKeyFactory(finished=True)
    IdempotencyKey.objects.update(created_at=Now() - timedelta(days=99), finished_at=Now() - timedelta(days=99))
    call_command("reap_keys", stdout=out)
    assert ("\r1 of 1" in out.getvalue()) is counts
    assert out.getvalue().rpartition("\r\033[K")[2].startswith("reap_keys: 1 ")
    assert not IdempotencyKey.objects.exists()
