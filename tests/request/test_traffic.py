"""The counts of requests per minute: what is counted, how it is stored, and what the charts
read."""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Event
from typing import Any

import pytest
from django.core import mail
from django.core.signals import request_finished
from django.db import DatabaseError, OperationalError, connection, transaction
from django.http import Http404, HttpRequest, HttpResponse

from idempotency import reaper, signals
from idempotency.admin import traffic
from idempotency.models import TrafficCount
from idempotency.signals import RequestOutcome
from tests.kit.serving import Sender, View
from tests.kit.threads import at_once
from tests.kit.views import both_kinds, create, plain

Kind = Callable[..., View]
Serve = Callable[..., None]


@pytest.fixture(autouse=True)
def _forget(transactional_db: None) -> Iterator[None]:
    traffic._counts.clear()
    yield
    traffic._counts.clear()


@pytest.fixture
def outcomes() -> Iterator[list[RequestOutcome]]:
    found: list[RequestOutcome] = []

    def receive(*, outcome: RequestOutcome, seconds: float, **kwargs: Any) -> None:
        assert 0 <= seconds < 60
        found.append(outcome)

    signals.request_answered.connect(receive)
    yield found
    signals.request_answered.disconnect(receive)


def written() -> dict[str, int]:
    return {count.kind.partition(" ")[0]: count.count for count in TrafficCount.objects.all()}


@both_kinds
def test_each_request_with_a_key_has_one_outcome(
    serve: Serve, sender: Sender, outcomes: list[RequestOutcome], kind: Kind
) -> None:
    serve(view=kind(create))
    sender.send()
    sender.send()
    sender.send(body={"a": 2})
    assert outcomes == ["ran", "replayed", "conflict"]


@both_kinds
def test_an_error_of_the_server_is_a_failure_and_one_of_the_client_is_not(
    serve: Serve, sender: Sender, outcomes: list[RequestOutcome], kind: Kind
) -> None:
    def missing(request: HttpRequest) -> HttpResponse:
        raise Http404

    def broken(request: HttpRequest) -> HttpResponse:
        raise ZeroDivisionError

    def answering(status: int) -> Callable[[HttpRequest], HttpResponse]:
        return lambda request: HttpResponse(status=status)

    for number, work in enumerate((missing, broken, answering(500), answering(503))):
        serve(view=kind(work))
        sender.send(key=f"key-{number}")
    assert outcomes == ["ran", "failed", "failed", "failed"]


@pytest.mark.parametrize("status", ["N/A", None, 404, 500])
@both_kinds
def test_an_error_with_a_status_of_any_type_is_that_of_the_view(
    serve: Serve, sender: Sender, outcomes: list[RequestOutcome], kind: Kind, status: Any
) -> None:
    class OfALibrary(Exception):
        status_code = status

    def broken(request: HttpRequest) -> HttpResponse:
        raise OfALibrary

    serve(view=kind(broken))
    sender.client.raise_request_exception = True
    with pytest.raises(OfALibrary):
        sender.send()
    assert outcomes == ["ran" if status == 404 else "failed"]


def test_a_request_without_a_scope_is_refused_and_one_without_a_key_is_not_counted(
    serve: Serve, sender: Sender, outcomes: list[RequestOutcome]
) -> None:
    serve(view=plain(create, required=False, scope=lambda request: ""))
    sender.send()
    sender.send(key=None)
    sender.send(method="GET")
    assert outcomes == ["refused"]


def test_what_is_written_is_added_to_what_others_have_written() -> None:
    def process(number: int) -> None:
        traffic._counts.update({(7, "replayed"): 2, (7, "ran 3"): number})
        traffic.write()

    process(1)
    process(2)
    assert written() == {"replayed": 4, "ran": 3}
    assert not traffic._counts


@pytest.mark.postgres
def test_threads_that_write_at_once_lose_nothing() -> None:
    def requests() -> None:
        for _ in range(50):
            traffic.count_request(outcome=RequestOutcome.REPLAYED, seconds=0)
            traffic.write()

    at_once([requests] * 4)
    traffic.write()
    assert sum(TrafficCount.objects.values_list("count", flat=True)) == 200


def test_counts_that_could_not_be_written_wait_for_the_next_time() -> None:
    traffic.count_request(outcome=RequestOutcome.CONFLICT, seconds=0)
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE idempotency_trafficcount RENAME TO elsewhere")
    traffic.count_request(outcome=RequestOutcome.CONFLICT, seconds=0)
    with pytest.raises(DatabaseError):
        traffic.write()
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE elsewhere RENAME TO idempotency_trafficcount")
    assert written() == {}
    traffic.write()
    assert sum(written().values()) == 2


def test_nothing_is_written_in_a_transaction_of_others() -> None:
    traffic.count_request(outcome=RequestOutcome.CONFLICT, seconds=0)
    with transaction.atomic():
        traffic.write()
        assert written() == {}
    traffic.write()
    assert written() == {"conflict": 1}


def test_after_a_request_it_is_written_but_not_after_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mail, "outbox")
    monkeypatch.setattr(traffic, "_next_write", 0.0)
    for _ in range(2):
        traffic.count_request(outcome=RequestOutcome.REPLAYED, seconds=0)
        traffic.write_after_request()
    assert written() == {"replayed": 1}
    assert sum(traffic._counts.values()) == 1


@pytest.mark.postgres
def test_a_lock_on_the_table_stops_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "LOCK_SECONDS", 0.05)
    traffic.count_request(outcome=RequestOutcome.REPLAYED, seconds=0)
    locked, over = Event(), Event()

    def hold() -> None:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("LOCK TABLE idempotency_trafficcount")
            locked.set()
            assert over.wait(5)

    def write() -> None:
        locked.wait()
        try:
            with pytest.raises(OperationalError):
                traffic.write()
        finally:
            over.set()

    at_once([hold, write])
    traffic.write()
    assert written() == {"replayed": 1}
    with connection.cursor() as cursor:
        cursor.execute("SHOW lock_timeout")
        assert cursor.fetchone() == ("0",)


class NoTenant:
    """A router that needs a value that a middleware sets, and clears before the end of the
    request."""

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        raise LookupError("No tenant is active.")


def test_an_error_of_the_router_reaches_nobody_and_loses_nothing(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(mail, "outbox")
    monkeypatch.setattr(traffic, "_next_write", 0.0)
    settings.DATABASE_ROUTERS = [f"{__name__}.NoTenant"]
    traffic.count_request(outcome=RequestOutcome.REPLAYED, seconds=0)
    traffic._counts[0, "replayed"] = 1  # of 1970, which is too old to be kept
    request_finished.send(sender=None)
    settings.DATABASE_ROUTERS = []
    traffic.write()
    assert written() == {"replayed": 1}


@pytest.mark.postgres
def test_a_connection_that_the_server_has_ended_is_closed_and_the_counts_are_written_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(mail, "outbox")
    traffic.count_request(outcome=RequestOutcome.REPLAYED, seconds=0)
    with connection.cursor() as cursor, suppress(OperationalError):
        cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")
    for open_after in (False, True):
        monkeypatch.setattr(traffic, "_next_write", 0.0)
        traffic.write_after_request()
        assert connection.connection is None, open_after
    assert written() == {"replayed": 1}


def test_nothing_is_counted_if_the_setting_says_so(settings: Any) -> None:
    settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "COUNT_REQUESTS": False}
    traffic.count_request(outcome=RequestOutcome.REPLAYED, seconds=0)
    assert not traffic._counts


def test_the_numbers_of_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = int(time.time()) // 3600 * 3600 - 3600  # the start of an hour
    monkeypatch.setattr(time, "time", lambda: begin + 1)
    durations = [0.01] * 90 + [1.0] * 10
    for seconds in durations:
        traffic.count_request(outcome=RequestOutcome.RAN, seconds=seconds)
    traffic.count_request(outcome=RequestOutcome.REPLAYED, seconds=0)
    traffic.write()
    monkeypatch.setattr(time, "time", lambda: begin + 3720)
    hour, now = traffic.read_intervals("default", intervals=2, minutes=60)
    assert (hour.begin.timestamp(), hour.requests, hour.replays) == (
        begin,
        pytest.approx(101 / 60),
        pytest.approx(1 / 60),
    )
    assert 0.01 <= (hour.p50 or 0) < 0.0142
    assert 1 <= (hour.p95 or 0) < 1.42
    assert (now.requests, now.p50) == (0, None)


def test_the_reaper_deletes_old_counts() -> None:
    now = int(time.time()) // 60
    TrafficCount.objects.create(
        minute=now - reaper.TRAFFIC_RETENTION_MINUTES - 5, kind="replayed", count=1
    )
    kept = TrafficCount.objects.create(minute=now - 7 * 24 * 60, kind="replayed", count=1)
    reaper.reap_once()
    assert [*TrafficCount.objects.all()] == [kept]


def test_the_counts_are_those_of_the_requests(serve: Serve, sender: Sender) -> None:
    serve(view=plain(create))
    for _ in range(3):
        sender.send()
    traffic.write()
    assert Counter(written()) == {"ran": 1, "replayed": 2}


NO_ADMIN = """
import sys
import django
from django.conf import settings
from django.core.signals import request_finished

apps = ["django.contrib.auth", "django.contrib.contenttypes", "idempotency"]
settings.configure(INSTALLED_APPS=apps)
django.setup()
from idempotency import signals

assert "idempotency.admin" not in sys.modules
assert not signals.request_answered.receivers
assert not [key for key, *_ in request_finished.receivers if "idempotency" in str(key)]
"""


@pytest.mark.processes
def test_a_process_without_the_admin_site_counts_nothing() -> None:
    subprocess.run([sys.executable, "-c", NO_ADMIN], check=True, timeout=60)
