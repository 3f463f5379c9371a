"""The timeline of one key: its runs, the events between runs, the lock, and the next run of the
completer."""

from collections import Counter
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from idempotency._engine.history import HistoryEvent
from idempotency._states import KeyState
from idempotency._text import duration
from idempotency.admin.history import LOST, Event, LoggedRun, event_label, runs_of
from idempotency.admin.timeline import Lane, Mark, Stretch, draw
from idempotency.templatetags.idempotency_admin import aware, written

#: If a key has more runs, the runs in the middle share one row.
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
    """The drawing of the events of a key. All times come from the database; positions are seconds
    since the first event."""

    def __init__(self, key: Any, events: list[Event]) -> None:
        self._key, self._events = key, [event for event in events if event.at is not None]
        self._lock_seconds = key.lease_seconds
        self._runs, self._others = runs_of(self._events, self._lock_seconds)
        if self._runs and not self._runs[-1].ending and key.state != KeyState.IN_FLIGHT:
            self._runs[-1].ending = LOST
        self._now = aware(key.read_at)
        self._begin: datetime = min(
            (event.at for event in self._events if event.at), default=aware(key.created_at)
        )

    def drawn(self) -> SafeString:
        """Return the drawing; an empty text if all times are equal."""
        rows, now = self._rows(), None if self._key.finished_at else self._at(self._now)
        times = [now or 0, *(bar.end for row in rows for bar in row.bars)]
        times += [mark.at for row in rows for mark in row.marks]
        end = self._begin + timedelta(seconds=max(times))
        return draw(
            rows,
            now=now,
            axis=(written(self._begin), written(end)),
            summary=_("Timeline: %(rows)s") % {"rows": "; ".join(row.label for row in rows)},
            described_by="idem-history",
        )

    def _rows(self) -> list[Lane]:
        rows = []
        for number, run in enumerate(self._runs, 1):
            told = {"number": number, "by": run.by, "course": self._told(run)}
            caption = _("Run %(number)s, %(by)s: %(course)s") % told
            rows.append(Lane(caption, *self._drawn_run(run)))
        if len(rows) > MAX_ROWS:
            rows[_FIRST:-_LAST] = [self._folded(rows[_FIRST:-_LAST])]
        if self._others:
            marks = tuple(
                Mark(self._at(event.at), _mark_of(event), event.label) for event in self._others
            )
            rows.append(Lane(_("Between runs"), marks=marks))
        return rows + self._ahead()

    def _drawn_run(self, run: LoggedRun) -> tuple[tuple[Stretch, ...], tuple[Mark, ...]]:
        """Return the bars and the marks of a run. The bar of a call ends at the next event of the
        run. The call of a lost run is drawn up to the place where the run is lost."""
        begin, last, silent = self._at(run.begin), self._at(run.last), self._silence(run)
        alive = silent if run.ending == "" else last
        events = [*run.events, Event("", "", self._begin + timedelta(seconds=alive), None)]
        calls = [
            Stretch(self._at(event.at), self._at(after.at), "call")
            for event, after in pairwise(events)
            if event.name == HistoryEvent.CALL_BEGUN
        ]
        marks = [
            Mark(self._at(event.at), _mark_of(event), _label_of(event)) for event in run.events
        ]
        bars = [Stretch(begin, alive), *calls]
        if run.ending == LOST:
            in_call = run.events and run.events[-1].name == HistoryEvent.CALL_BEGUN
            bars.append(Stretch(last, silent, "unanswered" if in_call else "silent"))
            marks.append(Mark(silent, "error", event_label(LOST)))
        return tuple(bars), tuple(marks)

    def _silence(self, run: LoggedRun) -> float:
        """Return the time until which a run without a last event may have held its lock: the expiry
        of the lock, the next event of the key, or now, whichever is first."""
        later = [event.at for event in self._events if event.at and event.at > run.last]
        expired = run.last + timedelta(seconds=self._lock_seconds)
        return self._at(min([expired, self._now, *later[:1]]))

    def _told(self, run: LoggedRun) -> str:
        """Return the duration of a run, and its ending."""
        if run.ending == LOST:
            lasted = duration(run.last - run.begin)
            return _("lost, last sign of life after %(duration)s") % {"duration": lasted}
        end = run.last if run.ending else self._now
        lasted = duration(end - run.begin)
        if not run.ending:
            return _("running for %(duration)s") % {"duration": lasted}
        ending = f"{lasted}, {event_label(run.ending)}"
        return (
            f"{ending}, {run.events[-1].detail}" if run.ending == HistoryEvent.FINISHED else ending
        )

    def _folded(self, rows: list[Lane]) -> Lane:
        runs = self._runs[_FIRST:-_LAST]
        counted = Counter(run.ending for run in runs).items()
        ends = ", ".join(
            _("%(count)s times %(ending)s") % {"count": count, "ending": event_label(name)}
            for name, count in counted
        )
        numbers = {"first": _FIRST + 1, "last": len(self._runs) - _LAST, "endings": ends}
        return Lane(
            _("Runs %(first)s to %(last)s: %(endings)s") % numbers,
            tuple(bar for row in rows for bar in row.bars),
        )

    def _ahead(self) -> list[Lane]:
        """Return the row for the future: the expiry of the lock, or the next run of the
        completer."""
        now = self._at(self._now)
        match self._key.state:
            case KeyState.IN_FLIGHT:
                expiry = self._at(self._key.locked_until)
                bar = Stretch(now, expiry, "ahead")
                label = _("Lock, expires in %(duration)s") % {"duration": duration(expiry - now)}
                return [Lane(label, (bar,), (Mark(expiry, "expiry", _("expires")),))]
            case KeyState.WAITING | KeyState.ABANDONED:
                due = max(now, self._at(self._key.due_at))
                label = _("Next run, completer: in its next pass")
                if due > now:
                    label = _("Next run, completer: in %(duration)s") % {
                        "duration": duration(due - now)
                    }
                return [Lane(label, marks=(Mark(due, "next", _("due")),))]
        return []

    def _at(self, at: Any) -> float:
        return float((aware(at) - self._begin).total_seconds())


def _mark_of(event: Event) -> str:
    """Return the shape of an event. An event without a shape of its own is an action of a
    person."""
    return _SHAPES.get(event.name, "person")


def _label_of(event: Event) -> str:
    """Return the name of a recovery point or a call; for the last event of a run, the label of the
    event."""
    has_name = event.name in (HistoryEvent.RECOVERY_POINT, HistoryEvent.CALL_BEGUN)
    return event.detail if has_name else event.label
