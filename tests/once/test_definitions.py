"""Definitions of operations that are refused at import, since their keys could not be stored,
compared, or continued."""

from collections.abc import Callable
from typing import Any

import pytest
from django.apps import apps

from idempotency._operations import definition
from idempotency.operations import Rejected, at_most_once, keyed, operation, step

LONGEST = "b" * 50


def function(name: str, calls: Any = None) -> Callable[..., Any]:
    """Return a function with the parameters of the others; with ``calls``, the function of a call
    or of the transaction after it."""

    def transaction(*, pilot: int, cents: int = 0) -> None:
        """Do nothing."""

    def with_a_value(value: Any, /, *, pilot: int, cents: int) -> None:
        """Do nothing."""

    made = transaction if calls is None else with_a_value
    made.__name__ = name
    return made


def call(name: str) -> Any:
    return keyed(function(name, "call"), valid_hours=23)


def define(last: Callable[..., Any] | None = None, **options: Any) -> Any:
    last = last or function("last", "call")
    return operation("tests.defined", **{"call": call("transfer"), **options})(last)


def without_cents(value: Any, /, *, pilot: int) -> None:
    """Do nothing."""


def with_any(value: Any, /, **given: int) -> None:
    """Do nothing."""


def by_position(value: Any, pilot: int, /, cents: int) -> None:
    """Do nothing."""


def undone(why: Rejected, *, pilot: int, currency: str) -> None:
    """Do nothing."""


def test_functions_with_different_names_and_the_same_parameters_are_an_operation() -> None:
    first = step(call=at_most_once(function("first_call", "call")), after=function(LONGEST))
    steps = define(after=first(function("second", "call")))._definition.steps
    assert steps.points == ("started", LONGEST, "second", "finished")
    assert list(steps.calls) == ["first_call", "transfer"]
    assert steps.first_call == "", "a claim begins only a call with a key of the service"
    keyed_first = step(call=call("first_call"))(function("second", "call"))
    last = at_most_once(function("transfer", "call"))
    assert define(after=keyed_first, call=last)._definition.steps.first_call == "first_call"


@pytest.mark.parametrize(
    "options",
    [
        {"after": function("finished")},
        {"after": function(LONGEST + "b")},
        {"call": call(LONGEST + "b")},
        {"after": step(call=call("transfer"))(function("first", "call"))},
        {"after": step(call=call("other"), after=function("twice"))(function("twice", "call"))},
    ],
)
def test_a_name_that_cannot_be_stored_or_is_stored_twice_is_refused(
    options: dict[str, Any],
) -> None:
    with pytest.raises(TypeError, match=r"tests\.defined must have different names"):
        define(**options)


@pytest.mark.parametrize("option", ["after", "call", "undo", "last"])
@pytest.mark.parametrize("wrong", [without_cents, with_any, by_position, undone])
def test_functions_with_other_parameters_are_refused(
    option: str, wrong: Callable[..., Any]
) -> None:
    options = {
        "after": lambda: {"after": step(call=call("first"))(wrong)},
        "call": lambda: {"call": keyed(wrong, valid_hours=23)},
        "undo": lambda: {"undo": wrong},
        "last": lambda: {"last": wrong},
    }[option]()
    with pytest.raises(TypeError, match=r"operation tests\.defined must have the same parameters"):
        define(**options)


def test_undo_without_an_earlier_transaction_is_refused() -> None:
    with pytest.raises(TypeError, match=r"undo= of the operation tests\.defined would never run"):
        define(undo=lambda why, *, pilot, cents: None)


@pytest.mark.parametrize("name", ["n" * 101, "tests:pay", "tests\npay", " \0"])
def test_an_invalid_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="1 to 100 printable characters"):
        operation(name)(function("last"))


@pytest.mark.parametrize("name", ["n", "n" * 100])
def test_a_name_has_1_to_100_characters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition, "_operations", {})
    assert operation(name)(function("last"))._definition.name == name


@pytest.mark.parametrize(
    ("option", "most"), [("retention_hours", 87_600), ("lease_seconds", 86_400)]
)
def test_an_option_has_its_limits(option: str, most: int) -> None:
    for value in (1, most):
        assert getattr(define(**{option: value})._definition, option) == value
    for value in (0, -1, most + 1, True, 1.5, "1", "always"):
        with pytest.raises(ValueError, match=f"from 1 to {most:,}"):
            define(**{"retention_hours": "forever", option: value})


@pytest.mark.parametrize("hours", [0, -1, 87_601, float("nan"), "23", None])
def test_the_validity_of_a_call_is_a_number_above_0_and_at_most_ten_years(hours: Any) -> None:
    with pytest.raises(ValueError, match="above 0, and at most 87,600"):
        keyed(function("transfer", "call"), valid_hours=hours)


@pytest.mark.parametrize("hours", [0.5, 87_600])
def test_a_call_is_valid_for_parts_of_an_hour_up_to_ten_years(hours: float) -> None:
    assert keyed(function("transfer", "call"), valid_hours=hours).valid_hours == hours


def test_only_an_operation_of_the_start_can_be_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition, "_operations", {})
    monkeypatch.setattr(definition, "OPERATIONS", set())
    operation("tests.late")(function("last"))
    with monkeypatch.context() as start:
        start.setattr(apps, "ready", False)
        operation("tests.early")(function("last"))
    assert {"tests.early"} == definition.OPERATIONS


def test_two_functions_cannot_have_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition, "_operations", {})
    first, other = function("first"), function("other")
    other.__qualname__ = "other"
    for _ in range(2):  # A module that is imported again defines the same function again.
        operation("tests.twice")(first)
    with pytest.raises(ValueError, match="Two operations have the name"):
        operation("tests.twice")(other)
