"""Each tenant's keys, jobs and messages in the tenant's own database: two shards, chosen by the
request or by a router."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from django.core.management import call_command
from django.db import OperationalError, connections, transaction
from django.db.models import Model
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.test import Client
from django_rq import get_queue
from pytest_django import Settings

from idempotency.admin.actions import looked_at
from idempotency.completer import CompletePass, complete_once
from idempotency.contrib.celery import CeleryBackend
from idempotency.contrib.tasks import TasksBackend
from idempotency.decorators import idempotent
from idempotency.enqueuer import EnqueuePass, enqueue_once
from idempotency.exceptions import NoOpenTransaction
from idempotency.inbox import process_once
from idempotency.jobs import stage_job
from idempotency.models import (
    DownstreamCall,
    IdempotencyKey,
    ProcessedMessage,
    ProcessHeartbeat,
    StagedJob,
)
from idempotency.phases import atomic_phase
from idempotency.reaper import ReapPass, reap_once
from tests.factories import IdempotencyKeyFactory, StagedJobFactory, UserFactory
from tests.jobs import jobs_of_shards
from tests.kit import commands, shards
from tests.kit.ageing import abandon, ago, past_the_retention
from tests.kit.brokers import KINDS
from tests.kit.serving import Sender, problem
from tests.kit.shards import SHARDS, prepare_request, shard
from tests.kit.threads import Gate, background
from tests.kit.waiting import eventually
from tests.models import Entry

TABLES: tuple[type[Model], ...] = (
    IdempotencyKey,
    StagedJob,
    DownstreamCall,
    ProcessedMessage,
    Entry,
)

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.django_db(transaction=True, databases=["default", "shard_b"]),
]


@pytest.fixture(autouse=True)
def _hosts(settings: Settings) -> None:
    settings.ALLOWED_HOSTS = list(SHARDS)


def rows(alias: str) -> dict[str, int]:
    """Return the number of rows in a shard by name of the model, without models that have no
    rows."""
    counts = {model.__name__: model._default_manager.using(alias).count() for model in TABLES}
    return {name: number for name, number in counts.items() if number}


def send(sender: Sender, tenant: str, key: str = "key-1", **options: Any) -> Any:
    """Send a request of a tenant."""
    return sender.send(key=key, headers={"Host": f"{tenant}.example"}, **options)


@idempotent(using=shard)
def plain(request: HttpRequest) -> HttpResponseBase:
    """Create an entry and a job in the tenant's database."""
    alias = shard(request)
    Entry.objects.using(alias).create(name=alias, idempotency_key=request.idempotency_key)
    stage_job("tests.kit.jobs.record", {"user": 1})
    return JsonResponse({"shard": alias}, status=201)


class Shop:
    """A phased view that fails after its first phase while ``broken``."""

    def __init__(
        self,
        using: Callable[[HttpRequest], str] | None = shard,
        alias: Callable[[HttpRequest], Any] = shard,
    ) -> None:
        self.broken = True
        self.ran: list[str] = []
        self._alias = alias
        self.view = idempotent(
            recovery_points=["entered", "called"], using=using, on_abandon=self._on_abandon
        )(self._view)

    def _view(self, request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        # With None, the router chooses the database.
        alias = self._alias(request)
        self.ran.append(key._state.db)
        for recovery_point in key.phases():
            match recovery_point:
                case "started":
                    with atomic_phase(key) as phase:
                        Entry.objects.using(alias).create(name="entry", idempotency_key=key)
                        phase.set_recovery_point("entered")
                case "entered":
                    if self.broken:
                        raise OSError("the service is down")
                    with key.call("sms", at_most_once=True) as call:
                        if call.due:
                            call.record({"sent": True})
                    with atomic_phase(key) as phase:
                        phase.set_recovery_point("called")
                case "called":
                    with atomic_phase(key) as phase:
                        stage_job("tests.kit.jobs.record", {"user": 1})
                        entry = Entry.objects.using(alias).get(idempotency_key=key)
                        phase.set_response(
                            JsonResponse(
                                {"entry": entry.pk, "body": key.request_params}, status=201
                            )
                        )
        return key.response()

    def _on_abandon(self, key: IdempotencyKey) -> HttpResponseBase:
        return JsonResponse({"abandoned": key.recovery_point}, status=410)


@pytest.fixture
def shop(serve: Any) -> Shop:
    """Return the shop, which is served at /view/."""
    shop = Shop()
    serve(view=shop.view)
    return shop


def in_both_shards(change: Callable[..., object]) -> None:
    """Apply ``change`` to the keys of both shards."""
    for alias in SHARDS.values():
        change(using=alias)


def finished(alias: str) -> int:
    """Return the number of finished keys in a shard."""
    return IdempotencyKey.objects.using(alias).filter(finished_at__isnull=False).count()


def test_the_same_key_in_two_shards_is_two_requests(serve: Any, sender: Sender) -> None:
    serve(view=plain)
    for tenant, alias in (("a", "default"), ("b", "shard_b")):
        first, again = send(sender, tenant), send(sender, tenant)
        assert (first.status_code, first.json(), "Idempotent-Replayed" in first) == (
            201,
            {"shard": alias},
            False,
        )
        assert (again.content, again["Idempotent-Replayed"]) == (first.content, "true")
    for alias in SHARDS.values():
        assert rows(alias) == {"IdempotencyKey": 1, "StagedJob": 1, "Entry": 1}
        key = IdempotencyKey.objects.using(alias).get()
        assert Entry.objects.using(alias).get().idempotency_key_id == key.pk
        assert StagedJob.objects.using(alias).get().idempotency_key_id == key.pk


def test_a_shard_knows_nothing_of_the_other_ones_keys(serve: Any, sender: Sender) -> None:
    serve(view=plain)
    send(sender, "a", body={"a": 1})
    assert send(sender, "b", body={"another": 2}).status_code == 201
    assert problem(send(sender, "b", body={"a": 1}))["code"] == "key_reused"


def test_a_request_in_flight_holds_its_key_in_its_own_shard_alone(
    serve: Any, sender: Sender
) -> None:
    gate = Gate()

    @idempotent(using=shard)
    def view(request: HttpRequest) -> HttpResponseBase:
        if shard(request) == "default":
            gate.wait_here()
        return JsonResponse({}, status=201)

    serve(view=view)
    with background(lambda: send(sender, "a").status_code) as first:
        gate.wait_until_reached()
        assert send(sender, "b").status_code == 201
        assert problem(send(sender, "a"))["code"] == "key_in_use"
        gate.open()
    assert first.result() == 201


def test_an_error_rolls_back_what_a_plain_view_wrote_to_its_shard(
    serve: Any, sender: Sender
) -> None:
    @idempotent(using=shard)
    def view(request: HttpRequest) -> HttpResponseBase:
        plain.__wrapped__(request)
        raise OSError("on purpose")

    serve(view=view)
    assert send(sender, "b").status_code == 500
    assert (rows("default"), rows("shard_b")) == ({}, {})


def test_phases_calls_and_jobs_are_where_the_key_is(shop: Shop, sender: Sender) -> None:
    shop.broken = False
    first = send(sender, "b")
    assert (first.status_code, first.json()["body"]) == (201, {"a": 1})
    assert send(sender, "b").content == first.content
    assert rows("shard_b") == {"IdempotencyKey": 1, "StagedJob": 1, "DownstreamCall": 1, "Entry": 1}
    assert rows("default") == {}
    assert shop.ran == ["shard_b"]


def test_a_phase_that_fails_leaves_nothing_in_its_shard(serve: Any, sender: Sender) -> None:
    @idempotent(recovery_points=["entered"], using=shard)
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for _ in key.phases():
            with atomic_phase(key):
                Entry.objects.using("shard_b").create(name="entry", idempotency_key=key)
                raise OSError("on purpose")
        return key.response()

    serve(view=view)
    assert send(sender, "b").status_code == 500
    assert rows("shard_b") == {"IdempotencyKey": 1}


def test_a_message_is_known_to_its_shard_alone() -> None:
    def deliver(alias: str) -> bool:
        with process_once("stripe", "evt_1", using=alias) as first:
            if first:
                Entry.objects.using(alias).create(name="entry")
            return first

    assert [deliver(alias) for alias in ("shard_b", "shard_b", "default")] == [True, False, True]
    assert rows("default") == rows("shard_b") == {"ProcessedMessage": 1, "Entry": 1}


def test_a_message_whose_work_fails_leaves_nothing_in_its_shard() -> None:
    def deliver() -> None:
        with process_once("stripe", "evt_1", using="shard_b"):
            Entry.objects.using("shard_b").create(name="entry")
            raise OSError("on purpose")

    with pytest.raises(OSError, match="on purpose"):
        deliver()
    assert rows("shard_b") == {}


def test_a_message_stages_its_job_in_its_shard() -> None:
    with process_once("stripe", "evt_1", using="shard_b"):
        stage_job("tests.kit.jobs.record", {"user": 1}, using="shard_b")
    assert (rows("default"), rows("shard_b")) == ({}, {"ProcessedMessage": 1, "StagedJob": 1})


def test_a_job_is_not_staged_in_a_database_without_a_transaction() -> None:
    """Without ``using``, the router chooses the database; an open transaction in another database
    is not enough."""
    with transaction.atomic(using="shard_b"), pytest.raises(NoOpenTransaction):
        stage_job("tests.kit.jobs.record", {"user": 1})
    assert (rows("default"), rows("shard_b")) == ({}, {})


@pytest.mark.parametrize("concurrency", [1, 2])
def test_the_completer_of_a_shard_finishes_the_keys_of_that_shard(
    shop: Shop, sender: Sender, concurrency: int
) -> None:
    for tenant in ("a", "b"):
        for number in range(3):
            assert send(sender, tenant, key=f"key-{number}").status_code == 500
    in_both_shards(abandon)
    shop.broken = False
    shop.ran.clear()
    assert complete_once(using="shard_b", concurrency=concurrency) == CompletePass(finished=3)
    assert set(shop.ran) == {"shard_b"}, (
        "a serialization failure of two at once makes a phase run again"
    )
    assert (finished("default"), finished("shard_b")) == (0, 3)
    assert rows("default") == {"IdempotencyKey": 3, "Entry": 3}
    assert rows("shard_b") == {"IdempotencyKey": 3, "StagedJob": 3, "DownstreamCall": 3, "Entry": 3}
    assert send(sender, "b", key="key-0")["Idempotent-Replayed"] == "true"


def test_a_key_is_finished_where_it_is_although_its_view_names_another_database_now(
    serve: Any, sender: Sender
) -> None:
    runs: list[str | None] = []

    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for _ in key.phases():
            runs.append(key._state.db)
            if len(runs) == 1:
                raise OSError("The bank is down.")
            with atomic_phase(key) as phase:
                phase.set_response(HttpResponse(status=201))
        return key.response()

    serve(view=idempotent(recovery_points=[], using="shard_b")(view))
    assert sender.send(headers={"Host": next(iter(SHARDS))}).status_code == 500
    abandon(using="shard_b")
    serve(view=idempotent(recovery_points=[])(view))
    assert complete_once(using="shard_b") == CompletePass(finished=1)
    assert (runs, finished("shard_b")) == (["shard_b"] * 2, 1)


def test_the_reaper_of_a_shard_deletes_and_settles_there(shop: Shop, sender: Sender) -> None:
    for tenant in ("a", "b"):
        shop.broken = False
        send(sender, tenant, key="finished")
        shop.broken = True
        send(sender, tenant, key="unfinished")
    in_both_shards(past_the_retention)
    assert reap_once(using="shard_b") == ReapPass(deleted=1, settled=1)
    assert send(sender, "b", key="unfinished").status_code == 410
    assert (
        not Entry.objects.using("shard_b")
        .filter(name="entry", idempotency_key__idempotency_key="finished")
        .exists()
    )
    assert IdempotencyKey.objects.using("default").count() == 2
    assert finished("default") == 1


def test_the_enqueuer_of_a_shard_moves_the_jobs_of_that_shard(settings: Settings) -> None:
    taken: list[str | None] = []
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.take"}}
    take.list = taken  # type: ignore[attr-defined]
    for alias in SHARDS.values():
        with transaction.atomic(using=alias):
            StagedJobFactory._meta.model.objects.using(alias).create(job_name=f"tests.{alias}.job")
    assert enqueue_once(using="shard_b") == EnqueuePass(handed_over=1)
    assert taken == ["tests.shard_b.job"]
    assert (rows("default"), rows("shard_b")) == ({"StagedJob": 1}, {})


def take(job: StagedJob) -> None:
    """Record the job, like a project's own queue, which may read all its fields."""
    assert job.created_at <= job.run_at
    take.list.append(job.job_name)  # type: ignore[attr-defined]


def stage_in_shard(function: str, **arguments: Any) -> None:
    """Stage a job in the second shard."""
    with transaction.atomic(using="shard_b"):
        stage_job(f"{jobs_of_shards.__name__}.{function}", arguments, using="shard_b")


def jobs_handed_over(**arguments: Any) -> list[Any]:
    """Stage a job in the second shard, let its enqueuer hand it over, and return the jobs in RQ."""
    stage_in_shard("enter", **arguments)
    assert enqueue_once(using="shard_b") == EnqueuePass(handed_over=1)
    return get_queue("default").jobs


def test_with_a_router_a_worker_of_a_shard_keeps_its_inbox_there(
    broker: Any, routed: "Shop"
) -> None:
    with shards.tenant("shard_b"):
        for job in jobs_handed_over(alias="shard_b") * 2:
            job.perform()
    assert (rows("default"), rows("shard_b")) == ({}, {"ProcessedMessage": 1, "Entry": 1})


def test_a_worker_for_all_shards_keeps_the_inbox_of_a_job_where_it_was_staged(broker: Any) -> None:
    for job in jobs_handed_over(alias="shard_b") * 2:
        job.perform()
    assert (rows("default"), rows("shard_b")) == ({}, {"ProcessedMessage": 1, "Entry": 1})


def test_a_job_that_fails_in_a_worker_for_all_shards_leaves_nothing(broker: Any) -> None:
    (job,) = jobs_handed_over(alias="shard_b", fail=True)
    with pytest.raises(OSError, match="on purpose"):
        job.perform()
    assert (rows("default"), rows("shard_b")) == ({}, {})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__.lower())
@pytest.mark.processes
def test_the_workers_of_each_queue_try_a_job_again_in_its_shard(
    kind: Any, broker: Any, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for backend in (CeleryBackend, TasksBackend):
        monkeypatch.setattr(backend, "follow_up_seconds", 2)
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": kind.backend}}
    monkeypatch.setenv("RIDES_TEST_SHARD_B", connections["shard_b"].settings_dict["NAME"])
    queue = kind(broker)
    queue.worker = f"import {jobs_of_shards.__name__}\n{queue.worker}"
    mark = tmp_path / "mark"
    stage_in_shard("enter_after_a_failure", alias="shard_b", mark=str(mark))

    def done() -> bool:
        enqueue_once(using="shard_b")
        return rows("shard_b") == {"ProcessedMessage": 1, "Entry": 1}

    with queue.working():
        eventually(done, 40)
    assert mark.exists()
    assert rows("default") == {}


def test_a_worker_for_all_shards_is_told_what_the_router_of_the_enqueuer_knows(
    broker: Any, routed: "Shop"
) -> None:
    with shards.tenant("shard_b"):
        jobs = jobs_handed_over(alias="shard_b")
    for job in jobs * 2:
        job.perform()
    assert (rows("default"), rows("shard_b")) == ({}, {"ProcessedMessage": 1, "Entry": 1})


def run(*arguments: str) -> Any:
    """Run a command in a separate process with both shards."""
    return commands.run(*arguments, RIDES_TEST_SHARD_B=connections["shard_b"].settings_dict["NAME"])


def in_each_shard(factory: Any, **values: Any) -> None:
    """Create a row in each shard."""
    for alias in SHARDS.values():
        factory._meta.model.objects.using(alias).create(**factory.stub(**values).__dict__)


@pytest.mark.processes
def test_the_commands_work_on_the_shard_they_are_given(broker: Any) -> None:
    long_ago = {"created_at": ago(hours=74), "finished_at": ago(hours=73)}
    in_each_shard(StagedJobFactory)
    in_each_shard(IdempotencyKeyFactory, finished=True, **long_ago)
    in_each_shard(IdempotencyKeyFactory, request_path="/nowhere")
    in_both_shards(abandon)
    outputs = [
        run(command, "--database", "shard_b").stdout
        for command in ("enqueue_jobs", "complete_keys", "reap_keys")
    ]
    assert outputs == [
        "enqueue_jobs: 1 handed over, 0 refused, 0 failed\n",
        "complete_keys: 0 finished, 0 failed, 1 stuck\n",
        "reap_keys: 1 deleted, 0 protected, 0 settled, 0 stuck, 0 messages\n",
    ]
    assert rows("shard_b") == {"IdempotencyKey": 1}
    assert IdempotencyKey.objects.using("shard_b").stuck().count() == 1
    assert rows("default") == {"IdempotencyKey": 2, "StagedJob": 1}
    assert not IdempotencyKey.objects.using("default").stuck().exists()
    assert broker.llen("rq:queue:default") == 1


class WritesToShardB:
    """A router that writes the rows of the app to the second shard, whatever the request."""

    def db_for_write(self, model: type[Model], **hints: Any) -> str | None:
        return "shard_b" if model._meta.app_label == "idempotency" else None

    db_for_read = db_for_write


COMMANDS = ["enqueue_jobs", "complete_keys", "reap_keys", "staged_jobs list", "idempotency_doctor"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_works_where_the_router_writes(
    command: str, broker: Any, settings: Settings
) -> None:
    in_each_shard(StagedJobFactory)
    in_each_shard(IdempotencyKeyFactory, request_path="/nowhere")
    in_both_shards(past_the_retention)
    before = rows("default")
    settings.DATABASE_ROUTERS = [WritesToShardB()]
    done = commands.run_here(*command.split())
    assert done.returncode == (1 if command == "idempotency_doctor" else 0)
    match command:
        case "enqueue_jobs":
            assert rows("shard_b") == {"IdempotencyKey": 1}
        case "complete_keys" | "reap_keys":
            assert IdempotencyKey.objects.using("shard_b").stuck().exists()
        case "staged_jobs list":
            assert str(StagedJob.objects.using("shard_b").get().pk) in done.stdout
    assert rows("default") == before
    assert not IdempotencyKey.objects.using("default").stuck().exists()


@pytest.mark.processes
def test_the_worker_of_a_shard_works_on_that_shard(broker: Any) -> None:
    in_each_shard(StagedJobFactory)
    in_each_shard(IdempotencyKeyFactory, request_path="/nowhere")
    in_both_shards(abandon)
    intervals = [f"--{loop}-interval=0.1" for loop in ("enqueue", "complete", "reap")]
    name = connections["shard_b"].settings_dict["NAME"]
    with commands.start(
        "idempotency_worker", "--database", "shard_b", *intervals, RIDES_TEST_SHARD_B=name
    ) as process:
        eventually(lambda: not StagedJob.objects.using("shard_b").exists())
        eventually(IdempotencyKey.objects.using("shard_b").stuck().exists)
        eventually(lambda: ProcessHeartbeat.objects.using("shard_b").count() == 3)
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert not ProcessHeartbeat.objects.using("default").exists()
    assert not IdempotencyKey.objects.using("default").stuck().exists()
    assert rows("default") == {"IdempotencyKey": 1, "StagedJob": 1}


def test_staged_jobs_and_the_doctor_look_into_the_shard_they_are_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with transaction.atomic(using="shard_b"):
        job = StagedJob.objects.using("shard_b").create(job_name="tests.job", failed_at=Now())
    for alias in SHARDS.values():
        call_command("staged_jobs", "stats", database=alias)
    assert [line.split(", ")[-1] for line in capsys.readouterr().out.splitlines()] == [
        "0 failed",
        "1 failed",
    ]
    with pytest.raises(SystemExit):
        call_command("idempotency_doctor", database="shard_b")
    assert "jobs_failed" in capsys.readouterr().out
    call_command("staged_jobs", "retry", str(job.pk), "--database", "shard_b")
    assert StagedJob.objects.using("shard_b").get().failed_at is None


@pytest.fixture
def routed(settings: Settings, serve: Any) -> Shop:
    """Return the shop with a router instead of ``using``: its code names no database."""
    shards.routed(settings)
    settings.IDEMPOTENCY = {}
    shop = Shop(using=None, alias=lambda request: None)
    serve(view=shop.view, plain=routed_plain)
    return shop


@idempotent
def routed_plain(request: HttpRequest) -> HttpResponseBase:
    """Create an entry and a job without naming a database."""
    Entry.objects.create(name="entry", idempotency_key=request.idempotency_key)
    stage_job("tests.kit.jobs.record", {"user": 1})
    return JsonResponse({}, status=201)


def test_with_a_router_a_view_names_no_database(routed: Shop, sender: Sender) -> None:
    routed.broken = False
    assert send(sender, "b").status_code == send(sender, "a").status_code == 201
    assert send(sender, "b")["Idempotent-Replayed"] == "true"
    for alias in SHARDS.values():
        assert rows(alias) == {"IdempotencyKey": 1, "StagedJob": 1, "DownstreamCall": 1, "Entry": 1}


def test_with_a_router_a_plain_view_names_no_database(routed: Shop, sender: Sender) -> None:
    assert send(sender, "b", url="/plain/").status_code == 201
    assert (rows("default"), rows("shard_b")) == (
        {},
        {"IdempotencyKey": 1, "StagedJob": 1, "Entry": 1},
    )


def test_with_a_router_a_message_and_its_job_go_to_the_shard(routed: Shop) -> None:
    with shards.tenant("shard_b"), process_once("stripe", "evt_1"):
        Entry.objects.create(name="entry")
        stage_job("tests.kit.jobs.record", {"user": 1})
    assert (rows("default"), rows("shard_b")) == (
        {},
        {"ProcessedMessage": 1, "StagedJob": 1, "Entry": 1},
    )


@pytest.mark.parametrize(
    "prepared", [False, True], ids=["one process for each shard", "PREPARE_REQUEST"]
)
def test_with_a_router_the_completer_of_a_shard_finishes_its_keys(
    routed: Shop, sender: Sender, settings: Settings, prepared: bool
) -> None:
    """The other shard has a key with the same id; the completer must not run the request of that
    key."""
    assert (
        send(sender, "a", body={"of": "a"}).status_code
        == send(sender, "b", body={"of": "b"}).status_code
        == 500
    )
    in_both_shards(abandon)
    routed.broken = False
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": prepare_request} if prepared else {}
    with shards.tenant(None if prepared else "shard_b"):
        assert complete_once(using="shard_b") == CompletePass(finished=1)
    assert rows("default") == {"IdempotencyKey": 1, "Entry": 1}
    assert rows("shard_b") == {"IdempotencyKey": 1, "StagedJob": 1, "DownstreamCall": 1, "Entry": 1}
    assert send(sender, "b", body={"of": "b"}).json()["body"] == {"of": "b"}


@pytest.mark.parametrize(
    "alias", ["shard_b", None], ids=["one process for each shard", "one for all"]
)
def test_with_a_router_the_reaper_settles_a_key_of_its_shard(
    routed: Shop, sender: Sender, alias: str | None
) -> None:
    """A key whose call is in doubt becomes stuck, whichever database the router chooses for
    calls."""
    assert (
        send(sender, "b", key="settled").status_code
        == send(sender, "b", key="in-doubt").status_code
        == 500
    )
    key = IdempotencyKey.objects.using("shard_b").get(idempotency_key="in-doubt")
    DownstreamCall.objects.using("shard_b").create(key_id=key.pk, name="sms", token=uuid4())
    in_both_shards(past_the_retention)
    with shards.tenant(alias):
        assert reap_once(using="shard_b") == ReapPass(settled=1, stuck=1)
    assert send(sender, "b", key="settled").status_code == 410
    assert problem(send(sender, "b", key="in-doubt"))["code"] == "key_stuck"


def test_with_a_router_the_admin_shows_and_moves_the_keys_of_the_shard(
    routed: Shop, settings: Settings
) -> None:
    settings.ROOT_URLCONF = "rides_demo.urls"
    stuck = {"stuck_at": Now(), "stuck_code": "in_doubt", "stuck_reason": "Look there."}
    in_each_shard(IdempotencyKeyFactory, request_path="/nowhere", **stuck)
    key = IdempotencyKey.objects.using("shard_b").get()
    IdempotencyKey.objects.using("shard_b").filter(pk=key.pk).update(request_path="/only-in-b")
    admin = Client(headers={"Host": "b.example"})
    admin.force_login(UserFactory(is_staff=True, is_superuser=True))
    pages = {
        host: admin.get("/admin/idempotency/idempotencykey/", headers={"Host": host}).text
        for host in SHARDS
    }
    assert ["/only-in-b" in page for page in pages.values()] == [False, True]
    pressed = admin.post(
        f"/admin/idempotency/idempotencykey/{key.pk}/press/acknowledge/",
        looked_at(key, "shard_b") | {"note": ""},
    )
    assert pressed.status_code == 302
    assert [IdempotencyKey.objects.using(alias).stuck().count() for alias in SHARDS.values()] == [
        1,
        0,
    ]


class ReplicaRouter:
    """A router that reads from a replica, here one with such a lag that it has no data yet."""

    def db_for_read(self, model: type[Model], **hints: Any) -> str | None:
        return "shard_b" if model._meta.app_label == "idempotency" else None

    def db_for_write(self, model: type[Model], **hints: Any) -> str | None:
        return "default"

    def allow_relation(self, *rows: Model, **hints: Any) -> bool:
        return True


@pytest.fixture
def replica(settings: Settings, serve: Any) -> Shop:
    """Return the shop behind a router that reads from a replica."""
    settings.DATABASE_ROUTERS = [ReplicaRouter()]
    shop = Shop(using=None, alias=lambda request: None)
    serve(view=shop.view, plain=routed_plain)
    return shop


def test_a_replay_is_not_read_from_a_replica(replica: Shop, sender: Sender) -> None:
    replica.broken = False
    for url in ("/view/", "/plain/"):
        first = sender.send(url, key=url, headers={"Host": "a.example"})
        again = sender.send(url, key=url, headers={"Host": "a.example"})
        assert (first.status_code, again.content, again["Idempotent-Replayed"]) == (
            201,
            first.content,
            "true",
        )
    assert rows("shard_b") == {}


def test_the_processes_do_not_read_from_a_replica(
    replica: Shop, sender: Sender, settings: Settings
) -> None:
    taken: list[str | None] = []
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.take"}}
    take.list = taken  # type: ignore[attr-defined]
    assert send(sender, "a").status_code == 500
    in_both_shards(abandon)
    replica.broken = False
    assert complete_once() == CompletePass(finished=1)
    assert enqueue_once() == EnqueuePass(handed_over=1)
    replica.broken = True
    assert send(sender, "a", key="left").status_code == 500
    in_both_shards(past_the_retention)
    assert reap_once() == ReapPass(deleted=1, settled=1)


@pytest.mark.parametrize(
    "end",
    [RuntimeError("on purpose"), HttpResponse(status=503), OperationalError("conflict")],
    ids=type,
)
def test_what_a_plain_view_wrote_to_another_database_goes_with_its_answer(
    end: Any, serve: Any, sender: Sender, monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    """This is the behaviour without the decorator if that database has ATOMIC_REQUESTS."""

    @idempotent(scope=lambda request: "everybody")
    def view(request: HttpRequest) -> HttpResponseBase:
        Entry.objects.using("shard_b").create(name="there")
        Entry.objects.using("default").create(name="here")
        last = ends.pop() if ends else JsonResponse({}, status=201)
        if isinstance(last, Exception):
            raise last from psycopg.errors.SerializationFailure()
        return last

    settings.ALLOWED_HOSTS = ["*"]
    monkeypatch.setitem(connections.settings["shard_b"], "ATOMIC_REQUESTS", True)
    ends: list[Any] = [end]
    serve(view=view)
    answers = [sender.send().status_code for _ in range(2)]
    assert answers[1] == 201
    assert (rows("default")["Entry"], rows("shard_b")) == (1, {"Entry": 1})
