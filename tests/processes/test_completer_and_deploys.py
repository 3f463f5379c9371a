"""Keys that the completer leaves in peace: what this code does not know after a deploy, what a
person has just given back."""

from datetime import timedelta
from typing import Any

import pytest
from django.db.models.functions import Now
from django.http import HttpResponse
from django.utils import timezone
from pytest_django import Settings

from idempotency import interventions
from idempotency.completer import CompletePass, complete_once
from idempotency.decorators import idempotent
from idempotency.exceptions import StuckCode
from idempotency.models import IdempotencyKey
from idempotency.signals import key_claimed
from tests.kit.ageing import abandon
from tests.kit.serving import Sender
from tests.kit.shop import Shop, open_shop
from tests.kit.views import two_phases

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def shop(serve: Any) -> Shop:
    """Return the shop, which answers at /view/."""
    return open_shop(serve)


@pytest.fixture
def left(shop: Shop, sender: Sender) -> IdempotencyKey:
    """Return a key that a deploy has left, and the completer has met once."""
    sender.send()
    IdempotencyKey.objects.update(recovery_point="of_another_release")
    abandon()
    assert complete_once() == CompletePass(stuck=1)
    key = IdempotencyKey.objects.get()
    assert key.stuck_code == StuckCode.UNKNOWN_RECOVERY_POINT
    return key


def test_nothing_comes_between_a_person_and_the_key(
    left: IdempotencyKey, caplog: pytest.LogCaptureFixture
) -> None:
    assert interventions.acknowledge(left.pk, left.claim_token, by="jane")
    assert f"key {left.key_hash}: acknowledged by jane" in caplog.text
    before = IdempotencyKey.objects.values().get()
    for _ in range(3):
        IdempotencyKey.objects.update(next_run_at=None)
        assert complete_once() == CompletePass()
    after = IdempotencyKey.objects.values().get()
    assert after == before | {"next_run_at": after["next_run_at"]}
    assert not IdempotencyKey.objects.stuck().exists(), "what was acknowledged stays off the list"


@pytest.mark.parametrize(("stuck_hours", "wait_seconds"), [(0, 60), (2, 720), (100, 3600)])
def test_the_completer_looks_at_it_again_after_a_tenth_of_its_time(
    left: IdempotencyKey, stuck_hours: float, wait_seconds: float
) -> None:
    abandon()
    IdempotencyKey.objects.update(stuck_at=Now() - timedelta(hours=stuck_hours))
    asked: list[bool] = []
    complete_once(stop=lambda: bool(asked.append(True)))
    assert len(asked) == 2, "each such key lets the process stop, and renew its heartbeat"
    wait = IdempotencyKey.objects.get().next_run_at - timezone.now()
    assert wait_seconds - 10 < wait.total_seconds() < wait_seconds + 10
    assert not IdempotencyKey.objects.abandoned().exists()


def test_it_goes_on_once_the_code_knows_the_point(left: IdempotencyKey, shop: Shop) -> None:
    IdempotencyKey.objects.update(recovery_point="entry_created")
    abandon()
    shop.broken = False
    assert complete_once() == CompletePass(finished=1)


def test_when_it_fails_under_the_new_code_it_is_tried_and_given_up_on_as_any_other(
    left: IdempotencyKey,
    shop: Shop,
    settings: Settings,
) -> None:
    settings.IDEMPOTENCY = {"COMPLETER_MAX_ATTEMPTS": 2}
    IdempotencyKey.objects.update(recovery_point="entry_created")
    for expected in (CompletePass(failed=1), CompletePass(stuck=1)):
        abandon()
        assert complete_once() == expected
    assert IdempotencyKey.objects.get().stuck_code == "attempts_exhausted"


def test_a_view_that_is_gone_meanwhile_changes_nothing(left: IdempotencyKey, serve: Any) -> None:
    serve(elsewhere=lambda request: None)
    abandon()
    assert complete_once() == CompletePass()
    assert IdempotencyKey.objects.get().stuck_code == StuckCode.UNKNOWN_RECOVERY_POINT


def test_a_key_that_a_person_hands_back_in_the_middle_of_a_pass_has_its_attempts_again(
    shop: Shop,
    sender: Sender,
    settings: Settings,
) -> None:
    """The pass had read that they were used up."""
    settings.IDEMPOTENCY = {"COMPLETER_MAX_ATTEMPTS": 2}
    for name in ("first", "second"):
        sender.send(key=name)
    abandon()
    second = IdempotencyKey.objects.get(idempotency_key="second")
    IdempotencyKey.objects.filter(pk=second.pk).update(completer_attempts=2)

    handed_back: list[bool] = []

    def hand_back(key: IdempotencyKey, **kwargs: Any) -> None:
        if key.idempotency_key == "first":
            handed_back.append(interventions.hand_back(second.pk, second.claim_token, by="jane"))

    shop.broken = False
    key_claimed.connect(hand_back)
    try:
        assert complete_once() == CompletePass(finished=2)
    finally:
        key_claimed.disconnect(hand_back)
    assert handed_back == [True]


@pytest.mark.postgres
def test_a_deploy_that_takes_long_to_be_mended_leaves_keys_that_the_completer_finishes(
    serve: Any, sender: Sender
) -> None:
    """25 runs of code that does not know the point take 20 hours; then the mended code comes."""
    broken = [1]

    def call() -> None:
        if broken:
            raise OSError("down")

    good = two_phases(lambda request: None, lambda request: HttpResponse(status=201), call=call)
    serve(view=good)
    assert sender.send().status_code == 500
    serve(
        view=idempotent(recovery_points=["other"])(
            lambda request: request.idempotency_key.response()
        )
    )
    for _ in range(26):
        abandon()
        complete_once()
    key = IdempotencyKey.objects.get()
    assert key.stuck_code == "unknown_recovery_point", (key.stuck_code, key.completer_attempts)
    broken.clear()
    serve(view=good)
    abandon()
    complete_once()
    assert IdempotencyKey.objects.get().response_code == 201
