"""The states of a key: each key has exactly one, and the annotation, the methods and the counts
agree on it."""

from collections.abc import Callable
from datetime import timedelta
from itertools import product
from typing import Any
from uuid import uuid4

import pytest
from django.utils import timezone

from idempotency import conf
from idempotency._states import KeyState
from idempotency.models import FINISHED, IdempotencyKey
from tests.factories import IdempotencyKeyFactory
from tests.kit.ageing import ago

pytestmark = pytest.mark.django_db

LONG_AGO, LATER = ago(days=1), timezone.now() + timedelta(days=1)
STUCK = {"stuck_at": ago(hours=1), "stuck_reason": "x"}
LOCKED = {"claim_token": uuid4(), "locked_until": LATER}
#: The possible values of a row's columns, in groups of columns.
PARTS: list[list[dict[str, Any]]] = [
    [{}, {"refused_at": LONG_AGO, "expires_at": LATER}],
    [{}, LOCKED, {**LOCKED, "locked_until": LONG_AGO}],
    [
        {},
        {**STUCK, "stuck_code": "call_in_doubt"},
        {**STUCK, "stuck_code": "unknown_recovery_point"},
    ],
    [{}, {"acknowledged_at": LONG_AGO}, {"acknowledged_at": LATER}],
    [{}, {"created_at": LONG_AGO}, {"created_at": LONG_AGO, "last_run_at": LONG_AGO}],
    [{}, {"next_run_at": LONG_AGO}, {"next_run_at": LATER}],
]


@pytest.fixture
def every_row() -> int:
    """Create a key for each combination of column values; return the number of keys."""
    rows = [
        {name: value for part in parts for name, value in part.items()} for parts in product(*PARTS)
    ]
    over = {"finished_at": LONG_AGO, "recovery_point": FINISHED, "expires_at": LATER}
    rows += [row | over for row in rows if "stuck_at" not in row]
    IdempotencyKey.objects.bulk_create(IdempotencyKeyFactory.build(**row) for row in rows)
    return len(rows)


def test_each_key_has_one_state_and_the_methods_find_it_there(every_row: int) -> None:
    objects = IdempotencyKey.objects
    states = dict(objects.with_state().values_list("pk", "state"))
    assert len(states) == every_row
    assert {*states.values()} == {*KeyState}
    methods: dict[KeyState, Callable[[], Any]] = {
        KeyState.STUCK: objects.stuck, KeyState.ACKNOWLEDGED: objects.acknowledged,
        KeyState.IN_FLIGHT: objects.in_flight, KeyState.REFUSED: objects.refused,
        KeyState.FINISHED: objects.finished,
    }  # fmt: skip
    for state in KeyState:
        of_state = {pk for pk, found in states.items() if found == state}
        assert {key.pk for key in objects.in_state(state)} == of_state, state
        assert state not in methods or {key.pk for key in methods[state]()} == of_state, state


def test_the_completer_takes_abandoned_keys_and_those_that_a_deploy_left(every_row: int) -> None:
    taken = IdempotencyKey.objects.abandoned().with_state()
    assert {*taken.filter(stuck_at=None)} == {*IdempotencyKey.objects.in_state(KeyState.ABANDONED)}
    stuck = taken.exclude(stuck_at=None)
    assert {key.stuck_code for key in stuck} == {"unknown_recovery_point"}
    assert {key.state for key in stuck} == {KeyState.STUCK, KeyState.ACKNOWLEDGED}


@pytest.mark.parametrize(
    ("columns", "state"),
    [
        (LOCKED | STUCK | {"stuck_code": "unknown_recovery_point"}, KeyState.IN_FLIGHT),
        (LOCKED | STUCK | {"locked_until": LONG_AGO, "stuck_code": "on_abandon"}, KeyState.STUCK),
        (STUCK | {"stuck_code": "x", "acknowledged_at": LONG_AGO}, KeyState.STUCK),
    ],
)
def test_of_several_marks_the_first_in_precedence_is_the_state(
    columns: dict[str, Any], state: KeyState
) -> None:
    IdempotencyKeyFactory(**columns)
    assert IdempotencyKey.objects.with_state().get().state == state


@pytest.mark.parametrize("late", ["created_at", "last_run_at", "next_run_at"])
def test_a_key_is_abandoned_when_it_is_old_idle_and_due(late: str) -> None:
    limits = conf.get()
    seconds = {
        "created_at": limits.COMPLETER_MIN_AGE_SECONDS,
        "last_run_at": limits.COMPLETER_IDLE_SECONDS,
        "next_run_at": 0,
    }
    due = {name: ago(seconds=needed + 30) for name, needed in seconds.items()}
    IdempotencyKeyFactory(**due)
    IdempotencyKeyFactory(**due | {late: ago(seconds=seconds[late] - 30)})
    states = IdempotencyKey.objects.order_by("pk").with_state().values_list("state", flat=True)
    assert list(states) == [KeyState.ABANDONED, KeyState.WAITING]
