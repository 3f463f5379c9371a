"""System checks of operations."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, current_app
from django.core.checks import run_checks

from idempotency.checks import operations as checks
from idempotency.contrib.celery import RETRIES, OnceTask
from idempotency.operations import keyed, operation
from tests import operations


def found(check_id: str) -> list[str]:
    return [message.msg for message in run_checks(databases=[]) if message.id == check_id]


@pytest.fixture
def app() -> Iterator[Celery]:
    """Return the current app of Celery, without the tasks of the test at its end."""
    former = current_app._get_current_object()
    app = Celery("checks", broker="memory://")
    app.set_current()
    yield app
    app.close()
    former.set_current()


def test_the_operations_of_the_tests_pass() -> None:
    assert found("idempotency.E014") == found("idempotency.E015") == []


def test_an_option_that_has_no_effect_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        """Do nothing."""

    made = [
        operation("tests.elsewhere", using="nowhere")(work),
        operation("tests.short", retention_hours=1)(work),
        operation("tests.long", retention_hours=1000, using="default")(work),
        operation("tests.forever", retention_hours="forever")(work),
    ]
    monkeypatch.setattr(checks, "registered", lambda: [each._definition for each in made])
    for check_id, name in (("E005", "tests.elsewhere"), ("W016", "tests.short")):
        assert [text.split()[2] for text in found(f"idempotency.{check_id}")] == [name]


def test_a_phased_operation_without_a_retention_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @operation("tests.forgetful", call=keyed(operations.transfer, valid_hours=23))
    def forgetful(made: int, /, *, name: str, cents: int) -> int:
        return made

    @operation("tests.chain", after=operations.booked)
    def chain(*, name: str, cents: int) -> None:
        """Do nothing."""

    monkeypatch.setattr(
        checks,
        "registered",
        lambda: [each._definition for each in (forgetful, chain, operations.note, operations.pay)],
    )
    assert [text.split()[2] for text in found("idempotency.E014")] == [
        "tests.forgetful",
        "tests.chain",
    ]


def calls() -> Any:
    return operations_pay.once("key", name="one", cents=1)


def calls_for_a_user(user: Any) -> Any:
    return operations_pay.by(user).once("key", name="one", cents=1)


async def awaits() -> Any:
    return await operations_pay.aonce("key", name="one", cents=1)


def of_an_outer_function() -> Callable[[], Any]:
    pay = operations.pay

    def calls_it() -> Any:
        return pay.once("key", name="one", cents=1)

    return calls_it


def calls_a_plain_one() -> Any:
    return operations_note.once("key", name="one")


def calls_a_plain_one_and_stages() -> Any:
    operations_pay.stage("key", name="one", cents=1)
    return operations_note.once("key", name="one")


def stages() -> Any:
    return operations_pay.stage("key", name="one", cents=1)


operations_pay, operations_note = operations.pay, operations.note
MISTAKES = [
    calls,
    calls_for_a_user,
    awaits,
    of_an_outer_function(),
    operations.pay.once,
    operations.pay,
]


@pytest.mark.parametrize("function", MISTAKES)
def test_a_once_task_that_calls_a_phased_operation_is_an_error(
    app: Celery, function: Callable[..., Any]
) -> None:
    app.task(shared=False, base=OnceTask, name="tests.mistake")(function)
    [text] = found("idempotency.E015")
    assert "tests.mistake" in text
    assert "tests.pay" in text


@pytest.mark.parametrize("options", [{}, {"bind": True}, {"autoretry_for": [ValueError]}])
def test_its_options_hide_no_mistake(app: Celery, options: dict[str, Any]) -> None:
    def function(*args: Any) -> Any:
        return operations_pay.once("key", name="one", cents=1)

    app.task(shared=False, base=OnceTask, name="tests.mistake", **options)(function)
    assert len(found("idempotency.E015")) == 1


@pytest.mark.parametrize("function", [calls_a_plain_one, calls_a_plain_one_and_stages, stages])
def test_a_once_task_may_call_plain_operations_and_stage_others(
    app: Celery, function: Callable[..., Any]
) -> None:
    app.task(shared=False, base=OnceTask, name="tests.right")(function)
    assert not found("idempotency.E015")


def test_a_task_with_the_options_may_call_each_operation(app: Celery) -> None:
    app.task(shared=False, name="tests.right", **RETRIES)(calls)
    assert not found("idempotency.E015")
