"""The how-to guides that are mostly settings: each block is executed as it stands, and then
used."""

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
from prometheus_client import CollectorRegistry, generate_latest
from pytest_django import Settings
from rest_framework.views import APIView

from idempotency._outcomes import BACKOFF_SECONDS
from idempotency.backends import MAX_ATTEMPTS
from idempotency.contrib.celery import _MAX_WAIT, OnceTask
from idempotency.contrib.rq import RQBackend
from idempotency.contrib.tasks import TasksBackend
from idempotency.decorators import idempotent
from idempotency.enqueuer import EnqueuePass, enqueue_once
from idempotency.exceptions import NoOpenTransaction
from idempotency.models import StagedJob
from tests.factories import StagedJobFactory
from tests.kit import jobs
from tests.kit.examples import file_of, shop_modules
from tests.kit.pages import says
from tests.kit.printed import GUIDES, Write, steps

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """Return a function that makes the modules of the shop that the pages import, with these models
    and functions."""
    return shop_modules(monkeypatch)


def executed(guide: str, path: str, **names: Any) -> SimpleNamespace:
    """Execute a file of a guide with these names in reach; return what it made."""
    names |= {"__name__": path.removesuffix(".py").replace("/", ".")}
    exec(compile(file_of(guide, path), path, "exec"), names)
    return SimpleNamespace(**names)


def added(guide: str, path: str) -> list[Write]:
    """Return what a guide adds to a file, step by step."""
    return [
        step
        for step in steps((GUIDES / guide).read_text())
        if isinstance(step, Write) and step.path == path
    ]


# choose-a-queue.md


def test_a_plain_enqueue_is_staged_with_the_tasks_of_the_page(settings: Settings) -> None:
    settings.TASKS = executed("choose-a-queue.md", "shop/settings.py", INSTALLED_APPS=[]).TASKS
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
    said = re.findall(
        r"^\| (RQ|Celery|Django Tasks) \|.*?(\d+)\)? (?:more )?tries within ([\d.]+) hours",
        text,
        re.M,
    )
    doubled = [2**number for number in range(MAX_ATTEMPTS)]
    assert [(name, int(tries), float(within)) for name, tries, within in said] == [
        ("RQ", RQBackend.retry.max, hours(*RQBackend.retry.intervals)),
        (
            "Celery",
            OnceTask.max_retries,
            hours(*(min(2**tries, _MAX_WAIT) for tries in range(OnceTask.max_retries))),
        ),
        (
            "Django Tasks",
            MAX_ATTEMPTS,
            hours(*(TasksBackend.follow_up_seconds * wait for wait in doubled)),
        ),
    ]
    assert says(text, hours(*(TasksBackend.follow_up_seconds * wait for wait in doubled)), "hours")
    # The last refusal is followed by no wait.
    assert says(text, hours(*(BACKOFF_SECONDS * wait for wait in doubled[:-1])), "hours")


# use-a-pooler.md: the runs behind poolers have their settings from the page (tests/settings.py).


@pytest.mark.parametrize("options", [{}, {"OPTIONS": {"application_name": "shop"}}])
def test_the_settings_of_poolers_keep_what_is_there(options: dict[str, Any]) -> None:
    databases = {"default": {"NAME": "shop", **options}}
    for_pgbouncer, for_a_pool = (
        step.content for step in added("use-a-pooler.md", "shop/settings.py")[2:]
    )
    exec(for_pgbouncer, {"DATABASES": databases})
    assert databases["default"] == {
        "NAME": "shop",
        "DISABLE_SERVER_SIDE_CURSORS": True,
        "OPTIONS": {**options.get("OPTIONS", {}), "prepare_threshold": None},
    }
    exec(for_a_pool, {"DATABASES": databases})
    assert (
        databases["default"]["OPTIONS"]["pool"]["max_size"]
        > databases["default"]["OPTIONS"]["pool"]["min_size"]
    )


# publish-in-openapi.md


def described(operation: dict[str, Any]) -> bool:
    return "x-idempotency" in operation and {"400", "409", "422", "503"} <= {
        str(status) for status in operation["responses"]
    }


def test_the_schema_class_of_the_page_describes_a_protected_method(settings: Settings) -> None:
    settings.REST_FRAMEWORK = executed(
        "publish-in-openapi.md", "shop/settings.py", INSTALLED_APPS=[]
    ).REST_FRAMEWORK

    class Orders(APIView):
        @idempotent
        def post(self, request: Any) -> Any: ...

        def put(self, request: Any) -> Any: ...

    document = SchemaGenerator(patterns=[path("orders", Orders.as_view())]).get_schema(public=True)
    assert {
        method: described(operation) for method, operation in document["paths"]["/orders"].items()
    } == {
        "post": True,
        "put": False,
    }


def test_the_ninja_api_of_the_page_describes_a_protected_operation(shop: Any) -> None:
    api = executed("publish-in-openapi.md", "shop/api.py").api
    api.urls_namespace = "publish-in-openapi"
    assert described(api.get_openapi_schema(path_prefix="")["paths"]["/orders"]["post"])


def test_a_document_kept_by_hand_is_described(settings: Settings) -> None:
    @idempotent
    def create_order(request: HttpRequest) -> JsonResponse:
        return JsonResponse({})

    settings.ROOT_URLCONF = urls = ModuleType("urls")
    urls.urlpatterns = [path("function/", require_http_methods(["PUT", "POST"])(create_order))]  # type: ignore[attr-defined]
    example = executed("publish-in-openapi.md", "shop/openapi.py")
    document = example.add_policies(example.DOCUMENT)
    assert described(document["paths"]["/function/"]["post"])
    assert list(document["components"]["schemas"]) == ["IdempotencyProblem"]


# metrics-and-alerts.md


def test_the_registered_collector_reads_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry := CollectorRegistry())
    executed("metrics-and-alerts.md", "shop/apps.py").ShopConfig("shop", prometheus_client).ready()
    StagedJobFactory()
    assert b"\nidempotency_due_jobs 1.0\n" in generate_latest(registry)
