"""What an operator does to the key of an operation."""

from typing import Any
from uuid import uuid4

import pytest
from django.http import HttpResponse, JsonResponse

from idempotency import interventions
from idempotency.exceptions import InterventionRequired, Rejected, Unfinished
from idempotency.models import IdempotencyKey
from tests.factories import IdempotencyKeyFactory
from tests.kit.ageing import lock_end
from tests.models import Entry
from tests.operations import Bank, charge, note, pay, pay_without_undo

pytestmark = pytest.mark.django_db(transaction=True)


def stuck() -> IdempotencyKey:
    with pytest.raises(InterventionRequired):
        pay_without_undo.once("key", name="one", cents=402)
    return IdempotencyKey.objects.get()


def unfinished(bank: Bank, operation: Any = charge) -> IdempotencyKey:
    def broken() -> None:
        raise OSError("no route")

    bank.after = broken
    with pytest.raises(Unfinished):
        operation.once("key", name="one", cents=900)
    bank.after = lambda: None
    return IdempotencyKey.objects.get()


@pytest.mark.parametrize("result", [{"transfer": 17}, [1, "zwei"], "text", 3, True, None])
def test_a_result_is_what_each_repeat_returns(result: Any) -> None:
    key = stuck()
    calls = interventions.calls_of(key.pk)
    assert interventions.answer(key.pk, key.claim_token, result, by="jane", calls=calls)
    assert pay_without_undo.once("key", name="one", cents=402) == result
    key.refresh_from_db()
    assert (key.response_code, key.stuck_code) == (200, "")
    assert key.history[-1]["detail"] == "result, by jane"
    assert key.request_body is not None


def test_a_refusal_is_what_each_repeat_raises() -> None:
    key = stuck()
    refusal = Rejected("returned", "The bank returned the money.", {"cents": 402})
    assert interventions.answer(key.pk, key.claim_token, refusal, by="jane", note="ticket 7")
    with pytest.raises(Rejected) as caught:
        pay_without_undo.once("key", name="one", cents=402)
    assert caught.value.args == ("returned", "The bank returned the money.", {"cents": 402})
    key.refresh_from_db()
    assert key.history[-1]["detail"] == "rejected: returned, by jane: ticket 7"


def test_the_answer_to_a_key_that_is_kept_forever_deletes_its_arguments(bank: Bank) -> None:
    key = unfinished(bank, pay)
    assert key.request_body is not None
    assert interventions.answer(key.pk, key.claim_token, {"transfer": 0}, by="jane")
    key.refresh_from_db()
    assert (key.request_body, key.expires_at) == (None, None)


@pytest.mark.parametrize("value", [JsonResponse({}), {1, 2}, b"bytes", float("nan")])
def test_an_answer_that_is_not_json_is_refused_for_an_operation(value: Any) -> None:
    key = stuck()
    with pytest.raises(ValueError, match="its result, a JSON value, or Rejected"):
        interventions.answer(key.pk, key.claim_token, value, by="jane")
    assert "a JSON value" in interventions.answer_problem(value, key=key)
    assert not interventions.answer_problem({"transfer": 1}, key=key)
    assert IdempotencyKey.objects.get().finished_at is None


@pytest.mark.parametrize("value", [{}, None, "text", Rejected("declined")])
def test_an_answer_to_a_request_is_a_response(value: Any) -> None:
    key = IdempotencyKeyFactory(claim_token=uuid4())
    with pytest.raises(ValueError, match="an HttpResponse, not"):
        interventions.answer(key.pk, key.claim_token, value, by="jane")
    assert interventions.answer_problem(value)
    assert IdempotencyKey.objects.get().finished_at is None


def test_a_key_that_is_gone_is_not_answered() -> None:
    for value in ({}, HttpResponse()):
        assert not interventions.answer(17, None, value, by="jane")


def test_the_other_interventions_work_as_for_a_request(bank: Bank) -> None:
    key = unfinished(bank)
    assert interventions.hand_back(key.pk, key.claim_token, by="jane")
    key.refresh_from_db()
    assert interventions.complete_now(key.pk, key.claim_token, by="jane") == "finished"
    assert charge.once("key", name="one", cents=900) == {"transfer": 0}
    assert bank.transfers == {next(iter(bank.transfers)): 0}
    key.refresh_from_db()
    assert key.history[-1]["detail"] == "result"
    key = IdempotencyKey.objects.exclude(pk=key.pk).filter(pk=_stuck_one()).get()
    assert interventions.acknowledge(key.pk, key.claim_token, by="jane")
    assert IdempotencyKey.objects.acknowledged().get() == key


def test_a_lock_is_released(bank: Bank) -> None:
    key = unfinished(bank)
    IdempotencyKey.objects.update(locked_until=lock_end())
    assert interventions.release_lock(key.pk, key.claim_token, by="jane")
    assert charge.once("key", name="one", cents=900) == {"transfer": 0}


def test_the_history_says_whether_an_operation_was_rejected() -> None:
    note.once("key", name="one")
    with pytest.raises(Rejected):
        note.once("other", name="two", fails="returns")
    histories = IdempotencyKey.objects.order_by("pk").values_list("history", flat=True)
    assert [events[-1]["detail"] for events in histories] == ["result", "rejected: refused"]
    assert Entry.objects.count() == 2


def _stuck_one() -> int:
    with pytest.raises(InterventionRequired):
        pay_without_undo.once("stuck", name="two", cents=402)
    return IdempotencyKey.objects.stuck().get().pk
