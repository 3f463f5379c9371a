"""The lists of messages, calls and jobs: what they are searched and filtered by, and the actions of
one job."""

import re
from html import unescape
from typing import Any
from uuid import uuid4

import pytest
from django.test import Client
from django.utils import timezone

from idempotency.admin import message_list
from idempotency.inbox import STAGED_JOBS
from idempotency.models import DownstreamCall, ProcessedMessage, StagedJob
from tests.factories import IdempotencyKeyFactory, StagedJobFactory
from tests.kit.admin import KEYS, listed, person, pks
from tests.kit.ageing import ago

MESSAGES, CALLS = "/admin/idempotency/processedmessage/", "/admin/idempotency/downstreamcall/"
JOBS = "/admin/idempotency/stagedjob/"


@pytest.fixture
def staff(db: None) -> Client:
    return person()


def message(source: str, message_id: str, **changes: Any) -> ProcessedMessage:
    return ProcessedMessage.objects.create(source=source, message_id=message_id, **changes)


def call(name: str, **changes: Any) -> DownstreamCall:
    return DownstreamCall.objects.create(
        **{"key": IdempotencyKeyFactory(), "name": name, "token": uuid4()} | changes
    )


def test_messages_are_searched_by_their_whole_id_and_filtered_by_source_and_age(
    staff: Client,
) -> None:
    old = message("stripe", "evt_1", processed_at=ago(hours=2))
    same, other = (
        message("mail", "evt_1", processed_at=ago(minutes=10)),
        message("stripe", "evt_12"),
    )
    assert listed(staff, {}, MESSAGES) == pks(other, same, old)
    assert listed(staff, {"q": "evt_1"}, MESSAGES) == pks(same, old)
    assert listed(staff, {"q": str(other.pk)}, MESSAGES) == pks(other)
    assert listed(staff, {"q": "evt"}, MESSAGES) == []
    assert listed(staff, {"source": "stripe"}, MESSAGES) == pks(other, old)
    assert listed(staff, {"age": "day"}, MESSAGES) == pks(old)
    assert 'href="?source=stripe"' in staff.get(MESSAGES).text


def test_a_message_of_a_staged_job_links_to_the_job_and_its_key(staff: Client) -> None:
    job = StagedJobFactory(idempotency_key=IdempotencyKeyFactory())
    row = message(STAGED_JOBS, str(job.pk))
    message(STAGED_JOBS, str(uuid4())), message(STAGED_JOBS, "a task of Celery")
    message("stripe", str(job.pk))
    links = f"{JOBS}{job.pk}/change/", f"{KEYS}{job.idempotency_key_id}/change/"
    for page in (MESSAGES, f"{MESSAGES}{row.pk}/change/"):
        assert [staff.get(page).text.count(f'href="{link}"') for link in links] == [1, 1]
        few = person("view_processedmessage", "view_idempotencykey").get(page)
        assert not [link for link in links if link in few.text]


def test_calls_are_searched_by_their_key_and_their_name(staff: Client) -> None:
    first, second = call("sms"), call("mail")
    assert listed(staff, {"q": str(first.key_id)}, CALLS) == pks(first)
    assert (
        listed(staff, {"q": "mail"}, CALLS) == listed(staff, {"name": "mail"}, CALLS) == pks(second)
    )
    assert (
        f'<a href="/admin/idempotency/idempotencykey/{first.key_id}/change/">'
        in staff.get(CALLS).text
    )


def test_calls_in_doubt_are_those_of_unfinished_keys(staff: Client) -> None:
    doubtful = call("sms")
    call("sms", recorded_at=timezone.now(), result=1)
    call("sms", key=IdempotencyKeyFactory(finished=True))
    assert listed(staff, {"result": "unknown"}, CALLS) == pks(doubtful)


@pytest.mark.parametrize("page", [MESSAGES, CALLS, JOBS])
@pytest.mark.parametrize("term", ["9" * 30, "²", "%", "x" * 500])
def test_any_term_can_be_searched_for(page: str, term: str, staff: Client) -> None:
    assert staff.get(page, {"q": term}).status_code == 200
    assert staff.get(page, {"source": term, "name": term}, follow=True).status_code in (200, 400)


def test_a_filter_without_an_index_looks_at_the_newest_rows(
    staff: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_list, "NEWEST", 1)
    message("stripe", "evt_1", processed_at=ago(hours=2))
    young = message("stripe", "evt_2")
    assert listed(staff, {"source": "stripe"}, MESSAGES) == pks(young)
    call("sms")
    last = call("sms")
    assert listed(staff, {"name": "sms"}, CALLS) == listed(staff, {"q": "sms"}, CALLS) == pks(last)


def test_a_job_is_found_by_its_id_and_by_its_key(staff: Client) -> None:
    job, _ = StagedJobFactory(idempotency_key=IdempotencyKeyFactory()), StagedJobFactory()
    for term in (str(job.pk), job.pk.hex, str(job.idempotency_key_id)):
        assert listed(staff, {"q": term}, JOBS) == pks(job)
    assert listed(staff, {"q": str(uuid4())}, JOBS) == listed(staff, {"q": "x"}, JOBS) == []


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("action", "left"), [("retry", 1), ("discard", 0)])
def test_the_page_of_a_failed_job_leads_to_its_actions(action: str, left: int) -> None:
    job = StagedJobFactory(
        failed_at=timezone.now(), job_args={"ride": 7}, last_error="OSError: down"
    )
    waiting = StagedJobFactory()
    client = person("view_stagedjob", f"{action}_stagedjob")
    links = [
        unescape(url)
        for url in re.findall(
            r'href="([^"]+/bulk/[^"]+)"', client.get(f"{JOBS}{job.pk}/change/").text
        )
    ]
    assert len(links) == 1
    assert "/bulk/" not in client.get(f"{JOBS}{waiting.pk}/change/").text
    question = client.get(links[0])
    assert "ride" in question.text
    assert "OSError: down" in question.text
    (work,) = re.findall(r'name="work" value="([^"]+)"', question.text)
    progress = client.post(links[0], {"work": work})["Location"]
    assert client.post(progress, {"step": "continue"}).status_code == 302
    assert StagedJob.objects.filter(pk=job.pk, failed_at=None).count() == left
    assert StagedJob.objects.filter(pk=waiting.pk).exists()
