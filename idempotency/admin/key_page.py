"""What the page of a key shows beside its fields: where it stands, what happened, what comes next."""

from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.utils.safestring import SafeString

from idempotency import conf
from idempotency._request.lookup import on_abandon_of, options_for
from idempotency._request.stored_request import urlconf_of
from idempotency._states import KeyState
from idempotency._store.history import HistoryEvent
from idempotency._text import duration
from idempotency.admin.history import history_of, is_whole
from idempotency.admin.reading import first_line_of, masked
from idempotency.admin.stuck_codes import STUCK_CODES
from idempotency.exceptions import StuckCode
from idempotency.models import FINISHED, STARTED, IdempotencyKey
from idempotency.templatetags.idempotency_admin import aware, written

#: How many foreign calls of a key are looked at for one in doubt.
MAX_CALLS = 100


class DeclaredPoints:
    """The recovery points that views declare; each view is looked up once for a page."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str], tuple[str, ...] | None] = {}

    def of(self, key: IdempotencyKey) -> tuple[str, ...] | None:
        """Return the points of the view that answers the key's request, none for a plain one; None without a protected view."""
        place = key.request_path.partition("?")[0], key.request_method, urlconf_of(key) or ""
        if place not in self._found:
            self._found[place] = _declared(key)
        return self._found[place]


def _declared(key: IdempotencyKey) -> tuple[str, ...] | None:
    options = options_for(key)
    return options.every_point() if options else None


def progress(key: IdempotencyKey, points: tuple[str, ...] | None) -> str:
    """Return the recovery point with its place among those declared, as in ``ride_created (2/4)``."""
    if not points or key.recovery_point not in points:
        return key.recovery_point
    return f"{key.recovery_point} ({points.index(key.recovery_point) + 1}/{len(points)})"


@dataclass(frozen=True, slots=True)
class Stop:
    """A recovery point on the line.

    ``place`` is passed, skipped (before the marker, and the history shows that no phase committed it), unrecorded (before the
    marker, and the history is cut or empty), here, unknown or ahead.
    """

    name: str
    place: str
    at: datetime | None
    errors: int = 0


def line(key: IdempotencyKey, points: tuple[str, ...] | None) -> list[Stop]:
    """Return the phases of the key in their order, with the place where it stands and the errors met at each."""
    reached, errors = _reached(key)
    order = list(points or (STARTED, FINISHED))
    unknown = key.recovery_point not in order
    if unknown:  # Which of the declared points it has passed, the history alone can tell.
        passed = [name for name in reached if name not in (FINISHED, key.recovery_point)]
        order = [*passed, key.recovery_point, *(name for name in order if name not in passed)]
    here = order.index(key.recovery_point)
    not_reached = "skipped" if is_whole(key) else "unrecorded"
    stops = []
    for position, name in enumerate(order):
        if position < here or key.finished_at:
            place = "passed" if name in reached else not_reached
        elif position == here:
            place = "unknown" if unknown else "here"
        else:
            place = "ahead"
        stops.append(Stop(name, place, reached.get(name), errors[name]))
    return stops


def since(key: Any) -> datetime:
    """Return when the key came into its state; while it is unfinished and no run holds it, when its last run began."""
    times = {
        KeyState.FINISHED: key.finished_at,
        KeyState.REFUSED: key.refused_at,
        KeyState.STUCK: key.stuck_at,
        KeyState.ACKNOWLEDGED: key.acknowledged_at,
    }
    found: datetime = times.get(key.state) or key.last_run_at
    return found


def for_how_long(key: Any) -> str:
    """Return how long the key has been in its state."""
    return duration(max(0.0, (key.read_at - since(key)).total_seconds()))


def heading(key: Any) -> str:
    """Return the state of the key in a few words, with the stuck code or the stored status."""
    if key.state == KeyState.FINISHED:
        return f"Finished: answered {key.response_code}" if key.response_code else "Finished: without a response"
    state = short_state(key).capitalize()
    return f"{state}: {key.stuck_code}" if key.stuck_code else state


def short_state(key: Any) -> str:
    """Return the state of the key and its age, for a cell of a table: ``stuck, 9 min``."""
    return f"{key.state}, {for_how_long(key)}"


def state_line(key: Any) -> str:
    """Return where the key stands, and how it came there, in a sentence."""
    place, ago = progress(key, key.declared), f"{for_how_long(key)} ago"
    runs = f"{key.attempts} run{'' if key.attempts == 1 else 's'}"
    match key.state:
        case KeyState.FINISHED:
            events = history_of(key)
            if events and events[-1].name == HistoryEvent.ANSWERED:
                return f"A person wrote its response {ago} ({events[-1].detail}), after {runs}."
            took = duration((key.finished_at - key.created_at).total_seconds())
            return f"Its response was stored {ago}, {took} after the request, in {runs}."
        case KeyState.REFUSED:
            return f"Its client was refused {ago}, in {runs}. Nothing was begun."
        case KeyState.IN_FLIGHT:
            return f"Run {key.attempts} began {ago} and holds its lock. The key stands at {place}."
        case KeyState.STUCK:
            return f"It was given up {ago} at {place}, after {runs}. It has no response."
        case KeyState.ACKNOWLEDGED:
            return f"It is stuck at {place}, after {runs}. A person took it off the list {ago}. It has no response."
    return f"No run holds it. Its last run, number {key.attempts}, began {ago}. The key stands at {place}."


def best_action(key: Any) -> str:
    """Return the name of the button that ends what the key waits for; "" if nothing does."""
    if key.state in (KeyState.IN_FLIGHT, KeyState.FINISHED, KeyState.REFUSED):
        return ""
    if key.stuck_code == StuckCode.CALL_IN_DOUBT:
        calls = list(key.foreign_calls.values_list("recorded_at", flat=True)[:MAX_CALLS])
        return "complete" if calls and None not in calls else "answer"  # a late result was recorded
    return STUCK_CODES[key.stuck_code].best if key.stuck_code in STUCK_CODES else "complete"


def _reached(key: IdempotencyKey) -> tuple[dict[str, datetime | None], Counter[str]]:
    """Return when each point was reached, and how many errors there were at it, as far as the history remembers."""
    reached: dict[str, datetime | None] = {STARTED: key.created_at, FINISHED: key.finished_at}
    errors: Counter[str] = Counter()
    here = STARTED
    for event in history_of(key):
        if event.name == HistoryEvent.RECOVERY_POINT:
            here = event.detail
            reached[here] = event.at
        elif event.name == HistoryEvent.ERROR:
            errors[here] += 1
    return reached, errors


@dataclass(frozen=True, slots=True)
class LastCall:
    """A call under a derived key that no later phase has answered for."""

    name: str
    seconds_ago: float


def last_call(key: IdempotencyKey, now: datetime) -> LastCall | None:
    """Return the last call under a derived key since the key last moved; None if there is none, or the key is finished."""
    for event in reversed(history_of(key)) if key.finished_at is None else ():
        if event.name == HistoryEvent.RECOVERY_POINT:
            break
        if event.name == HistoryEvent.CALL_BEGUN and event.at is not None:
            return LastCall(event.detail, max(0.0, (aware(now) - event.at).total_seconds()))
    return None


def next_step(key: Any, *, has_view: bool) -> str:
    """Return what the machine will do next with ``key``, and when, in a sentence or two."""
    limits, now = conf.get(), key.read_at
    number, limit = key.completer_attempts + 1, limits.COMPLETER_MAX_ATTEMPTS
    run = f"run {number} of {limit}"
    if number > limit:
        to_a_person = f"its {limit} runs are over: it hands the key to a person"
        run = f"run {number}, until on_abandon settles it" if on_abandon_of(key) else to_a_person
    lost = "" if has_view else " No protected view answers its path now: a run would mark it as stuck."
    match key.state:
        case KeyState.FINISHED:
            expires = (key.finished_at or now) + timedelta(hours=limits.RETENTION_HOURS)
            if expires <= now:
                return "Its retention is over: the reaper deletes it, and a further request with this key runs anew."
            return f"Nothing: each retry of its client gets the stored response, until {_moment(expires, now)}."
        case KeyState.IN_FLIGHT:
            expires = key.locked_at + timedelta(seconds=limits.LOCK_TIMEOUT_SECONDS)
            return (
                f"A run holds it. Should that run fall silent, its lock expires at {_moment(expires, now)}; then a "
                f"retry of its client goes on from its recovery point, or later the completer."
            )
        case KeyState.REFUSED:
            expires = (key.refused_at or now) + timedelta(hours=limits.RETENTION_HOURS)
            return f"Nothing was begun. Only a retry of its client runs it; the reaper deletes it at {_moment(expires, now)}."
        case KeyState.STUCK if key.stuck_code == StuckCode.REFUSED_WHEN_REBUILT:
            return "The completer does not run it again. A retry of its client does."
        case KeyState.STUCK if key.stuck_code == StuckCode.UNKNOWN_RECOVERY_POINT:
            due = _moment(max(key.due_at, now), now)
            return f"Code that knows its recovery point goes on: with a retry, or the completer at {due}."
        case KeyState.STUCK:
            return "Nothing: it waits for a person. A retry of its client is answered 409 key_stuck, and changes nothing."
        case KeyState.ACKNOWLEDGED:
            return "Nothing: a person has taken it off the list, and it has no response. A retry is answered 409 key_stuck."
        case KeyState.ABANDONED:
            return f"The completer takes it in its next pass ({run}), if a retry of its client does not come first.{lost}"
    due = _moment(key.due_at, now)
    return f"A retry of its client goes on at once. Without one the completer takes it at {due} ({run}).{lost}"


def _moment(at: datetime, now: datetime) -> str:
    distance = f"in {duration((at - now).total_seconds())}" if at > now else "now"
    return f"{written(at)} ({distance})"


def facts(key: Any) -> dict[str, Any]:
    """Return what the page and each question say of ``key``, for the template: its state, its cause, its cure, its next run."""
    return {
        "heading": heading(key),
        "state_line": state_line(key),
        **_last_error(key),
        "stuck_code": STUCK_CODES.get(key.stuck_code),
        "last_call": last_call(key, key.read_at),
        "next_step": next_step(key, has_view=key.declared is not None),
    }


def _last_error(key: IdempotencyKey) -> dict[str, SafeString]:
    """Return the last error of an unfinished key: its first line, and the whole of it if there is more."""
    line = "" if key.finished_at else first_line_of(key.last_error)
    return {
        "error_line": masked(line),
        "whole_error": masked("" if key.finished_at or is_error_on_top(key) else key.last_error),
    }


def is_error_on_top(key: IdempotencyKey) -> bool:
    """Return whether the facts of the key hold its whole last error."""
    return key.finished_at is None and first_line_of(key.last_error) == key.last_error.strip()
