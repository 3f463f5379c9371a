"""The how-to guides that are mostly settings: each block is executed as it stands, and then used."""

import re
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path
from django.views.decorators.http import require_http_methods
from django_tasks import task
from django_tasks_db.models import DBTaskResult
from drf_spectacular.generators import SchemaGenerator
from ninja.decorators import decorate_view
from prometheus_client import CollectorRegistry, generate_latest
from pytest_django import Settings
from rest_framework.views import APIView

from idempotency.backends import MAX_ATTEMPTS
from idempotency.contrib import ninja
from idempotency.contrib.celery import OnceTask
from idempotency.contrib.rq import RQBackend
from idempotency.contrib.tasks import TasksBackend
from idempotency.decorators import idempotent
from idempotency.enqueuer import BACKOFF_SECONDS, EnqueuePass, enqueue_once
from idempotency.exceptions import NoOpenTransaction
from idempotency.models import StagedJob
from tests.factories import StagedJobFactory
from tests.kit import jobs
from tests.kit.celery_app import app as celery_app
from tests.kit.examples import GUIDES, blocks, shop_modules
from tests.kit.pages import says

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """Return a function that makes the modules of the shop that the pages import, with these models and functions."""
    return shop_modules(monkeypatch)


def executed(guide: str, *numbers: int, **names: Any) -> SimpleNamespace:
    """Execute blocks of a guide with these names in reach; return what they made."""
    for number in numbers:
        exec(compile(blocks(guide, "python")[number], guide, "exec"), names)
    return SimpleNamespace(**names)


# choose-a-queue.md


def test_each_queue_of_the_settings_gets_its_jobs(broker: Any, settings: Settings, shop: Any) -> None:
    sent: list[StagedJob] = []
    shop(audit={"send": sent.append})
    settings.IDEMPOTENCY = executed("choose-a-queue.md", 0).IDEMPOTENCY
    reports, audit, other = (
        StagedJobFactory(job_name="tests.kit.jobs.record", job_args=[1], queue=queue)
        for queue in ("reports", "audit", "default")
    )
    assert enqueue_once() == EnqueuePass(handed_over=3)
    assert [job.pk for job in sent] == [audit.pk]
    assert broker.lrange("rq:queue:default", 0, -1) == [str(other.pk).encode()]
    assert str(reports.pk).encode() in broker.lindex("reports", 0)
    broker.flushdb()


def test_the_task_of_the_page_is_one_that_celery_is_given(broker: Any, settings: Settings, shop: Any) -> None:
    shop(tasks={"__name__": "shop.tasks"})
    made = executed("choose-a-queue.md", 1, __name__="shop.tasks")
    name = re.findall(r'stage_job\("(shop\.tasks\.\w+)", \{"ride_id"', (GUIDES / "choose-a-queue.md").read_text())[0]
    assert name == made.send_receipt.name
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": "idempotency.contrib.celery.CeleryBackend"}}
    job = StagedJobFactory(job_name=name, job_args={"ride_id": 1})
    try:
        assert enqueue_once() == EnqueuePass(handed_over=1)
        assert str(job.pk).encode() in broker.lindex("celery", 0)
    finally:
        celery_app.tasks.pop(name)
        broker.flushdb()


def test_a_plain_enqueue_is_staged_with_the_tasks_of_the_page(settings: Settings) -> None:
    settings.TASKS = executed("choose-a-queue.md", 2).TASKS
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": "idempotency.contrib.tasks.TasksBackend"}}
    record = task(jobs.record)
    with pytest.raises(NoOpenTransaction):
        record.enqueue(1)
    with transaction.atomic():
        record.enqueue(1)
    assert StagedJob.objects.get().job_name == "tests.kit.jobs.record"
    assert enqueue_once() == EnqueuePass(handed_over=1)
    assert DBTaskResult.objects.get().backend_name == "worker"


def hours(*seconds: float) -> float:
    return round(sum(seconds) / 3600, 1)


def test_how_long_jobs_are_tried_is_what_the_page_says() -> None:
    text = (GUIDES / "choose-a-queue.md").read_text()
    said = re.findall(r"^\| (RQ|Celery|Django Tasks) \|.*?(\d+)\)? (?:more )?tries within ([\d.]+) hours", text, re.M)
    doubled = [2**number for number in range(MAX_ATTEMPTS)]
    assert [(name, int(tries), float(within)) for name, tries, within in said] == [
        ("RQ", RQBackend.retry.max, hours(*RQBackend.retry.intervals)),
        ("Celery", OnceTask.max_retries, hours(*(min(2**tries, 3600) for tries in range(OnceTask.max_retries)))),
        ("Django Tasks", MAX_ATTEMPTS, hours(*(TasksBackend.follow_up_seconds * wait for wait in doubled))),
    ]
    assert says(text, hours(*(TasksBackend.follow_up_seconds * wait for wait in doubled)), "hours")
    # The last refusal is followed by no wait.
    assert says(text, hours(*(BACKOFF_SECONDS * wait for wait in doubled[:-1])), "hours")


# use-a-pooler.md: the runs behind poolers have their settings from the page (tests/settings.py).


@pytest.mark.parametrize("options", [{}, {"OPTIONS": {"application_name": "shop"}}])
def test_the_settings_of_poolers_keep_what_is_there(options: dict[str, Any]) -> None:
    databases = {"default": {"NAME": "shop", **options}}
    executed("use-a-pooler.md", 0, DATABASES=databases)
    assert databases["default"] == {
        "NAME": "shop",
        "DISABLE_SERVER_SIDE_CURSORS": True,
        "OPTIONS": {**options.get("OPTIONS", {}), "prepare_threshold": None},
    }
    executed("use-a-pooler.md", 1, DATABASES=databases)
    assert databases["default"]["OPTIONS"]["pool"]["max_size"] > databases["default"]["OPTIONS"]["pool"]["min_size"]


# publish-in-openapi.md


def described(operation: dict[str, Any]) -> bool:
    return "x-idempotency" in operation and {"400", "409", "422", "503"} <= {str(status) for status in operation["responses"]}


def test_the_schema_class_of_the_page_describes_a_protected_method(settings: Settings) -> None:
    settings.REST_FRAMEWORK = executed("publish-in-openapi.md", 0).REST_FRAMEWORK

    class Orders(APIView):
        @idempotent
        def post(self, request: Any) -> Any: ...

        def put(self, request: Any) -> Any: ...

    document = SchemaGenerator(patterns=[path("orders", Orders.as_view())]).get_schema(public=True)
    assert {method: described(operation) for method, operation in document["paths"]["/orders"].items()} == {
        "post": True,
        "put": False,
    }


def test_the_ninja_api_of_the_page_describes_a_protected_operation() -> None:
    api = executed("publish-in-openapi.md", 1).api
    api.urls_namespace = "publish-in-openapi"

    @api.post("/orders")
    @decorate_view(ninja.idempotent)
    def create_order(request: HttpRequest) -> None: ...

    assert described(api.get_openapi_schema(path_prefix="")["paths"]["/orders"]["post"])


def test_a_document_kept_by_hand_is_described(settings: Settings) -> None:
    @idempotent
    def create_order(request: HttpRequest) -> JsonResponse:
        return JsonResponse({})

    settings.ROOT_URLCONF = urls = ModuleType("urls")
    urls.urlpatterns = [path("orders/", require_http_methods(["PUT", "POST"])(create_order))]  # type: ignore[attr-defined]
    operation = {"responses": {"201": {"description": "Made."}}}
    document: dict[str, Any] = {"paths": {"/orders/": {"post": operation}}, "components": {"schemas": {}}}
    executed("publish-in-openapi.md", 2, document=document)
    assert described(document["paths"]["/orders/"]["post"])
    assert list(document["components"]["schemas"]) == ["IdempotencyProblem"]


# metrics-and-alerts.md


def test_the_registered_collector_reads_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry := CollectorRegistry())
    executed("metrics-and-alerts.md", 0)
    StagedJobFactory()
    assert b"\nidempotency_due_jobs 1.0\n" in generate_latest(registry)
