"""The timeline of one key: its runs, what happened between them, the lock, and the next run of the completer."""

from collections import Counter
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from django.utils.safestring import SafeString

from idempotency import conf
from idempotency._states import KeyState
from idempotency._store.history import HistoryEvent
from idempotency._text import duration
from idempotency.admin.history import Event, Run, runs_of
from idempotency.admin.timeline import Bar, Mark, Row, draw
from idempotency.templatetags.idempotency_admin import aware, written

#: Of more runs, those in the middle share one row.
MAX_ROWS = 7
_FIRST, _LAST = 2, 3
_SHAPES: dict[str, str] = {
    HistoryEvent.RECOVERY_POINT: "point",
    HistoryEvent.CALL_BEGUN: "call",
    HistoryEvent.ERROR: "error",
    HistoryEvent.REFUSED: "error",
    HistoryEvent.STUCK: "stuck",
    HistoryEvent.FINISHED: "finished",
}


class KeyTimeline:
    """Draws the events of a key. All times are those of the database; places are in seconds since the first event."""

    def __init__(self, key: Any, events: list[Event]) -> None:
        self._key, self._events = key, [event for event in events if event.at is not None]
        self._lock_seconds = conf.get().LOCK_TIMEOUT_SECONDS
        self._runs, self._others = runs_of(self._events, self._lock_seconds)
        if self._runs and not self._runs[-1].ending and key.state != KeyState.IN_FLIGHT:
            self._runs[-1].ending = "lost"
        self._now = aware(key.read_at)
        self._begin: datetime = min((event.at for event in self._events if event.at), default=aware(key.created_at))

    def drawn(self) -> SafeString:
        """Return the drawing; nothing if all happened at one moment."""
        rows, now = self._rows(), None if self._key.finished_at else self._at(self._now)
        ends = [bar.end for row in rows for bar in row.bars] + [mark.at for row in rows for mark in row.marks] + [now or 0]
        end = self._begin + timedelta(seconds=max(ends))
        return draw(
            rows,
            now=now,
            axis=(written(self._begin), written(end)),
            summary=f"Timeline: {'; '.join(row.label for row in rows)}",
            described_by="idem-history",
        )

    def _rows(self) -> list[Row]:
        captions = [f"Run {number}, {run.by}: {self._told(run)}" for number, run in enumerate(self._runs, 1)]
        rows = [Row(caption, *self._drawn_run(run)) for caption, run in zip(captions, self._runs, strict=True)]
        if len(rows) > MAX_ROWS:
            rows[_FIRST:-_LAST] = [self._folded(rows[_FIRST:-_LAST])]
        if self._others:
            marks = tuple(Mark(self._at(event.at), _mark_of(event), event.name) for event in self._others)
            rows.append(Row("Between runs", marks=marks))
        return rows + self._ahead()

    def _drawn_run(self, run: Run) -> tuple[tuple[Bar, ...], tuple[Mark, ...]]:
        """Return the bars and the marks of a run; a call lasts until the next event of its run."""
        begin, last, silent = self._at(run.begin), self._at(run.last), self._silence(run)
        alive = silent if run.ending == "" else last
        events = [*run.events, Event("", "", self._begin + timedelta(seconds=alive), None)]
        calls = [
            Bar(self._at(event.at), self._at(after.at), "call")
            for event, after in pairwise(events)
            if event.name == HistoryEvent.CALL_BEGUN
        ]
        marks = [Mark(self._at(event.at), _mark_of(event), _label_of(event)) for event in run.events]
        bars = [Bar(begin, alive), *calls]
        if run.ending == "lost":
            bars.append(Bar(last, silent, "silent"))
            marks.append(Mark(silent, "error", "lost"))
        return tuple(bars), tuple(marks)

    def _silence(self, run: Run) -> float:
        """Return until when a run without an end may have held its lock: until it expired, or the key was changed."""
        later = [event.at for event in self._events if event.at and event.at > run.last]
        expired = run.last + timedelta(seconds=self._lock_seconds)
        return self._at(min([expired, self._now, *later[:1]]))

    def _told(self, run: Run) -> str:
        """Return how long a run lasted, and how it ended."""
        if run.ending == "lost":
            return f"lost, last sign of life after {duration((run.last - run.begin).total_seconds())}"
        end = run.last if run.ending else self._now
        lasted = duration((end - run.begin).total_seconds())
        if not run.ending:
            return f"running for {lasted}"
        return f"{lasted}, {run.ending}" + (f", {run.events[-1].detail}" if run.ending == HistoryEvent.FINISHED else "")

    def _folded(self, rows: list[Row]) -> Row:
        runs = self._runs[_FIRST:-_LAST]
        ends = ", ".join(f"{count} times {ending}" for ending, count in Counter(run.ending for run in runs).items())
        caption = f"Runs {_FIRST + 1} to {len(self._runs) - _LAST}: {ends}"
        return Row(caption, tuple(bar for row in rows for bar in row.bars))

    def _ahead(self) -> list[Row]:
        """Return what comes next: the lock that expires, or the run of the completer."""
        now = self._at(self._now)
        match self._key.state:
            case KeyState.IN_FLIGHT:
                expiry = self._at(self._key.locked_at) + self._lock_seconds
                bar = Bar(now, expiry, "ahead")
                return [Row(f"Lock, expires in {duration(expiry - now)}", (bar,), (Mark(expiry, "expiry", "expires"),))]
            case KeyState.WAITING | KeyState.ABANDONED:
                due = max(now, self._at(self._key.due_at))
                label = f"in {duration(due - now)}" if due > now else "in its next pass"
                return [Row(f"Next run, completer: {label}", marks=(Mark(due, "next", "due"),))]
        return []

    def _at(self, at: Any) -> float:
        return float((aware(at) - self._begin).total_seconds())


def _mark_of(event: Event) -> str:
    """Return the shape of an event; what a person did is the rest."""
    return _SHAPES.get(event.name, "person")


def _label_of(event: Event) -> str:
    """Return the name of a point or a call, else what ended the run."""
    return event.detail if event.name in (HistoryEvent.RECOVERY_POINT, HistoryEvent.CALL_BEGUN) else event.name
