"""The dashboard, the lists behind its numbers, and what all of them cost on large tables."""

import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode
from uuid import uuid4

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from django.utils.html import escape

from idempotency import _bulk_work
from idempotency._engine.round_trips import numbered
from idempotency.admin import charts, dashboard, traffic
from idempotency.admin.actions import looked_at
from idempotency.models import (
    DownstreamCall,
    IdempotencyKey,
    ProcessHeartbeat,
    StagedJob,
    TrafficCount,
)
from idempotency.monitoring.doctor import diagnose
from idempotency.monitoring.heartbeats import LOOPS
from tests.factories import IdempotencyKeyFactory, RideFactory, StagedJobFactory, UserFactory
from tests.kit.ageing import ago, lock_end

KEYS, JOBS = "/admin/idempotency/idempotencykey/", "/admin/idempotency/stagedjob/"
MESSAGES, CALLS = "/admin/idempotency/processedmessage/", "/admin/idempotency/downstreamcall/"
DASHBOARD = f"{KEYS}dashboard/"


def staff(**changes: Any) -> Client:
    client = Client()
    client.force_login(UserFactory(is_staff=True, **{"is_superuser": True, **changes}))
    return client


def stuck(code: str) -> dict[str, Any]:
    return {
        "stuck_at": timezone.now(),
        "stuck_code": code,
        "stuck_reason": "Look.",
        "created_at": ago(days=2),
    }


def bars(context: Any) -> Iterator[dashboard.Bar]:
    for name in ("by_state", "jobs_by_age", "jobs_failed"):
        yield from context[name]
    for _, of_point in context["by_point"]:
        yield from of_point


@pytest.mark.django_db
def test_each_number_leads_to_the_list_that_it_counts() -> None:
    for code in ("call_in_doubt", "call_in_doubt", "my_own_code"):
        IdempotencyKeyFactory(recovery_point="ride_created", **stuck(code))
    IdempotencyKeyFactory(
        **stuck("view_gave_up"), acknowledged_at=timezone.now() + timedelta(seconds=1)
    )
    IdempotencyKeyFactory(created_at=ago(minutes=10))
    IdempotencyKeyFactory(locked_until=lock_end(), claim_token=uuid4())
    IdempotencyKeyFactory(finished=True)
    for since in ({"seconds": 1}, {"minutes": 7}, {"hours": -1}):
        StagedJobFactory(run_at=ago(**since))
    for name in ("a.first", "a.first", "a.second"):
        StagedJobFactory(failed_at=timezone.now(), job_name=name)
    client = staff()
    context = client.get(DASHBOARD).context
    assert context["unfinished"] == 6
    assert {group.cause: group.count for group, _ in context["groups"]} == {
        "call_in_doubt": 2,
        "my_own_code": 1,
    }
    assert {bar.label: bar.count for bar in context["by_state"]} == {
        "stuck": 3, "acknowledged": 1, "abandoned": 0, "waiting for a retry": 1, "in flight": 1,
    }  # fmt: skip
    assert sum(bar.count for bar in context["jobs_by_age"]) == 3
    for bar in bars(context):
        behind = client.get(bar.url).context["cl"].result_count
        assert behind == bar.count, bar.url


@pytest.mark.django_db
def test_stuck_keys_with_one_cause_are_one_group_and_lead_to_their_list() -> None:
    for number, minutes in enumerate([30, 9, 4]):
        changes = stuck("view_gave_up") | {
            "stuck_at": ago(minutes=minutes),
            "stuck_reason": f"No charge for ride {number}.",
        }
        IdempotencyKeyFactory(**changes, request_path=f"/rides/{number}/pay?page={number}")
    IdempotencyKeyFactory(
        **stuck("view_gave_up") | {"stuck_reason": "No charge for ride 7."}, request_path="/tips/7"
    )
    IdempotencyKeyFactory(**stuck("call_in_doubt"))
    client = staff()
    (largest, query), *others = client.get(DASHBOARD).context["groups"]
    assert (largest.cause, largest.count) == ("view_gave_up", 3)
    assert sorted((other.cause, other.place, other.count) for other, _ in others) == [
        ("call_in_doubt", "POST /rides", 1), ("view_gave_up", "POST /tips/#", 1),
    ]  # fmt: skip
    assert (largest.error, largest.place) == ("No charge for ride #.", "POST /rides/#/pay")
    assert (round(largest.oldest / 60), round(largest.newest / 60)) == (30, 4)
    assert client.get(f"{KEYS}{query}").context["cl"].result_count == 3
    question = client.get(f"{KEYS}bulk/hand_back/{query}")
    assert question.context["eligible"] == 3


@pytest.mark.django_db
def test_groups_that_are_not_shown_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "MAX_GROUPS", 1)
    for code in ("view_gave_up", "view_gave_up", "call_in_doubt", "on_abandon"):
        IdempotencyKeyFactory(**stuck(code))
    page = staff().get(DASHBOARD)
    assert [group.cause for group, _ in page.context["groups"]] == ["view_gave_up"]
    assert page.context["other_groups"] == (2, 2)
    assert "groups that are not shown: 2, with 2 rows" in page.text


@pytest.mark.django_db
def test_the_dashboard_reads_the_keys_once_and_the_list_of_a_group_three_times() -> None:
    """The list reads them for the patterns of the group, for the count and for its page."""
    client = staff()
    IdempotencyKeyFactory(**stuck("view_gave_up"))
    [(_, query)] = client.get(DASHBOARD).context["groups"]
    reads = []
    for page in (DASHBOARD, f"{KEYS}{query}"):
        with CaptureQueriesContext(connection) as queries:
            client.get(page)
        keys = [sql for sql in queries if 'FROM "idempotency_idempotencykey"' in sql["sql"]]
        reads.append(len(keys))
    assert reads == [1, 3]


@pytest.mark.django_db
def test_failed_jobs_with_one_cause_are_one_group() -> None:
    for name, error in (
        ("a.b", "Refused: job 1"),
        ("a.b", "Refused: job 2"),
        ("a.b", "Timeout"),
        ("a.c", "Timeout"),
    ):
        StagedJobFactory(failed_at=timezone.now(), job_name=name, last_error=error)
    client = staff()
    groups = client.get(DASHBOARD).context["job_groups"]
    assert (groups[0][0].cause, groups[0][0].error, groups[0][0].count) == (
        "a.b",
        "Refused: job #",
        2,
    )
    assert [client.get(f"{JOBS}{query}").context["cl"].result_count for _, query in groups] == [
        group.count for group, _ in groups
    ]


@pytest.mark.django_db
def test_the_banner_says_what_the_doctor_says() -> None:
    client = staff()
    assert client.get(DASHBOARD).context["findings"] == []
    IdempotencyKeyFactory(**stuck("view_gave_up"))
    IdempotencyKeyFactory(created_at=ago(minutes=10), last_run_at=ago(minutes=10))
    StagedJobFactory(run_at=ago(minutes=7))
    StagedJobFactory(
        run_at=ago(minutes=-7), last_error="NotDeleted: kept for the audit", refusals=1
    )
    StagedJobFactory(failed_at=timezone.now())
    ProcessHeartbeat.objects.create(name="reap_keys", host="web1", pid=1, beat_at=ago(minutes=9))
    context = client.get(DASHBOARD).context
    no_heartbeat = "no heartbeat (if cron does not run it, %(consequence)s)"
    codes = {finding.code: url for finding, url in context["findings"]}
    assert set(codes) == {
        "stuck_keys",
        "completer_late",
        "jobs_late",
        "jobs_not_deleted",
        "jobs_failed",
        "process_silent",
    }
    assert {finding.code for finding in diagnose().findings} >= set(codes)
    found = {code: client.get(url).context["cl"].result_count for code, url in codes.items() if url}
    assert found == dict.fromkeys(set(codes) - {"process_silent"}, 1)
    states = dict(context["loops"])
    assert (states["enqueue_jobs"], states["reap_keys"]) == (
        no_heartbeat % {"consequence": "staged jobs wait"},
        "silent",
    )


@pytest.mark.django_db
def test_a_process_that_another_one_has_replaced_is_gone_not_silent() -> None:
    for pid, minutes in ((1, 9), (2, 0)):
        ProcessHeartbeat.objects.create(
            name="reap_keys", host="web1", pid=pid, beat_at=ago(minutes=minutes)
        )
    context = staff().get(DASHBOARD).context
    assert [process.pid for process in context["gone"]] == [1]
    assert [process.pid for process in context["processes"]] == [2]
    assert context["findings"] == []


@pytest.mark.django_db
@pytest.mark.parametrize("span", charts.SPANS, ids=lambda span: span.name)
def test_the_charts_show_what_was_counted(span: charts.Span) -> None:
    minute = int(time.time()) // 60 // span.minutes * span.minutes - 2 * span.minutes
    for kind, count in (("ran 7", 8), ("replayed", 4), ("conflict", 2), ("failed", 1)):
        TrafficCount.objects.create(minute=minute, kind=kind, count=count * span.minutes)
    context = staff().get(f"{DASHBOARD}?span={span.name}").context
    lines = [line for chart in context["charts"] for line in chart["lines"]]
    shown = {line.name: max(filter(None, line.values)) for line in lines}
    assert shown == {
        "requests": 15, "replays": 4, "conflicts": 2, "errors": 1,
        "p50": pytest.approx(0.00336, abs=1e-5), "p95": pytest.approx(0.00336, abs=1e-5),
    }  # fmt: skip
    assert all(
        len(line.values) == span.intervals for chart in context["charts"] for line in chart["lines"]
    )


@pytest.mark.django_db
def test_an_interval_of_the_charts_is_a_link_to_the_keys_of_that_minute() -> None:
    minute = int(time.time()) // 60 - 3
    TrafficCount.objects.create(minute=minute, kind="ran 7", count=8)
    begin = datetime.fromtimestamp(minute * 60, UTC)
    times = (begin - timedelta(seconds=1), begin, begin + timedelta(seconds=60))
    keys = [IdempotencyKeyFactory(finished=True, created_at=at) for at in times]
    page = staff().get(DASHBOARD)
    (url,) = [url for at, url, _ in page.context["intervals"] if at == begin]
    listed = staff().get(url).context["cl"].result_list
    assert [key.pk for key in listed] == [keys[1].pk]
    assert page.text.count(escape(url)) == len(page.context["charts"]) + 1
    (numbers,) = [numbers for at, _, numbers in page.context["intervals"] if at == begin]
    # A phone shows the labels beside the numbers, because it has no headings.
    assert all(f'data-label="{label}">{number}<' in page.text for label, number in numbers)
    assert numbers == [
        ("requests a minute", "8"), ("replays a minute", "0"), ("conflicts a minute", "0"),
        ("errors a minute", "0"), ("p50 in s", "0.00336"), ("p95 in s", "0.00336"),
    ]  # fmt: skip


@pytest.mark.django_db
def test_a_minute_that_is_not_over_draws_no_drop() -> None:
    for minutes_ago in range(3):
        minute = int(time.time()) // 60 - minutes_ago
        TrafficCount.objects.create(minute=minute, kind="replayed", count=60)
    (requests,) = staff().get(DASHBOARD).context["charts"][0]["lines"]
    assert requests.values[-1] == 60


def test_a_percentile_is_at_most_as_much_too_high_as_the_page_says() -> None:
    shares = []
    for milliseconds in range(10, 2000, 7):
        shown = traffic._percentile([(traffic._class_of(milliseconds / 1000), 1)], 0.95)
        shares.append(shown * 1000 / milliseconds)
    assert min(shares) >= 1
    assert max(shares) <= 1 + traffic.MAX_TOO_HIGH / 100


@pytest.mark.django_db
def test_an_empty_site_and_one_without_processes_are_shown() -> None:
    page = staff().get(DASHBOARD)
    assert (page.context["processes"], page.context["absent"]) == ([], [*LOOPS])
    assert DASHBOARD in staff().get("/admin/idempotency/").text
    assert DASHBOARD in staff().get(KEYS).text


@pytest.mark.django_db
def test_a_loop_that_is_dead_for_days_stays_a_finding() -> None:
    ProcessHeartbeat.objects.create(name="complete_keys", host="dead", pid=1, beat_at=ago(hours=25))
    findings = [finding.code for finding, _ in staff().get(DASHBOARD).context["findings"]]
    assert findings == ["process_silent"]


@pytest.mark.django_db
def test_who_may_not_view_keys_sees_no_dashboard() -> None:
    assert staff(is_superuser=False).get(DASHBOARD).status_code == 403


PAGES = [
    KEYS, f"{KEYS}?state=stuck", f"{KEYS}?state=abandoned", f"{KEYS}?state=waiting_for_a_retry",
    f"{KEYS}?state=finished", f"{KEYS}?state=stuck&stuck_code=view_gave_up",
    f"{KEYS}?state=unfinished&recovery_point=started&age=older", f"{KEYS}?stuck_code=view_gave_up",
    f"{KEYS}?recovery_point=charged", f"{KEYS}?q=user:1", f"{KEYS}?q=1-2-3-4", f"{KEYS}?status=5xx",
    f"{KEYS}?path=/none", f"{KEYS}?path=/none&state=stuck", f"{KEYS}?error_group=none",
    f"{KEYS}?created_from=2026-01-01T00:00",
    f"{KEYS}?mine=1", f"{KEYS}?state=stuck&o=-6", f"{KEYS}csv/?state=stuck",
    JOBS, f"{JOBS}?state=failed", f"{JOBS}?error_group=none", f"{JOBS}?state=waiting&age=hour",
    f"{JOBS}?q=1", DASHBOARD,
    MESSAGES, f"{MESSAGES}?q=7", f"{MESSAGES}?source=none", f"{MESSAGES}?age=hour",
    CALLS, f"{CALLS}?q=1", f"{CALLS}?q=none", f"{CALLS}?result=unknown",
    f"{KEYS}bulk/hand_back/", f"{KEYS}bulk/acknowledge/?state=stuck&stuck_code=view_gave_up",
    f"{JOBS}bulk/retry/?state=failed",
]  # fmt: skip


LARGE = [
    f"idempotency_{model}"
    for model in ("idempotencykey", "stagedjob", "processedmessage", "downstreamcall")
]


def fill(count: int) -> None:
    """Let there be ``count`` finished keys more, as many staged jobs, and fresh statistics."""
    last = IdempotencyKey.objects.order_by("-pk").values_list("pk", flat=True)[0]
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO idempotency_idempotencykey (scope, idempotency_key, attempts,"
            " completer_attempts, request_method, request_path, request_content_type,"
            " request_headers, remote_addr, request_fingerprint, seed, recovery_point, finished_at,"
            " response_code, response_headers, stuck_code, stuck_reason, last_error, history,"
            " lease_seconds, created_at) SELECT 'user:' || n %% 1000, n::text, 1, 0, 'POST',"
            " '/rides', '', '{}', '', 'v1:0', '', 'finished', now(), 201, '{}', '', '', '', '[]',"
            " 90, now() - n * interval '1 second' FROM generate_series(%s, %s) AS n",
            [last + 1, last + count],
        )
        cursor.execute(
            "INSERT INTO idempotency_stagedjob (id, job_name, job_args, queue, run_at, hand_overs,"
            " refusals, last_error) SELECT gen_random_uuid(), 'a.b', '{}', 'default', now() - n *"
            " interval '1 second', 0, 0, '' FROM generate_series(1, %s) AS n",
            [count],
        )
        cursor.execute(
            "INSERT INTO idempotency_processedmessage (source, message_id, processed_at) SELECT"
            " 'stripe', n::text, now() - n * interval '1 second' FROM generate_series(%s, %s) AS n",
            [last + 1, last + count],
        )
        cursor.execute(
            "INSERT INTO idempotency_downstreamcall (key_id, name, token, started_at, recorded_at)"
            " SELECT id, 'made', gen_random_uuid(), created_at, created_at FROM"
            " idempotency_idempotencykey WHERE id > %s",
            [last],
        )
        cursor.execute(f"ANALYZE {', '.join(LARGE)}")


def costs(client: Client) -> dict[str, list[str]]:
    """Return the statements of each page."""
    found, key = {}, IdempotencyKey.objects.stuck().latest("pk")
    of_key = ("change/", "json/", f"press/answer/?{urlencode(looked_at(key, 'default'))}")
    for page in [*PAGES, *(f"{KEYS}{key.pk}/{name}" for name in of_key)]:
        with CaptureQueriesContext(connection) as queries:
            assert client.get(page).status_code == 200
        found[page] = [
            query["sql"] for query in queries.captured_queries if query["sql"].startswith("SELECT")
        ]
    return found


def second_chunk(client: Client, page: str) -> list[str]:
    """Return the statements of the second chunk of an action that read keys or jobs."""
    work = re.findall(r'name="work" value="([^"]+)"', client.get(page).text)
    url = client.post(page, {"work": work})["Location"]
    client.post(url, {"step": "continue"})
    with CaptureQueriesContext(connection) as queries:
        assert client.post(url, {"step": "continue"}).context["work"].done == 20
    read = [query["sql"] for query in queries.captured_queries if "FOR UPDATE" in query["sql"]]
    return [sql for sql in read if any(f'"{table}"' in sql for table in LARGE)]


def plan_of(sql: str) -> str:
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN (GENERIC_PLAN) {numbered(sql)[0]}")
        return "\n".join(row[0] for row in cursor.fetchall())


def scans_whole_table(sql: str) -> bool:
    plan = plan_of(sql)
    # The other tables have few rows here, for which the planner may choose either.
    lines = [
        line for line in plan.splitlines() if any(f"Seq Scan on {table}" in line for table in LARGE)
    ]
    # A count that stops at its limit may go through the table in any order, and nearly all staged
    # jobs are counted as waiting.
    may = "LIMIT" in sql or '"group" IS NULL' in sql
    return bool(lines) and not ("COUNT" in sql and may)


@pytest.mark.postgres
@pytest.mark.django_db
@pytest.mark.processes
def test_no_page_costs_more_at_two_hundred_thousand_keys_than_at_one_thousand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = staff()
    # Django cannot show a prepared statement.
    monkeypatch.setattr(connection.connection, "prepare_threshold", None)
    for _ in range(60):
        key = IdempotencyKeyFactory(user=UserFactory(), **stuck("view_gave_up"))
        RideFactory(idempotency_key=key)
        StagedJobFactory(idempotency_key=key)
        StagedJobFactory(failed_at=timezone.now())
        DownstreamCall.objects.create(key=key, name="sms", token=uuid4())
    fill(1_000)
    costs(client)  # What is read once for a process is read.
    few = {page: len(statements) for page, statements in costs(client).items()}
    fill(199_000)
    many = costs(client)
    assert {page: len(statements) for page, statements in many.items()} == few
    assert max(few.values()) <= 12, few
    scanning = [sql for statements in many.values() for sql in statements if scans_whole_table(sql)]
    assert not scanning
    monkeypatch.setattr(_bulk_work, "CHUNK_ROWS", 10)
    monkeypatch.setattr(_bulk_work, "CHUNK_SECONDS", 60)
    monkeypatch.setattr(_bulk_work, "TURN_SECONDS", -1)
    for page in (f"{KEYS}bulk/hand_back/", f"{JOBS}bulk/retry/"):
        statements = second_chunk(client, page)
        assert statements
        assert not any(map(scans_whole_table, statements))
    assert StagedJob.objects.count() > 200_000
