"""The page of one key: its state in words, the cure first, the timeline, what belongs to it, and
what one takes away."""

import json
import re
import shlex
import subprocess
from datetime import datetime, timedelta
from html import unescape
from typing import Any
from uuid import uuid4
from xml.etree import ElementTree

import pytest
from django.conf import settings
from django.contrib import admin
from django.contrib.auth.models import Group, Permission
from django.db import connection, connections
from django.db.models.functions import Now
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from pytest_django import Settings

from idempotency import conf
from idempotency.admin.actions import BUTTONS
from idempotency.admin.key_timeline import MAX_ROWS
from idempotency.admin.stuck_codes import STUCK_CODES
from idempotency.exceptions import WAITS_FOR_DEPLOY, KeyStuck
from idempotency.inbox import STAGED_JOBS
from idempotency.models import DownstreamCall, IdempotencyKey, ProcessedMessage, StagedJob
from rides_demo.models import Ride
from tests.factories import IdempotencyKeyFactory, RideFactory, StagedJobFactory, UserFactory
from tests.kit.admin import listed
from tests.kit.ageing import ago, lock_end
from tests.kit.shards import EntriesInShardB
from tests.models import Entry

pytestmark = pytest.mark.django_db

KEYS = "/admin/idempotency/idempotencykey/"


@pytest.fixture
def staff(client: Client) -> Client:
    client.force_login(UserFactory(is_staff=True, is_superuser=True))
    return client


def person(*permissions: str) -> Client:
    """Return a client signed in as staff with these permissions of the app."""
    user = UserFactory(is_staff=True)
    user.user_permissions.add(
        *Permission.objects.filter(content_type__app_label="idempotency", codename__in=permissions)
    )
    client = Client()
    client.force_login(user)
    return client


def stuck_key(code: str = "attempts_exhausted", **changes: Any) -> IdempotencyKey:
    state = {"stuck_at": ago(minutes=9), "stuck_code": code, "stuck_reason": "Look."} | changes
    return IdempotencyKeyFactory(claim_token=uuid4(), **state)


def page(client: Client, key: IdempotencyKey) -> Any:
    return client.get(f"{KEYS}{key.pk}/change/")


def history(begin: float, *events: tuple[float, str, str]) -> dict[str, Any]:
    """Return the columns of a key that was created so many seconds ago, with events so many seconds
    later."""
    created = timezone.now() - timedelta(seconds=begin)
    written = [
        {"at": (created + timedelta(seconds=later)).isoformat(), "event": name, "detail": detail}
        for later, name, detail in events
    ]
    return {"created_at": created, "last_run_at": created, "history": written}


# The state, and the cure.


def test_the_state_is_in_the_heading_with_its_age_and_its_code(staff: Client) -> None:
    assert page(staff, stuck_key()).context["heading"] == "Stuck for 9 min: attempts_exhausted"
    assert page(staff, IdempotencyKeyFactory(finished=True, response_code=None)).context["heading"]
    held = IdempotencyKeyFactory(
        claim_token=uuid4(), locked_until=lock_end(), last_run_at=ago(seconds=20)
    )
    assert re.fullmatch(r"In flight for 2\d s", page(staff, held).context["heading"])


@pytest.mark.parametrize("changes", [{}, {"acknowledged_at": Now()}], ids=["stuck", "acknowledged"])
@pytest.mark.parametrize(
    ("code", "next_step"),
    [
        *((code, "When a deploy has ended this cause, a retry") for code in WAITS_FOR_DEPLOY),
        (
            "refused_when_rebuilt",
            "The completer does not run the request again. A retry of the client runs it.",
        ),
        (
            "user_missing",
            "The completer does not run the request again. A retry of the client runs it.",
        ),
    ],
)
def test_a_stuck_key_that_a_retry_may_run_says_so(
    staff: Client, code: str, next_step: str, changes: dict[str, Any]
) -> None:
    assert next_step in page(staff, stuck_key(code, **changes)).content.decode()


def test_an_answer_of_a_person_is_told_from_a_stored_response(staff: Client) -> None:
    events = (0, "claimed", "client"), (300, "answered", "status 409, by jane")
    line = page(
        staff, IdempotencyKeyFactory(finished=True, response_code=409, **history(400, *events))
    ).context["state_line"]
    assert "jane" in line


@pytest.mark.parametrize("code", [*STUCK_CODES, "code_of_a_view"])
def test_the_button_of_the_cure_is_the_first_and_the_primary_one(staff: Client, code: str) -> None:
    best = STUCK_CODES[code].best if code in STUCK_CODES else ""
    buttons = re.findall(
        r'class="button ([\w-]+)" href="[^"]*/press/(\w+)/', page(staff, stuck_key(code)).text
    )
    # The reason decides without a recommended button, so all buttons are equal.
    assert [name for style, name in buttons if style == "default"] == [best][: bool(best)]
    assert best in ("", buttons[0][1])
    assert "answer" in {name for _, name in buttons}


def test_a_view_that_gives_up_may_recommend_the_answer(staff: Client) -> None:
    stuck = KeyStuck("Check the bank, then store a response.", best="answer")
    assert page(staff, stuck_key(stuck.code)).context["best"] == "answer"
    question = staff.get("/admin/idempotency/idempotencykey/bulk/hand_back/").context
    assert [group.alarming for group, _ in question["groups"]] == [True]
    assert KeyStuck("Check the bank.").code == "view_gave_up"


def test_a_call_whose_result_came_late_is_cured_by_completing(staff: Client) -> None:
    key = stuck_key("call_in_doubt")
    call = DownstreamCall.objects.create(key=key, name="sms", token=uuid4())
    assert page(staff, key).context["best"] == "answer"
    DownstreamCall.objects.filter(pk=call.pk).update(recorded_at=Now(), result="sent")
    assert page(staff, key).context["best"] == "complete"


def test_a_run_that_is_going_on_has_no_cure(staff: Client) -> None:
    held = IdempotencyKeyFactory(claim_token=uuid4(), locked_until=lock_end())
    assert 'class="button default"' not in page(staff, held).text


def test_the_docs_name_the_button_of_each_cure() -> None:
    docs = (settings.BASE_DIR / "docs/how-to/a-key-is-stuck.md").read_text()
    documented = dict(re.findall(r"^\| `(\w+)` \|.*\| ([\w ]+) \|$", docs, re.M))
    assert {code: documented[code] for code in STUCK_CODES} == {
        code: BUTTONS[found.best].label if found.best else "none"
        for code, found in STUCK_CODES.items()
    }


@pytest.mark.parametrize(
    ("error", "below"), [("OSError: down", False), ("OSError: down\nat last", True), ("", False)]
)
def test_an_error_of_many_lines_is_below_the_buttons(
    staff: Client, error: str, below: bool
) -> None:
    top, _, rest = page(staff, stuck_key(last_error=error)).text.partition('class="button default"')
    assert error.partition("\n")[0] in top
    assert ("at last" in rest) == below
    assert ("OSError: down" in rest) == below
    assert "at last" not in top


# Who may do what.


def test_a_person_reads_which_permission_a_missing_button_needs() -> None:
    text = page(person("view_idempotencykey", "answer_idempotencykey"), stuck_key()).text
    for name in ("complete", "acknowledge"):
        assert f"idempotency.{BUTTONS[name].permission}" in text
    for name in ("answer", "release"):
        assert f"idempotency.{BUTTONS[name].permission}" not in text


@pytest.mark.parametrize(
    ("name", "permission"), [("change", "view"), ("json", "view"), ("press/complete", "complete")]
)
def test_a_refused_page_says_who_may(name: str, permission: str) -> None:
    group = Group.objects.create(name="People on call")
    group.permissions.add(Permission.objects.get(codename=f"{permission}_idempotencykey"))
    refused = person("view_stagedjob" if permission == "view" else "view_idempotencykey").get(
        f"{KEYS}{stuck_key().pk}/{name}/"
    )
    assert refused.status_code == 403
    assert f"idempotency.{permission}_idempotencykey" in refused.text
    assert "People on call" in refused.text


# The timeline.


def timeline(staff: Client, key: IdempotencyKey) -> ElementTree.Element:
    return ElementTree.fromstring(page(staff, key).context["timeline"])


def captions(svg: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in svg.iter("text") if text.get("class") == "idem-caption"]


def shapes(svg: ElementTree.Element) -> set[str]:
    """Return the kinds of spans and marks that are drawn."""
    classes = " ".join(element.get("class", "") for element in svg.iter())
    return set(re.findall(r"idem-(?:span|mark)-(\w+)", classes))


def test_the_timeline_shows_runs_phases_calls_the_lost_run_and_the_next_one(staff: Client) -> None:
    first = (
        (0, "claimed", "client"),
        (0.1, "recovery point", "ride_created"),
        (0.2, "call begun", "charge"),
        (1, "error", "down"),
    )
    key = IdempotencyKeyFactory(
        recovery_point="ride_created", **history(250, *first, (2, "claimed", "client"))
    )
    svg = timeline(staff, key)
    assert shapes(svg) == {"run", "call", "silent", "point", "error", "next"}
    assert len(captions(svg)) == 3
    assert [path.get("class") for path in svg.iter("path")].count("idem-break") >= 1
    assert svg.find("title").text


def test_the_call_of_a_lost_run_is_drawn_up_to_its_loss(staff: Client) -> None:
    events = (0, "claimed", "client"), (0.2, "call begun", "charge"), (60, "run lost", "")
    svg = timeline(staff, IdempotencyKeyFactory(**history(250, *events)))
    assert {"unanswered", "error"} <= shapes(svg)
    assert "silent" not in shapes(svg)


def test_the_timeline_of_a_run_that_goes_on_shows_when_its_lock_expires(staff: Client) -> None:
    events = history(20, (0, "claimed", "client"))
    svg = timeline(
        staff, IdempotencyKeyFactory(claim_token=uuid4(), locked_until=lock_end(20), **events)
    )
    assert shapes(svg) == {"run", "ahead", "expiry"}
    begin, end = (written for text in svg.iter("text") if "UTC" in (written := text.text or ""))
    assert timezone.datetime.fromisoformat(end[:19]) - timezone.datetime.fromisoformat(
        begin[:19]
    ) == timedelta(seconds=conf.get().LOCK_TIMEOUT_SECONDS)


def test_the_timeline_of_a_finished_key_ends_with_it(staff: Client) -> None:
    events = history(4000, (0, "claimed", "client"), (1, "finished", "status 201"))
    svg = timeline(staff, IdempotencyKeyFactory(finished=True, **events))
    assert shapes(svg) == {"run", "finished"}
    assert "now" not in [text.text for text in svg.iter("text")]


def test_what_people_did_has_a_row_of_its_own(staff: Client) -> None:
    events = (
        (0, "claimed", "client"),
        (1, "stuck", "Look."),
        (60, "acknowledged", "by jane: ticket 7"),
    )
    svg = timeline(staff, stuck_key(**history(100, *events)))
    assert shapes(svg) == {"run", "stuck", "person"}


def test_many_runs_share_rows(staff: Client) -> None:
    runs = [
        event
        for at in range(0, 2500, 100)
        for event in ((at, "claimed", "completer"), (at + 1, "error", "down"))
    ]
    svg = timeline(staff, IdempotencyKeyFactory(**history(2600, *runs)))
    assert len(captions(svg)) <= MAX_ROWS
    assert len([rect for rect in svg.iter("rect") if rect.get("class") == "idem-span-run"]) == 25


@pytest.mark.parametrize(
    "events",
    [
        [],
        [{"at": "", "event": "claimed", "detail": ""}],
        [{"at": "2026-11-21T06:00:00Z", "event": "?", "detail": ""}],
    ],
)
def test_any_history_can_be_shown(staff: Client, events: list[dict[str, str]]) -> None:
    for changes in ({"finished": True}, {}, {"claim_token": uuid4(), "locked_until": lock_end()}):
        assert page(staff, IdempotencyKeyFactory(history=events, **changes)).status_code == 200


@pytest.mark.parametrize(
    "state",
    [
        {"finished": True},
        {},
        # SQLite takes no time with a zone in such a project.
        {"claim_token": uuid4(), "locked_until": datetime(9999, 1, 1)},
    ],
)
def test_the_page_works_in_a_project_without_time_zones(
    staff: Client, settings: Any, state: dict[str, Any]
) -> None:
    settings.USE_TZ = False
    events = [
        {"at": "2026-11-21T06:00:00Z", "event": name, "detail": ""}
        for name in ("claimed", "call begun")
    ]
    key = IdempotencyKeyFactory(history=events, **state)
    assert page(staff, key).status_code == 200
    assert staff.get(f"{KEYS}{key.pk}/json/").status_code == 200


# What belongs to it.


def test_an_empty_column_of_a_row_of_the_key_is_a_dash(staff: Client) -> None:
    key = IdempotencyKeyFactory()
    RideFactory(idempotency_key=key, stripe_charge_id=None)
    (row,) = next(kind.rows for kind in page(staff, key).context["linked"] if kind.name == "ride")
    assert "charge" in row.state
    assert "-" in row.state


def test_what_belongs_to_a_key_has_its_state(staff: Client) -> None:
    key = IdempotencyKeyFactory()
    RideFactory(idempotency_key=key, stripe_charge_id="ch_7", paid_at=ago(minutes=1))
    taken, _waiting = (
        StagedJobFactory(idempotency_key=key),
        StagedJobFactory(idempotency_key=key, run_at=ago(seconds=130)),
    )
    StagedJobFactory(idempotency_key=key, failed_at=ago(minutes=3), last_error="ImportError: gone")
    StagedJobFactory(idempotency_key=key, last_error="NotDeleted: trigger", refusals=1)
    ProcessedMessage.objects.create(source=STAGED_JOBS, message_id=str(taken.pk))
    DownstreamCall.objects.create(
        key=key, name="sms", token=uuid4(), recorded_at=Now(), result="sent <b>"
    )
    rows = {
        (kind.name, row.alarming, row.state)
        for kind in page(staff, key).context["linked"]
        for row in kind.rows
    }
    ride, calls, jobs = (
        [(alarming, state) for name, alarming, state in rows if name == kind]
        for kind in ("ride", "downstream call", "staged job")
    )
    assert "ch_7" in ride[0][1]
    assert "UTC" in ride[0][1]
    assert "sent <b>" in calls[0][1]
    assert sorted((alarming, state.split()[0]) for alarming, state in jobs) == [
        (False, "sent,"),
        (False, "took"),
        (False, "waiting,"),
        (True, "failed"),
    ]


@pytest.mark.postgres
@pytest.mark.django_db(databases=["default", "shard_b"])
def test_rows_in_another_database_are_shown_and_searched_too(
    staff: Client, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = IdempotencyKeyFactory(finished=True)
    with connections["shard_b"].cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL DEFERRED")
        cursor.execute("ALTER TABLE tests_entry DISABLE TRIGGER ALL")
    entry = Entry.objects.using("shard_b").create(name="order", idempotency_key_id=key.pk)
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE tests_entry RENAME TO in_another_database")
    settings.DATABASE_ROUTERS = [EntriesInShardB()]
    linked = {
        kind.name: [row.name for row in kind.rows] for kind in page(staff, key).context["linked"]
    }
    assert linked == {"entry": [str(entry.pk)]}
    on_no_index = {"has_module_permission": lambda self, request: False}
    searched = type("Entries", (admin.ModelAdmin,), {"search_fields": ("name",), **on_no_index})
    monkeypatch.setitem(admin.site._registry, Entry, searched(Entry, admin.site))
    assert listed(staff, {"q": "order"}) == [key.pk]


def test_a_person_who_may_not_see_a_model_sees_no_state_of_its_rows() -> None:
    key = IdempotencyKeyFactory()
    ride = RideFactory(idempotency_key=key, stripe_charge_id="ch_7")
    text = page(person("view_idempotencykey"), key).text
    assert f"ride: {ride.pk}" in text
    assert "ch_7" not in text


def test_a_person_who_may_not_see_jobs_and_calls_sees_neither_errors_nor_results() -> None:
    key = IdempotencyKeyFactory()
    DownstreamCall.objects.create(
        key=key, name="sms", token=uuid4(), recorded_at=timezone.now(), result={"to": "+4915112345"}
    )
    StagedJobFactory(
        idempotency_key=key, job_name="receipt", failed_at=timezone.now(), last_error="card 4242"
    )
    text = page(person("view_idempotencykey", "view_bodies"), key).text
    assert "downstream call: sms" in text
    assert "staged job: receipt" in text
    assert "+4915112345" not in text
    assert "4242" not in text
    rights = ("view_idempotencykey", "view_bodies", "view_stagedjob", "view_downstreamcall")
    text = page(person(*rights), key).text
    assert "+4915112345" in text
    assert "4242" in text


class NeedsItsList(admin.ModelAdmin):
    """Its column reads what only its list sets."""

    list_display = ("id", "price")

    def price(self, ride: Any) -> str:
        return f"{ride.pk} in {self.currency}"  # type: ignore[attr-defined]


def test_a_column_of_another_app_that_fails_is_left_out(
    staff: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(admin.site._registry, Ride, NeedsItsList(Ride, admin.site))
    key = IdempotencyKeyFactory()
    ride = RideFactory(idempotency_key=key)
    assert f"{ride.pk}</a>" in page(staff, key).text


def test_the_page_costs_the_same_whatever_belongs_to_the_key(staff: Client) -> None:
    keys = [IdempotencyKeyFactory() for _ in range(2)]
    for number in (1, 9):
        key = keys[number > 1]
        for count in range(number):
            StagedJobFactory(idempotency_key=key)
            DownstreamCall.objects.create(key=key, name=f"call {count}", token=uuid4())
        RideFactory(idempotency_key=key)
    page(staff, keys[0])
    counts = []
    for key in keys:
        with CaptureQueriesContext(
            connection,
        ) as queries:
            page(staff, key)
        counts.append(len(queries))
    assert counts[0] == counts[1]


# What one takes away.


def test_empty_fields_are_folded_away(staff: Client) -> None:
    form = page(staff, IdempotencyKeyFactory()).context["adminform"]
    names = {
        title: {getattr(field, "__name__", field) for field in options["fields"]}
        for title, options in form.fieldsets
    }
    assert {"finished_at", "response_code", "response_shown"} < names["Empty"]
    assert {"created_at", "attempts"} < names["Runs"]
    assert "Response" not in names
    names = {
        title
        for title, _ in (
            page(staff, IdempotencyKeyFactory(finished=True)).context["adminform"].fieldsets
        )
    }
    assert "Response" in names


def test_all_times_are_written_alike_and_with_their_zone(staff: Client) -> None:
    events = history(4000, (0, "claimed", "client"), (1, "finished", "status 201"))
    with timezone.override("Europe/Berlin"):
        text = page(staff, IdempotencyKeyFactory(finished=True, **events)).text
    times = re.findall(r"<time[^>]*>([^<]*)</time>", text)
    assert len(times) >= 7
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d CES?T", time) for time in times)
    assert not re.search(r"[ap]\.m\.", text)


def test_the_key_as_json_has_no_secret_and_the_body_as_it_is_stored(staff: Client) -> None:
    key = stuck_key(request_body=b'{"card": 1.0}', **history(9, (0, "claimed", "client")))
    StagedJobFactory(idempotency_key=key)
    read = staff.get(f"{KEYS}{key.pk}/json/").json()
    assert not {"seed", "claim_token"} & read.keys()
    columns = {field.attname for field in IdempotencyKey._meta.concrete_fields} - {
        "seed",
        "claim_token",
        "user_id",
    }
    assert columns <= read.keys()
    assert (read["state"], read["request_body"], read["history"][0]["event"]) == (
        "stuck",
        '{"card": 1.0}',
        "claimed",
    )
    assert read["linked"][0]["name"] == StagedJob.objects.get().job_name
    assert staff.get(f"{KEYS}987654/json/").status_code == 404


@pytest.mark.parametrize("body", [None, b"", b"\xff", b"[" * 5000])
def test_any_key_can_be_had_as_json(staff: Client, body: bytes | None) -> None:
    key = IdempotencyKeyFactory(
        finished=True, request_body=body, response_body=body, response_headers=None
    )
    assert staff.get(f"{KEYS}{key.pk}/json/").json()["request_body_bytes"] == (
        None if body is None else len(body)
    )


def command_of(staff: Client, key: IdempotencyKey) -> str:
    """Return the curl command on the page, with its comments."""
    (text,) = re.findall(r'id="idem-curl">(.*?)</pre>', page(staff, key).text, re.S)
    return unescape(text)


def curl_of(staff: Client, key: IdempotencyKey) -> tuple[list[str], str]:
    """Return the words of the curl command on the page, as a shell reads them, and the command with
    its comments."""
    command = command_of(staff, key)
    return shlex.split(command.replace("\\\n", " "), comments=True), command


def test_the_request_can_be_had_as_a_curl_command(staff: Client, settings: Settings) -> None:
    headers = {
        "Host": "shop.example",
        "scheme": "https",
        "script_name": "/api",
        "Accept": "a/b; c='d'",
        "no_user": "true",
    }
    key = IdempotencyKeyFactory(
        idempotency_key='it\'s "one"',
        request_headers=headers,
        request_body=b'{"note": "it\'s $HOME"}',
        request_path="/rides?a=1",
    )
    settings.ALLOWED_HOSTS = ["testserver", ".shop.example"]
    words, _ = curl_of(staff, key)
    assert words[:5] == ["curl", "--globoff", "-X", "POST", "https://shop.example/api/rides?a=1"]
    assert {words[at + 1] for at, word in enumerate(words) if word == "-H"} == {
        'Idempotency-Key: it\'s "one"',
        "Accept: a/b; c='d'",
        "Content-Type: application/json",
    }
    assert words[-2:] == ["--data-raw", '{"note": "it\'s $HOME"}']


@pytest.mark.parametrize(
    ("changes", "sent"),
    [
        ({"request_body": None}, False),
        ({"request_body": b"\xff"}, False),
        ({"request_body": b"a" * 50_000}, False),
        ({}, True),
    ],
)
def test_the_curl_command_says_what_it_leaves_out(
    staff: Client, changes: dict[str, Any], sent: bool
) -> None:
    words, text = curl_of(staff, IdempotencyKeyFactory(**changes))
    assert ("--data-raw" in words) == sent
    assert text.count("# Left out") == (1 if sent else 2)


def arguments(command: str) -> list[str]:
    """Return the arguments that bash passes to curl."""
    script = f"curl() {{ printf '%s\\0' \"$@\"; }}\n{command}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True, timeout=30)
    return done.stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize(
    "body",
    [
        '{\n\t"note": "it\'s a \\\\ backslash"\n}\r\n',
        "'\x03\x1b[201~\nid #",
        "\x07\x7f\x85\u2028\u202e\u00a07 é 'ü'",
        "\x0112",
    ],
)
def test_no_control_character_is_in_the_curl_command(body: str, staff: Client) -> None:
    """A terminal acts on a control character of a pasted text before the shell reads its quotes."""
    key = IdempotencyKeyFactory(request_body=body.encode())
    command = command_of(staff, key)
    assert all(line.isprintable() for line in command.split("\n"))
    assert arguments(command)[-2:] == ["--data-raw", body]


def test_a_body_with_nul_is_left_out_of_the_curl_command(staff: Client) -> None:
    words, text = curl_of(staff, IdempotencyKeyFactory(request_body=b"a\0b"))
    assert "--data-raw" not in words
    assert text.count("# Left out") == 2


@pytest.mark.parametrize(
    ("allowed", "host", "path", "url"),
    [
        (["*"], "evil.example", "/rides", "http://testserver/rides"),
        (
            ["testserver", "shop.example"],
            "shop.example:8443",
            "/rides",
            "https://shop.example:8443/rides",
        ),
        (["testserver"], "", "/rides", "http://testserver/rides"),
        (["testserver"], "a b\x1b", "/rides", "http://testserver/rides"),
        (
            ["testserver", "shop.example"],
            "shop.example",
            "@evil.example/",
            "https://shop.example/@evil.example/",
        ),
    ],
)
def test_the_curl_command_goes_to_a_host_of_the_site(
    allowed: list[str], host: str, path: str, url: str, staff: Client, settings: Settings
) -> None:
    settings.ALLOWED_HOSTS = allowed
    key = IdempotencyKeyFactory(
        request_headers={"Host": host, "scheme": "https"}, request_path=path
    )
    assert url in curl_of(staff, key)[0]


def test_the_request_of_a_plain_view_is_not_stored_so_no_curl_command_is_offered(
    staff: Client,
) -> None:
    key = IdempotencyKeyFactory(
        finished=True, request_body=None, request_headers={}, request_content_type=""
    )
    shown = page(staff, key)
    assert "idem-curl" not in shown.text
    assert re.findall(r'data-copy="([\w-]+)"', shown.text) == ["idem-key", "idem-path"]


def test_each_copy_button_names_a_text_of_the_page(staff: Client) -> None:
    text = page(staff, IdempotencyKeyFactory()).text
    named = re.findall(r'data-copy="([\w-]+)"', text)
    assert len(named) == 3
    assert all(f'id="{name}"' in text for name in named)
    assert "idempotency/copy.js" in text
    assert json.loads(staff.get(f"{KEYS}{IdempotencyKey.objects.get().pk}/json/").text)


def test_the_trace_of_a_key_is_a_link_if_the_project_has_set_an_address(
    staff: Client, settings: Settings
) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    key = IdempotencyKeyFactory(traceparent=f"00-{trace_id}-b7ad6b7169203331-01")
    assert trace_id in page(staff, key).content.decode()
    address = {"TRACE_URL": "https://traces.example.com/{trace_id}"}
    settings.IDEMPOTENCY = settings.IDEMPOTENCY | address
    link = f'<a href="https://traces.example.com/{trace_id}">{trace_id}</a>'
    assert link in page(staff, key).content.decode()
    assert "https://traces" not in page(staff, IdempotencyKeyFactory()).content.decode()
