"""Sites of a project: with some of the pages, and with admins that show a person some of the
rows."""

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from django.contrib import admin
from django.contrib.admin import AdminSite
from django.contrib.auth.admin import UserAdmin
from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.urls import path
from django.utils import timezone
from pytest_django import Settings

from idempotency.admin import DownstreamCallAdmin, IdempotencyKeyAdmin, StagedJobAdmin
from idempotency.admin.actions import looked_at
from idempotency.models import DownstreamCall, IdempotencyKey, StagedJob
from rides_demo.admin import RideAdmin
from rides_demo.models import Ride, User
from tests.factories import IdempotencyKeyFactory, RideFactory, StagedJobFactory, UserFactory
from tests.kit.admin import listed, person, pks

pytestmark = pytest.mark.django_db

KEYS, JOBS, CALLS = (
    f"/ops/idempotency/{name}/" for name in ("idempotencykey", "stagedjob", "downstreamcall")
)

Serve = Callable[..., None]


@pytest.fixture
def serve(settings: Settings) -> Serve:
    """Return a function that serves a site of its own at /ops/, with these models and their
    admins."""

    def put(pages: dict[type[Model], Any]) -> None:
        site = AdminSite("ops")
        for model, model_admin in pages.items():
            site.register(model, model_admin)
        patterns = [path("admin/", admin.site.urls), path("ops/", site.urls)]
        settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": patterns})

    return put


def showing(model_admin: Any, **chosen: Any) -> Any:
    """Return a subclass of an admin that shows only the rows that a filter chooses."""

    def get_queryset(self: Any, request: HttpRequest) -> QuerySet[Any]:
        rows: QuerySet[Any] = model_admin.get_queryset(self, request)
        return rows.filter(**chosen)

    return type("OfOurTenant", (model_admin,), {"get_queryset": get_queryset})


def stuck(**changes: Any) -> IdempotencyKey:
    reason = {"stuck_at": timezone.now(), "stuck_code": "view_gave_up", "stuck_reason": "Look."}
    key: IdempotencyKey = IdempotencyKeyFactory(**reason | changes)
    return key


def test_a_site_with_the_keys_alone_has_a_dashboard(serve: Serve) -> None:
    serve({IdempotencyKey: IdempotencyKeyAdmin})
    key = stuck()
    StagedJobFactory(failed_at=timezone.now(), idempotency_key=key)
    client = person()
    shown = client.get(f"{KEYS}dashboard/")
    assert (shown.status_code, shown.context["unfinished"], shown.context.get("may_see_jobs")) == (
        200,
        1,
        None,
    )
    assert {finding.code for finding, _ in shown.context["findings"]} == {"stuck_keys"}
    for page in ("/ops/", "/ops/idempotency/", KEYS, f"{KEYS}{key.pk}/change/"):
        assert client.get(page).status_code == 200


def test_a_site_without_keys_has_the_other_lists(serve: Serve) -> None:
    serve({StagedJob: StagedJobAdmin, DownstreamCall: DownstreamCallAdmin})
    key = stuck()
    job = StagedJobFactory(idempotency_key=key)
    DownstreamCall.objects.create(key=key, name="sms", token=uuid4())
    client = person()
    for page in ("/ops/", "/ops/idempotency/", JOBS, CALLS, f"{JOBS}{job.pk}/change/"):
        shown = client.get(page)
        assert shown.status_code == 200
        assert "/dashboard/" not in shown.text
    assert str(key.pk) in client.get(CALLS).text


def test_the_dashboard_counts_what_the_lists_show(serve: Serve) -> None:
    serve(
        {
            IdempotencyKey: showing(IdempotencyKeyAdmin, request_path__startswith="/ours/"),
            StagedJob: showing(StagedJobAdmin, queue="ours"),
        }
    )
    for whose in ("ours", "theirs"):
        stuck(request_path=f"/{whose}/rides", stuck_reason=f"Nothing works in {whose}.")
        StagedJobFactory(
            failed_at=timezone.now(), queue=whose, last_error=f"Nothing works in {whose}."
        )
    client = person()
    shown = client.get(f"{KEYS}dashboard/")
    assert (shown.context["unfinished"], len(client.get(KEYS).context["cl"].result_list)) == (1, 1)
    assert [group.error for group, _ in shown.context["groups"]] == ["Nothing works in ours."]
    assert [group.error for group, _ in shown.context["job_groups"]] == ["Nothing works in ours."]
    assert "theirs" not in shown.text


def test_an_answer_is_not_filled_in_from_a_key_that_the_person_may_not_see(serve: Serve) -> None:
    theirs = {
        "finished": True,
        "response_headers": {"Content-Type": "application/json"},
        "response_body": b'{"theirs": 1}',
    }
    serve({IdempotencyKey: showing(IdempotencyKeyAdmin, scope="ours")})
    IdempotencyKeyFactory(scope="theirs", request_path="/rides", **theirs)
    key = stuck(scope="ours", request_path="/rides", claim_token=uuid4())
    asked = person().get(
        f"{KEYS}{key.pk}/press/answer/", looked_at(key, "default") | {"template": "1"}
    )
    assert (asked.status_code, asked.context["template"]) == (200, None)


def test_rows_jobs_and_calls_that_the_person_may_not_see_are_not_on_the_page_of_the_key(
    serve: Serve,
) -> None:
    pages = {
        StagedJob: showing(StagedJobAdmin, queue="ours"),
        DownstreamCall: showing(DownstreamCallAdmin, name="ours"),
    }
    serve(
        {
            IdempotencyKey: IdempotencyKeyAdmin,
            **pages,
            Ride: showing(RideAdmin, stripe_charge_id="ours"),
        }
    )
    key = stuck()
    ride = RideFactory(idempotency_key=key, stripe_charge_id="theirs")
    for whose in ("ours", "theirs"):
        StagedJobFactory(
            idempotency_key=key,
            queue=whose,
            failed_at=timezone.now(),
            last_error=f"refused for {whose}",
        )
        DownstreamCall.objects.create(key=key, name=whose, token=uuid4())
    shown = person().get(f"{KEYS}{key.pk}/change/").text
    assert "refused for ours" in shown
    assert "theirs" not in shown
    assert f"/ride/{ride.pk}/" not in shown


def test_a_search_by_a_linked_row_reads_the_rows_that_the_person_may_see(serve: Serve) -> None:
    serve(
        {
            IdempotencyKey: IdempotencyKeyAdmin,
            Ride: showing(RideAdmin, stripe_charge_id__startswith="ours"),
        }
    )
    keys = {whose: IdempotencyKeyFactory() for whose in ("ours", "theirs")}
    for whose, key in keys.items():
        RideFactory(idempotency_key=key, stripe_charge_id=f"{whose}_ch")
    client = person()
    assert listed(client, {"q": "ours_ch"}, KEYS) == pks(keys["ours"])
    assert listed(client, {"q": "theirs_ch"}, KEYS) == []


def test_a_search_by_an_email_address_needs_the_permission_to_view_the_user(serve: Serve) -> None:
    serve({IdempotencyKey: IdempotencyKeyAdmin, User: showing(UserAdmin, is_staff=False)})
    keys = {}
    for whose, is_staff in (("ours", False), ("theirs", True)):
        user = UserFactory(username=whose, email=f"{whose}@example.com", is_staff=is_staff)
        keys[whose] = IdempotencyKeyFactory(user=user, scope=f"user:{user.pk}")
    few, more = person("view_idempotencykey"), person("view_idempotencykey", "view_user")
    assert listed(few, {"q": "ours"}, KEYS) == pks(keys["ours"]), "the list shows the name"
    assert listed(few, {"q": "ours@example.com"}, KEYS) == []
    assert listed(more, {"q": "ours@example.com"}, KEYS) == pks(keys["ours"])
    assert listed(more, {"q": "theirs@example.com"}, KEYS) == []
