"""No text of the pages is left out of the catalogue, and the catalogue is whole."""

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from gettext import GNUTranslations
from pathlib import Path
from string import Formatter
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import Group, Permission
from django.core.management import call_command
from django.db.models.functions import Now
from django.utils import timezone, translation

from idempotency import _bulk_work, interventions
from idempotency._operations.definition import registered
from idempotency.admin import export
from idempotency.admin.actions import BUTTONS, looked_at
from idempotency.admin.stuck_codes import STUCK_CODES
from idempotency.inbox import STAGED_JOBS
from idempotency.models import (
    DownstreamCall,
    IdempotencyKey,
    ProcessedMessage,
    ProcessHeartbeat,
    StagedJob,
    TrafficCount,
)
from idempotency.monitoring.doctor import diagnose
from idempotency.monitoring.heartbeats import LOOPS
from tests import catalogue
from tests.factories import IdempotencyKeyFactory, RideFactory, StagedJobFactory
from tests.kit.admin import KEYS, person
from tests.kit.ageing import ago, lock_end
from tests.kit.pseudo_language import latin_words, pseudo_language

ADMIN = "/admin/idempotency/"
JOBS, CALLS, MESSAGES = f"{ADMIN}stagedjob/", f"{ADMIN}downstreamcall/", f"{ADMIN}processedmessage/"
DASHBOARD = f"{KEYS}dashboard/"
#: Names that are the same in each language: of codes, formats, units, headers, commands and
#: permissions.
NAMES = {
    *STUCK_CODES, *LOOPS, *BUTTONS, "started", "ride_created", "charge_created", "finished",
    "rides", "ride", "idempotency",
    *("CSV", "JSON", "ID", "POST", "UTC", "ms", "s", "min", "h", "d", "k", "M", "p50", "p95", "xx"),
    *("curl", "globoff", "http", "testserver", "X", "H", "data-raw", "application"),
    *("Idempotency-Key", "Content-Type", "Idempotent-Replayed"),
    *(operation.name for operation in registered()),
    *("json", "text", "plain", "default", "charset", "utf-8", "true", "OK", "Conflict", "TRUE"),
}  # fmt: skip
#: What the rows of these tests have: words in capitals, and the names that factories give.
MADE_UP = re.compile(
    r"[A-Z]{4,}\w*|(rider|key|scope)-?\d+|rides_demo\.\w+(\.\w+)*|idempotency\.\w+|[0-9a-f-]+"
)


@pytest.fixture
def pseudo(db: None, tmp_path: Path, settings: Any) -> Iterator[None]:
    with pseudo_language(tmp_path, settings):
        yield


def left_out(page: Any) -> dict[str, str]:
    """Return the words of a page that are neither translated nor data, each with the text that has
    it."""
    assert page.status_code in (200, 403)
    return {
        word: text
        for word, text in latin_words(page.text).items()
        if word.strip("'-.") not in NAMES and not MADE_UP.fullmatch(word.strip("'-."))
    }


def stuck(code: str = "attempts_exhausted", **changes: Any) -> IdempotencyKey:
    state = {
        "claim_token": uuid4(),
        "stuck_at": ago(minutes=9),
        "stuck_code": code,
        "stuck_reason": "REASON",
    } | changes
    return IdempotencyKeyFactory(**state)


def history(begin: float, *events: tuple[float, str]) -> dict[str, Any]:
    created = timezone.now() - timedelta(seconds=begin)
    written = [
        {"at": (created + timedelta(seconds=at)).isoformat(), "event": name, "detail": "DETAIL"}
        for at, name in events
    ]
    return {"created_at": created, "last_run_at": created, "history": written}


RUN = ((0, "claimed"), (0.1, "recovery point"), (0.2, "call begun"), (1, "error"))
LOST = (
    *RUN,
    (2, "claimed"),
    (200, "run lost"),
    (200, "claimed"),
    (201, "refused"),
    (202, "claimed"),
    (203, "stuck"),
)
MANY = tuple(event for at in range(0, 2000, 100) for event in ((at, "claimed"), (at + 1, "error")))
BY_PEOPLE = (
    (0, "claimed"),
    (1, "lock released"),
    (2, "handed back"),
    (3, "answered"),
    (4, "acknowledged"),
    (5, "finished"),
)

NO_RESPONSE = {"response_code": None, "response_headers": None, "response_body": None}

#: A key in each state, and with each kind of history.
KEYS_OF_ALL_KINDS: dict[str, Callable[[], IdempotencyKey]] = {
    **{code: lambda code=code: stuck(code) for code in STUCK_CODES},  # type: ignore[misc]
    "a code of a view": lambda: stuck("CODE", last_error="ERROR\nMORE", **history(300, *LOST)),
    "waiting": lambda: IdempotencyKeyFactory(attempts=1, **history(20, *RUN)),
    "abandoned": lambda: IdempotencyKeyFactory(request_path="/NOWHERE", **history(2100, *MANY)),
    "no attempt left": lambda: IdempotencyKeyFactory(completer_attempts=99),
    "in flight": lambda: IdempotencyKeyFactory(
        claim_token=uuid4(), locked_until=lock_end(5), **history(5, *RUN)
    ),
    "refused": lambda: IdempotencyKeyFactory(refused_at=Now()),
    "acknowledged": lambda: stuck(acknowledged_at=Now()),
    "finished": lambda: IdempotencyKeyFactory(
        finished=True, attempts=2, **history(60, *RUN, (2, "finished"))
    ),
    "answered": lambda: IdempotencyKeyFactory(finished=True, **history(60, *BY_PEOPLE[:4])),
    "without a response": lambda: IdempotencyKeyFactory(finished=True, **NO_RESPONSE),
    "past its retention": lambda: IdempotencyKeyFactory(
        finished=True, finished_at=ago(days=9), created_at=ago(days=9)
    ),
    "without bodies": lambda: IdempotencyKeyFactory(
        finished=True, request_body=None, response_body=None
    ),
    "of much text": lambda: stuck(
        request_body=b'"DATA"', last_error="ERROR" * 9000, **history(9, *BY_PEOPLE)
    ),
}


@pytest.mark.parametrize("kind", KEYS_OF_ALL_KINDS)
def test_the_page_of_a_key_is_translated(pseudo: None, kind: str) -> None:
    key = KEYS_OF_ALL_KINDS[kind]()
    for client in (person(), person("view_idempotencykey")):
        assert left_out(client.get(f"{KEYS}{key.pk}/change/")) == {}


def test_what_belongs_to_a_key_is_translated(pseudo: None) -> None:
    key = stuck("call_in_doubt", **history(9, (0, "call begun")))
    RideFactory(idempotency_key=key)
    taken = StagedJobFactory(idempotency_key=key)
    ProcessedMessage.objects.create(source=STAGED_JOBS, message_id=str(taken.pk))
    for changes in (
        {"hand_overs": 1},
        {"refusals": 2, "last_error": "ERROR"},
        {"failed_at": Now()},
        {"run_at": ago(hours=-1)},
    ):
        StagedJobFactory(idempotency_key=key, **changes)
    for name, recorded_at in (("FIRST", None), ("SECOND", Now())):
        DownstreamCall.objects.create(
            key=key, name=name, token=uuid4(), recorded_at=recorded_at, result="RESULT"
        )
    page = person().get(f"{KEYS}{key.pk}/change/")
    # What the admin of another app says of its rows is not ours.
    others = {
        word
        for kind in page.context["linked"][:1]
        for row in kind.rows
        for word in latin_words(row.state)
    }
    assert {word for word in left_out(page) if word not in others} == set()
    assert len(page.context["linked"]) == 3


@pytest.mark.parametrize("button", BUTTONS)
def test_a_question_and_its_answer_are_translated(pseudo: None, button: str) -> None:
    held = {
        "claim_token": uuid4(),
        "locked_until": lock_end(),
        "stuck_at": None,
        "stuck_code": "",
        "stuck_reason": "",
    }
    key, client = stuck(last_error="ERROR\nMORE", **(held if button == "release" else {})), person()
    if button == "answer":
        IdempotencyKeyFactory(finished=True)
    url = f"{KEYS}{key.pk}/press/{button}/"
    seen = looked_at(key, "default")
    assert left_out(client.get(url, seen)) == {}
    assert left_out(client.get(url, seen | {"template": 1})) == {}
    sent = seen | {"note": "NOTE", "status": "409", "kind": "text", "body": "", "step": "preview"}
    mistakes = [
        {"body": "{}"},
        {"kind": "json", "body": "TRUE"},
        {"status": "9999"},
        {"status": "500"},
    ]
    for changes in [*mistakes, {"status": "204", "body": "BODY"}] if button == "answer" else ():
        assert {*left_out(client.post(url, sent | changes))} <= {"Expecting", "value"}, "of Python"
    page = client.post(url, sent)
    if button == "answer":
        (digest,) = re.findall(r'name="previewed" value="(\w+)"', page.text)
        page = client.post(url, sent | {"step": "store", "previewed": digest})
    # The second one is too late.
    for answered in (client.get(page["Location"]), client.get(url, {}, follow=True)):
        (told,) = re.findall(r'<ul class="messagelist">(.*?)</ul>', answered.text, re.S)
        assert latin_words(told) == {}


@pytest.fixture
def rows(db: None) -> None:
    """Make some rows of each kind, which all lists and the dashboard show."""
    (
        stuck(created_at=ago(days=2), last_error="ERROR"),
        stuck("call_in_doubt"),
        stuck("CODE", acknowledged_at=Now()),
    )
    IdempotencyKeyFactory(created_at=ago(minutes=10), last_run_at=ago(minutes=10))
    IdempotencyKeyFactory(finished=True)
    for changes in (
        {"run_at": ago(minutes=7)},
        {"run_at": ago(hours=-1)},
        {"failed_at": ago(minutes=2), "last_error": "ERROR"},
        {"group": "GROUP", "group_position": 1},
        {"group": "GROUP", "group_position": 2},
    ):
        StagedJobFactory(**changes)
    DownstreamCall.objects.create(
        key=IdempotencyKey.objects.first(), name="CALL", token=uuid4(), result="RESULT"
    )
    ProcessedMessage.objects.create(source="SOURCE", message_id="MESSAGE")
    for name, pid, minutes in (
        ("reap_keys", 1, 9),
        ("complete_keys", 2, 9),
        ("complete_keys", 3, 0),
    ):
        ProcessHeartbeat.objects.create(
            name=name, host="HOST", pid=pid, beat_at=ago(minutes=minutes)
        )
    TrafficCount.objects.create(minute=int(timezone.now().timestamp()) // 60, kind="ran 7", count=8)


@pytest.mark.parametrize(
    "path",
    [
        ADMIN, KEYS, JOBS, CALLS, MESSAGES, DASHBOARD,
        f"{DASHBOARD}?span=24h", f"{DASHBOARD}?span=7d",
        *(f"{KEYS}?state={state}" for state in ("stuck", "acknowledged", "abandoned")),
        *(f"{KEYS}?state={state}" for state in ("in_flight", "finished")),
        f"{KEYS}?path=/rides&mine=1&error_group=REASON&request_group=REQUEST",
        f"{KEYS}?q=NOTHING", f"{KEYS}?q=key", f"{JOBS}?state=failed", f"{JOBS}?q=1",
        *(f"{KEYS}bulk/{name}/?state=unfinished" for name in ("hand_back", "acknowledge")),
        *(f"{JOBS}bulk/{name}/?state=failed" for name in ("retry", "discard")),
        f"{KEYS}bulk/hand_back/?state=finished",
    ],
)  # fmt: skip
def test_lists_questions_and_the_dashboard_are_translated(
    pseudo: None, rows: None, path: str
) -> None:
    assert left_out(person().get(path)) == {}


@pytest.mark.parametrize("groups", [0, 1, 2])
def test_what_is_refused_and_what_is_not_offered_is_translated(
    pseudo: None, rows: None, groups: int
) -> None:
    for number in range(groups):
        Group.objects.create(name=f"GROUP{number}").permissions.add(
            *Permission.objects.filter(codename="view_idempotencykey")
        )
    views = (
        "view_idempotencykey",
        "view_stagedjob",
        "view_downstreamcall",
        "view_processedmessage",
    )
    viewer, stranger = person(*views), person("view_ride")
    for path in (KEYS, JOBS, f"{KEYS}bulk/hand_back/") if groups == 0 else (KEYS,):
        assert left_out(viewer.get(path)) == {}
        assert left_out(stranger.get(path)) == {}


@pytest.mark.parametrize("model", [StagedJob, DownstreamCall, ProcessedMessage])
def test_the_page_of_another_row_is_translated(pseudo: None, rows: None, model: Any) -> None:
    for row in model.objects.all():
        for client in (person(), person(f"view_{model._meta.model_name}")):
            assert left_out(client.get(f"{ADMIN}{model._meta.model_name}/{row.pk}/change/")) == {}


@pytest.mark.parametrize(
    ("page", "action"),
    [(KEYS, "hand_back"), (KEYS, "acknowledge"), (JOBS, "retry"), (JOBS, "discard")],
)
def test_the_progress_of_an_action_and_its_end_are_translated(
    pseudo: None, rows: None, monkeypatch: pytest.MonkeyPatch, page: Any, action: str
) -> None:
    monkeypatch.setattr(_bulk_work, "CHUNK_ROWS", 1)
    monkeypatch.setattr(_bulk_work, "TURN_SECONDS", -1)
    StagedJobFactory(failed_at=Now())
    IdempotencyKeyFactory(claim_token=uuid4(), locked_until=lock_end())
    client, url = (
        person(),
        f"{page}bulk/{action}/?state={'unfinished' if page == KEYS else 'failed'}",
    )
    asked = client.get(url)
    IdempotencyKey.objects.filter(stuck_code="call_in_doubt").update(
        stuck_at=Now(), last_run_at=ago(seconds=-9)
    )
    assert left_out(asked) == {}
    (work,) = re.findall(r'name="work" value="([^"]+)"', asked.text)
    progress = client.post(url, {"work": work, "note": "NOTE"})["Location"]
    for step in ("stop", "resume"):
        assert left_out(client.post(progress, {"step": step})) == {}
    assert left_out(client.get(f"{KEYS}dashboard/")) == {}
    while (page := client.post(progress, {"step": "continue"})).status_code == 200:
        assert left_out(page) == {}
    for done in (page["Location"], progress, f"{KEYS}dashboard/"):
        assert left_out(client.get(done)) == {}
    assert left_out(client.post(url, {"work": "OLD"})) == {}


def test_the_last_line_of_a_file_is_translated(
    pseudo: None, rows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "MAX_ROWS", 1)
    assert not re.search("[A-Za-z]", person().get(f"{KEYS}csv/").text.splitlines()[-1])


def test_the_state_in_the_admin_of_another_app_is_translated(pseudo: None) -> None:
    RideFactory(idempotency_key=stuck())
    (cell,) = re.findall(
        r'<td class="field-key_state">(.*?)</td>', person().get("/admin/rides_demo/ride/").text
    )
    assert set(latin_words(cell)) == {"min"}


# What is not translated.


def test_the_command_of_the_doctor_and_what_is_stored_are_english(
    pseudo: None, rows: None, capsys: Any
) -> None:
    with pytest.raises(SystemExit):
        call_command("idempotency_doctor")
    told = capsys.readouterr().out
    with translation.override("en"):
        assert all(finding.seen.split(":")[0] in told for finding in diagnose().findings)
    key = stuck()
    assert interventions.acknowledge(key.pk, key.claim_token, by="jane")
    key.refresh_from_db()
    assert key.history[-1]["event"] == "acknowledged"


# The catalogue.


def entries() -> dict[catalogue.Message, list[str]]:
    return catalogue.read(catalogue.PO.read_text())


def test_each_message_of_the_code_is_in_the_catalogue_with_all_its_forms() -> None:
    known = entries()
    del known[catalogue.Message()]
    assert set(known) == set(catalogue.used()), "python -m tests.catalogue"
    for message, forms in known.items():
        assert len(forms) == 1 + bool(message.plural), message
        assert all(forms), message


def test_a_translation_has_the_placeholders_and_tags_of_its_message() -> None:
    for message, forms in entries().items():
        for form in forms:
            assert parts(form) == parts(message.plural or message.text), message


def parts(text: str) -> list[str]:
    braces = [
        f"{{{name}}}" for _, name, _, _ in Formatter().parse(re.sub(r"%\(\w+\)s", "", text)) if name
    ]
    return sorted([*re.findall(r"%\(\w+\)[sd]|<[^>]+>", text), *braces])


def test_the_compiled_catalogue_is_that_of_the_texts() -> None:
    binary = catalogue.PO.with_suffix(".mo")
    assert binary.read_bytes() == catalogue.compiled(entries()), "python -m tests.catalogue"
    with binary.open("rb") as file:
        read = GNUTranslations(file)
    assert read.gettext("stuck") == "blockiert"
    assert (
        read.npgettext('"after %(runs)s" or "in %(runs)s"', "%(count)s run", "%(count)s runs", 2)
        == "%(count)s Läufen"
    )


def test_the_pages_speak_german(rows: None) -> None:
    with translation.override("de"):
        client = person()
        assert "blockiert" in client.get(KEYS).text
        key = IdempotencyKeyFactory(
            finished=True, finished_at=timezone.now(), created_at=ago(seconds=1.4), attempts=2
        )
        assert "1,4 s" in client.get(f"{KEYS}{key.pk}/change/").context["state_line"]
        assert "20.000" in str(client.get(KEYS).context["cl"].search_help_text)


def test_no_script_has_a_text_of_its_own() -> None:
    for path in (catalogue.APP / "static").rglob("*.js"):
        assert not re.findall(r'(?:textContent = |say\()"[^"]', path.read_text()), path
