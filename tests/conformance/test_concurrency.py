"""Numbers 29, 31 and 32: requests that meet. The fifty duplicates of number 12 are in
``test_first_run.py``."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from django.db import DatabaseError, connection, transaction
from django.db.models import F
from django.http import HttpRequest, HttpResponse
from pytest_django import Settings

from idempotency.models import IdempotencyKey
from tests.kit.ageing import make_older
from tests.kit.serving import Sender, View, another_client, problem
from tests.kit.threads import WAIT_SECONDS, Gate, elsewhere, in_background
from tests.kit.views import Counted, both_kinds, create, plain, two_phases
from tests.kit.waiting import eventually
from tests.models import Account, Entry

Kind = Callable[..., View]
Serve = Callable[..., None]


@pytest.fixture
def gate() -> Gate:
    """Return a gate that the first visitor of a view stops at."""
    return Gate()


@both_kinds
@pytest.mark.postgres
def test_29_duplicate_in_flight_is_told_when_to_come_back(
    kind: Kind, gate: Gate, serve: Serve, sender: Sender
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        gate.wait_here()
        return create(request)

    serve(view=kind(counted := Counted(work)))
    running = in_background(another_client(sender).send)
    gate.wait_until_reached()
    duplicate = sender.send()
    gate.open()
    assert (duplicate.status_code, problem(duplicate)["code"]) == (409, "key_in_use")
    assert problem(duplicate)["retryable"] is True
    assert 1 <= int(duplicate["Retry-After"]) <= (1 if kind is plain else 90)
    assert running.result(WAIT_SECONDS).status_code == 201
    assert sender.send()["Idempotent-Replayed"] == "true"
    assert counted.runs == 1


@pytest.mark.parametrize(("seconds_ago", "at_most"), [(0, 90), (88, 2), (88.9, 1), (89.5, 1)])
def test_29_retry_after_is_at_most_what_is_left_of_the_lock(
    seconds_ago: float, at_most: int, serve: Serve, sender: Sender
) -> None:
    gates: list[Gate] = []
    serve(view=two_phases(lambda request: None, create, call=lambda: gates[-1].wait_here()))

    def met() -> Any:
        gates.append(Gate())
        key = f"key-{len(gates)}"
        running = in_background(lambda: another_client(sender).send(key=key))
        gates[-1].wait_until_reached()
        make_older(seconds_ago, "locked_until")
        answer = sender.send(key=key)
        gates[-1].open()
        assert running.result(WAIT_SECONDS).status_code == 201
        # A moment is left of the lock: a duplicate that takes longer to come takes over, as it
        # should.
        return answer.status_code != 201 and answer

    duplicate = eventually(met)
    assert (duplicate.status_code, problem(duplicate)["code"]) == (409, "key_in_use")
    assert 1 <= int(duplicate["Retry-After"]) <= at_most


def test_31_takeover_resumes_and_the_late_one_changes_nothing(
    gate: Gate, serve: Serve, sender: Sender
) -> None:
    serve(
        view=two_phases(
            first := Counted(), second := Counted(partial(_create_second)), call=gate.wait_here
        )
    )
    late = in_background(another_client(sender).send)
    gate.wait_until_reached()
    make_older(91, "locked_until")
    winner = sender.send()
    finished = IdempotencyKey.objects.values().get()
    gate.open()
    answer = late.result(WAIT_SECONDS)
    assert (winner.status_code, answer.status_code) == (201, 201)
    assert answer.content == winner.content
    assert answer["Idempotent-Replayed"] == "true"
    assert "Idempotent-Replayed" not in winner
    assert (first.runs, second.runs) == (1, 2)
    assert sorted(Entry.objects.values_list("name", flat=True)) == ["made", "second"]
    assert IdempotencyKey.objects.values().get() == finished


def _create_second(request: HttpRequest) -> HttpResponse:
    entry = Entry.objects.create(name="second")
    return HttpResponse(f"{entry.pk}", status=201)


def test_31_no_takeover_before_the_lock_timeout(
    gate: Gate, serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"LOCK_TIMEOUT_SECONDS": 3600}
    serve(view=two_phases(lambda request: None, second := Counted(), call=gate.wait_here))
    running = in_background(another_client(sender).send)
    gate.wait_until_reached()
    make_older(3600 - 60, "locked_until")
    assert sender.send().status_code == 409
    gate.open()
    assert running.result(WAIT_SECONDS).status_code == 201
    assert second.runs == 1


@pytest.mark.postgres
def test_31_late_one_inside_its_phase_is_rolled_back(
    gate: Gate, serve: Serve, sender: Sender
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        response = _create_second(request)
        gate.wait_here()
        return response

    serve(view=two_phases(lambda request: None, Counted(work)))
    late = in_background(another_client(sender).send)
    gate.wait_until_reached()
    make_older(91, "locked_until")
    winner = sender.send()
    gate.open()
    answer = late.result(WAIT_SECONDS)
    assert (answer.status_code, answer.content) == (201, winner.content)
    assert Entry.objects.count() == 1


def test_31_late_one_that_fails_does_not_free_the_lock_of_the_winner(
    serve: Serve, sender: Sender
) -> None:
    gates = [Gate(), Gate()]

    def call() -> None:
        visitor = calls.runs
        gates[visitor - 1].wait_here()
        if visitor == 1:
            raise RuntimeError("late and broken")

    calls = Counted(lambda request: call())
    serve(view=two_phases(lambda request: None, create, call=partial(calls, None)))
    late = in_background(another_client(sender).send)
    gates[0].wait_until_reached()
    make_older(91, "locked_until")
    winner = in_background(another_client(sender).send)
    gates[1].wait_until_reached()
    gates[0].open()
    assert late.result(WAIT_SECONDS).status_code == 500
    assert sender.send().status_code == 409
    assert IdempotencyKey.objects.get().last_error == ""
    gates[1].open()
    assert winner.result(WAIT_SECONDS).status_code == 201
    assert calls.runs == 2


def test_31_late_one_is_sent_round_again_while_the_winner_runs(
    serve: Serve, sender: Sender
) -> None:
    gates = [Gate(), Gate()]
    calls = Counted(lambda request: gates[calls.runs - 1].wait_here())
    serve(view=two_phases(lambda request: None, create, call=partial(calls, None)))
    late = in_background(another_client(sender).send)
    gates[0].wait_until_reached()
    make_older(91, "locked_until")
    winner = in_background(another_client(sender).send)
    gates[1].wait_until_reached()
    gates[0].open()
    answer = late.result(WAIT_SECONDS)
    gates[1].open()
    assert (answer.status_code, problem(answer)["code"]) == (409, "key_in_use")
    assert winner.result(WAIT_SECONDS).status_code == 201
    assert Entry.objects.count() == 1


@pytest.mark.postgres
def test_31_silent_transaction_of_a_plain_view_is_ended_by_the_database(
    gate: Gate, serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"LOCK_TIMEOUT_SECONDS": 3}

    def work(request: HttpRequest) -> HttpResponse:
        gate.wait_here()
        return create(request)

    serve(view=plain(work))
    silent = in_background(another_client(sender).send)
    gate.wait_until_reached()
    # 503 is a run that was silent for too long itself.
    took_over = eventually(
        lambda: (response := sender.send()).status_code not in (409, 503) and response
    )
    gate.open()
    late = silent.result(WAIT_SECONDS)
    assert took_over.status_code == 201
    assert (late.status_code, problem(late)["code"]) == (503, "time_limit_exceeded")
    assert Entry.objects.count() == 1


def serializable(kind: Kind) -> Callable[..., View]:
    """Return the kind with its transactions under SERIALIZABLE."""
    return partial(kind, isolation="serializable")


class Rivalry:
    """Work that adds 1 to an account, while a rival changes it on another connection as often as
    ``times`` says."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.account = Account.objects.create(name="shared")

    def __call__(self, request: HttpRequest) -> HttpResponse:
        account = Account.objects.get(pk=self.account.pk)
        if self.times:
            self.times -= 1
            elsewhere(lambda: Account.objects.update(balance=F("balance") + 100))
        account.balance += 1
        account.save()
        return create(request)


@both_kinds
@pytest.mark.postgres
def test_32_serialization_failure_is_retried_inside_the_request(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=serializable(kind)(work := Counted(Rivalry(times=3))))
    assert sender.send().status_code == 201
    assert work.runs == 4
    assert Account.objects.get().balance == 301
    assert Entry.objects.count() == 1
    assert IdempotencyKey.objects.get().attempts == 1


@both_kinds
@pytest.mark.postgres
def test_32_serialization_failure_at_commit_is_retried_too(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    def rival() -> None:
        with transaction.atomic():
            transaction.get_connection().cursor().execute(
                "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE"
            )
            Account.objects.create(name=f"rival sees {Account.objects.count()}")

    def work(request: HttpRequest) -> HttpResponse:
        Account.objects.create(name=f"view sees {Account.objects.count()}")
        response = create(request)
        if counted.runs == 1:
            elsewhere(rival)
        return response

    serve(view=serializable(kind)(counted := Counted(work)))
    assert sender.send().status_code == 201
    assert counted.runs == 2
    assert sorted(Account.objects.values_list("name", flat=True)) == ["rival sees 0", "view sees 1"]
    assert Entry.objects.count() == 1


def explained(query: Callable[[], object]) -> None:
    """Explain the query after it, as django-silk does."""
    try:
        query()
    finally:
        with connection.cursor() as cursor:
            cursor.execute("EXPLAIN SELECT 1")


def logged(query: Callable[[], object]) -> None:
    """Write the error into a table."""
    try:
        query()
    except DatabaseError as error:
        Account.objects.create(name=str(error)[:50])


def logged_in_savepoint(query: Callable[[], object]) -> None:
    """Write the error into a table in a savepoint, and explain that too."""

    def insert_of(error: Exception) -> None:
        with transaction.atomic():
            Account.objects.create(name=str(error)[:50])

    try:
        query()
    except DatabaseError as error:
        explained(partial(insert_of, error))


@both_kinds
@pytest.mark.postgres
@pytest.mark.parametrize("hide", [explained, logged, logged_in_savepoint])
def test_32_serialization_failure_that_a_later_statement_hides_is_retried_too(
    hide: Callable[[Callable[[], object]], None], kind: Kind, serve: Serve, sender: Sender
) -> None:
    account = Account.objects.create(name="shared")

    def work(request: HttpRequest) -> HttpResponse:
        Account.objects.get(pk=account.pk)
        if counted.runs == 1:
            elsewhere(lambda: Account.objects.update(balance=F("balance") + 100))
        hide(lambda: Account.objects.select_for_update().get(pk=account.pk))
        Account.objects.update(balance=F("balance") + 1)
        return create(request)

    serve(view=serializable(kind)(counted := Counted(work)))
    assert sender.send().status_code == 201
    assert counted.runs == 2
    assert Account.objects.get().balance == 101


@both_kinds
@pytest.mark.postgres
def test_32_after_the_limit_the_client_is_told_to_come_back_and_the_key_is_free(
    kind: Kind, serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"SERIALIZATION_RETRIES": 2}
    serve(view=serializable(kind)(work := Counted(rivalry := Rivalry(times=1000))))
    response = sender.send()
    assert (response.status_code, problem(response)["code"]) == (409, "conflict")
    assert problem(response)["retryable"] is True
    assert int(response["Retry-After"]) >= 1
    assert work.runs == 3
    assert not Entry.objects.exists()
    assert not IdempotencyKey.objects.in_flight().exists()
    rivalry.times = 0
    assert sender.send().status_code == 201
    assert Entry.objects.count() == 1
