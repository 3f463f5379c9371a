"""People with few rights: what they are not offered, and why, and who may see what they are
refused."""

from html import unescape
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import Group, Permission
from django.utils import timezone

from idempotency import interventions
from idempotency.models import StagedJob
from tests.factories import IdempotencyKeyFactory, StagedJobFactory
from tests.kit.admin import person

pytestmark = pytest.mark.django_db

KEYS, JOBS = "/admin/idempotency/idempotencykey/", "/admin/idempotency/stagedjob/"
DASHBOARD = f"{KEYS}dashboard/"


def stuck_key() -> Any:
    reason = {"stuck_at": timezone.now(), "stuck_code": "view_gave_up", "stuck_reason": "Look."}
    return IdempotencyKeyFactory(claim_token=uuid4(), **reason)


def test_a_page_says_which_permission_each_action_needs_that_it_does_not_offer() -> None:
    job = StagedJobFactory(failed_at=timezone.now())
    client = person(
        "view_idempotencykey", "view_stagedjob", "acknowledge_idempotencykey", "retry_stagedjob"
    )
    needed = {
        KEYS: {"complete_idempotencykey", "answer_idempotencykey"},
        JOBS: {"discard_stagedjob"},
        f"{JOBS}{job.pk}/change/": {"discard_stagedjob"},
    }
    for page, permissions in needed.items():
        answer = client.get(page)
        assert {name for _, name in answer.context["not_offered"]} == {
            f"idempotency.{name}" for name in permissions
        }
        assert all(f"<code>idempotency.{name}</code>" in answer.text for name in permissions)
        assert "Not offered" not in person().get(page).text


def test_a_job_that_waits_offers_nothing_and_needs_no_reason() -> None:
    job = StagedJobFactory()
    assert "Not offered" not in person("view_stagedjob").get(f"{JOBS}{job.pk}/change/").text


@pytest.mark.parametrize(
    ("page", "held", "permission"),
    [
        (KEYS, (), "view_idempotencykey"),
        (f"{KEYS}1/change/", (), "view_idempotencykey"),
        (f"{KEYS}csv/", (), "view_idempotencykey"),
        (DASHBOARD, (), "view_idempotencykey"),
        (f"{KEYS}1/press/answer/", (), "view_idempotencykey"),
        (f"{KEYS}1/press/answer/", ("view_idempotencykey",), "answer_idempotencykey"),
        (f"{KEYS}bulk/hand_back/", ("view_idempotencykey",), "complete_idempotencykey"),
        (JOBS, (), "view_stagedjob"),
        (f"{JOBS}bulk/discard/", ("view_stagedjob",), "discard_stagedjob"),
        ("/admin/idempotency/downstreamcall/", (), "view_downstreamcall"),
    ],
)
def test_a_refused_page_says_which_permission_it_needs_and_who_has_it(
    page: str, held: Any, permission: str
) -> None:
    client = person(*held, "view_group")
    refused = client.get(page)
    assert refused.status_code == 403
    assert f"<code>idempotency.{permission}</code>" in refused.text
    assert "No group has it" in refused.text
    on_call = Group.objects.create(name="On <call>")
    on_call.permissions.add(Permission.objects.get(codename=permission))
    text = client.get(page).text
    assert "On &lt;call&gt;" in text
    assert "On <call>" in unescape(text)


def test_who_is_not_signed_in_is_asked_to_sign_in(client: Any) -> None:
    for page in (KEYS, DASHBOARD, f"{KEYS}csv/", f"{KEYS}bulk/hand_back/"):
        assert client.get(page).status_code == 302


def test_the_banner_says_what_is_not_counted_for_the_reader() -> None:
    StagedJobFactory(failed_at=timezone.now())
    of_keys = person("view_idempotencykey").get(DASHBOARD)
    assert of_keys.context["findings"] == []
    assert "OK: nothing requires manual review" not in of_keys.text
    assert "idempotency.view_stagedjob" in of_keys.text
    assert "OK: nothing" not in person().get(DASHBOARD).text
    StagedJob.objects.all().delete()
    assert "OK: nothing requires manual review" in person().get(DASHBOARD).text


def test_acknowledged_keys_are_not_said_to_be_in_order() -> None:
    key = stuck_key()
    assert interventions.acknowledge(key.pk, key.claim_token, by="jane")
    page = person().get(DASHBOARD)
    assert page.context["findings"] == []
    assert "OK: nothing requires manual review" not in page.text
    assert [url for _, url in page.context["notes"]] == [f"{KEYS}?state=acknowledged"]


def test_who_may_view_jobs_alone_has_a_dashboard_of_jobs() -> None:
    stuck_key()
    StagedJobFactory(failed_at=timezone.now())
    page = person("view_stagedjob").get(DASHBOARD)
    assert [finding.code for finding, _ in page.context["findings"]] == ["jobs_failed"]
    assert "idempotency.view_idempotencykey" in page.text
    assert KEYS not in page.text.replace(DASHBOARD, "")
