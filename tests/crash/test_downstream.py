"""The fake of another system: each call counts, and a key is honoured as such systems do."""

import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from django.http import HttpRequest, HttpResponseBase, JsonResponse

from idempotency.decorators import idempotent
from idempotency.phases import atomic_phase
from idempotency.testing import DoesNotSurvive, Downstream, Failure, assert_survives, cures
from idempotency.testing.downstream import KeyReused
from tests.kit.serving import Sender
from tests.models import Entry

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_downstream_honours_its_keys_and_refuses_other_arguments() -> None:
    bank = Downstream("bank", lambda *card, amount, key: {"amount": amount}, key="key")
    assert [bank(amount=5, key="a"), bank(amount=5, key="a"), bank(amount=7, key="b")] == [
        {"amount": n} for n in (5, 5, 7)
    ]
    for changed in ({"amount": 6}, {"amount": 5, "currency": "eur"}, {}):
        with pytest.raises(KeyReused, match=r"another value of (amount|currency)"):
            bank(key="a", **changed)
    with pytest.raises(KeyReused, match="another value of argument 1"):
        bank("visa", amount=5, key="a")
    assert bank.effects == [{"args": [], "amount": 5}, {"args": [], "amount": 7}]


def test_arguments_that_compare_by_identity_are_no_reason_to_refuse() -> None:
    bank = Downstream("bank", "paid", key="key")
    assert [bank(order=object(), key="a") for _ in range(2)] == ["paid", "paid"]
    assert len(bank.effects) == 1


def failures_of(
    view: Any, serve: Callable[..., None], sender: Sender, **options: Any
) -> list[Failure]:
    """Return what the kit reports of a view."""
    serve(view=view)
    with pytest.raises(DoesNotSurvive) as caught:
        assert_survives(lambda key: sender.send(key=key), races=False, **options)
    return caught.value.failures


@pytest.mark.parametrize(
    ("key", "arguments", "cure"),
    [(None, dict, cures.UNSAFE_CALL), ("key", lambda: {"key": uuid.uuid4().hex}, cures.RANDOM_KEY)],
)
def test_a_call_without_arguments_that_is_made_twice_is_caught(
    key: str | None,
    arguments: Callable[[], Any],
    cure: str,
    serve: Callable[..., None],
    sender: Sender,
) -> None:
    ping = Downstream("ping", key=key)

    @idempotent
    def pings(request: HttpRequest) -> HttpResponseBase:
        Entry.objects.create(name="made")
        ping(**arguments())
        return JsonResponse({}, status=201)

    assert {failure.cure for failure in failures_of(pings, serve, sender)} == {cure}


def test_an_empty_list_in_an_answer_is_compared(serve: Callable[..., None], sender: Sender) -> None:
    @idempotent(recovery_points=["made"])
    def lists(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        new = False
        for recovery_point in key.phases():
            with atomic_phase(key) as phase:
                if recovery_point == "started":
                    new = True
                    phase.set_recovery_point("made")
                else:
                    phase.set_response(JsonResponse({"entries": []} if new else {}, status=201))
        return key.response()

    assert {failure.cure for failure in failures_of(lists, serve, sender)} == {cures.OTHER_ANSWER}


@pytest.mark.parametrize("first", ["charge", "customer"])
def test_two_functions_of_one_system_do_not_hide_each_other(
    first: str, serve: Callable[..., None], sender: Sender
) -> None:
    second = {"charge": "customer", "customer": "charge"}[first]
    fakes = {name: Downstream("bank", {"id": name}, key="key") for name in (first, second)}

    @idempotent
    def charges_twice(request: HttpRequest) -> HttpResponseBase:
        Entry.objects.create(name="made")
        fakes["charge"](amount=5, key=uuid.uuid4().hex)
        fakes["customer"](email="jane", key="always the same")
        return JsonResponse({}, status=201)

    assert {failure.cure for failure in failures_of(charges_twice, serve, sender)} == {
        cures.RANDOM_KEY
    }


def test_a_fake_of_the_test_is_not_hidden_by_a_downstream(
    serve: Callable[..., None], sender: Sender
) -> None:
    sent: list[str] = []
    fake = Downstream("effects", key="key")

    @idempotent
    def texts(request: HttpRequest) -> HttpResponseBase:
        Entry.objects.create(name="made")
        sent.append("hello")
        fake(amount=5, key="always the same")
        return JsonResponse({}, status=201)

    assert failures_of(texts, serve, sender, effects=sent)


@pytest.mark.parametrize("handled", [False, True])
def test_a_known_key_with_another_argument_is_caught(
    handled: bool, serve: Callable[..., None], sender: Sender
) -> None:
    charge = Downstream("bank", {"id": "ch_1"}, key="key")

    @idempotent(recovery_points=[])
    def charges(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for _ in key.phases():
            with key.call("charge") as call, suppress(*[KeyReused] * handled):
                charge(amount=5, reference=uuid.uuid4().hex, key=call.key)
            with atomic_phase(key) as phase:
                phase.set_response(JsonResponse({}, status=201))
        return key.response()

    failures = failures_of(charges, serve, sender)
    assert {failure.cure for failure in failures} == {cures.OTHER_ARGUMENTS}
    assert all(
        "another value of reference, at tests/crash/test_downstream.py" in failure.cause
        for failure in failures
    )
