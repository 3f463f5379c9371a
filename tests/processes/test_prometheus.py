"""Metrics: what is counted is what happened, a scrape is cheap, and the alert rules of the docs
name what exists."""

import re
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from asgiref.sync import sync_to_async
from django.core.management import call_command, load_command_class
from django.db import connection, connections
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from prometheus_client import REGISTRY, CollectorRegistry

from idempotency import signals
from idempotency.contrib.prometheus import OUTCOMES, PHASE_SECONDS, DatabaseCollector
from idempotency.decorators import idempotent
from idempotency.exceptions import KeyReused, KeyStuck
from idempotency.models import IdempotencyKey, ProcessHeartbeat
from idempotency.phases import atomic_phase
from tests import operations
from tests.factories import IdempotencyKeyFactory, StagedJobFactory
from tests.kit.ageing import make_older
from tests.kit.serving import Sender, another_client
from tests.kit.threads import Gate, background
from tests.kit.views import Counted, create, phased, plain, two_phases

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = (DOCS / "reference" / "signals-and-metrics.md").read_text()
ALERTS = Path(__file__).parents[2] / "examples" / "prometheus" / "alerts.yml"
RULES = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]

Serve = Callable[..., None]
INCIDENTS = (Path(__file__).parents[2] / "docs" / "incidents.md").read_text()


def test_each_alert_has_a_row_with_a_command_that_exists() -> None:
    rows = dict(re.findall(r"^\| `(Idem\w+)` \| (.*?) \|", INCIDENTS, re.M))
    assert sorted(rows) == sorted(rule["alert"] for rule in RULES)
    assert {rule["annotations"]["runbook_url"].rpartition("/")[2] for rule in RULES} == {
        "incidents.html"
    }
    for first in rows.values():
        for name, *options in map(str.split, re.findall(r"^`(.*)`$", first)):
            load_command_class("idempotency", name).create_parser("", name).parse_args(options)


def counted() -> dict[tuple[str, str], float]:
    """Return the counts of outcomes by outcome and code."""
    [family] = OUTCOMES.collect()
    samples = [sample for sample in family.samples if sample.name.endswith("_total")]
    return {(sample.labels["outcome"], sample.labels["code"]): sample.value for sample in samples}


@pytest.fixture
def outcomes() -> Callable[[], dict[tuple[str, str], float]]:
    """Return a function that returns what has been counted since the beginning of the test."""
    before = counted()
    return lambda: {
        name: more for name, now in counted().items() if (more := now - before.get(name, 0))
    }


def timed() -> dict[str, float]:
    """Return how many phases were timed, by recovery point."""
    [family] = PHASE_SECONDS.collect()
    return {
        sample.labels["recovery_point"]: sample.value
        for sample in family.samples
        if sample.name.endswith("_count")
    }


def scraped() -> dict[str, float]:
    """Return what a scrape of the collector says, by name and labels."""
    families = list(DatabaseCollector().collect())
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.mark.parametrize("kind", [plain, phased])
def test_a_request_and_its_replay_are_counted(
    kind: Any, serve: Serve, sender: Sender, outcomes: Any
) -> None:
    serve(view=kind(Counted()))
    sender.send()
    assert outcomes() == {("claimed", ""): 1, ("finished", ""): 1}
    sender.send()
    assert outcomes() == {("claimed", ""): 1, ("finished", ""): 1, ("replayed", ""): 1}


def test_a_conflict_is_counted_by_the_code_of_its_answer(
    serve: Serve, sender: Sender, outcomes: Any
) -> None:
    serve(view=plain(Counted()), stuck=two_phases(lambda request: None, stuck))
    assert [sender.send(body=body).status_code for body in (1, 2)] == [201, 422]
    assert outcomes()["conflict", "key_reused"] == 1
    assert [sender.send("/stuck/", "key-2").status_code for _ in "ab"] == [409, 409]
    assert outcomes()["conflict", "key_stuck"] == 1


@pytest.mark.django_db(transaction=True)
def test_operations_are_counted_as_requests_are(
    outcomes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "bank", operations.Bank())
    for operation in (operations.note.once, partial(operations.charge.once, cents=9)):
        assert operation("key", name="one") == operation("key", name="one")
    with pytest.raises(KeyReused):
        operations.note.once("key", name="two")
    assert outcomes() == {
        ("claimed", ""): 2,
        ("finished", ""): 2,
        ("replayed", ""): 2,
        ("conflict", "key_reused"): 1,
    }


def test_a_counter_that_fails_has_no_effect_on_the_request(
    serve: Serve, sender: Sender, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*labels: str) -> Any:
        raise OSError("No space left on device")

    monkeypatch.setattr(OUTCOMES, "labels", fail)
    serve(view=plain(Counted()))
    assert [sender.send(body=body).status_code for body in (1, 1, 2)] == [201, 201, 422]
    assert len([record for record in caplog.records if record.name == "django.dispatch"]) == 4


@pytest.mark.postgres
def test_a_request_in_flight_is_a_conflict(serve: Serve, sender: Sender, outcomes: Any) -> None:
    gate = Gate()

    def work(request: Any) -> Any:
        gate.wait_here()
        return create(request)

    serve(view=plain(work))
    with background(another_client(sender).send):
        gate.wait_until_reached()
        assert sender.send().status_code == 409
        gate.open()
    assert outcomes() == {("claimed", ""): 1, ("finished", ""): 1, ("conflict", "key_in_use"): 1}


def stuck(request: Any) -> Any:
    raise KeyStuck("Stripe says nothing.")


def test_a_key_that_becomes_stuck_is_counted_by_its_code(
    serve: Serve, sender: Sender, outcomes: Any
) -> None:
    serve(view=two_phases(lambda request: None, stuck))
    assert sender.send().status_code == 409
    code = IdempotencyKey.objects.get().stuck_code
    assert outcomes() == {("claimed", ""): 1, ("stuck", code): 1}


def test_each_phase_is_timed_from_where_it_started(serve: Serve, sender: Sender) -> None:
    before = timed()
    serve(view=two_phases(lambda request: None, create))
    sender.send()
    assert Counter(timed()) - Counter(before) == {"started": 1, "between": 1}


def test_phases_of_an_async_view_are_timed_too(serve: Serve, sender: Sender) -> None:
    @idempotent(recovery_points=["between"])
    async def view(request: Any) -> Any:
        key = request.idempotency_key
        async for recovery_point in key.aphases():
            async with atomic_phase(key) as phase:
                if recovery_point == "started":
                    phase.set_recovery_point("between")
                else:
                    phase.set_response(await sync_to_async(create)(request))
        return key.response()

    before = timed()
    serve(view=view)
    assert sender.send().status_code == 201
    assert Counter(timed()) - Counter(before) == {"started": 1, "between": 1}


def test_the_time_of_a_phase_holds_the_call_before_it(serve: Serve, sender: Sender) -> None:
    def spent() -> float:
        return (
            REGISTRY.get_sample_value(
                "idempotency_phase_seconds_sum", {"recovery_point": "between"}
            )
            or 0
        )

    before, gate = spent(), Gate()
    serve(view=two_phases(lambda request: None, create, call=gate.wait_here))
    client = another_client(sender)
    with background(client.send):
        gate.wait_until_reached()
        key = IdempotencyKey.objects.get()
        while (waited := timezone.now() - key.created_at) < timedelta(seconds=0.3):
            key.refresh_from_db()
        gate.open()
    assert spent() - before > waited.total_seconds() / 2


def test_a_run_of_the_completer_is_counted_and_timed(
    serve: Serve, sender: Sender, outcomes: Any
) -> None:
    calls = []

    def call() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("the service is down")

    serve(view=two_phases(lambda request: None, create, call=call))
    assert sender.send().status_code == 500
    make_older(3600, "created_at", "last_run_at")
    before = timed()
    call_command("complete_keys", verbosity=0)
    assert outcomes() == {("claimed", ""): 2, ("finished", ""): 1}
    assert timed()["between"] - before.get("between", 0) == 1


def test_no_phase_takes_the_time_from_another_key() -> None:
    mine, other = IdempotencyKey(pk=1), IdempotencyKey(pk=2)
    before = sum(timed().values())
    signals.key_claimed.send(sender=IdempotencyKey, key=other, request=None)
    signals.phase_committed.send(sender=IdempotencyKey, key=mine, request=None)
    assert sum(timed().values()) == before


@pytest.mark.django_db
def test_a_scrape_says_what_the_tables_hold() -> None:
    def ago(**time: float) -> Any:
        return timezone.now() - timedelta(**time)

    IdempotencyKeyFactory(finished=True, created_at=ago(days=1))
    IdempotencyKeyFactory(created_at=ago(minutes=10))
    trouble = {
        "stuck_at": ago(minutes=1),
        "stuck_code": "call_in_doubt",
        "stuck_reason": "x",
        "created_at": ago(hours=5),
    }
    IdempotencyKeyFactory(**trouble)
    IdempotencyKeyFactory(**trouble, acknowledged_at=timezone.now())
    StagedJobFactory(run_at=ago(minutes=2))
    StagedJobFactory(run_at=timezone.now() + timedelta(hours=1))
    StagedJobFactory(failed_at=ago(minutes=2))
    ProcessHeartbeat.objects.create(name="reap_keys", host="a", pid=1, beat_at=ago(minutes=9))
    ProcessHeartbeat.objects.create(name="reap_keys", host="b", pid=1, beat_at=ago(seconds=90))
    # What is told in seconds has grown since the rows were made.
    assert {
        name: value // 60 * 60 if "seconds" in name else value for name, value in scraped().items()
    } == {
        "idempotency_database_up": 1,
        "idempotency_unfinished_keys": 3,
        "idempotency_stuck_keys call_in_doubt": 1,
        "idempotency_oldest_unfinished_seconds": 600,
        "idempotency_due_jobs": 1,
        "idempotency_failed_jobs": 1,
        "idempotency_oldest_job_seconds": 120,
        "idempotency_process_lag_seconds reap_keys": 60,
    }


@pytest.mark.django_db
def test_a_scrape_costs_the_same_for_many_rows_and_writes_nothing() -> None:
    with CaptureQueriesContext(connection) as few:
        scraped()
    IdempotencyKeyFactory.create_batch(30)
    StagedJobFactory.create_batch(30)
    with CaptureQueriesContext(connection) as many:
        scraped()
    assert len(many) == len(few) == 6
    assert all(query["sql"].startswith("SELECT") for query in many)
    of_keys = [query["sql"] for query in many if "idempotency_idempotencykey" in query["sql"]]
    assert all('finished_at" IS NULL' in sql for sql in of_keys)


@pytest.mark.postgres
def test_a_database_that_is_away_leaves_the_scrape_standing(
    monkeypatch: pytest.MonkeyPatch, django_db_blocker: Any
) -> None:
    nowhere = {**connection.settings_dict, "HOST": "127.0.0.1", "PORT": "1"}
    monkeypatch.setitem(connections.settings, "nowhere", nowhere)
    with django_db_blocker.unblock():
        [family] = DatabaseCollector(using="nowhere").collect()
    del connections["nowhere"]
    assert (family.name, family.samples[0].value) == ("idempotency_database_up", 0)


@pytest.mark.django_db(transaction=True)
def test_a_scrape_in_a_thread_of_its_own_leaves_no_connection() -> None:
    def scrape() -> bool:
        scraped()
        return connection.connection is None

    with background(scrape) as closed:
        pass
    assert closed.result()


def test_to_register_the_collector_asks_no_database() -> None:
    CollectorRegistry().register(DatabaseCollector(using="nowhere"))


@pytest.mark.django_db
def test_every_metric_of_the_alert_rules_exists() -> None:
    registry = CollectorRegistry()
    registry.register(DatabaseCollector())
    IdempotencyKeyFactory(stuck_at=timezone.now(), stuck_code="x", stuck_reason="x")
    ProcessHeartbeat.objects.create(name="reap_keys", host="a", pid=1)
    PHASE_SECONDS.labels("started")
    families = [*registry.collect(), *OUTCOMES.collect(), *PHASE_SECONDS.collect()]
    labels = {
        sample.name: sample.labels.keys() | {"le"}
        for family in families
        for sample in family.samples
    }
    named = {name for rule in RULES for name in re.findall(r"\bidempotency_\w+", rule["expr"])}
    assert len(named) >= 8
    assert named <= labels.keys()
    for rule in RULES:
        for name, matchers in re.findall(r"\b(idempotency_\w+)\{(.*?)\}", rule["expr"]):
            assert set(re.findall(r"(\w+)=", matchers)) <= labels[name]
        for by in re.findall(r"by \((.*?)\)", rule["expr"]):
            [name] = re.findall(r"\bidempotency_\w+", rule["expr"])
            assert set(by.split(", ")) <= labels[name]
    documented = set(re.findall(r"^\| `(idempotency_\w+)", REFERENCE, re.M))
    assert documented == {
        family.name + ("_total" if family.type == "counter" else "") for family in families
    }


def test_every_rule_says_what_to_do_and_what_it_waits_for_is_there_from_the_start() -> None:
    for rule in RULES:
        assert {"alert", "expr", "labels", "annotations"} <= rule.keys()
        assert {"summary", "action", "runbook_url"} == rule["annotations"].keys()
        assert rule["labels"]["severity"] in ("page", "ticket")
    assert ("replayed", "") in counted()
