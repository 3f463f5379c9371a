"""One answer for many keys: it is previewed, filled with the values of each key, and stored as the
single answer is."""

import json
import re
from html import unescape
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.admin.models import LogEntry
from django.db.models.functions import Now
from django.http import HttpResponse
from django.test import Client

from idempotency import _bulk_answers, _bulk_work
from idempotency._operations.definition import METHOD
from idempotency.models import BulkWork, DownstreamCall, IdempotencyKey
from idempotency.phases import AtMostOnceCall
from idempotency.signals import key_finished
from tests.factories import IdempotencyKeyFactory
from tests.kit.admin import KEYS, person
from tests.kit.ageing import ago, lock_end
from tests.kit.serving import Sender
from tests.kit.views import texting

pytestmark = pytest.mark.django_db(transaction=True)

ANSWER = f"{KEYS}bulk/answer/?state=stuck"
OPERATION = {"request_method": METHOD, "request_path": "pay"}


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bulk_work, "CHUNK_ROWS", 2)


def stuck_keys(count: int, **changes: Any) -> list[IdempotencyKey]:
    stuck = {"stuck_at": ago(minutes=1), "stuck_code": "call_in_doubt", "stuck_reason": "Look."}
    times = {"created_at": ago(hours=1), "last_run_at": ago(minutes=30)}
    return [
        IdempotencyKeyFactory(claim_token=uuid4(), **stuck | times | changes) for _ in range(count)
    ]


def confirm(client: Client, url: str = ANSWER, **sent: Any) -> Any:
    """Preview an answer; return the page of the preview, and what its form sends."""
    (work,) = re.findall(r'name="work" value="([^"]+)"', client.get(url).text)
    form = {"kind": "json", "body": "", "status": 409, "note": "ticket 7", "work": unescape(work)}
    page = client.post(url, form | sent | {"step": "preview"})
    previewed = re.findall(r'name="previewed" value="(\w+)"', page.text)
    return page, form | sent | {"step": "store", "previewed": "".join(previewed)}


def answer(client: Client, url: str = ANSWER, **sent: Any) -> BulkWork:
    """Preview and store an answer, and do the work to its end."""
    _, form = confirm(client, url, **sent)
    assert client.post(url, form)["Location"]
    while _bulk_work.work_off("default"):
        pass
    return BulkWork.objects.latest("created_at")


def bodies() -> list[Any]:
    keys = IdempotencyKey.objects.filter(finished_at__isnull=False).order_by("pk")
    return [json.loads(bytes(key.response_body)) for key in keys]


def test_all_keys_of_a_group_get_one_response_and_each_is_audited() -> None:
    finished: list[int] = []
    key_finished.connect(lambda key, **more: finished.append(key.pk), weak=False)
    client, keys, (other,) = person(), stuck_keys(5), stuck_keys(1, stuck_code="hung")
    body = '{"detail":  "not placed"}'
    work = answer(client, f"{ANSWER}&stuck_code=call_in_doubt", status=410, body=body)
    assert (work.done, work.unchanged) == (5, {})
    for key in keys:
        key.refresh_from_db()
        assert (key.response_code, bytes(key.response_body)) == (410, body.encode())
        event = key.history[-1]
        name = client.user.get_username()
        assert (event["event"], event["detail"]) == ("answered", f"status 410, by {name}: ticket 7")
    assert set(LogEntry.objects.values_list("change_message", flat=True)) == {
        "Answered with status 410. ticket 7"
    }
    assert sorted(finished) == [key.pk for key in keys]
    assert IdempotencyKey.objects.stuck().get() == other


def test_fields_become_the_values_of_each_key() -> None:
    body = json.dumps({"ride": 17, "names": ["Jane"]}).encode()
    keys = stuck_keys(2, request_body=body, request_content_type="application/json")
    for key in keys:
        DownstreamCall.objects.create(
            key=key, name="sms", token=uuid4(), result={"sid": key.pk}, started_at=ago(minutes=9),
            recorded_at=ago(minutes=8),
        )  # fmt: skip
    told = {
        "id": "{key.id}", "text": "Ride {request.ride} of {request.names.0}",
        "ride": "{request.ride}", "sms": ["{calls.sms.sid}"], "other": "{not.a.field} {x}",
    }  # fmt: skip
    answer(person(), status=201, body=json.dumps(told))
    assert bodies() == [
        {
            "id": key.pk, "text": "Ride 17 of Jane", "ride": 17, "sms": [key.pk],
            "other": "{not.a.field} {x}",
        }
        for key in keys
    ]  # fmt: skip


def test_the_preview_shows_the_answer_of_each_key_and_which_key_gets_none() -> None:
    content = {"request_content_type": "application/json"}
    (full,) = stuck_keys(1, request_body=b'{"ride": 17}', **content)
    (empty,) = stuck_keys(1, request_body=None)
    client = person()
    page, _ = confirm(client, body='{"ride": "{request.ride}"}')
    shown = {sample.key.pk: (sample.answer, sample.reason) for sample in page.context["answers"]}
    assert shown == {full.pk: ('409\n{"ride": 17}', ""), empty.pk: ("", _bulk_answers.NO_FIELD)}
    assert not BulkWork.objects.exists()
    work = answer(client, body='{"ride": "{request.ride}"}')
    assert (work.done, work.unchanged) == (1, {_bulk_answers.NO_FIELD: 1})
    assert IdempotencyKey.objects.stuck().get() == empty


def test_only_a_previewed_answer_is_stored_and_one_with_a_mistake_is_not_previewed() -> None:
    stuck_keys(1)
    client = person()
    _, form = confirm(client, body='{"a": 1}')
    for changed in ({"body": '{"a": 2}'}, {"status": 410}, {"previewed": ""}, {"step": "edit"}):
        assert client.post(ANSWER, form | changed).status_code == 200
    for mistake in ({"body": "{"}, {"status": 503}, {"status": 99}):
        page, form = confirm(client, **mistake)
        assert (page.context["answers"], form["previewed"]) == ([], "")
        assert 'class="errorlist' in page.text
    assert not BulkWork.objects.exists()


def recorded(key: IdempotencyKey) -> Any:
    """Return an answer as the function of a project does."""
    if key.request_path == "/broken":
        raise LookupError(key.pk)
    if key.request_path == "/impossible":
        return HttpResponse(status=503)
    return HttpResponse(f"ride {key.pk}", status=201) if key.request_path == "/mine" else None


def test_the_project_answers_as_its_rows_say(settings: Any) -> None:
    settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "ANSWER_FOR_KEY": recorded}
    keys = {path: stuck_keys(1, request_path=path)[0] for path in PATHS}
    work = answer(person(), kind="project")
    assert (work.done, work.unchanged) == (
        1,
        {_bulk_answers.RAISED: 1, _bulk_answers.NOT_POSSIBLE: 1, _bulk_answers.NO_ANSWER: 1},
    )
    mine = IdempotencyKey.objects.get(pk=keys["/mine"].pk)
    assert bytes(mine.response_body) == f"ride {mine.pk}".encode()
    assert IdempotencyKey.objects.stuck().count() == 3


PATHS = ("/mine", "/other", "/broken", "/impossible")


def test_without_the_setting_the_project_is_no_choice() -> None:
    stuck_keys(1)
    page, _ = confirm(person(), kind="project")
    assert page.context["answers"] == []
    assert 'value="project"' not in page.text


def test_operations_get_a_result_or_a_refusal_and_are_not_mixed_with_requests() -> None:
    client = person()
    stuck_keys(1, **OPERATION)
    answer(client, kind="result", body='{"paid": "{key.id}"}')
    assert bodies() == [{"paid": IdempotencyKey.objects.get().pk}]
    (key,) = stuck_keys(1, **OPERATION)
    answer(client, kind="rejected", code="declined", message="By {key.scope}", body="")
    stored = IdempotencyKey.objects.get(pk=key.pk)
    assert json.loads(bytes(stored.response_body))["message"] == f"By {key.scope}"
    stuck_keys(1, **OPERATION)
    stuck_keys(1)
    page = client.get(ANSWER)
    assert page.context["problem"]
    assert 'name="work"' not in page.text


def test_a_key_whose_call_is_recorded_after_the_question_is_left_alone() -> None:
    begun, recorded_late, same, held = stuck_keys(4)
    calls = {
        key.pk: DownstreamCall.objects.create(
            key=key, name="sms", token=uuid4(), started_at=ago(minutes=9)
        )
        for key in (begun, recorded_late, same, held)
    }
    client = person()
    _, form = confirm(client)
    DownstreamCall.objects.create(key=begun, name="mail", token=uuid4())
    DownstreamCall.objects.filter(pk=calls[recorded_late.pk].pk).update(recorded_at=Now())
    assert client.post(ANSWER, form).status_code == 302
    # After the confirmation, the fence compares the calls that the work has stored.
    calls[same.pk].delete()
    IdempotencyKey.objects.filter(pk=held.pk).update(locked_until=lock_end())
    while _bulk_work.work_off("default"):
        pass
    work = BulkWork.objects.get()
    assert (work.done, work.unchanged) == (0, {_bulk_work.CHANGED: 3, _bulk_work.RUNNING: 1})
    assert not IdempotencyKey.objects.finished().exists()


def test_a_key_whose_call_ends_without_effect_after_the_question_is_left_alone(
    serve: Any, sender: Sender, settings: Any
) -> None:
    """The run has lost its lock, and only then learns that its call took no effect."""
    client, urls, asked = person(), settings.ROOT_URLCONF, []

    def block(call: AtMostOnceCall) -> None:
        stuck = {"stuck_at": ago(minutes=1), "stuck_code": "hung", "stuck_reason": "Look."}
        IdempotencyKey.objects.update(locked_until=None, **stuck)
        settings.ROOT_URLCONF = urls
        asked.append(confirm(client)[1])
        call.retryable()

    serve(view=texting(block))
    sender.send()
    assert not DownstreamCall.objects.exists()
    assert client.post(ANSWER, asked[0]).status_code == 302
    assert BulkWork.objects.get().unchanged == {_bulk_work.CHANGED: 1}


def test_who_may_not_view_bodies_sees_none_in_the_preview() -> None:
    content = {"request_content_type": "application/json", "request_body": b'{"name": "Secret"}'}
    stuck_keys(1, **content)
    for client, seen in (
        (person("view_idempotencykey", "answer_idempotencykey"), False),
        (person("view_idempotencykey", "answer_idempotencykey", "view_bodies"), True),
    ):
        page, form = confirm(client, body='{"name": "{request.name}"}')
        assert ("Secret" in page.text) == seen
        assert form["previewed"]


def test_an_answer_needs_its_permission() -> None:
    stuck_keys(1)
    assert person("view_idempotencykey", "complete_idempotencykey").get(ANSWER).status_code == 403
