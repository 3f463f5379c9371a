"""The crash kit on operations: each planted bug is caught, with its line and the cure for
operations; each correct operation passes."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import async_to_sync

from idempotency._operations import definition
from idempotency.testing import (
    CannotProve,
    DoesNotSurvive,
    Downstream,
    assert_survives,
    courses,
    cures,
)
from tests.crash import operations
from tests.crash.views import systems
from tests.factories import UserFactory

RIGHT = ["plain", "asynchronous", "refusal", "pay", "declining", "texting", "chain"]
#: The operation, the cause whose cure the message must name, and the function and the text of the
#: line that it must name.
WRONG = [
    ("write_in_the_call", cures.OUTSIDE, "charged_and_written", 'create(name="outside")'),
    (
        "transaction_in_the_call",
        cures.OUTSIDE,
        "charged_and_committed",
        'create(name="committed")',
    ),
    ("key_not_passed", cures.UNSAFE_CALL, "charged_without_key", "systems.charge"),
    ("random_key", cures.RANDOM_KEY, "charged_with_another_key", "systems.charge"),
    ("other_arguments", cures.OTHER_ARGUMENTS, "charged_another_amount", "systems.charge"),
    (
        "text_in_the_last_transaction",
        cures.UNSAFE_CALL,
        "text_in_the_last_transaction",
        "systems.text",
    ),
    ("text_in_a_plain_operation", cures.UNSAFE_CALL, "text_in_a_plain_operation", "systems.text"),
    ("text_after_commit", cures.LOST, "text_after_commit", "systems.text"),
]
#: The cases of the default run.
QUICK = ["plain", "write_in_the_call", "key_not_passed", "text_in_the_last_transaction"]

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch, texts: list[str]) -> None:
    """Register the operations, as those of a module ``operations`` are at start. Their calls of
    the text service are seen with their lines."""
    systems.text = Downstream("texts", "sent")
    for each in operations.ALL:
        monkeypatch.setitem(definition._operations, each._definition.name, each._definition)


def caller(name: str) -> Callable[[str], Any]:
    """Return what calls an operation with a key."""
    return lambda key: getattr(operations, name).once(key, name="one")


def cases(names: list[Any]) -> list[Any]:
    """Return the parameters; those that are not quick only run with the processes."""
    named = [name if isinstance(name, tuple) else (name,) for name in names]
    return [
        pytest.param(*case, id=case[0], marks=[] if case[0] in QUICK else pytest.mark.processes)
        for case in named
    ]


@pytest.mark.parametrize("name", cases(RIGHT))
def test_a_correct_operation_passes(name: str, line: Callable[[str, str], None]) -> None:
    report = assert_survives(caller(name))
    line(f"correct operation: {name}", f"passes: {report}")
    assert report.courses > len(report.places)
    assert bool(report.handed_over) == (name == "texting")


@pytest.mark.parametrize(("name", "cure", "function", "culprit"), cases(WRONG))
def test_a_planted_bug_is_caught_with_its_line_and_its_cure(
    name: str,
    cure: str,
    function: str,
    culprit: str,
    line: Callable[[str, str], None],
) -> None:
    def check_each() -> None:
        for course in courses(caller(name)):
            course.check()

    with pytest.raises(DoesNotSurvive) as caught:
        check_each()
    (failure,) = caught.value.failures
    assert failure.cure == cures.OF_OPERATIONS[cure], str(failure)
    assert any(
        f"tests/crash/operations.py:{number} in" in failure.cause
        for number in lines_near(function, culprit)
    ), str(failure)
    line(f"planted: {name.replace('_', ' ')}", f"caught: {failure.cause[:110]}")


def lines_near(function: str, culprit: str) -> range:
    """Return the lines of a function from two before the culprit to two after."""
    found = getattr(operations, function)
    source, first = inspect.getsourcelines(getattr(found, "function", found))
    (number,) = (first + offset for offset, text in enumerate(source) if culprit in text)
    return range(number - 2, number + 3)


def failures_of(send: Callable[[str], Any], **options: Any) -> Any:
    """Return what the kit reports."""
    with pytest.raises(DoesNotSurvive) as caught:
        assert_survives(send, races=False, **options)
    return caught.value.failures


@pytest.mark.processes
def test_a_function_that_only_its_caller_can_run_is_caught() -> None:
    def send(key: str) -> Any:
        token = operations.currency.set("eur")
        try:
            return caller("context_of_the_caller")(key)
        finally:
            operations.currency.reset(token)

    for failure in failures_of(send):
        assert failure.cure == cures.OF_OPERATIONS[cures.NOT_REBUILT]
        assert "the completer takes over" in failure.course
        assert "LookupError" in failure.cause


@pytest.mark.postgres
def test_a_lost_update_of_two_keys_is_caught() -> None:
    with pytest.raises(DoesNotSurvive) as caught:
        assert_survives(caller("lost_update"))
    assert {failure.cure for failure in caught.value.failures} == {cures.LOST_UPDATE}


def test_a_refusal_that_nothing_undoes_proves_nothing() -> None:
    with pytest.raises(CannotProve, match="stuck key"):
        assert_survives(caller("refusal_that_nothing_undoes"))


@pytest.mark.processes
def test_a_second_caller_gets_the_same_result() -> None:
    def later(key: str) -> Any:
        return async_to_sync(operations.pay.aonce)(key, name="one")

    assert_survives(caller("pay"), again=later, races=False)


def test_a_second_caller_in_another_scope_is_caught() -> None:
    user = UserFactory()

    def other(key: str) -> Any:
        return operations.refusal.by(user).once(key, name="one")

    (failure, *_) = failures_of(caller("refusal"), again=other)
    assert failure.cure == cures.OF_OPERATIONS[cures.WRITTEN_AGAIN]


def test_a_second_caller_with_other_arguments_proves_nothing() -> None:
    def other(key: str) -> Any:
        return operations.plain.once(key, name="two")

    with pytest.raises(CannotProve, match="KeyReused"):
        assert_survives(caller("plain"), again=other)


def test_an_exception_of_the_undisturbed_operation_is_shown() -> None:
    def broken(key: str) -> Any:
        return operations.context_of_the_caller.once(key, name="one")

    with pytest.raises(CannotProve) as caught:
        assert_survives(broken)
    assert isinstance(caught.value.__cause__, LookupError)
