"""Each number on each page is the number that a plain statement counts, however many rows there
are."""

# ruff: noqa: S608 - the conditions are constants of this module

from typing import Any

import pytest
from django.db import connection
from django.test import Client

from idempotency.contrib.prometheus import DatabaseCollector
from idempotency.monitoring.doctor import diagnose
from tests.admin import filled
from tests.factories import UserFactory

pytestmark = [pytest.mark.postgres, pytest.mark.django_db]

KEYS, JOBS = "/admin/idempotency/idempotencykey/", "/admin/idempotency/stagedjob/"
#: The unfinished keys of an outage: more than any list, group or confirmation reads at once.
UNFINISHED, FAILED = 20_000, 6_000
STUCK = "stuck_at IS NOT NULL AND acknowledged_at IS NULL"


@pytest.fixture
def staff() -> Client:
    client = Client()
    client.force_login(UserFactory(is_staff=True, is_superuser=True))
    return client


@pytest.fixture
def outage() -> None:
    filled.fill_keys(300, UNFINISHED, 10)
    filled.fill_jobs(700, FAILED)


def counted(condition: str, table: str = "idempotencykey", by: str = "1") -> Any:
    """Return the numbers of rows by a column; without one, the number of rows."""
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT {by}, count(*) FROM idempotency_{table} WHERE {condition} GROUP BY 1"
        )
        numbers = dict(cursor.fetchall())
    return numbers if by != "1" else sum(numbers.values())


@pytest.mark.usefixtures("outage")
def test_the_dashboard_counts_all_unfinished_keys_and_all_jobs(staff: Client) -> None:
    context = staff.get(f"{KEYS}dashboard/").context
    states = {bar.label: bar.count for bar in context["by_state"]}
    assert context["unfinished"] == counted("finished_at IS NULL AND refused_at IS NULL")
    assert context["unfinished"] == UNFINISHED
    assert states["stuck"] == counted(STUCK)
    assert states["acknowledged"] == counted("acknowledged_at IS NOT NULL")
    assert {group.cause: group.count for group, _ in context["groups"]} == counted(
        STUCK, by="stuck_code"
    )
    assert sum(bar.count for _, bars in context["by_point"] for bar in bars) == UNFINISHED
    assert sum(bar.count for bar in context["jobs_by_age"]) == counted(
        "failed_at IS NULL", "stagedjob"
    )
    assert [(group.error, group.count) for group, _ in context["job_groups"]] == [
        ("OSError: mail # down", FAILED)
    ]
    assert {group.place for group, _ in context["groups"]} == {"POST /rides/#/pay"}


@pytest.mark.usefixtures("outage")
def test_the_action_of_a_group_covers_all_its_keys(staff: Client) -> None:
    context = staff.get(f"{KEYS}dashboard/").context
    for group, query in context["groups"]:
        for _, url in context["key_actions"][1:]:
            question = staff.get(f"{url}{query}").context
            assert question["eligible"] == question["work"].expected == group.count
            assert [count for _, count in question["groups"]] == [group.count]
        assert staff.get(f"{KEYS}{query}").context["cl"].paginator.count in (5000, group.count)
    [(group, query)] = context["job_groups"]
    assert staff.get(f"{JOBS}bulk/retry/{query}").context["eligible"] == group.count == FAILED


@pytest.mark.usefixtures("outage")
def test_the_doctor_and_the_metrics_count_all_rows() -> None:
    due = counted("failed_at IS NULL AND run_at <= now()", "stagedjob")
    wanted = (UNFINISHED, counted(STUCK, by="stuck_code"), due, FAILED)
    names = ("keys_unfinished", "keys_stuck_by_code", "due_jobs", "failed_jobs")
    measured = diagnose().measured
    assert tuple(measured[name] for name in names) == wanted
    gauges = {gauge.name: gauge.samples for gauge in DatabaseCollector().collect()}
    names = ("unfinished_keys", "stuck_keys", "due_jobs", "failed_jobs")
    keys, stuck, jobs, failed = (gauges[f"idempotency_{name}"] for name in names)
    codes = {sample.labels["code"]: sample.value for sample in stuck}
    assert (keys[0].value, codes, jobs[0].value, failed[0].value) == wanted
