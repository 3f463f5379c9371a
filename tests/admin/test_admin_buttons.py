"""The buttons of the admin: who may press them, what the person is told, and what the admin log
keeps."""

import json
import re
from functools import partial
from html import unescape
from typing import Any
from uuid import uuid4

import pytest
from django.conf import settings
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission
from django.db import connection, transaction
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.test import Client
from django.urls import path, resolve

from idempotency import interventions
from idempotency.admin import answering
from idempotency.admin.actions import BUTTONS as ALL_BUTTONS
from idempotency.admin.actions import TOO_LATE, looked_at
from idempotency.admin.bulk_keys import HandBack
from idempotency.admin.stuck_codes import STUCK_CODES
from idempotency.decorators import idempotent
from idempotency.exceptions import KeyStuck, StuckCode
from idempotency.interventions import acknowledge
from idempotency.models import IdempotencyKey, StagedJob
from rides_demo.urls import urlpatterns
from tests.factories import IdempotencyKeyFactory, RideFactory, StagedJobFactory, UserFactory
from tests.kit.ageing import ago, lock_end, make_older
from tests.kit.claims import hand_back_and_meet_another_run
from tests.kit.serving import Sender
from tests.kit.threads import all_at_once
from tests.kit.views import two_phases
from tests.models import Entry

pytestmark = pytest.mark.django_db(transaction=True)

KEYS, JOBS = "/admin/idempotency/idempotencykey/", "/admin/idempotency/stagedjob/"
BUTTONS = ("complete", "answer", "acknowledge", "release")


def person(*permissions: str, superuser: bool = False) -> Client:
    """Return a client signed in as staff with these permissions; everybody may view."""
    user = UserFactory(is_staff=True, is_superuser=superuser)
    wanted = ("view_idempotencykey", "view_stagedjob", "view_bodies", *permissions)
    user.user_permissions.add(
        *Permission.objects.filter(content_type__app_label="idempotency", codename__in=wanted)
    )
    client = Client()
    client.force_login(user)
    client.user = user
    return client


def stuck_key(**changes: Any) -> IdempotencyKey:
    state = {
        "stuck_at": Now(),
        "stuck_code": "attempts_exhausted",
        "stuck_reason": "Look.",
    } | changes
    return IdempotencyKeyFactory(claim_token=uuid4(), **state)


def held_key() -> IdempotencyKey:
    return IdempotencyKeyFactory(claim_token=uuid4(), locked_until=lock_end())


def url(key: IdempotencyKey, button: str) -> str:
    return f"{KEYS}{key.pk}/press/{button}/"


def press(client: Client, key: IdempotencyKey, button: str, **sent: Any) -> Any:
    """Press a button on the page as it was when ``key`` was read, and follow to the page of the
    key."""
    return send(client, key, button, looked_at(key, "default") | sent)


def send(client: Client, key: IdempotencyKey, button: str, sent: dict[str, Any]) -> Any:
    """Send the form of a button; an answer is previewed first, if it has no mistake, and then
    stored."""
    if button == "answer":
        sent = {"kind": "json", "body": ""} | sent
        asked = client.post(url(key, button), sent | {"step": "preview"})
        if previewed := previewed_in(asked):
            sent |= {"step": "store", "previewed": previewed}
    return client.post(url(key, button), sent, follow=True)


def previewed_in(asked: Any) -> str:
    """Return what the page sends to store the response in its preview; "" if it has no preview."""
    found = re.search(r'name="previewed" value="(\w+)"', asked.text)
    return found[1] if found else ""


def told(response: Any) -> str:
    return " ".join(str(message) for message in response.context["messages"])


def columns() -> list[dict[str, Any]]:
    return list(IdempotencyKey.objects.order_by("pk").values())


def test_who_may_only_view_sees_no_button_and_can_press_none() -> None:
    client = person()
    stuck, held = stuck_key(), held_key()
    before = columns()
    for key in (stuck, held):
        assert "/press/" not in client.get(f"{KEYS}{key.pk}/change/").text
        for button in BUTTONS:
            assert client.get(url(key, button)).status_code == 403
            assert press(client, key, button, status=410, body="").status_code == 403
    page = client.get(KEYS)
    assert 'name="action"' not in page.text
    for action in ("hand_back", "acknowledge", "delete_selected"):
        client.post(KEYS, {"action": action, "_selected_action": [stuck.pk]})
    assert columns() == before
    assert not LogEntry.objects.exists()


def test_who_may_not_view_can_press_nothing() -> None:
    client = person()
    client.user.user_permissions.set(
        Permission.objects.filter(codename="acknowledge_idempotencykey")
    )
    assert press(client, stuck_key(), "acknowledge", note="").status_code == 403
    assert IdempotencyKey.objects.stuck().exists()


@pytest.mark.parametrize("button", BUTTONS)
def test_a_permission_gives_its_own_button_and_no_other(button: str) -> None:
    client = person(f"{button}_idempotencykey")
    key = held_key() if button == "release" else stuck_key()
    page = client.get(f"{KEYS}{key.pk}/change/").text
    assert re.findall(r"/press/(\w+)/\?seen", page) == [button]
    for other in set(BUTTONS) - {button}:
        assert press(client, key, other, status=410).status_code == 403
    assert 'name="note"' in client.get(url(key, button), looked_at(key, "default")).text
    answer = press(client, key, button, status=410, body="", note="ticket 7")
    assert answer.redirect_chain
    entry = LogEntry.objects.get()
    assert (entry.user, entry.change_message.endswith(" ticket 7")) == (client.user, True)
    assert [
        event
        for event in IdempotencyKey.objects.get().history
        if event["detail"].endswith(": ticket 7")
    ]
    assert [
        event["detail"]
        for event in IdempotencyKey.objects.get().history
        if client.user.username in event["detail"]
    ]


def test_the_log_of_the_admin_keeps_nothing_of_the_request_of_a_deleted_key() -> None:
    client = person("acknowledge_idempotencykey", "complete_idempotencykey")
    keys = [stuck_key(request_path="/reset/jane/?from=mail") for _ in range(2)]
    press(client, keys[0], "acknowledge", note="ticket 7")
    page = f"{KEYS}bulk/hand_back/?ids={keys[1].pk}"
    work = client.get(page).context["work"]
    url = client.post(page, {"work": work.signed(HandBack()), "note": "ticket 7"})["Location"]
    client.post(url, {"step": "continue"})
    IdempotencyKey.objects.all().delete()
    entries = list(LogEntry.objects.values())
    assert len(entries) == 2
    assert not re.search("jane|mail|reset", str(entries))


def test_a_superuser_is_offered_what_makes_sense_in_each_state() -> None:
    client = person(superuser=True)
    offered = {
        stuck_key(): ["complete", "answer", "acknowledge"],
        stuck_key(stuck_code="on_abandon"): ["answer", "acknowledge"],
        stuck_key(acknowledged_at=Now()): ["complete", "answer", "unacknowledge"],
        held_key(): ["release"],
        IdempotencyKeyFactory(claim_token=uuid4()): ["complete", "answer"],
        IdempotencyKeyFactory(finished=True): [],
    }
    for key, buttons in offered.items():
        assert re.findall(r"/press/(\w+)/", client.get(f"{KEYS}{key.pk}/change/").text) == buttons
        for button in buttons:
            assert client.get(url(key, button), looked_at(key, "default")).status_code == 200


def test_looking_at_a_button_does_nothing() -> None:
    client = person(superuser=True)
    key = stuck_key()
    before = columns()
    for button in BUTTONS:
        assert client.get(url(key, button), looked_at(key, "default")).status_code == 200
    assert columns() == before


def test_a_button_is_pressed_from_the_page_of_the_key_and_from_nowhere_else() -> None:
    client, key = person(superuser=True), stuck_key()
    assert str(TOO_LATE) in told(client.get(url(key, "answer"), follow=True))


def test_a_button_that_is_none_and_a_key_that_is_gone_are_not_found() -> None:
    client = person(superuser=True)
    assert client.get(url(stuck_key(), "delete")).status_code == 404
    assert client.get(f"{KEYS}987654/press/complete/").status_code == 404


@pytest.mark.parametrize("atomic_requests", [False, True])
def test_a_stuck_key_is_completed_and_its_client_gets_the_answer(
    sender: Sender, settings: Any, atomic_requests: bool
) -> None:
    broken = True

    def call() -> None:
        if broken:
            raise OSError("down")

    def work(request: HttpRequest) -> HttpResponseBase:
        return JsonResponse({"user": request.user.pk}, status=201)

    def write(request: HttpRequest) -> None:
        Entry.objects.create(name="ordered", idempotency_key=request.idempotency_key)

    view = two_phases(write, work, call=call)
    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": [path("view/", view), *urlpatterns]})
    connection.settings_dict["ATOMIC_REQUESTS"] = atomic_requests
    try:
        sender.send()
        IdempotencyKey.objects.update(
            stuck_at=Now(), stuck_code="attempts_exhausted", stuck_reason="Look."
        )
        key = IdempotencyKey.objects.get()
        page = person(superuser=True).get(f"{KEYS}{key.pk}/change/").text
        for shown in ("between", "1 failed run", "OSError: down", "entry: "):
            assert shown in page
        broken = False
        press(person("complete_idempotencykey"), key, "complete")
    finally:
        connection.settings_dict["ATOMIC_REQUESTS"] = False
    answer = sender.send()
    assert (answer.status_code, answer.json(), answer["Idempotent-Replayed"]) == (
        201,
        {"user": sender.user.pk},
        "true",
    )
    assert Entry.objects.count() == 1


def in_a_transaction(get_response: Any) -> Any:
    """Open a transaction around each request, as the middleware of django-reversion does."""

    def middleware(request: HttpRequest) -> HttpResponseBase:
        with transaction.atomic():
            return get_response(request)

    return middleware


def test_in_the_transaction_of_a_middleware_a_key_is_handed_back(settings: Any) -> None:
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.in_a_transaction"]
    client, key = person(superuser=True), stuck_key()
    press(client, key, "complete")
    key.refresh_from_db()
    assert (key.stuck_code, key.handed_back_at is not None) == ("", True)
    assert LogEntry.objects.filter(user=client.user, object_id=str(key.pk)).exists()


@pytest.mark.parametrize(
    ("body", "kind", "content_type"),
    [
        ('{"sorry": true}', "json", "application/json"),
        ('{"sorry": true}', "text", "text/plain; charset=utf-8"),
        ("sorry", "text", "text/plain; charset=utf-8"),
        ("", "json", "text/plain"),
    ],
)
def test_the_answer_is_stored_as_it_was_written(body: str, kind: str, content_type: str) -> None:
    key = stuck_key()
    done = press(person("answer_idempotencykey"), key, "answer", status=410, body=body, kind=kind)
    assert "Answered with status 410" in told(done)
    key.refresh_from_db()
    assert (key.response_code, bytes(key.response_body).decode()) == (410, body)
    assert key.response_headers["Content-Type"].startswith(content_type)
    assert LogEntry.objects.get().change_message == "Answered with status 410."


@pytest.mark.parametrize(
    "sent",
    [
        {"status": 500},
        {"status": 401},
        {"status": 7},
        {"status": ""},
        {"status": 204, "body": "1"},
        {"status": 409, "kind": "xml"},
        {"status": 409, "body": "sorry"},
        {"status": 409, "body": '{"rate": NaN}'},
    ],
)
def test_an_answer_that_ends_nothing_is_asked_for_again(sent: dict[str, Any]) -> None:
    key = stuck_key()
    page = press(person("answer_idempotencykey"), key, "answer", **sent)
    assert "errorlist" in page.text
    assert IdempotencyKey.objects.stuck().exists()


def test_a_mistake_in_json_is_shown_with_its_place() -> None:
    page = press(
        person("answer_idempotencykey"),
        stuck_key(),
        "answer",
        status=409,
        body='{\r\n  "error": sorry\r\n}',
    )
    (mistake,) = page.context["form"].errors["body"]
    assert re.findall(r"\d+", mistake) == ["2", "12"]


def test_nothing_is_stored_before_the_preview() -> None:
    client, key = person("answer_idempotencykey"), stuck_key()
    sent = looked_at(key, "default") | {
        "status": 409,
        "kind": "json",
        "body": '{"error":\r\n "<b>no seat</b>"}',
        "step": "store",
    }
    before = columns()
    asked = client.post(url(key, "answer"), sent)
    assert '{"error":\n "<b>no seat</b>"}' in unescape(asked.text)
    assert "<b>no seat" not in asked.text
    assert client.post(url(key, "answer"), sent | {"step": "edit"}).context["preview"] is None
    sent["previewed"] = previewed_in(asked)
    client.post(url(key, "answer"), sent | {"status": 410})
    assert columns() == before, "another response than the previewed one was stored"
    client.post(url(key, "answer"), sent)
    key.refresh_from_db()
    assert bytes(key.response_body) == b'{"error":\n "<b>no seat</b>"}'


def test_the_preview_is_what_each_retry_gets(sender: Sender, settings: Any) -> None:
    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponseBase:
        raise KeyStuck("Look.")

    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": [path("view/", view), *urlpatterns]})
    sender.send()
    client, key = person("answer_idempotencykey"), IdempotencyKey.objects.get()
    sent = {"status": 409, "kind": "json", "body": '{"error": "no seat"}'}
    preview = client.post(url(key, "answer"), looked_at(key, "default") | sent).context["preview"]
    press(client, key, "answer", **sent)
    retry = sender.send()
    assert preview.status == f"{retry.status_code} {retry.reason_phrase}"
    assert {(name, retry[name]) for name, _ in preview.headers} == set(preview.headers)
    assert {"Content-Type", "Idempotent-Replayed"} == {name for name, _ in preview.headers}
    assert preview.body == retry.text


def test_what_a_person_must_know_to_answer_is_on_the_page_of_the_answer() -> None:
    key = stuck_key(last_error="OSError: down", request_body=b'{"seat": 7}')
    StagedJobFactory(idempotency_key=key)
    page = unescape(
        person("answer_idempotencykey").get(url(key, "answer"), looked_at(key, "default")).text
    )
    for shown in (
        "attempts_exhausted",
        "Look.",
        "OSError: down",
        '"seat": 7',
        "rides_demo.jobs.send_ride_receipt",
    ):
        assert shown in page


def earlier(path: str = "/rides", **changes: Any) -> IdempotencyKey:
    return IdempotencyKeyFactory(
        **{"finished": True, "request_path": path, "response_body": b'{"ride": 7}'} | changes
    )


def filled(key: IdempotencyKey) -> Any:
    """Return the form of an answer that is to start from an earlier response."""
    return (
        person("answer_idempotencykey")
        .get(url(key, "answer"), looked_at(key, "default") | {"template": "1"})
        .context["form"]
    )


def test_an_answer_can_start_from_the_last_success_of_its_path() -> None:
    key, wanted = stuck_key(), earlier("/rides?page=1")
    for other in (
        {"path": "/rides/7"},
        {"request_method": "PUT"},
        {"response_code": 402},
        {"created_at": ago(hours=1)},
    ):
        earlier(response_body=b"{}", **other)
    client = person("answer_idempotencykey")
    asked = client.get(url(key, "answer"), looked_at(key, "default"))
    assert (asked.context["template"], asked.context["form"]["body"].value()) == (wanted, None)
    form = filled(key)
    assert (form["status"].value(), form["kind"].value(), json.loads(form["body"].value())) == (
        201,
        "json",
        {"ride": 7},
    )
    sent = looked_at(key, "default") | {"status": 201, "kind": "json", "body": '{ "ride": 7 }'}
    assert f"#{wanted.pk}" in " ".join(
        client.post(url(key, "answer"), sent).context["preview"].notes
    )


@pytest.mark.parametrize(
    ("own", "is_offered"),
    [({"stripe_charge_id": "ch_2"}, True), ({"stripe_charge_id": None}, False), (None, False)],
    ids=["charged", "not charged", "no ride"],
)
def test_an_answer_does_not_start_from_a_success_that_the_row_of_the_key_denies(
    own: dict[str, Any] | None, is_offered: bool
) -> None:
    key = stuck_key()
    RideFactory(idempotency_key=earlier(), stripe_charge_id="ch_1")
    if own is not None:
        RideFactory(idempotency_key=key, **own)
    asked = person("answer_idempotencykey").get(url(key, "answer"), looked_at(key, "default"))
    assert (asked.context["template"] is not None, "Start from" in asked.text) == (
        is_offered,
        is_offered,
    )
    assert filled(key)["status"].value() == (201 if is_offered else 409)


@pytest.mark.parametrize(
    "changes",
    [
        {"response_body": None},
        {"response_body": b"\xff"},
        {"response_headers": {"Content-Type": "image/png"}},
    ],
    ids=["not kept", "no text", "image"],
)
def test_a_response_that_no_form_can_hold_is_no_template(changes: dict[str, Any]) -> None:
    earlier(**changes)
    assert filled(stuck_key())["body"].value() is None


def test_the_response_of_a_view_that_stores_no_body_is_no_template(settings: Any) -> None:
    @idempotent(recovery_points=[], store_body=False)
    def view(request: HttpRequest) -> HttpResponseBase:
        return JsonResponse({})

    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": [path("cards", view), *urlpatterns]})
    earlier("/cards")
    assert filled(stuck_key(request_path="/cards"))["body"].value() is None


def test_a_template_is_looked_for_among_the_youngest_keys_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answering, "MAX_SEARCHED", 2)
    key = stuck_key()
    earlier(created_at=ago(hours=1))
    assert filled(key)["status"].value() == 201
    stuck_key()
    assert filled(key)["status"].value() == 409


def test_a_page_that_is_out_of_date_changes_nothing_and_says_so() -> None:
    client = person(superuser=True)
    key = stuck_key()
    IdempotencyKey.objects.update(claim_token=uuid4())
    for button in BUTTONS:
        assert str(TOO_LATE) in told(press(client, key, button, status=410))
    assert IdempotencyKey.objects.stuck().exists()
    assert not LogEntry.objects.exists()


def test_a_key_that_moved_on_under_the_claim_that_was_seen_is_left_alone() -> None:
    client, key = person(superuser=True), stuck_key()
    asked = client.get(url(key, "answer"), looked_at(key, "default")).text
    hidden = dict(re.findall(r'<input type="hidden" name="(seen)" value="([^"]*)"', asked))
    assert hidden == looked_at(key, "default")
    assert str(key.claim_token) not in asked
    IdempotencyKey.objects.update(recovery_point="charged")
    for button in BUTTONS:
        assert str(TOO_LATE) in told(send(client, key, button, hidden | {"status": 409}))
    assert IdempotencyKey.objects.stuck().exists()


@pytest.mark.postgres
def test_of_two_people_who_answer_at_once_one_is_told_to_look_again() -> None:
    people, key = [person(superuser=True), person(superuser=True)], stuck_key()
    answers = all_at_once(
        lambda number: press(people[number], key, "answer", status=410 + number).text, 2
    )
    assert sum("Answered" in answer for answer in answers) == 1
    assert sum(str(TOO_LATE) in answer for answer in answers) == 1
    assert LogEntry.objects.count() == 1


@pytest.mark.postgres
def test_an_answer_that_no_standby_confirms_is_stored_and_said_to_be_unconfirmed(
    settings: Any,
) -> None:
    settings.IDEMPOTENCY = {"CONFIRM_REPLICATED": True}
    key = stuck_key()
    done = press(person("answer_idempotencykey"), key, "answer", status=410)
    assert "no standby has confirmed it" in told(done)
    key.refresh_from_db()
    assert key.response_code == 410
    assert (
        LogEntry.objects.get().change_message
        == "Answered with status 410, not confirmed by a standby."
    )


def test_acknowledged_keys_leave_the_list_of_stuck_ones() -> None:
    client, key = person("acknowledge_idempotencykey"), stuck_key()
    press(client, key, "acknowledge", note="ticket 7")
    other = stuck_key()
    assert acknowledge(other.pk, other.claim_token, by="jane")
    assert not client.get(KEYS, {"state": "stuck"}).context["cl"].result_list
    assert {
        row.pk for row in client.get(KEYS, {"state": "acknowledged"}).context["cl"].result_list
    } == {key.pk, other.pk}
    page = client.get(f"{KEYS}{key.pk}/change/").text
    assert "ticket 7" in page


def test_who_may_only_view_jobs_settles_none() -> None:
    StagedJobFactory(failed_at=Now())
    client, before = person(), list(StagedJob.objects.values())
    assert 'name="action"' not in client.get(JOBS).text
    for action in ("retry", "discard", "delete_selected"):
        client.post(
            JOBS,
            {
                "action": action,
                "_selected_action": [before[0]["id"]],
                "confirmed": "yes",
                "post": "yes",
            },
        )
    assert list(StagedJob.objects.values()) == before


def test_the_page_says_what_happens_next() -> None:
    client = person()
    key = IdempotencyKeyFactory(request_path="/rides", claim_token=uuid4())
    expected = {
        "waiting": ({}, "Without a retry, the completer takes the key at"),
        "abandoned": ({}, "The completer takes the key in its next pass (run 1 of 25)"),
        "in flight": ({"locked_until": lock_end()}, "its lock expires at"),
        "stuck": (
            {"locked_until": None, "stuck_at": Now(), "stuck_code": "x", "stuck_reason": "y"},
            "it waits for a person",
        ),
    }
    for name, (state, sentence) in expected.items():
        if state:
            IdempotencyKey.objects.update(**state)
        if name == "abandoned":
            make_older(3600, "created_at", "last_run_at")
        assert sentence in client.get(f"{KEYS}{key.pk}/change/").text, name


def test_the_page_of_a_finished_key_says_when_its_retention_is_over() -> None:
    key = IdempotencyKeyFactory(finished=True)
    assert "reaper" not in person().get(f"{KEYS}{key.pk}/change/").text
    make_older(73 * 3600, "finished_at")
    assert "reaper" in person().get(f"{KEYS}{key.pk}/change/").text


def test_completing_a_request_that_no_view_answers_says_that_it_is_stuck_again() -> None:
    key = stuck_key(request_path="/nowhere")
    press(person("complete_idempotencykey"), key, "complete")
    key.refresh_from_db()
    assert key.stuck_code == "view_missing"


def test_completing_says_and_keeps_that_another_run_was_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        interventions, "hand_back", partial(hand_back_and_meet_another_run, interventions.hand_back)
    )
    done = press(person("complete_idempotencykey"), stuck_key(), "complete")
    assert "handed back" in told(done)
    assert "anded back" in LogEntry.objects.get().get_change_message()


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/rides", "on_abandon"),
        ("/rides/7/texts", "all 25 runs are used up"),
    ],
)
def test_after_the_last_run_the_page_says_who_settles_the_key(path: str, sentence: str) -> None:
    key = IdempotencyKeyFactory(request_path=path, completer_attempts=25)
    make_older(3600, "created_at", "last_run_at")
    assert sentence in person().get(f"{KEYS}{key.pk}/change/").text


def test_a_button_runs_in_no_transaction_whatever_database_has_atomic_requests() -> None:
    press = resolve(f"{KEYS}1/press/complete/", urlconf="rides_demo.urls").func
    assert "any alias" in press._non_atomic_requests


DOCS = (settings.BASE_DIR / "docs/how-to/a-key-is-stuck.md").read_text()


def test_every_stuck_code_of_the_app_is_explained_on_the_page_and_in_the_docs() -> None:
    assert set(STUCK_CODES) == set(StuckCode)
    documented = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \| [\w ]+ \|$", DOCS, re.M)
    assert documented == [(code, found.cause, found.cure) for code, found in STUCK_CODES.items()]
    key = stuck_key(stuck_code="call_in_doubt")
    assert str(STUCK_CODES["call_in_doubt"].cure) in unescape(
        person().get(f"{KEYS}{key.pk}/change/").text
    )


def test_the_docs_name_each_button_with_its_permission() -> None:
    documented = re.findall(r"^\| ([A-Z][\w ]+) \| `(\w+)` \|", DOCS, re.M)
    assert documented == [(button.label, button.permission) for button in ALL_BUTTONS.values()]


def test_another_site_cannot_press_a_button() -> None:
    client, key = person(superuser=True), stuck_key()
    client.handler.enforce_csrf_checks = True
    assert press(client, key, "answer", status=410).status_code == 403
    assert IdempotencyKey.objects.stuck().exists()
