"""The runs that the history of a key tells of."""

from datetime import UTC, datetime, timedelta

import pytest

from idempotency.admin.history import history_of, is_whole, runs_of
from idempotency.models import IdempotencyKey

BEGIN = datetime(2026, 11, 21, 6, tzinfo=UTC)
LOCK_SECONDS = 90


def key(*events: tuple[float, str, str]) -> IdempotencyKey:
    return IdempotencyKey(
        history=[
            {
                "at": (BEGIN + timedelta(seconds=seconds)).isoformat(),
                "event": name,
                "detail": detail,
            }
            for seconds, name, detail in events
        ]
    )


def endings(*events: tuple[float, str, str]) -> list[tuple[str, str]]:
    """Return by whom each run was begun, and how it ended."""
    runs, _ = runs_of(history_of(key((0, "claimed", "client"), *events)), LOCK_SECONDS)
    return [(run.by, run.ending) for run in runs]


def others(*events: tuple[float, str, str]) -> list[str]:
    return [
        event.name
        for event in runs_of(history_of(key((0, "claimed", "client"), *events)), LOCK_SECONDS)[1]
    ]


@pytest.mark.parametrize("ending", ["finished", "error", "refused", "stuck"])
def test_a_run_ends_with_its_own_event(ending: str) -> None:
    events = ((1, "recovery point", "paid"), (2, ending, ""))
    assert endings(*events) == [("client", ending)]
    assert others(*events) == []


def test_a_run_is_lost_if_another_one_follows_it() -> None:
    events = (
        (1, "call begun", "charge"),
        (95, "claimed", "completer"),
        (96, "finished", "status 201"),
    )
    assert endings(*events) == [("client", "lost"), ("completer", "finished")]


def test_a_run_is_lost_if_its_history_says_so() -> None:
    events = ((90, "run lost", "lock expired"), (91, "stuck", ""), (95, "run lost", "lock expired"))
    assert endings(*events) == [("client", "lost")]
    assert others(*events) == ["stuck"]


@pytest.mark.parametrize("name", ["answered", "handed back", "lock released"])
def test_a_run_is_lost_if_a_person_decides_about_its_key(name: str) -> None:
    assert endings((120, name, "by jane")) == [("client", "lost")]
    assert others((120, name, "by jane")) == [name]


def test_a_key_that_is_given_up_after_its_lock_has_expired_was_lost() -> None:
    assert endings((LOCK_SECONDS + 1, "stuck", "")) == [("client", "lost")]
    assert others((LOCK_SECONDS + 1, "stuck", "")) == ["stuck"]


def test_an_acknowledgement_ends_no_run() -> None:
    events = (1, "acknowledged", "by jane"), (2, "unacknowledged", "by jane"), (3, "finished", "")
    assert endings(*events) == [("client", "finished")]


def test_a_cut_history_begins_inside_a_run() -> None:
    cut = key((0, "recovery point", "paid"), (1, "error", "OSError"), (2, "claimed", "client"))
    runs, _ = runs_of(history_of(cut), LOCK_SECONDS)
    assert [run.ending for run in runs] == ["error", ""]
    assert not is_whole(cut)


def test_an_event_without_a_time_is_no_part_of_a_run() -> None:
    runs, found = runs_of(
        history_of(IdempotencyKey(history=[{"at": "", "event": "claimed", "detail": ""}])),
        LOCK_SECONDS,
    )
    assert (runs, found) == ([], [])
