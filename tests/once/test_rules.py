"""The numbered rules of operations (``tests/conformance/titles.py``), for each way of a call: from
a function, from async code, and from a management command. Further cases of a number are in
``test_operations.py``, ``test_staged.py`` and ``test_killed.py``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.apps import apps
from django.db import connection, transaction

from idempotency import interventions, jobs
from idempotency._operations import definition
from idempotency.completer import CompletePass, complete_key, complete_once
from idempotency.exceptions import (
    InProgress,
    InterventionRequired,
    KeyReused,
    Rejected,
    StuckCode,
    Unfinished,
)
from idempotency.models import IdempotencyKey
from idempotency.operations import keyed, operation, run_staged
from idempotency.reaper import reap_once
from idempotency.testing import assert_survives
from tests.kit.ageing import abandon, expire_lock, make_older
from tests.kit.threads import Gate, background, in_background
from tests.models import Account, Entry
from tests.once.calling import call as call_by
from tests.operations import Bank, book, charge, note, pay, pay_without_undo, tell

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = 3600
WAYS = ["once", "aonce", "command"]

Call = Callable[..., Any]


@pytest.fixture(params=WAYS)
def call(request: pytest.FixtureRequest) -> Call:
    """Return what calls an operation with a key and arguments."""

    def calls(each: Any, key: str = "key", **arguments: Any) -> Any:
        return call_by(request.param, each, key, arguments)

    return calls


def names() -> list[str]:
    return sorted(Entry.objects.values_list("name", flat=True))


def fails() -> None:
    raise OSError("no route")


def complete_again() -> CompletePass:
    """Run the completer over all keys that a deploy may have freed."""
    abandon()
    return complete_once()


@contextmanager
def unfinished(bank: Bank) -> Iterator[IdempotencyKey]:
    """Fail after the transfer, and yield the key, which the completer may continue."""
    bank.after = fails
    with pytest.raises(Unfinished):
        charge.once("key", name="one", cents=9)
    bank.after = lambda: None
    abandon()
    yield IdempotencyKey.objects.get()


def test_o01_it_runs_once(call: Call, bank: Bank) -> None:
    pk = call(book, name="plain")
    assert pk == Entry.objects.get().pk
    assert call(pay, name="phased", cents=9) == {"transfer": 0}
    assert names() == ["booked phased", "plain"]
    assert (bank.requests, Account.objects.get().balance) == (1, 9)


@pytest.mark.parametrize("way", WAYS)
def test_o02_a_repeat_gets_the_stored_result(call: Call, way: str, bank: Bank) -> None:
    for each, arguments in ((note, {"name": "n"}), (pay, {"name": "p", "cents": 9})):
        first = call(each, **arguments)
        before = names()
        assert call_by(way, each, "key", arguments) == first
        assert names() == before
    assert (bank.requests, Account.objects.count()) == (1, 1)


def test_o03_other_arguments_are_refused_and_the_result_stays(call: Call, bank: Bank) -> None:
    call(book, name="one")
    call(pay, name="one", cents=9)
    for each, arguments in ((book, {"name": "two"}), (pay, {"name": "one", "cents": 8})):
        with pytest.raises(KeyReused):
            call(each, **arguments)
    assert call(pay, cents=9, name="one") == {"transfer": 0}
    assert (bank.requests, names()) == (1, ["booked one", "one"])


def test_o04_a_call_in_progress_is_refused_with_the_seconds_to_wait(call: Call, bank: Bank) -> None:
    gate = Gate()
    bank.before = gate.wait_here
    with background(partial(charge.once, "key", name="one", cents=9)) as running:
        gate.wait_until_reached()
        with pytest.raises(InProgress) as caught:
            call(charge, name="one", cents=9)
        with pytest.raises(KeyReused):
            call(charge, name="one", cents=8)
        gate.open()
    assert 0 < caught.value.retry_after <= 90
    assert call(charge, name="one", cents=9) == running.result() == {"transfer": 0}
    assert bank.requests == 1


@pytest.mark.parametrize("by_completer", [False, True])
def test_o05_a_run_past_its_lease_is_taken_over_and_fenced(
    call: Call, by_completer: bool, bank: Bank
) -> None:
    gate = Gate()
    bank.after = gate.wait_here
    late = in_background(lambda: call(pay, name="one", cents=9))
    gate.wait_until_reached()
    abandon()
    expire_lock()
    if by_completer:
        assert complete_key(IdempotencyKey.objects.get().pk) == "finished"
    assert call(pay, name="one", cents=9) == {"transfer": 0}
    gate.open()
    assert late.result(60) == {"transfer": 0}
    assert (names(), Account.objects.count(), len(bank.transfers)) == (["booked one"], 1, 1)


def test_o06_a_crash_at_any_statement_leaves_one_effect_and_one_result(bank: Bank) -> None:
    """The deaths of real processes are in ``test_killed.py``."""
    report = assert_survives(
        lambda key: pay.once(key, name="one", cents=9),
        again=lambda key: async_to_sync(pay.aonce)(key, name="one", cents=9),
        effects=lambda: list(bank.transfers.values()),
        reset=bank.transfers.clear,
        races=False,
    )
    assert report.courses > 20
    if connection.vendor == "postgresql":
        assert connection.connection is None, "psycopg has prepared statements on it"


@pytest.mark.parametrize(("ends", "left"), [("raises", []), ("returns", ["one"])])
def test_o07_a_refusal_is_stored_and_raised_by_each_repeat(
    call: Call, ends: str, left: list[str]
) -> None:
    for _ in range(2):
        with pytest.raises(Rejected) as caught:
            call(note, name="one", fails=ends)
        why = caught.value
        assert (why.code, str(why), why.data) == ("refused", "It was refused.", {"name": "one"})
    assert names() == left


@pytest.mark.parametrize(
    ("cents", "left"), [(402, ["declined one"]), (403, ["raised late one"]), (404, ["booked one"])]
)
def test_o08_a_refusal_is_stored_with_its_compensation(
    call: Call, cents: int, left: list[str], bank: Bank
) -> None:
    """The call refuses, the last function raises its refusal, or returns it."""
    for _ in range(2):
        with pytest.raises(Rejected):
            call(pay, name="one", cents=cents)
    assert names() == left
    assert bank.requests == (cents != 402)


def test_o08_a_refusal_that_nothing_undoes_is_stuck(call: Call) -> None:
    for _ in range(2):
        with pytest.raises(InterventionRequired):
            call(pay_without_undo, name="one", cents=402)
    key = IdempotencyKey.objects.get()
    assert (key.stuck_code, "undo" in key.stuck_reason) == (StuckCode.VIEW_GAVE_UP, True)
    assert names() == ["booked one"]
    with pytest.raises(Rejected):  # Nothing was committed before the call.
        call(charge, name="one", cents=402)


def test_o09_after_an_exception_before_the_first_effect_only_the_caller_continues(
    call: Call, bank: Bank
) -> None:
    for each, arguments in (
        (note, {"name": "one", "fails": "breaks"}),
        (pay, {"name": "one", "cents": 0}),
    ):
        with pytest.raises(ValueError):
            call(each, **arguments)
    key = IdempotencyKey.objects.get()
    assert (key.request_path, key.refused_at is None) == ("tests.pay", False)
    abandon()
    assert complete_key(key.pk) is None
    assert (names(), bank.requests) == ([], 0)


def test_o09_an_exception_after_the_first_effect_is_unfinished_and_the_completer_continues(
    call: Call, bank: Bank
) -> None:
    bank.after = fails
    with pytest.raises(Unfinished) as caught:
        call(pay, name="one", cents=9)
    assert isinstance(caught.value.__cause__, OSError)
    bank.after = lambda: None
    key = IdempotencyKey.objects.get()
    assert (key.recovery_point, key.last_error) == ("booked", "OSError: no route")
    assert complete_key(key.pk) == "finished"
    assert call(pay, name="one", cents=9) == {"transfer": 0}
    assert names() == ["booked one"]
    assert (bank.requests, len(bank.transfers)) == (2, 1), "repeated with the same key"


@pytest.fixture
def deploy(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that defines an operation as a module ``operations`` does at start."""
    monkeypatch.setattr(definition, "_operations", {})
    monkeypatch.setattr(jobs, "OPERATIONS", set())
    monkeypatch.setattr(definition, "OPERATIONS", jobs.OPERATIONS)

    def deploys(name: str, module: str, *, is_phased: bool) -> Any:
        def transfer(key: str, *, name: str) -> int:
            Entry.objects.create(name=f"called in {module}")
            return 1

        def ends(made: int, /, *, name: str) -> str:
            return f"{name} of {module}"

        def plain(*, name: str) -> str:
            Entry.objects.create(name=f"called in {module}")
            return f"{name} of {module}"

        plain.__module__ = ends.__module__ = module
        definition._operations.clear()
        with monkeypatch.context() as start:
            start.setattr(apps, "ready", False)
            if not is_phased:
                return operation(name)(plain)
            return operation(name, call=keyed(transfer, valid_hours=23), retention_hours="forever")(
                ends
            )

    return deploys


@pytest.mark.parametrize("is_phased", [False, True])
@pytest.mark.parametrize("way", ["once", "aonce"])
def test_o10_a_function_that_moved_has_the_same_keys_and_another_name_has_others(
    way: str, is_phased: bool, deploy: Callable[..., Any]
) -> None:
    old = deploy("shop.pay", "shop.operations", is_phased=is_phased)
    assert call_by(way, old, "key", {"name": "one"}) == "one of shop.operations"
    moved = deploy("shop.pay", "bank.operations", is_phased=is_phased)
    assert call_by(way, moved, "key", {"name": "one"}) == "one of shop.operations"
    renamed = deploy("bank.pay", "bank.operations", is_phased=is_phased)
    assert call_by(way, renamed, "key", {"name": "one"}) == "one of bank.operations"
    assert names() == ["called in bank.operations", "called in shop.operations"]


def test_o11_after_its_retention_a_key_is_new(call: Call, bank: Bank) -> None:
    call(tell, name="one", cents=9)
    make_older(99 * HOUR, "created_at", "finished_at")
    call(tell, name="one", cents=9)
    assert bank.requests == 1
    make_older(2 * HOUR, "created_at", "finished_at")
    call(tell, name="one", cents=9)
    assert (bank.requests, names()) == (2, ["told one", "told one"])


def test_o11_a_key_is_kept_forever_without_its_arguments(call: Call, bank: Bank) -> None:
    call(pay, name="one", cents=9)
    make_older(10 * 365 * 24 * HOUR, "created_at", "finished_at")
    reap_once()
    key = IdempotencyKey.objects.get()
    assert (key.expires_at, key.request_body) == (None, None)
    assert call(pay, name="one", cents=9) == {"transfer": 0}
    assert bank.requests == 1


@pytest.mark.parametrize("is_committed", [True, False])
def test_o12_in_an_open_transaction_a_plain_operation_commits_with_it_and_a_phased_one_is_refused(
    is_committed: bool,
) -> None:
    with transaction.atomic():
        first = book.once("key", name="one")
        assert book.once("key", name="one") == first
        with pytest.raises(Rejected):
            note.once("key", name="two", fails="raises")
        with pytest.raises(ValueError, match="broken"):
            note.once("key 2", name="two", fails="breaks")
        with pytest.raises(RuntimeError, match="stage"):
            pay.once("key", name="three", cents=9)
        transaction.set_rollback(not is_committed)
    assert names() == ["one"] * is_committed
    assert IdempotencyKey.objects.count() == 2 * is_committed


def test_o13_a_staged_call_is_one_of_the_callers(call: Call, bank: Bank) -> None:
    with transaction.atomic():
        job = pay.stage("key", name="one", cents=9)
    assert run_staged(**job.job_args) == {"transfer": 0}
    assert call(pay, name="one", cents=9) == run_staged(**job.job_args) == {"transfer": 0}
    assert (bank.requests, names()) == (1, ["booked one"])


def test_o14_a_name_that_the_running_code_does_not_have_waits_for_the_next_deploy(
    call: Call, bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unfinished(bank) as key:
        with monkeypatch.context() as deploy:
            deploy.delitem(definition._operations, "tests.charge")
            assert complete_key(key.pk) == "stuck"
            key.refresh_from_db()
            assert key.stuck_code == StuckCode.OPERATION_MISSING
            assert complete_again() == CompletePass(), "the completer does not claim it"
            with pytest.raises(RuntimeError, match=r"operations\.py"):
                call(charge, name="one", cents=9)
        assert call(charge, name="one", cents=9) == {"transfer": 0}
    assert (len(bank.transfers), Account.objects.count()) == (1, 1)


def test_o14_the_completer_continues_after_the_next_deploy(
    bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unfinished(bank) as key:
        with monkeypatch.context() as deploy:
            deploy.delitem(definition._operations, "tests.charge")
            assert complete_key(key.pk) == "stuck"
        assert complete_again() == CompletePass(finished=1)
    assert (len(bank.transfers), Account.objects.count()) == (1, 1)


def test_o15_arguments_that_do_not_fit_wait_for_the_next_deploy(bank: Bank) -> None:
    with unfinished(bank) as key:
        fitting = bytes(key.request_body)
        IdempotencyKey.objects.update(request_body=b'{"cents":9,"currency":"eur","name":"one"}')
        assert complete_key(key.pk) == "stuck"
        key.refresh_from_db()
        assert key.stuck_code == StuckCode.ARGUMENTS_CHANGED
        assert complete_again() == CompletePass(), "the completer does not claim it"
        IdempotencyKey.objects.update(request_body=fitting)
        assert complete_again() == CompletePass(finished=1)
    assert (len(bank.transfers), Account.objects.count()) == (1, 1)


def test_o16_more_than_1000_in_one_transaction_are_refused() -> None:
    def many() -> None:
        with transaction.atomic():
            for number in range(1000):
                book.once(f"key {number}", name="many")
            book.once("key 0", name="many")  # A repeat holds no lock.
            book.once("key 1000", name="many")

    with pytest.raises(RuntimeError, match="1,000"):
        many()
    assert not Entry.objects.exists()


@pytest.mark.postgres
def test_o17_a_serialization_failure_repeats_the_transaction_and_not_the_call(
    call: Call, bank: Bank
) -> None:
    runs: list[int] = []

    def fails_once() -> None:
        runs.append(bank.requests)
        if len(runs) == 1:
            with connection.cursor() as cursor:
                cursor.execute("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40001'; END $$")

    bank.inside = fails_once
    assert call(charge, name="one", cents=9) == {"transfer": 0}
    # A connection of a pool may have lost its prepared statements, which repeats it once more.
    assert len(runs) >= 2
    assert set(runs) == {1}


@pytest.mark.parametrize("answer", [{"transfer": 7}, Rejected("refunded", "It was refunded.")])
def test_o18_a_stuck_key_says_so_and_its_answer_is_the_result(call: Call, answer: Any) -> None:
    for _ in range(2):
        with pytest.raises(InterventionRequired):
            call(pay_without_undo, name="one", cents=402)
    key = IdempotencyKey.objects.get()
    assert complete_key(key.pk) is None
    assert interventions.answer(key.pk, key.claim_token, answer, by="an operator")
    for _ in range(2):
        if not isinstance(answer, Rejected):
            assert call(pay_without_undo, name="one", cents=402) == answer
            continue
        with pytest.raises(Rejected) as caught:
            call(pay_without_undo, name="one", cents=402)
        assert caught.value.args == answer.args
    assert names() == ["booked one"]
