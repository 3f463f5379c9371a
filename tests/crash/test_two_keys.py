"""Two requests with different keys on the same rows: an anomaly of the isolation level is found."""

from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction
from django.db.models import F
from django.http import HttpRequest, HttpResponse, JsonResponse

from idempotency.decorators import idempotent
from idempotency.phases import atomic_phase
from idempotency.testing import DoesNotSurvive, Downstream, assert_survives, cures
from tests.kit.serving import Sender
from tests.kit.views import over_key, phased, plain
from tests.models import Account, Entry

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

Serve = Callable[..., None]
both_kinds = pytest.mark.parametrize("kind", [plain, pytest.param(phased, marks=pytest.mark.full)])


def read_and_save(request: HttpRequest) -> HttpResponse:
    """Add 10 to a balance in Python."""
    account = Account.objects.get(name="till")
    account.balance += 10
    account.save()
    return JsonResponse({"balance": account.balance}, status=201)


def lock_and_save(request: HttpRequest) -> HttpResponse:
    """Add 10 to a balance in Python, with a lock of its row."""
    with transaction.atomic():
        account = Account.objects.select_for_update().get(name="till")
        account.balance += 10
        account.save()
    return HttpResponse(status=201)


def add(request: HttpRequest) -> HttpResponse:
    """Add 10 to a balance in the database, and write an entry of this request."""
    Account.objects.filter(name="till").update(balance=F("balance") + 10)
    Entry.objects.create(name="added", idempotency_key=request.idempotency_key)
    return HttpResponse(status=201)


def book(request: HttpRequest) -> HttpResponse:
    """Book the only seat, if no entry of it exists."""
    if Entry.objects.filter(name="seat").exists():
        return HttpResponse(status=422)
    Entry.objects.create(name="seat")
    return HttpResponse(status=201)


@pytest.fixture
def prove(serve: Serve, sender: Sender) -> Callable[[Any], Any]:
    """Return a function that proves a view."""
    Account.objects.create(name="till")

    def proves(view: Any, **options: Any) -> Any:
        serve(view=view)
        return assert_survives(lambda key: sender.send(key=key), **options)

    return proves


def failures_of(prove: Callable[[Any], Any], view: Any) -> Any:
    """Return the failures of a view. Each must be an interference of two keys."""
    with pytest.raises(DoesNotSurvive) as caught:
        prove(view)
    assert {failure.cure for failure in caught.value.failures} == {cures.LOST_UPDATE}
    return caught.value.failures


@both_kinds
def test_a_lost_update_is_found(kind: Any, prove: Callable[[Any], Any]) -> None:
    (failure,) = failures_of(prove, kind(read_and_save))
    assert "before COMMIT" in failure.course
    assert "in read_and_save" in failure.cause
    (difference,) = failure.differences
    assert (difference.path[-1], difference.expected, difference.found) == ("balance", 20, 10)


@both_kinds
@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_higher_level_prevents_it(kind: Any, level: str, prove: Callable[[Any], Any]) -> None:
    prove(kind(read_and_save, isolation=level))


@both_kinds
@pytest.mark.parametrize("work", [lock_and_save, add])
def test_a_correct_view_passes(work: Any, kind: Any, prove: Callable[[Any], Any]) -> None:
    prove(kind(work))


@both_kinds
def test_a_double_booking_is_found(kind: Any, prove: Callable[[Any], Any]) -> None:
    (failure,) = failures_of(prove, kind(book))
    assert "in book" in failure.cause


@pytest.mark.full
def test_a_value_of_an_earlier_phase_is_found(prove: Callable[[Any], Any]) -> None:
    """Each phase is correct by itself, but the second one writes what the first one has read."""

    def work(key: Any) -> None:
        balance = 0
        with atomic_phase(key) as phase:
            balance = Account.objects.select_for_update().get(name="till").balance
            phase.no_op()
        with atomic_phase(key) as phase:
            Account.objects.filter(name="till").update(balance=balance + 10)
            phase.set_response(HttpResponse(status=201))

    assert failures_of(prove, over_key(work))


def test_a_request_may_be_refused_for_another_one(prove: Callable[[Any], Any]) -> None:
    """Two consecutive requests both take a seat. Of two concurrent ones, one is refused and leaves
    nothing."""

    def take(request: HttpRequest) -> HttpResponse:
        taken = Account.objects.get(name="till").balance
        if not Account.objects.filter(name="till", balance=taken).update(balance=taken + 1):
            return HttpResponse(status=422)
        return HttpResponse(status=201)

    prove(plain(take))


@pytest.mark.full
def test_the_order_of_the_requests_is_no_difference(prove: Callable[[Any], Any]) -> None:
    """The request that began first ends last, so that rows, keys and effects have another order."""
    bank = Downstream("bank", key="key")

    def numbered(request: HttpRequest) -> HttpResponse:
        count = Account.objects.select_for_update().get(name="till").balance
        Account.objects.filter(name="till").update(balance=count + 1)
        Entry.objects.create(name=f"number {count}", idempotency_key=request.idempotency_key)
        return JsonResponse({"number": count}, status=201)

    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponse:
        key = request.idempotency_key
        for _ in key.phases():
            with key.call("charge") as call:
                bank(amount=5, key=call.key)
            with atomic_phase(key) as phase:
                phase.set_response(numbered(request))
        return key.response()

    prove(view)


def test_without_races_it_is_not_tested(prove: Callable[..., Any]) -> None:
    prove(plain(read_and_save), races=False)
