"""What ``manage.py check`` finds in calls of ``stage_job``: names that their queue refuses."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest
from django.core.checks import CheckMessage, run_checks
from pytest_django import Settings

from idempotency import _hand_over
from idempotency.jobs import stage_job
from tests.kit import celery_app  # noqa: F401  # the current app of Celery

BACKENDS = {
    "*": "idempotency.contrib.rq.RQBackend",
    "celery": "idempotency.contrib.celery.CeleryBackend",
    "function": "tests.kit.jobs.nobody_takes",
}
Check = Callable[..., list[CheckMessage]]


@pytest.fixture
def check(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Check]:
    """Return a function that writes a module of a shop, imports it with the URLconf, and runs the checks."""
    _hand_over._built.clear()
    monkeypatch.syspath_prepend(tmp_path)
    settings.IDEMPOTENCY = {"ENQUEUERS": BACKENDS}

    def run(code: str, module: str = "shop_views") -> list[CheckMessage]:
        (tmp_path / f"{module}.py").write_text(dedent(code) + "\nurlpatterns = []\n")
        settings.ROOT_URLCONF = module
        return [message for message in run_checks(databases=[]) if message.id == "idempotency.W013"]

    yield run
    _hand_over._built.clear()
    for name in ("shop_views", "test_shop"):
        sys.modules.pop(name, None)


def test_the_name_of_a_plain_function_on_a_queue_of_celery_is_found_with_its_line(
    check: Check,
) -> None:
    (message,) = check(
        """
        from idempotency.jobs import stage_job

        def view(request):
            stage_job("tests.kit.jobs.record", queue="celery")  # is a task
            stage_job("tests.kit.jobs.anything", {"order_id": 1}, queue="celery")
        """
    )
    assert "shop_views.py:6 " in message.msg
    assert "'tests.kit.jobs.anything'" in message.msg
    assert "@shared_task(base=OnceTask)" in message.msg


@pytest.mark.parametrize(
    "call",
    [
        'stage_job("tests.unprotected", queue="celery")',
        'stage_job(name="shop.jobs.absent", queue="celery")',
        'await astage_job("shop.jobs.absent", queue="celery")',
        'jobs.stage_job("shop.jobs.absent", queue="celery")',
        'idempotency.jobs.stage_job("shop.jobs.absent", queue="celery")',
        'stage_job("tests.kit.jobs.absent")',
        'stage_job("json.dumps")',
    ],
)
def test_each_form_of_a_call_is_read(check: Check, call: str) -> None:
    code = "import idempotency.jobs\nfrom idempotency import jobs\nfrom idempotency.jobs import astage_job, stage_job\n"
    assert len(check(f"{code}async def view(request):\n    {call}")) == 1


@pytest.mark.parametrize(
    "call",
    [
        'stage_job("tests.kit.jobs.record")',
        'stage_job("anything.at.all", queue="function")',
        'stage_job(f"shop.jobs.{request}")',
        'stage_job("shop.jobs.absent", queue=request.queue)',
        'stage_job("shop.jobs.absent", **request.options)',
        'other.stage_job("shop.jobs.absent")',
    ],
)
def test_a_call_that_may_be_right_is_no_warning(check: Check, call: str) -> None:
    assert check(f"from idempotency.jobs import stage_job\ndef view(request, other):\n    {call}") == []


def test_tests_may_stage_wrong_names(check: Check) -> None:
    assert check('from idempotency.jobs import stage_job\ndef view(): stage_job("shop.jobs.absent")', "test_shop") == []


def test_a_module_without_source_is_passed_over(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("shop_without_source")
    module.stage_job = stage_job  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert check("") == []


def test_a_backend_that_cannot_be_built_is_reported_by_another_check(check: Check, settings: Settings) -> None:
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": "shop.absent.Backend"}}
    assert check('from idempotency.jobs import stage_job\ndef view(): stage_job("shop.jobs.absent")') == []


def test_a_default_backend_whose_package_is_missing_is_found_where_a_job_is_staged(
    check: Check, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.IDEMPOTENCY = {}
    monkeypatch.setitem(sys.modules, "idempotency.contrib.rq", None)
    messages = check('from idempotency.jobs import stage_job\ndef view(request):\n    stage_job("tests.kit.jobs.record")\n')
    (message,) = [message for message in messages if "shop_views.py:3 " in message.msg]
    assert "IDEMPOTENCY['ENQUEUERS']" in message.msg
