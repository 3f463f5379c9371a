"""A death of the kit is a death, its time is moved, and what it cannot prove it says."""

import os
import pty
import re
import ssl
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.db import connection
from django.db.models import DateTimeField
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.test import Client, TestCase
from django.urls import path
from django.utils import timezone

from idempotency.completer import complete_once
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from idempotency.testing import (
    CannotProve,
    CrashTestCase,
    DoesNotSurvive,
    Report,
    age,
    assert_survives,
    courses,
    progress,
)
from tests.crash import views
from tests.factories import IdempotencyKeyFactory
from tests.kit.ageing import lock_end
from tests.kit.commands import environment
from tests.kit.serving import Sender
from tests.kit.threads import background
from tests.kit.waiting import eventually
from tests.models import Account, Entry

pytestmark = pytest.mark.django_db(transaction=True)


def test_nothing_that_tidies_up_gets_through_after_a_death(
    serve: Callable[..., None], sender: Sender, texts: list[str]
) -> None:
    serve(view=views.tidies_up)
    ends = set()
    for course in courses(lambda key: sender.send(key=key), effects=texts, races=False):
        course.check()
        ends.add(
            (
                tuple(texts),
                Entry.objects.filter(name="failed").count(),
                Account.objects.get().balance,
            )
        )
    # What a death before COMMIT leaves, and what every retry comes to.
    assert ends == {((), 0, 0), ((), 0, 1)}


def test_afterwards_the_database_is_as_it_was_and_ids_go_on(
    serve: Callable[..., None], sender: Sender, texts: list[str]
) -> None:
    serve(view=views.plain)
    before = Entry.objects.create(name="before")
    assert_survives(lambda key: sender.send(key=key), races=False)
    assert list(Entry.objects.all()) == [before]
    assert not IdempotencyKey.objects.exists()
    assert Account.objects.get().balance == 0
    assert Entry.objects.create(name="after").pk == before.pk + 1


def sessions() -> int:
    """Return how many connections the database has besides this one."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <>"
            " pg_backend_pid()"
        )
        return int(cursor.fetchone()[0])


@pytest.mark.postgres
@pytest.mark.full
def test_no_connection_of_an_attempt_is_left(
    serve: Callable[..., None], sender: Sender, texts: list[str]
) -> None:
    serve(view=views.refusal)
    # A thread of an earlier test may still end one.
    before = sessions()
    # If this test fails, the open course must not observe the next one.
    with closing(courses(lambda key: sender.send(key=key))) as found:  # type: ignore[type-var]
        for course in found:
            course.check()
            if course.title.startswith("An attempt is held up"):
                break
        # Whoever leaves off in the middle, with the traceback of a failure, may still drop the
        # database.
        eventually(lambda: sessions() <= before)
        assert_survives(lambda key: sender.send(key=key))
        eventually(lambda: sessions() <= before)


@pytest.mark.full
def test_each_statement_commit_and_downstream_call_is_a_place(
    survives: Callable[..., Report], serve: Callable[..., None], sender: Sender, texts: list[str]
) -> None:
    serve(view=views.phased)
    places = survives(lambda key: sender.send(key=key), races=False).places
    told = [(place.when, place.what) for place in places]
    assert told.count(("before", "COMMIT")) == told.count(("after", "COMMIT")) == 3
    assert [place.detail for place in places if place.what == "downstream call"] == [
        "key.derive('charge'), which prepares one",
        "bank",
        "bank",
    ]
    assert told.count(("before", "statement")) == told.count(("after", "statement")) >= 7
    assert told[-1] == ("before", "response")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what the kit has logged."""
    return [
        record.getMessage() for record in caplog.records if record.name == "idempotency.testing"
    ]


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[int], None]:
    """Return a function that sets after how many seconds, and then how often, the kit logs its
    progress."""
    caplog.set_level("INFO", "idempotency.testing")

    def every(seconds: int) -> None:
        monkeypatch.setattr(progress, "QUIET_SECONDS", seconds)
        monkeypatch.setattr(progress, "EVERY_SECONDS", seconds)

    return every


@pytest.mark.parametrize("races", [False, pytest.param(True, marks=pytest.mark.full)])
def test_it_says_about_how_long_it_will_take_and_how_far_it_is(
    races: bool,
    serve: Callable[..., None],
    sender: Sender,
    texts: list[str],
    caplog: pytest.LogCaptureFixture,
    say: Callable[[int], None],
) -> None:
    say(0)
    serve(view=views.refusal)
    assert_survives(lambda key: sender.send(key=key), races=races)
    first, *others = said(caplog)
    (expected,) = re.findall(r"about (\d+) courses of events, which take about \d+ s$", first)
    assert 0.7 < int(expected) / len(others) < 1.4
    assert [int(re.findall(r"crash kit: (\d+) of about", line)[0]) for line in others] == list(
        range(1, len(others) + 1)
    )


def test_a_short_proof_says_nothing(
    serve: Callable[..., None],
    sender: Sender,
    caplog: pytest.LogCaptureFixture,
    say: Callable[[int], None],
) -> None:
    say(3600)
    serve(view=views.refusal)
    assert_survives(lambda key: sender.send(key=key), races=False)
    assert said(caplog) == []


SAYS = "from idempotency.testing.progress import Progress; Progress(200, 60)"
LINE = "crash kit: about 200 courses of events, which take about 60 s"


@pytest.mark.processes
def test_pytest_shows_it_while_the_test_runs(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["idempotency.testing.plugin"]\n')
    (tmp_path / "test_order.py").write_text(f"def test_an_order():\n    {SAYS}\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--ds=tests.settings",
        "-p",
        "no:cacheprovider",
        str(tmp_path),
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(settings.BASE_DIR)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert LINE in done.stdout.splitlines()


@pytest.mark.processes
def test_a_terminal_shows_it_where_lines_of_this_level_are_not_logged(tmp_path: Path) -> None:
    def say(stderr: Any) -> None:
        code = f"import django; django.setup(); {SAYS}"
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=settings.BASE_DIR,
            env=environment(),
            stderr=stderr,
            check=True,
        )

    terminal, stderr = pty.openpty()
    say(stderr)
    assert os.read(terminal, 1000).decode().splitlines() == [LINE]
    with (tmp_path / "log").open("wb") as log:
        say(log)
    assert (tmp_path / "log").read_bytes() == b""


def test_a_view_without_protection_proves_nothing(
    serve: Callable[..., None], sender: Sender
) -> None:
    serve(view=lambda request: JsonResponse({}))
    with pytest.raises(CannotProve, match="Is the view decorated"):
        assert_survives(lambda key: sender.send(key=key))


def test_a_view_that_fails_proves_nothing_and_shows_its_error(
    serve: Callable[..., None], sender: Sender
) -> None:
    @idempotent
    def fails(request: HttpRequest) -> Any:
        raise ValueError("the reason")

    serve(view=fails)
    with pytest.raises(CannotProve) as refused:
        assert_survives(lambda key: sender.send(key=key))
    assert str(refused.value.__cause__) == "the reason"


def test_an_aged_key_is_abandoned_and_its_lock_expired() -> None:
    key = IdempotencyKeyFactory(
        claim_token="7c9e6679-7425-40de-944b-e07fc1f90ae7", locked_until=lock_end()
    )
    other = IdempotencyKeyFactory()
    created_at = key.created_at
    assert not IdempotencyKey.objects.abandoned().exists()
    age(key, seconds=3600)
    assert (created_at - key.created_at).total_seconds() == 3600
    assert list(IdempotencyKey.objects.abandoned()) == [key]
    age(IdempotencyKey.objects.filter(pk=other.pk), seconds=3600)
    assert set(IdempotencyKey.objects.abandoned()) == {key, other}
    assert complete_once(dry_run=True).finished == 2


def test_an_aged_key_ages_in_all_that_it_remembers() -> None:
    moments = {
        field.name
        for field in IdempotencyKey._meta.concrete_fields
        if isinstance(field, DateTimeField)
    }
    moments -= {"finished_at", "locked_until"}  # of a key that is finished, or held
    now = timezone.now()
    key = IdempotencyKeyFactory(
        **dict.fromkeys(moments, now), stuck_code="a code", stuck_reason="the reason"
    )
    age(key, seconds=3600)
    assert {
        name for name in moments if (now - getattr(key, name)).total_seconds() == 3600
    } == moments


class InAnOpenTransaction(TestCase):
    """A plain TestCase."""

    def test_a_death_needs_real_transactions(self) -> None:
        with pytest.raises(CannotProve, match="TransactionTestCase"):
            assert_survives(lambda key: Client().post("/"))
        assert connection.in_atomic_block


@pytest.mark.full
class UnderUnittest(CrashTestCase):
    """The kit in a test case of Django."""

    def test_a_view_is_proved_in_one_line_and_course_by_course(self) -> None:
        sender = Sender()
        urls = type("Urls", (), {"urlpatterns": [path("view/", views.plain)]})
        with self.settings(ROOT_URLCONF=urls):
            self.assert_survives(lambda key: sender.send(key=key), races=False)
            for course in courses(lambda key: sender.send(key=key), races=False):
                with self.subTest(course.title):
                    course.check()


@idempotent(recovery_points=[])
def sets_a_header_late(request: HttpRequest) -> HttpResponseBase:
    """Set a header after the response was stored."""
    key = request.idempotency_key  # type: ignore[attr-defined]
    for _ in key.phases():
        with atomic_phase(key) as phase:
            response = JsonResponse({}, status=201)
            phase.set_response(response)
        response["X-Charge"] = "ch_1"
    return key.response()  # type: ignore[no-any-return]


def test_a_header_that_the_replay_lacks_is_found(
    serve: Callable[..., None], sender: Sender
) -> None:
    serve(view=sets_a_header_late)
    with pytest.raises(CannotProve, match="'x-charge'"):
        assert_survives(lambda key: sender.send(key=key), races=False)


@idempotent(scope=lambda request: "partner:one")
def reads_the_session(request: HttpRequest) -> HttpResponseBase:
    """Read the session, for which its middleware adds a header that a replay lacks."""
    request.session.get("cart")
    Entry.objects.create(name="made")
    return JsonResponse({}, status=201)


def test_a_header_of_a_middleware_for_caches_is_no_difference(
    serve: Callable[..., None], sender: Sender
) -> None:
    serve(view=reads_the_session)
    client = Client()
    assert_survives(
        lambda key: client.post("/view/", headers={"Idempotency-Key": key}), races=False
    )


def test_a_call_over_tls_is_a_place_to_die(serve: Callable[..., None], sender: Sender) -> None:
    """The sockets of TLS send and receive with methods of their own."""
    charges: dict[str, int] = {}
    texts: list[str] = []

    class Service(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status = 200 if self.path in charges else 201
            texts.append(self.path) if self.path == "/texts" else charges.setdefault(self.path, 1)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    def context(protocol: int) -> ssl.SSLContext:
        found = ssl.SSLContext(protocol)
        found.check_hostname = False
        found.verify_mode = ssl.CERT_NONE
        found.maximum_version = ssl.TLSVersion.TLSv1_2
        found.set_ciphers("aNULL:@SECLEVEL=0")  # without a certificate
        return found

    def call(path: str) -> int:
        client = HTTPSConnection(
            "127.0.0.1", server.server_port, context=context(ssl.PROTOCOL_TLS_CLIENT), timeout=10
        )
        with closing(client):
            client.request("POST", path)
            return client.getresponse().status

    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key  # type: ignore[attr-defined]
        for _ in key.phases():
            if call(f"/charges/{key.derive('charge')}") == 201:
                call("/texts")  # It is lost if the process dies between the two calls.
            with atomic_phase(key) as phase:
                phase.set_response(JsonResponse({}, status=201))
        return key.response()  # type: ignore[no-any-return]

    serve(view=view)
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        server.socket = context(ssl.PROTOCOL_TLS_SERVER).wrap_socket(
            server.socket, server_side=True
        )
        with background(server.serve_forever):
            try:
                with pytest.raises(DoesNotSurvive):
                    assert_survives(
                        lambda key: sender.send(key=key),
                        races=False,
                        effects=lambda: [len(charges), len(texts)],
                        reset=lambda: (charges.clear(), texts.clear()),
                    )
            finally:
                server.shutdown()
