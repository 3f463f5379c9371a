"""A refused request is not charged later: the state of a key whose request was refused."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from django.core.exceptions import PermissionDenied
from django.db import IntegrityError, OperationalError, connection, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from prometheus_client.metrics_core import Metric
from rest_framework import exceptions
from rest_framework.authentication import SessionAuthentication
from rest_framework.views import APIView

from idempotency import interventions
from idempotency._engine import claims, decisions
from idempotency.completer import CompletePass, complete_key, complete_once
from idempotency.contrib.prometheus import DatabaseCollector
from idempotency.decorators import idempotent
from idempotency.exceptions import InProgress, InterventionRequired, KeyReused, KeyStuck
from idempotency.http import not_stored
from idempotency.models import IdempotencyKey
from idempotency.monitoring.doctor import diagnose
from idempotency.phases import atomic_phase
from idempotency.reaper import ReapPass, reap_once
from tests.kit.ageing import make_older
from tests.kit.serving import Sender, another_client, problem
from tests.kit.threads import Gate, all_at_once, background
from tests.kit.views import phased_outside, plain
from tests.models import Account, Entry

pytestmark = pytest.mark.django_db(transaction=True)

Step = Callable[[IdempotencyKey], HttpResponseBase | None]


class Bank:
    """A phased view in which each attempt begins with the next step. If the step returns no
    response, the attempt charges."""

    def __init__(self, *steps: Step) -> None:
        self.steps: Iterator[Step] = iter(steps)
        self.charges: list[str] = []
        self.view = idempotent(recovery_points=["ordered"])(self._view)

    def _view(self, request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        if (step := next(self.steps, None)) is not None and (answer := step(key)) is not None:
            return answer
        for _ in key.phases():
            with key.call("charge") as call:
                self.charges.append(call.key)
            with atomic_phase(key) as phase:
                Entry.objects.create(name="charged")
                phase.set_response(JsonResponse({"charged": True}, status=201))
        return key.response()


def answer(status: int) -> Step:
    """Return a step that only returns a response."""
    return lambda key: HttpResponse(status=status)


def forbid(key: IdempotencyKey) -> HttpResponse:
    raise PermissionDenied


def call_then(status: int) -> Step:
    """Return a step that charges with a derived key and returns a response."""

    def step(key: IdempotencyKey) -> HttpResponse:
        with key.call("charge"):
            pass
        return HttpResponse(status=status)

    return step


def no_op_then(status: int) -> Step:
    """Return a step with a phase that commits at the same recovery point."""

    def step(key: IdempotencyKey) -> HttpResponse:
        with atomic_phase(key) as phase:
            phase.no_op()
        return HttpResponse(status=status)

    return step


def at_most_once_then(status: int) -> Step:
    """Return a step that makes an at-most-once call which takes no effect."""

    def step(key: IdempotencyKey) -> HttpResponse:
        with key.call("text", at_most_once=True) as call:
            call.retryable()
        return HttpResponse(status=status)

    return step


def abandon() -> None:
    """Make each key due for the completer."""
    make_older(1000, "created_at", "last_run_at", "locked_until")
    IdempotencyKey.objects.update(next_run_at=None)


@pytest.fixture
def bank(serve: Any) -> Callable[..., Bank]:
    """Return a function that serves a bank at /view/."""

    def open_bank(*steps: Step) -> Bank:
        bank = Bank(*steps)
        serve(view=bank.view)
        return bank

    return open_bank


@pytest.mark.parametrize(
    ("step", "status"),
    [
        *((answer(status), status) for status in (401, 403, 408, 412, 425, 428, 429)),
        (forbid, 403),
        (lambda key: not_stored(HttpResponse(status=400)), 400),
        (lambda key: not_stored(HttpResponse(status=409)), 409),
    ],
)
def test_a_refused_request_is_run_by_its_client_alone(
    step: Step, status: int, bank: Any, sender: Sender
) -> None:
    shop = bank(step)
    assert sender.send().status_code == status
    for _ in range(30):
        abandon()
        assert complete_once() == CompletePass()
    key = IdempotencyKey.objects.get()
    assert (key.refused_at is not None, key.untouched, key.stuck_code, key.locked_until) == (
        True,
        True,
        "",
        None,
    )
    assert complete_key(key.pk) is None
    assert shop.charges == []
    assert sender.send().status_code == 201
    assert (len(shop.charges), Entry.objects.count()) == (1, 1)
    assert not IdempotencyKey.objects.refused().exists()


@pytest.mark.parametrize(
    "error", [exceptions.NotAuthenticated, exceptions.PermissionDenied, exceptions.Throttled]
)
def test_what_a_framework_makes_a_refusal_of_is_one(
    error: type[Exception], serve: Any, sender: Sender
) -> None:
    class Pay(APIView):
        authentication_classes = [SessionAuthentication]

        @idempotent(recovery_points=["ordered"])
        def post(self, request: Any) -> HttpResponseBase:
            raise error

    serve(view=Pay.as_view())
    sender.send()
    assert IdempotencyKey.objects.refused().count() == 1


def test_refused_keys_are_on_no_list_and_the_reaper_deletes_them(bank: Any, sender: Sender) -> None:
    bank(answer(403))
    sender.send()
    abandon()
    objects = IdempotencyKey.objects
    for none in (
        objects.stuck(),
        objects.unfinished(),
        objects.unlocked(),
        objects.abandoned(),
        objects.overdue(),
    ):
        assert not none.exists()
    found = diagnose()
    assert (found.measured["keys_unfinished"], found.measured["keys_stuck"]) == (0, 0)
    assert found.measured["completer_lag_seconds"] == 0
    gauges: dict[str, Metric] = {gauge.name: gauge for gauge in DatabaseCollector().collect()}
    assert gauges["idempotency_unfinished_keys"].samples[0].value == 0
    assert gauges["idempotency_oldest_unfinished_seconds"].samples[0].value == 0
    assert reap_once() == ReapPass()
    make_older(73 * 3600, "created_at", "refused_at")
    assert reap_once(dry_run=True) == ReapPass(deleted=1)
    assert reap_once() == ReapPass(deleted=1)


def test_its_retention_counts_from_the_refusal(bank: Any, sender: Sender) -> None:
    bank(answer(403))
    sender.send()
    make_older(73 * 3600, "created_at")
    assert reap_once() == ReapPass()
    assert sender.send().status_code == 201


def test_503_then_403_is_not_run(bank: Any, sender: Sender) -> None:
    shop = bank(answer(503), answer(403))
    assert [sender.send().status_code for _ in range(2)] == [503, 403]
    abandon()
    assert complete_once() == CompletePass()
    assert shop.charges == []


def test_403_then_503_is_run_by_the_completer(bank: Any, sender: Sender) -> None:
    shop = bank(answer(403), answer(503))
    assert [sender.send().status_code for _ in range(2)] == [403, 503]
    abandon()
    assert complete_once() == CompletePass(finished=1)
    assert len(shop.charges) == 1


@pytest.mark.parametrize("begun", [call_then, no_op_then, at_most_once_then])
@pytest.mark.parametrize("refusal", [answer(429), forbid])
def test_503_after_something_was_begun_then_a_refusal_goes_on(
    begun: Callable[[int], Step], refusal: Step, bank: Any, sender: Sender
) -> None:
    bank(begun(503), refusal)
    assert sender.send().status_code == 503
    assert sender.send().status_code in (403, 429)
    assert not IdempotencyKey.objects.refused().exists()
    abandon()
    assert complete_once() == CompletePass(finished=1)
    assert sender.send().status_code == 201


@pytest.mark.parametrize("begun", [call_then, no_op_then, at_most_once_then])
def test_a_refusal_after_something_was_begun_in_the_same_attempt_goes_on(
    begun: Callable[[int], Step], bank: Any, sender: Sender
) -> None:
    bank(begun(403))
    assert sender.send().status_code == 403
    abandon()
    assert complete_once() == CompletePass(finished=1)


@pytest.mark.parametrize("begun", [call_then, no_op_then, at_most_once_then])
@pytest.mark.parametrize("later", [False, True])
def test_a_4xx_after_something_was_begun_is_not_stored_as_the_answer(
    begun: Callable[[int], Step], later: bool, bank: Any, sender: Sender
) -> None:
    bank(*([begun(503), answer(404)] if later else [begun(404)]))
    answers = [sender.send().status_code for _ in range(1 + later)]
    assert answers[-1] == 500
    assert IdempotencyKey.objects.get().last_error.startswith("ResponseNotCommitted")


def test_a_phase_that_was_rolled_back_has_begun_nothing(bank: Any, sender: Sender) -> None:
    def roll_back(key: IdempotencyKey) -> HttpResponse:
        with suppress(OSError), atomic_phase(key) as phase:
            phase.no_op()
            raise OSError
        return HttpResponse(status=403)

    bank(roll_back)
    sender.send()
    assert IdempotencyKey.objects.refused().exists()


@pytest.mark.parametrize("status", [401, 403, 404, 429])
def test_a_phase_may_end_a_request_with_any_4xx(status: int, bank: Any, sender: Sender) -> None:
    def end(key: IdempotencyKey) -> HttpResponseBase:
        with key.call("charge"):
            pass
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse("declined", status=status))
        return key.response()

    bank(end)
    first, again = sender.send(), sender.send()
    assert (first.status_code, again.status_code, again.content) == (status, status, b"declined")
    assert again["Idempotent-Replayed"] == "true"


def test_a_marked_4xx_ends_no_request(bank: Any, sender: Sender) -> None:
    def end(key: IdempotencyKey) -> HttpResponseBase:
        with atomic_phase(key) as phase:
            phase.set_response(not_stored(HttpResponse(status=403)))
        return key.response()

    bank(end)
    assert sender.send().status_code == 500


@pytest.mark.parametrize("refuse", [answer(403), forbid], ids=["returned", "raised"])
@pytest.mark.parametrize("winner_is_done", [True, False])
def test_a_late_refusal_is_not_told_when_the_key_was_taken_over(
    winner_is_done: bool, refuse: Step, bank: Any, sender: Sender
) -> None:
    late, at_work = Gate(), Gate()

    def refuse_late(key: IdempotencyKey) -> HttpResponseBase | None:
        late.wait_here()
        return refuse(key)

    def work(key: IdempotencyKey) -> None:
        if not winner_is_done:
            at_work.wait_here()

    shop = bank(refuse_late, work)
    with background(another_client(sender).send) as first:
        late.wait_until_reached()
        make_older(91, "locked_until")
        with background(another_client(sender).send) as winner:
            if winner_is_done:
                assert winner.result(60).status_code == 201
            else:
                at_work.wait_until_reached()
            late.open()
            told = first.result(60)
            at_work.open()
    if winner_is_done:
        assert (told.status_code, told["Idempotent-Replayed"]) == (201, "true")
    else:
        assert (told.status_code, problem(told)["code"]) == (409, "key_in_use")
    key = IdempotencyKey.objects.get()
    assert (key.refused_at, key.response_code, len(shop.charges)) == (None, 201, 1)


@pytest.mark.postgres
def test_of_two_duplicates_one_is_refused_and_the_key_is_its_clients(
    bank: Any, sender: Sender
) -> None:
    gate = Gate()

    def wait_and_refuse(key: IdempotencyKey) -> HttpResponse:
        gate.wait_here()
        return HttpResponse(status=403)

    shop = bank(wait_and_refuse)
    with background(another_client(sender).send) as first:
        gate.wait_until_reached()
        assert problem(sender.send())["code"] == "key_in_use"
        gate.open()
        assert first.result(60).status_code == 403
    assert IdempotencyKey.objects.refused().exists()
    clients = [another_client(sender) for _ in range(2)]
    statuses = [told.status_code for told in all_at_once(lambda number: clients[number].send(), 2)]
    assert 201 in statuses
    assert {*statuses} <= {201, 409}
    assert len(shop.charges) == 1


def test_a_completer_that_has_chosen_the_key_before_the_refusal_leaves_it_alone(
    bank: Any, sender: Sender
) -> None:
    bank(answer(503), answer(403))
    sender.send()
    abandon()
    (chosen,) = IdempotencyKey.objects.abandoned()
    sender.send()
    make_older(1000, "last_run_at")
    assert claims.claim_by_id(chosen.pk, delay_seconds=0, using="default") is None
    assert not decisions.give_up(chosen.pk, "code", "reason", using="default")
    key = IdempotencyKey.objects.get()
    assert not interventions.hand_back(key.pk, key.claim_token, by="jane")
    assert key.refused_at is not None


def test_what_a_task_of_the_view_begins_after_the_refusal_is_completed(
    bank: Any, sender: Sender
) -> None:
    left: list[IdempotencyKey] = []

    def refuse_and_leave_a_task(key: IdempotencyKey) -> HttpResponse:
        left.append(key)
        return HttpResponse(status=403)

    shop = bank(refuse_and_leave_a_task)
    sender.send()
    with atomic_phase(left[0]) as phase:
        phase.set_recovery_point("ordered")
    key = IdempotencyKey.objects.get()
    assert (key.refused_at, key.untouched) == (None, False)
    abandon()
    assert complete_once() == CompletePass(finished=1)
    assert len(shop.charges) == 1


@pytest.mark.postgres
def test_a_refusal_that_cannot_be_written_down_is_not_told(bank: Any, sender: Sender) -> None:
    def refuse_and_lose_the_connection(key: IdempotencyKey) -> HttpResponse:
        connection.connection.close()
        return HttpResponse(status=403)

    bank(refuse_and_lose_the_connection)
    told = sender.send()
    assert (told.status_code, problem(told)["code"]) == (503, "database_unavailable")


@pytest.mark.parametrize("status", [403, 404])
def test_a_refusal_after_a_commit_whose_end_is_unknown_is_not_told(
    status: int, bank: Any, sender: Sender, monkeypatch: Any
) -> None:
    def commit_and_lose_the_answer() -> None:
        monkeypatch.undo()
        connection.commit()
        raise OperationalError("server closed the connection unexpectedly")

    def begin(key: IdempotencyKey) -> HttpResponse:
        with suppress(OperationalError), atomic_phase(key) as phase:
            monkeypatch.setattr(connection, "_commit", commit_and_lose_the_answer)
            phase.no_op()
        return HttpResponse(status=status)

    bank(begin)
    told = sender.send()
    assert (told.status_code, problem(told)["code"]) == (409, "key_in_use")
    key = IdempotencyKey.objects.get()
    assert (key.refused_at, key.finished_at, key.locked_until) == (None, None, None)


@pytest.mark.postgres
def test_what_is_run_again_inside_the_process_is_locked_and_not_refused(
    bank: Any, sender: Sender
) -> None:
    """A unique violation above READ COMMITTED may be a race, so it refuses no request before the
    last attempt."""
    Account.objects.create(name="taken")
    found: list[tuple[bool, bool]] = []

    def forbid_what_is_taken(key: IdempotencyKey) -> None:
        try:
            with atomic_phase(key, isolation="serializable") as phase:
                Account.objects.create(name="taken")
                phase.set_recovery_point("ordered")
        except IntegrityError as error:
            raise PermissionDenied from error

    def order_and_fail(key: IdempotencyKey) -> HttpResponse:
        row = IdempotencyKey.objects.get()
        found.append((row.locked_until is not None, row.refused_at is not None))
        with atomic_phase(key) as phase:
            phase.set_recovery_point("ordered")
        return HttpResponse(status=503)

    shop = bank(forbid_what_is_taken, order_and_fail)
    assert sender.send().status_code == 503
    assert found == [(True, False)]
    abandon()
    assert complete_once() == CompletePass(finished=1)
    assert len(shop.charges) == 1


@pytest.mark.postgres
def test_a_refusal_in_the_last_run_inside_the_process_is_one(bank: Any, sender: Sender) -> None:
    Account.objects.create(name="taken")

    def forbid_what_is_taken(key: IdempotencyKey) -> None:
        try:
            with atomic_phase(key, isolation="serializable"):
                Account.objects.create(name="taken")
        except IntegrityError as error:
            raise PermissionDenied from error

    bank(*[forbid_what_is_taken] * 3)
    assert sender.send().status_code == 403
    key = IdempotencyKey.objects.get()
    assert (key.refused_at is not None, key.locked_until) == (True, None)


@pytest.mark.postgres
def test_a_key_is_stuck_although_the_connection_was_lost(bank: Any, sender: Sender) -> None:
    def give_up_and_lose_the_connection(key: IdempotencyKey) -> None:
        connection.connection.close()
        raise KeyStuck("The bank does not say what it did.")

    shop = bank(give_up_and_lose_the_connection)
    assert problem(sender.send())["code"] == "key_stuck"
    key = IdempotencyKey.objects.stuck().get()
    assert (key.stuck_code, key.locked_until) == (KeyStuck.code, None)
    assert problem(sender.send())["code"] == "key_stuck"
    assert shop.charges == []


def test_a_refusal_after_the_answer_was_stored_is_not_told(bank: Any, sender: Sender) -> None:
    def finish_and_forbid(key: IdempotencyKey) -> None:
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse(status=201))
        raise PermissionDenied

    bank(finish_and_forbid)
    assert [sender.send().status_code for _ in range(2)] == [500, 201]


def pay_and_forbid(request: Any) -> HttpResponseBase:
    """Pay, with an on-commit hook that raises a refusal."""

    def hook() -> None:
        raise PermissionDenied

    Entry.objects.create(name="paid")
    transaction.on_commit(hook)
    return HttpResponse(status=201)


class PayAndForbid(APIView):
    """The same in Django REST framework, which converts a refusal to a response."""

    authentication_classes = (SessionAuthentication,)

    @idempotent
    def post(self, request: Any) -> HttpResponseBase:
        return pay_and_forbid(request)


@pytest.mark.parametrize(
    "view", [idempotent(pay_and_forbid), PayAndForbid.as_view()], ids=["function", "framework"]
)
def test_a_refusal_after_a_plain_view_was_committed_is_not_told(
    view: Any, serve: Any, sender: Sender
) -> None:
    serve(view=view)
    assert [sender.send().status_code for _ in range(2)] == [500, 201]
    assert Entry.objects.count() == 1


def test_a_person_may_answer_a_refused_key(bank: Any, sender: Sender) -> None:
    bank(answer(403))
    sender.send()
    key = IdempotencyKey.objects.get()
    assert interventions.answer(
        key.pk, key.claim_token, HttpResponse("gone", status=410), by="jane"
    )
    key.refresh_from_db()
    assert (key.refused_at, sender.send().status_code) == (None, 410)


@pytest.mark.parametrize(
    "refusal",
    [KeyReused(), InProgress(), InterventionRequired()],
    ids=lambda refusal: type(refusal).__name__,
)
@pytest.mark.parametrize("kind", [plain, phased_outside])
def test_the_refusal_of_another_key_is_an_error_of_the_view(
    kind: Any, refusal: Exception, serve: Any, sender: Sender
) -> None:
    def work(request: HttpRequest) -> HttpResponseBase:
        raise refusal

    serve(view=kind(work))
    sender.client.raise_request_exception = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"work raised {type(refusal).__name__} of another"):
            sender.send()
    assert not IdempotencyKey.objects.filter(refused_at__isnull=False).exists()
