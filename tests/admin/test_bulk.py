"""Actions on all that match: they ask first, work in chunks, leave alone what has changed, and
count honestly."""

import re
from html import unescape
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.admin.models import DELETION, LogEntry
from django.contrib.auth.models import Permission
from django.db.models.functions import Now
from django.test import Client
from django.utils import timezone

from idempotency import _bulk_work, interventions
from idempotency._engine import decisions
from idempotency.admin import bulk
from idempotency.admin.keys import IdempotencyKeyAdmin
from idempotency.completer import CompletePass, complete_once
from idempotency.models import BulkWork, IdempotencyKey, ProcessedMessage, StagedJob
from idempotency.templatetags.idempotency_admin import moment
from tests.factories import IdempotencyKeyFactory, StagedJobFactory, UserFactory
from tests.kit.ageing import ago, lock_end
from tests.kit.threads import all_at_once

pytestmark = pytest.mark.django_db(transaction=True)

KEYS, JOBS = "/admin/idempotency/idempotencykey/", "/admin/idempotency/stagedjob/"
HAND_BACK, ACKNOWLEDGE = f"{KEYS}bulk/hand_back/", f"{KEYS}bulk/acknowledge/"


def person(*permissions: str) -> Client:
    """Return a client signed in as staff with these permissions; a superuser without any."""
    user = UserFactory(is_staff=True, is_superuser=not permissions)
    user.user_permissions.add(
        *Permission.objects.filter(content_type__app_label="idempotency", codename__in=permissions)
    )
    client = Client()
    client.force_login(user)
    return client


def stuck_keys(count: int, **changes: Any) -> list[IdempotencyKey]:
    before = {
        "created_at": ago(hours=1),
        "last_run_at": ago(minutes=30),
        "stuck_at": ago(minutes=20),
    }
    reason = {"stuck_code": "attempts_exhausted", "stuck_reason": "Look."}
    return [
        IdempotencyKeyFactory(claim_token=uuid4(), **before | reason | changes)
        for _ in range(count)
    ]


def choose(client: Client, page: str, action: str, rows: Any = (), *, across: bool = False) -> str:
    """Choose rows of a list, or all, and an action; return where the question is."""
    chosen = [str(row.pk) for row in rows] or [
        str(StagedJob.objects.first() or IdempotencyKey.objects.first())
    ]
    sent = {
        "action": action,
        "index": "0",
        "select_across": str(int(across)),
        "_selected_action": chosen,
    }
    return client.post(page, sent)["Location"]


def question(client: Client, url: str) -> dict[str, str]:
    """Return what the form of the question sends."""
    return sent_by(client.get(url))


def sent_by(page: Any) -> dict[str, str]:
    (work,) = re.findall(r'name="work" value="([^"]+)"', page.text)
    return {"work": unescape(work), "note": "ticket 7"}


def confirm(client: Client, url: str, sent: dict[str, str]) -> str:
    """Send the form of the question; return the URL of the work."""
    return client.post(url, sent)["Location"]


def work_on(client: Client, work: str) -> Any:
    """Do one chunk of a work; return the page."""
    return client.post(work, {"step": "continue"})


def work_to_the_end(client: Client, url: str, sent: dict[str, str]) -> tuple[str, int]:
    """Begin the work, and do it to its end on its page; return what the person is told, and the
    number of chunks."""
    work, chunks = confirm(client, url, sent), 1
    while (page := work_on(client, work)).status_code == 200:
        chunks += 1
        assert chunks < 50
    return told(client.get(page["Location"])), chunks


def told(page: Any) -> str:
    # Not from the context: of two clients at once one gets that of the other.
    return unescape(" ".join(re.findall(r'<li class="(?:success|warning)">(.*?)</li>', page.text)))


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bulk_work, "CHUNK_ROWS", 3)
    monkeypatch.setattr(_bulk_work, "TURN_SECONDS", -1)  # A turn is one chunk.


@pytest.mark.parametrize("action", ["hand_back", "acknowledge"])
def test_an_action_on_all_reaches_all_that_match_and_nothing_else(
    action: str, caplog: pytest.LogCaptureFixture
) -> None:
    client, keys, others = person(), stuck_keys(10), stuck_keys(2, stuck_code="view_gave_up")
    page = f"{KEYS}?state=stuck&stuck_code=attempts_exhausted"
    url = choose(client, page, action, keys[:1], across=True)
    assert IdempotencyKey.objects.stuck().count() == 12, "nothing is done before the answer"
    text, chunks = work_to_the_end(client, url, question(client, url))
    assert (numbers(text), chunks) == ([10], 4)
    assert set(IdempotencyKey.objects.stuck()) == set(others)
    assert LogEntry.objects.filter(change_message__endswith=" ticket 7").count() == 10
    histories = IdempotencyKey.objects.filter(
        stuck_code="" if action == "hand_back" else "attempts_exhausted"
    )
    assert all(key.history[-1]["detail"].endswith(": ticket 7") for key in histories)
    logged = [line for line in caplog.messages if line.endswith(": ticket 7")]
    assert len(logged) == 10
    assert all(any(key.key_hash in line for line in logged) for key in histories)


def test_two_works_of_one_action_differ_by_their_notes_and_times() -> None:
    client, _ = person(), stuck_keys(4)
    works = {}
    for note in ("ticket 7", "ticket 8"):
        sent = question(client, ACKNOWLEDGE) | {"note": note}
        works[note] = confirm(client, ACKNOWLEDGE, sent)
    for note, url in works.items():
        page = client.get(url)
        assert f"Note: {note}" in page.text
        assert f"at {moment(page.context['work'].created_at)}." in page.text
    shown = client.get(f"{KEYS}dashboard/").text
    assert [note for note in works if f">{note}<" in shown] == [*works]


def test_a_group_that_was_acknowledged_is_put_back_on_the_list() -> None:
    client, keys, others = person(), stuck_keys(5, acknowledged_at=Now()), stuck_keys(1)
    url = f"{KEYS}bulk/unacknowledge/?state=acknowledged"
    text, _ = work_to_the_end(client, url, question(client, url))
    assert numbers(text) == [5]
    assert set(IdempotencyKey.objects.stuck()) == {*keys, *others}


def test_an_action_from_the_last_page_does_not_end_when_that_page_is_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(IdempotencyKeyAdmin, "list_per_page", 2)
    client, keys = person(), stuck_keys(11)
    url = choose(client, f"{KEYS}?state=stuck&p=6", "acknowledge", keys[:1], across=True)
    text, chunks = work_to_the_end(client, url, question(client, url))
    assert (numbers(text), chunks) == ([11], 4)


def test_keys_of_the_same_moment_are_each_reached_once() -> None:
    moment = ago(hours=1)
    keys = stuck_keys(8)
    IdempotencyKey.objects.update(created_at=moment)
    client = person()
    text, _ = work_to_the_end(
        client, f"{ACKNOWLEDGE}?state=stuck", question(client, f"{ACKNOWLEDGE}?state=stuck")
    )
    assert numbers(text) == [8]
    assert [len(key.history) for key in IdempotencyKey.objects.all()] == [1] * len(keys)


def test_chosen_rows_alone_are_taken_and_those_that_run_are_left_alone() -> None:
    keys, other = stuck_keys(2), stuck_keys(1)
    running = IdempotencyKeyFactory(
        claim_token=uuid4(), locked_until=lock_end(), last_run_at=ago(seconds=5)
    )
    finished = IdempotencyKeyFactory(finished=True)
    client = person()
    url = choose(client, f"{KEYS}?state=unfinished", "hand_back", [*keys, running, finished])
    page = client.get(url)
    assert (page.context["eligible"], page.context["others"]) == (2, 1)
    text, _ = work_to_the_end(client, url, sent_by(page))
    assert numbers(text) == [2, 1]
    assert _bulk_work.RUNNING in text
    assert set(IdempotencyKey.objects.stuck()) == set(other)


def test_the_question_says_what_will_happen_to_each_kind_of_key() -> None:
    stuck_keys(3, stuck_code="call_in_doubt")
    stuck_keys(2, stuck_code="view_missing")
    stuck_keys(1, stuck_code="on_abandon")
    stuck_keys(1, stuck_code="my_own")
    page = person().get(f"{HAND_BACK}?state=stuck")
    groups = {group.label: (count, group.alarming) for group, count in page.context["groups"]}
    assert groups == {
        "stuck: call_in_doubt": (3, True), "stuck: view_missing": (2, False),
        "stuck: on_abandon": (1, False), "stuck: my_own": (1, False),
    }  # fmt: skip
    assert page.context["eligible"] == 6


def test_what_changes_after_the_question_is_left_alone_and_said_to_be() -> None:
    client, (again, finished, settled, running, same) = person(), stuck_keys(5)
    sent = question(client, f"{HAND_BACK}?state=unfinished")
    stuck_since = {"claim_token": uuid4(), "last_run_at": Now(), "stuck_at": Now()}
    IdempotencyKey.objects.filter(pk=again.pk).update(**stuck_since)
    finish = {
        "recovery_point": "finished",
        "stuck_at": None,
        "stuck_code": "",
        "stuck_reason": "",
        "finished_at": Now(),
    }
    IdempotencyKey.objects.filter(pk=finished.pk).update(**finish)
    assert interventions.acknowledge(settled.pk, settled.claim_token, by="jane")
    IdempotencyKey.objects.filter(pk=running.pk).update(locked_until=lock_end())
    text, _ = work_to_the_end(client, f"{HAND_BACK}?state=unfinished", sent)
    assert numbers(text) == [1, 4]
    assert _bulk_work.CHANGED in text
    assert IdempotencyKey.objects.get(pk=same.pk).handed_back_at
    assert IdempotencyKey.objects.exclude(handed_back_at=None).count() == 1


def test_the_ages_of_rows_are_those_at_the_time_of_the_question() -> None:
    same, grown, left = (stuck_keys(1, created_at=ago(hours=hours))[0] for hours in (2, 1.1, 24.1))
    client, url = person(), f"{ACKNOWLEDGE}?state=stuck&age=day"
    action = next(action for action in bulk_actions() if action.name == "acknowledge")
    work = bulk.Confirmation(as_of=ago(minutes=10).isoformat(), expected=2)
    text, _ = work_to_the_end(client, url, {"work": work.signed(action), "note": "ticket 7"})
    assert numbers(text) == [2]
    assert set(IdempotencyKey.objects.acknowledged()) == {same, left}
    assert IdempotencyKey.objects.get(pk=grown.pk).acknowledged_at is None


def test_jobs_that_fail_in_the_same_group_after_the_question_are_left_alone() -> None:
    for number in range(12):
        StagedJobFactory(failed_at=ago(hours=20 - number), last_error=f"OSError: order {number}")
    client, url = person(), f"{JOBS}bulk/discard/?state=failed&error_group=OSError%3A+order+%23"
    page = client.get(url)
    assert page.context["eligible"] == 12
    StagedJobFactory(failed_at=timezone.now(), last_error="OSError: order 12")
    text, _ = work_to_the_end(client, url, sent_by(page))
    assert numbers(text) == [12]
    assert StagedJob.objects.count() == 1


def test_rows_that_match_since_a_question_about_none_are_left_alone() -> None:
    client, url = person(), f"{ACKNOWLEDGE}?state=stuck&age=day"
    action = next(action for action in bulk_actions() if action.name == "acknowledge")
    stuck_keys(1, created_at=ago(hours=2))
    work = bulk.Confirmation(as_of="", expected=0)
    text, _ = work_to_the_end(client, url, {"work": work.signed(action), "note": "ticket 7"})
    assert numbers(text) == [0]
    assert not IdempotencyKey.objects.acknowledged().exists()


def test_a_key_that_a_run_claims_between_reading_and_writing_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, (key,) = person(), stuck_keys(1)
    sent, decide = question(client, ACKNOWLEDGE), decisions.decide

    def late(name: str, decision: Any) -> bool:
        IdempotencyKey.objects.update(claim_token=uuid4(), locked_until=lock_end())
        return decide(name, decision)

    monkeypatch.setattr(decisions, "decide", late)
    text, _ = work_to_the_end(client, ACKNOWLEDGE, sent)
    assert text.startswith("0 ")
    assert _bulk_work.RUNNING in text
    assert IdempotencyKey.objects.get(pk=key.pk).acknowledged_at is None


def bulk_actions() -> Any:
    from django.contrib import admin

    return admin.site._registry[IdempotencyKey].bulk


def test_the_work_goes_on_when_the_page_is_closed() -> None:
    client = person()
    stuck_keys(7)
    url = f"{ACKNOWLEDGE}?state=stuck"
    work = confirm(client, url, question(client, url))
    page = work_on(client, work)
    assert (page.context["work"].done, page.context["work"].expected) == (3, 7)
    assert complete_once() == CompletePass()
    page = client.get(work)
    assert page.context["work"].finished_at
    assert numbers(page.context["report"]) == [7]
    assert LogEntry.objects.count() == 7


def test_work_is_stopped_and_resumed_by_those_who_may_act_and_shown_on_the_dashboard() -> None:
    stuck_keys(7)
    client, url = person("view_idempotencykey", "acknowledge_idempotencykey"), ACKNOWLEDGE
    work = confirm(client, url, question(client, url))
    client.post(work, {"step": "stop"})
    page = work_on(client, work)
    assert (page.context["work"].done, page.context["work"].stopped_at is None) == (0, False)
    assert complete_once() == CompletePass()
    viewer = person("view_idempotencykey")
    for step in ("stop", "resume", "continue"):
        assert viewer.post(work, {"step": step}).status_code == 403
    (line,) = client.get(f"{KEYS}dashboard/").context["works"]
    assert (line.work.visited, line.url) == (0, work.partition("?")[0])
    assert viewer.get(f"{KEYS}dashboard/").context["works"] == []
    client.post(work, {"step": "resume"})
    complete_once()
    assert numbers(client.get(work).context["report"]) == [7]


def test_a_form_that_is_sent_twice_begins_one_work() -> None:
    client = person()
    stuck_keys(4)
    sent = question(client, ACKNOWLEDGE)
    assert confirm(client, ACKNOWLEDGE, sent) == confirm(client, ACKNOWLEDGE, sent)
    assert BulkWork.objects.count() == 1


def test_a_work_of_another_action_or_list_is_not_found() -> None:
    client = person()
    stuck_keys(1)
    work = confirm(client, ACKNOWLEDGE, question(client, ACKNOWLEDGE))
    for page in (work.replace("acknowledge", "hand_back"), f"{ACKNOWLEDGE}{uuid4()}/"):
        assert client.get(page).status_code == 404


def test_of_two_people_who_act_on_the_same_keys_each_key_is_counted_for_one() -> None:
    first, second, url = person(), person(), f"{ACKNOWLEDGE}?state=stuck"
    stuck_keys(8)
    by_first = confirm(first, url, question(first, url))
    by_second = confirm(second, url, question(second, url))
    work_on(first, by_first)
    while work_on(second, by_second).status_code == 200:
        pass
    while work_on(first, by_first).status_code == 200:
        pass
    reports = [numbers(first.get(work).context["report"]) for work in (by_first, by_second)]
    assert reports == [[3, 5], [5, 3]]
    assert LogEntry.objects.count() == 8


@pytest.mark.postgres
def test_two_people_at_the_same_time_change_each_key_once() -> None:
    people = [person(), person()]
    stuck_keys(30)
    sent = [question(client, ACKNOWLEDGE) for client in people]
    texts = all_at_once(
        lambda number: work_to_the_end(people[number], ACKNOWLEDGE, sent[number])[0], 2
    )
    assert sum(numbers(text)[0] for text in texts) == 30
    assert LogEntry.objects.count() == 30
    assert all(len(key.history) == 1 for key in IdempotencyKey.objects.all())


def test_a_chunk_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bulk_work, "CHUNK_SECONDS", -1)
    client = person()
    stuck_keys(2)
    page = work_on(client, confirm(client, ACKNOWLEDGE, question(client, ACKNOWLEDGE)))
    assert page.context["work"].done == 1, "each chunk does some of it"


def test_a_page_that_this_site_has_not_made_does_nothing() -> None:
    client = person()
    stuck_keys(1)
    other = question(client, HAND_BACK)
    for sent in ({}, {"work": "x"}, other | {"note": "x" * 500}, other):
        assert client.post(ACKNOWLEDGE, sent).context["eligible"] == 1
    client.handler.enforce_csrf_checks = True
    assert client.post(HAND_BACK, other).status_code == 403
    assert IdempotencyKey.objects.stuck().count() == 1


@pytest.mark.parametrize("ids", ["9" * 30, "x", "1,,2", "\0"])
def test_ids_that_no_row_can_have_are_not_found(ids: str) -> None:
    for page in (HAND_BACK, f"{JOBS}bulk/retry/"):
        assert person().get(page, {"ids": ids}).status_code == 404


def test_an_action_needs_its_permission() -> None:
    stuck_keys(1)
    client = person("view_idempotencykey", "acknowledge_idempotencykey")
    assert client.get(ACKNOWLEDGE).status_code == 200
    for method in (client.get, client.post):
        assert method(HAND_BACK).status_code == 403
        assert method(f"{KEYS}bulk/other/").status_code == 404
    assert person("acknowledge_idempotencykey").get(ACKNOWLEDGE).status_code == 403
    assert re.findall(r'<option value="(\w+)"', client.get(KEYS).text) == [
        "acknowledge",
        "unacknowledge",
    ]


def test_no_match_is_said_and_offers_nothing() -> None:
    page = person().get(f"{HAND_BACK}?state=stuck")
    assert (page.context["eligible"], 'name="work"' in page.text) == (0, False)


def failed_jobs(count: int, **changes: Any) -> list[StagedJob]:
    return [
        StagedJobFactory(**{"failed_at": ago(hours=1), "last_error": "OSError: down"} | changes)
        for _ in range(count)
    ]


@pytest.mark.parametrize(("action", "left"), [("retry", 8), ("discard", 1)])
def test_an_action_on_all_failed_jobs_shows_their_arguments_and_errors(
    action: str, left: int
) -> None:
    client, waiting = person(), StagedJobFactory()
    failed_jobs(7, job_args={"ride": "<seven>"})
    url = choose(client, f"{JOBS}?state=failed", action, [waiting], across=True)
    page = client.get(url)
    assert "OSError: down" in page.text
    assert "&lt;seven&gt;" in page.text
    text, chunks = work_to_the_end(client, url, sent_by(page))
    assert (numbers(text), chunks) == ([7], 3)
    assert StagedJob.objects.filter(failed_at=None).count() == StagedJob.objects.count() == left
    assert ProcessedMessage.objects.count() == 8 - left
    entries = LogEntry.objects.filter(change_message__endswith=" ticket 7")
    assert entries.count() == 7
    assert (entries.first().action_flag == DELETION) is (action == "discard")


@pytest.mark.parametrize("action", ["retry", "discard"])
def test_of_the_chosen_jobs_those_that_wait_are_left_alone(action: str) -> None:
    client, waiting, (failed, other) = person(), StagedJobFactory(), failed_jobs(2, refusals=10)
    url = choose(client, JOBS, action, [waiting, failed])
    page = client.get(url)
    assert (page.context["eligible"], page.context["others"]) == (1, 1)
    text, _ = work_to_the_end(client, url, sent_by(page))
    assert numbers(text) == [1]
    jobs = dict(StagedJob.objects.values_list("pk", "refusals"))
    assert jobs == {waiting.pk: 0, other.pk: 10} | ({failed.pk: 0} if action == "retry" else {})
    assert StagedJob.objects.get(pk=waiting.pk).run_at == waiting.run_at


def test_jobs_that_failed_anew_since_the_question_are_left_alone() -> None:
    client, (same, anew, _gone) = person(), failed_jobs(3)
    sent = question(client, f"{JOBS}bulk/discard/")
    StagedJob.objects.filter(pk=anew.pk).update(failed_at=Now())
    StagedJob.objects.filter(pk=_gone.pk).delete()
    text, _ = work_to_the_end(client, f"{JOBS}bulk/discard/", sent)
    assert numbers(text) == [1, 2]
    assert StagedJob.objects.get() == anew
    assert LogEntry.objects.get().object_id == str(same.pk)
