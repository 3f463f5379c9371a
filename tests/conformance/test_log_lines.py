"""Number 7, further: neither key nor body stands in a line of any outcome, and each line about a
key gives its hash."""

import json
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest
from django.core.management import call_command
from django.db import DatabaseError, connection
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.urls import re_path

from idempotency import interventions
from idempotency.exceptions import KeyStuck
from idempotency.models import IdempotencyKey
from tests.kit.ageing import make_older
from tests.kit.serving import Sender, View, another_client
from tests.kit.threads import Gate, background
from tests.kit.views import Counted, both_kinds, create, phased, two_phases

Kind = Callable[..., View]
Serve = Callable[..., None]

KEY, BODY = "sk-live-0f9d", "card-4242424242424242"
#: A line about a key names it by twelve hexadecimal digits.
HASH = re.compile(r"\bkey ([0-9a-f]{12})\b")


class Lines(logging.Handler):
    """All that is logged, by whomever, with tracebacks."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
        self.lines: list[str] = []
        self.records: list[logging.LogRecord] = []
        #: What each line of this app gives to handlers that write more than text.
        self.key_hashes: list[str | None] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line, and all that its handlers are given besides."""
        self.records.append(record)
        self.lines.append(f"{self.format(record)} {vars(record)}")
        if record.name == "idempotency":
            self.key_hashes.append(getattr(record, "key_hash", None))

    def own(self) -> list[str]:
        """Return the lines of this app."""
        return [line for line in self.lines if line.startswith("idempotency ")]

    def clean(self) -> bool:
        """Whether no line shows a key or a body."""
        return not any(KEY in line or BODY in line for line in self.lines)


@pytest.fixture
def lines() -> Iterator[Lines]:
    """Return the lines that are logged from here on, at every level."""
    loggers = [logging.getLogger(name) for name in ("", "idempotency", "django", "django.request")]
    levels = [logger.level for logger in loggers]
    handler = Lines()
    for logger in loggers:
        logger.setLevel(logging.DEBUG)
    loggers[0].addHandler(handler)
    yield handler
    loggers[0].removeHandler(handler)
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def send(sender: Sender, key: str = KEY, **extra: Any) -> int:
    """Send a request with a key and a body that no line may show; return the status."""
    return int(sender.send(key=key, body={"card": extra.pop("card", BODY)}, **extra).status_code)


@both_kinds
def test_07_no_line_of_an_ordinary_request_shows_key_or_body(
    kind: Kind, serve: Serve, sender: Sender, lines: Lines
) -> None:
    serve(view=kind(Counted()))
    assert [send(sender), send(sender), send(sender, card="other-" + BODY)] == [201, 201, 422]
    assert [send(sender, KEY * 90), send(sender, f'"{KEY}'), send(sender, KEY + ",")] == [
        400,
        400,
        400,
    ]
    assert lines.lines
    assert lines.clean()


@both_kinds
def test_07_no_line_of_a_request_in_flight_shows_key_or_body(
    kind: Kind, serve: Serve, sender: Sender, lines: Lines
) -> None:
    gate = Gate()

    def work(request: HttpRequest) -> HttpResponseBase:
        gate.wait_here()
        return create(request)

    serve(view=kind(work))
    first = another_client(sender)
    if connection.vendor == "sqlite":
        gate.open()  # Its one writer lets nobody else look.
    with background(lambda: send(first)):
        gate.wait_until_reached()
        send(sender)
        send(sender, card="other-" + BODY)
        gate.open()
    assert lines.clean()


@both_kinds
@pytest.mark.parametrize(
    "failure", [HttpResponse(status=500), HttpResponse(status=503), RuntimeError("out of luck")]
)
def test_07_no_line_of_a_failure_shows_key_or_body(
    kind: Kind, failure: Any, serve: Serve, sender: Sender, lines: Lines
) -> None:
    def work(request: HttpRequest) -> HttpResponseBase:
        if isinstance(failure, Exception):
            raise failure
        return failure  # type: ignore[no-any-return]

    serve(view=kind(work))
    assert send(sender) in (500, 503)
    assert lines.lines
    assert lines.clean()


@pytest.mark.postgres
def test_07_no_line_of_a_serialization_failure_shows_key_or_body(
    serve: Serve, sender: Sender, lines: Lines
) -> None:
    runs = []

    def work(request: HttpRequest) -> HttpResponseBase:
        runs.append(1)
        if len(runs) == 1:
            with connection.cursor() as cursor:
                text = f"could not serialize {KEY} {BODY}"
                cursor.execute(
                    "DO $$ BEGIN RAISE EXCEPTION 'out of luck' USING ERRCODE = '40001', DETAIL = '"
                    + text
                    + "'; END $$"
                )
        return create(request)

    serve(view=phased(work))
    assert send(sender) == 201
    assert any("run again inside the process" in line for line in lines.own())
    assert lines.clean()


def refused(request: HttpRequest) -> HttpResponseBase:
    """Hand the key to a person."""
    raise KeyStuck("Stripe says nothing.")


def failing(request: HttpRequest) -> HttpResponseBase:
    """Fail each time."""
    raise DatabaseError("out of luck")


def abandoned(key: IdempotencyKey) -> HttpResponseBase:
    """Fail to settle."""
    raise RuntimeError("cannot settle")


FORGED = "a\n2026-01-01 ERROR forged\x1b[2K\r\u2028ü"


def test_07_the_text_of_a_client_is_one_printable_line(
    serve: Serve, sender: Sender, lines: Lines, settings: Any
) -> None:
    def gives_up(request: HttpRequest) -> HttpResponseBase:
        raise KeyStuck(json.loads(request.body)["card"])

    serve(view=two_phases(lambda request: None, gives_up))
    assert send(sender, card=FORGED) == 409
    # The path of a view that a deploy has removed.
    failing_view = two_phases(lambda request: None, failing)
    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": [re_path("^pay/", failing_view)]})
    assert send(sender, url=f"/pay/{quote(FORGED)}", key="other") == 500
    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": []})
    make_older(3600, "created_at", "last_run_at")
    call_command("complete_keys", verbosity=0)
    said = [record for record in lines.records if "is stuck (" in record.getMessage()]
    assert [record.args[1] for record in said] == ["view_gave_up", "view_missing"]
    for record in said:
        assert record.getMessage().isprintable()
        assert r"a\n2026-01-01 ERROR forged\x1b[2K\r\u2028ü" in record.getMessage()


def test_07_each_line_about_a_key_names_it_by_its_hash(
    serve: Serve, sender: Sender, lines: Lines, settings: Any
) -> None:
    settings.IDEMPOTENCY = {"COMPLETER_MAX_ATTEMPTS": 1}
    serve(
        stuck=two_phases(lambda request: None, refused),
        failing=two_phases(lambda request: None, failing),
        settled=two_phases(lambda request: None, failing, on_abandon=abandoned),
        bodiless=two_phases(lambda request: None, failing, store_body=False),
    )
    names = ("stuck", "failing", "settled", "bodiless")
    assert [send(sender, f"{KEY}-{name}", url=f"/{name}/") for name in names] == [
        409,
        500,
        500,
        500,
    ]
    # A retry of the client's resumes it, and fails again.
    assert send(sender, f"{KEY}-failing", url="/failing/") == 500
    settled = IdempotencyKey.objects.filter(request_path="/settled/")
    make_older(100 * 3600, "created_at", "last_run_at")
    call_command("reap_keys", verbosity=0)
    assert settled.get().stuck_code == "on_abandon"
    IdempotencyKey.objects.exclude(request_path="/stuck/").exclude(request_path="/settled/").update(
        stuck_at=None, stuck_code="", stuck_reason="", next_run_at=None
    )
    call_command("complete_keys", verbosity=0)
    key = settled.get()
    assert interventions.acknowledge(key.pk, key.claim_token, by="a person")
    every = {key.key_hash for key in IdempotencyKey.objects.all()}
    assert len(every) == 4
    named = [found.group(1) if (found := HASH.search(line)) else None for line in lines.own()]
    assert set(named) == every
    assert lines.key_hashes == named
    assert lines.clean()
    said = "\n".join(lines.own())
    assert all(
        text in said
        for text in ("is stuck (", "is resumed at", "could not finish key", "on_abandon of key")
    )
