"""The permission to view bodies, and the log of each look at a body."""

import logging
import re
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.admin.models import LogEntry
from django.utils import timezone

from idempotency.admin.actions import looked_at
from idempotency.models import DownstreamCall, IdempotencyKey
from tests.factories import IdempotencyKeyFactory, StagedJobFactory
from tests.kit.admin import KEYS, listed, person

pytestmark = pytest.mark.django_db

JOBS, CALLS = "/admin/idempotency/stagedjob/", "/admin/idempotency/downstreamcall/"
FEW = (
    "view_idempotencykey", "view_stagedjob", "view_downstreamcall", "answer_idempotencykey",
    "discard_stagedjob",
)  # fmt: skip
SECRET = "s3cret"


def secrets() -> tuple[IdempotencyKey, dict[str, str]]:
    """Make a stuck key whose bodies, and those of its job and call, contain SECRET. Return it, and
    the pages that show them."""
    body = f'{{"card": "{SECRET}"}}'.encode()
    stored = {
        "response_code": 201,
        "response_body": body,
        "response_headers": {"Content-Type": "application/json", "X-Note": SECRET},
    }
    sent = {"request_body": body, "request_headers": {"accept": SECRET}}
    done = IdempotencyKeyFactory(finished=True, idempotency_key=SECRET, **stored, **sent)
    stuck = {"stuck_at": timezone.now(), "stuck_code": "view_gave_up", "stuck_reason": "Look."}
    key = IdempotencyKeyFactory(idempotency_key=f"{SECRET}2", claim_token=uuid4(), **stuck, **sent)
    job = StagedJobFactory(
        idempotency_key=key, failed_at=timezone.now(), job_args={"card": SECRET, "on": None}
    )
    call = DownstreamCall.objects.create(
        key=key, name="sms", token=uuid4(), recorded_at=timezone.now(), result={"to": SECRET}
    )
    press = f"{KEYS}{key.pk}/press/answer/?seen={looked_at(key, 'default')['seen']}"
    return key, {
        "finished": f"{KEYS}{done.pk}/change/",
        "stuck": f"{KEYS}{key.pk}/change/",
        "answer": press,
        "template": f"{press}&template=1",
        "JSON": f"{KEYS}{key.pk}/json/",
        "CSV": f"{KEYS}csv/?state=stuck&q={key.pk}",
        "job": f"{JOBS}{job.pk}/change/",
        "discard": f"{JOBS}bulk/discard/?state=failed",
        "calls": CALLS,
        "call": f"{CALLS}{call.pk}/change/",
    }


def audited(caplog: Any) -> list[str]:
    """Return the lines of the logger ``idempotency.audit``."""
    return [record.getMessage() for record in caplog.records if record.name.endswith(".audit")]


def test_a_body_is_shown_only_with_its_permission() -> None:
    _, pages = secrets()
    few, more = person(*FEW), person(*FEW, "view_bodies")
    for name, page in pages.items():
        assert SECRET in more.get(page).text, name
        hidden = few.get(page)
        assert SECRET not in hidden.text, name
        assert hidden.status_code == (403 if name in ("JSON", "CSV") else 200), name
    assert "idempotency.view_bodies" in few.get(pages["JSON"]).text
    assert not re.findall("/csv/|/json/|curl", few.get(KEYS).text + few.get(pages["stuck"]).text)


def test_the_beginning_of_a_key_is_no_way_to_guess_it() -> None:
    key, _ = secrets()
    few, more = person(*FEW), person(*FEW, "view_bodies")
    assert key.pk in listed(more, {"q": SECRET[:4]})
    assert listed(few, {"q": SECRET[:4]}) == []
    assert listed(few, {"q": key.idempotency_key}) == [key.pk]


@pytest.mark.parametrize("in_admin", [False, True])
def test_each_look_at_a_body_is_in_the_log(caplog: Any, settings: Any, in_admin: bool) -> None:
    settings.IDEMPOTENCY = {"LOG_VIEWS_IN_ADMIN": in_admin}
    key, pages = secrets()
    few, more = person(*FEW), person(*FEW, "view_bodies")
    caplog.set_level(logging.INFO, "idempotency.audit")
    for page in (KEYS, JOBS, f"{KEYS}dashboard/", *pages.values()):
        few.get(page)
    more.get(KEYS)
    assert audited(caplog) == []
    name = more.user.get_username()
    for count, page in enumerate(pages.values(), 1):
        more.get(page)
        assert len(audited(caplog)) == count, page
        assert audited(caplog)[-1].startswith(f"{name} ")
    lines = audited(caplog)
    assert f"{name} viewed the JSON of idempotency.IdempotencyKey: {key.pk}" in lines
    assert f"{name} exported rows of idempotency.IdempotencyKey: ?state=stuck" in lines
    assert LogEntry.objects.exists() is in_admin
    assert not listed(more, {"mine": "1"}), "a look is no action"


def test_a_refresh_of_a_page_is_no_further_look(caplog: Any) -> None:
    _, pages = secrets()
    caplog.set_level(logging.INFO, "idempotency.audit")
    clients = person(*FEW, "view_bodies"), person(*FEW, "view_bodies")
    looks = [client.get(pages["stuck"]).context["look"] for client in clients]
    for client, look in zip(clients, looks, strict=True):
        assert SECRET in client.get(pages["stuck"], headers={"Idempotency-Look": look}).text
    assert len(audited(caplog)) == 2
    clients[0].get(pages["finished"], headers={"Idempotency-Look": looks[0]})
    clients[0].get(pages["stuck"], headers={"Idempotency-Look": looks[1]})
    assert len(audited(caplog)) == 4, "the look of another key or person"
