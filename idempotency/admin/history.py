"""The history of a key: its events, and the runs to which the events belong."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext

from idempotency._engine.dialects import HISTORY_LIMIT
from idempotency._engine.history import HistoryEvent
from idempotency._operations.definition import METHOD
from idempotency.templatetags.idempotency_admin import aware

#: Events that only the run itself writes, as its last one.
_OWN_ENDS = (HistoryEvent.FINISHED, HistoryEvent.ERROR, HistoryEvent.REFUSED)
#: The ending of a run that wrote no last event, whether the history has the event "run lost" or
#: not.
LOST = "lost"
#: Events that end a run from outside: a person, the completer, the reaper, a retry or the watchdog
#: of a loop writes them.
_OTHER_ENDS = (
    HistoryEvent.ANSWERED, HistoryEvent.HANDED_BACK, HistoryEvent.LOCK_RELEASED,
    HistoryEvent.STUCK, HistoryEvent.HUNG,
)  # fmt: skip

#: Events of a person that leave a run as it is.
_NO_ENDS = (HistoryEvent.ACKNOWLEDGED, HistoryEvent.UNACKNOWLEDGED)


@dataclass(frozen=True, slots=True)
class Event:
    """An event of the history; ``seconds_later`` is the time since the previous event, None if it
    is unknown."""

    name: str
    detail: str
    at: datetime | None
    seconds_later: float | None

    @property
    def label(self) -> str:
        """The name in the language of the person."""
        return event_label(self.name)


@dataclass(slots=True)
class LoggedRun:
    """One run of the key. ``ending`` is the name of its last event, LOST without one, or "" while
    the run may continue."""

    by: str
    begin: datetime
    last: datetime
    ending: str = ""
    #: Recovery points and calls, in their order, and the event that ended the run.
    events: list[Event] = field(default_factory=list)


def event_label(name: str) -> str:
    """Return the name of an event or an ending in the language of the person; an unknown name is
    returned unchanged."""
    if name == LOST:
        return gettext("lost")
    return str(HistoryEvent(name).label) if name in HistoryEvent else name


def history_of(key: Any) -> list[Event]:
    """Return the events of the key, the oldest first."""
    found: list[Event] = []
    before: datetime | None = None
    for event in key.history:
        at = parse_datetime(event["at"])
        at = at and aware(at)
        # The time of an event is the start of its statement. A statement that waited for the
        # previous one may be older.
        later = max(0.0, (at - before).total_seconds()) if at and before else None
        found.append(Event(event["event"], _detail(key, event), at, later))
        before = at or before
    return found


def _detail(key: Any, event: dict[str, str]) -> str:
    """Return the detail of an event. A run for the caller of an operation has no client."""
    is_call = key.request_method == METHOD and event["event"] == HistoryEvent.CLAIMED
    return "caller" if is_call and event["detail"] == "client" else event["detail"]


def is_whole(key: Any) -> bool:
    """Return whether the history certainly has all events since the first claim."""
    # A claim after a lost run removes two old events first, so a cut history may have one event
    # less than the limit.
    return (
        bool(key.history)
        and key.history[0]["event"] == HistoryEvent.CLAIMED
        and len(key.history) < HISTORY_LIMIT - 1
    )


def runs_of(events: Sequence[Event], lock_seconds: float) -> tuple[list[LoggedRun], list[Event]]:
    """Return the runs, and the events that belong to no run. A cut history may begin inside a run.

    A run without a last event of its own is lost if "run lost", another claim or an event of
    _OTHER_ENDS follows. A run writes "stuck" itself, so this event means a lost run only if it is
    more than ``lock_seconds`` later than the event before it.
    """
    runs: list[LoggedRun] = []
    others: list[Event] = []
    for event in events:
        if event.at is None:
            continue
        run = runs[-1] if runs and not runs[-1].ending else None
        if event.name == HistoryEvent.CLAIMED or (
            run is None and event.name in (HistoryEvent.RECOVERY_POINT, *_OWN_ENDS) and not runs
        ):
            if run is not None:
                run.ending = LOST
            run = LoggedRun(
                event.detail if event.name == HistoryEvent.CLAIMED else "run", event.at, event.at
            )
            runs.append(run)
            if event.name == HistoryEvent.CLAIMED:
                continue
        if event.name == HistoryEvent.RUN_LOST:
            if run is not None:
                run.ending = LOST
        elif run is None or event.name in _NO_ENDS:
            others.append(event)
        elif event.name in _OTHER_ENDS and (
            event.name != HistoryEvent.STUCK or (event.at - run.last).total_seconds() > lock_seconds
        ):
            run.ending = LOST
            others.append(event)
        else:
            run.last = event.at
            run.ending = event.name if event.name in (*_OWN_ENDS, HistoryEvent.STUCK) else ""
            run.events.append(event)
    return runs, others
