"""Deploys between two runs of a key, hooks that end a step badly, and functions that do not run."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import OperationalError, transaction
from psycopg.errors import SerializationFailure

from idempotency._operations.steps import Step, Steps
from idempotency.completer import CompletePass, complete_once
from idempotency.exceptions import (
    InterventionRequired,
    NoOpenTransaction,
    Rejected,
    StuckCode,
    Unavailable,
    Unfinished,
)
from idempotency.models import IdempotencyKey
from idempotency.operations import keyed, operation, step
from tests.kit.ageing import abandon
from tests.models import Account, Entry
from tests.operations import Bank, booked, charge, note, pay

pytestmark = pytest.mark.django_db(transaction=True)


def broken() -> None:
    raise OSError("no route")


@contextmanager
def deployed(of: Any, **changes: Any) -> Iterator[None]:
    """Run the block with other functions of the last step of an operation."""
    former = of._definition.steps
    last = dataclasses.replace(former.last, **changes)
    object.__setattr__(of._definition, "steps", Steps(last, former.undo, of._definition.name))
    try:
        yield
    finally:
        object.__setattr__(of._definition, "steps", former)


def unfinished(bank: Bank, of: Any) -> None:
    bank.after = broken
    with pytest.raises(Unfinished):
        of.once("key", name="one", cents=5)
    bank.after = lambda: None


def test_a_renamed_call_is_never_made_however_long_its_key_is_retried(bank: Bank) -> None:
    def send(key: str, *, name: str, cents: int) -> int:
        return bank.transfer(key, cents)

    unfinished(bank, charge)
    with deployed(charge, call=keyed(send, valid_hours=23)):
        for _ in range(60):
            with pytest.raises((Unavailable, InterventionRequired)):
                charge.once("key", name="one", cents=5)
    assert len(bank.transfers) == 1
    assert IdempotencyKey.objects.get().stuck_code == StuckCode.CALL_IN_DOUBT


def checked(*, name: str, cents: int) -> None:
    raise Rejected("limit")


@pytest.mark.parametrize("after", [checked, Step(booked, None, checked)])
@pytest.mark.parametrize("history", ["whole", "lost"])
def test_a_refusal_by_an_inserted_step_does_not_hide_a_call_that_was_begun(
    history: str, after: Any, bank: Bank
) -> None:
    unfinished(bank, charge)
    if history == "lost":
        IdempotencyKey.objects.update(history=[])
    with deployed(charge, after=after), pytest.raises(InterventionRequired):
        charge.once("key", name="one", cents=5)
    assert "inserted" in IdempotencyKey.objects.get().stuck_reason
    assert len(bank.transfers) == 1


def test_a_service_may_refuse_the_call_that_an_earlier_run_has_begun(bank: Bank) -> None:
    def declined() -> None:
        raise Rejected("declined")

    unfinished(bank, charge)
    bank.before = declined
    with pytest.raises(Rejected, match="declined"):
        charge.once("key", name="one", cents=5)


@pytest.mark.parametrize("place", ["its call", "its transaction"])
def test_an_inserted_step_that_refuses_does_not_hide_a_later_call(place: str, bank: Bank) -> None:
    def limit(key: str, *, name: str, cents: int) -> int:
        if place == "its call":
            raise Rejected("limit")
        return cents

    def limited(found: int, /, *, name: str, cents: int) -> Rejected:
        return Rejected("limit")

    unfinished(bank, charge)
    inserted = step(call=keyed(limit, valid_hours=23))(limited)
    with deployed(charge, after=inserted), pytest.raises(InterventionRequired):
        charge.once("key", name="one", cents=5)
    assert "inserted" in IdempotencyKey.objects.get().stuck_reason
    assert len(bank.transfers) == 1


def test_a_committed_step_that_a_deploy_moves_behind_another_is_not_repeated(bank: Bank) -> None:
    def posted(*, name: str, cents: int) -> None:
        Entry.objects.create(name=f"posted {name}")

    with deployed(charge, after=Step(posted, None, booked)):
        unfinished(bank, charge)
    with deployed(charge, after=Step(booked, None, posted)):
        with pytest.raises(Unavailable):
            charge.once("key", name="one", cents=5)
        assert IdempotencyKey.objects.get().stuck_code == StuckCode.UNKNOWN_RECOVERY_POINT
    with deployed(charge, after=Step(posted, None, booked)):
        assert charge.once("key", name="one", cents=5) == {"transfer": 0}
    assert Entry.objects.count() == 2, "each step was committed once"


def test_the_completer_leaves_a_step_that_a_deploy_has_renamed_until_the_next(bank: Bank) -> None:
    def posted(*, name: str, cents: int) -> None:
        Entry.objects.create(name=f"posted {name}")

    unfinished(bank, pay)
    with deployed(pay, after=posted):
        with pytest.raises(Unavailable):
            pay.once("key", name="one", cents=5)
        abandon()
        assert complete_once() == CompletePass(), "the completer does not claim it"
    abandon()
    assert complete_once() == CompletePass(finished=1)
    assert Entry.objects.get().name == "booked one"


def rejected() -> None:
    raise Rejected("hook")


def serialization_failed() -> None:
    raise OperationalError from SerializationFailure()


@pytest.mark.parametrize("hook", [rejected, serialization_failed])
def test_a_hook_after_a_step_neither_refuses_nor_repeats_the_step(
    hook: Callable[[], None], bank: Bank
) -> None:
    runs: list[str] = []

    def booked_with_hook(*, name: str, cents: int) -> Rejected | None:
        runs.append(name)
        if len(runs) > 1:
            return Rejected("repeated")
        booked(name=name, cents=cents)
        transaction.on_commit(hook)
        return None

    booked_with_hook.__name__ = "booked"
    with deployed(pay, after=booked_with_hook):
        if hook is rejected:
            with pytest.raises(Unfinished):
                pay.once("key", name="one", cents=5)
        assert pay.once("key", name="one", cents=5) == {"transfer": 0}
    assert runs == ["one"]
    assert Entry.objects.get().name == "booked one"


def test_a_hook_of_a_plain_operation_that_fails_is_told_from_a_failure() -> None:
    def noted(*, name: str, fails: str = "") -> None:
        transaction.on_commit(broken)

    with deployed(note, function=noted):
        with pytest.raises(RuntimeError, match="after the result was stored"):
            note.once("key", name="one")
        assert note.once("key", name="one") is None


def test_a_call_that_returns_a_refusal_is_refused(bank: Bank) -> None:
    def transfer(key: str, *, name: str, cents: int) -> Rejected:
        return Rejected("declined")

    def paid(made: Any, /, *, name: str, cents: int) -> None:
        Account.objects.create(name=name, balance=cents)

    for valid_hours in (23, None):
        call = dataclasses.replace(keyed(transfer, valid_hours=23), valid_hours=valid_hours)
        with deployed(charge, function=paid, call=call):
            for _ in range(2):
                with pytest.raises(Rejected, match="declined"):
                    charge.once(f"key {valid_hours}", name="one", cents=5)
    assert not Account.objects.exists()


def test_a_call_or_an_undo_that_is_a_generator_is_no_effect(bank: Bank) -> None:
    def transfer(key: str, *, name: str, cents: int) -> Iterator[int]:
        yield bank.transfer(key, cents)

    def paid(made: Any, /, *, name: str, cents: int) -> None:
        Account.objects.create(name=name, balance=cents)

    def undone(why: Rejected, *, name: str, cents: int) -> Iterator[None]:
        yield None

    call = keyed(transfer, valid_hours=23)
    with deployed(charge, function=paid, call=call), pytest.raises(Unfinished) as caught:
        charge.once("key", name="one", cents=5)
    assert "generator" in str(caught.value.__cause__)
    assert not Account.objects.exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pay._definition.steps, "undo", undone)
        with pytest.raises(Unfinished):
            pay.once("key", name="one", cents=402)
    with pytest.raises(Rejected):
        pay.once("key", name="one", cents=402)
    assert Entry.objects.get().name == "declined one"


def test_local_functions_and_lambdas_need_names_because_they_share_a_path() -> None:
    with pytest.raises(TypeError, match="needs a name"):
        operation(lambda: None)


def test_a_function_of_a_script_needs_a_name_because_its_module_has_two() -> None:
    def credit() -> None:
        """Do nothing."""

    credit.__module__, credit.__qualname__ = "__main__", "credit"
    with pytest.raises(TypeError, match="needs a name"):
        operation(credit)


@pytest.mark.parametrize("code", [404, None])
def test_a_refusal_with_a_code_that_is_no_text_is_stored(code: Any) -> None:
    def noted(*, name: str, fails: str = "") -> None:
        raise Rejected(code)

    with deployed(note, function=noted):
        for _ in range(2):
            with pytest.raises(Rejected, match=str(code)) as caught:
                note.once("key", name="one")
            assert caught.value.code == code


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
def test_a_job_staged_with_the_key_of_another_database_has_no_second_key_there() -> None:
    @operation("tests.in_another_database", using="shard_b")
    def elsewhere() -> str:
        return note.stage("key", name="one")._state.db or ""

    with pytest.raises(NoOpenTransaction):
        elsewhere.once("key")
    with transaction.atomic():
        assert elsewhere.once("key") == "default"
