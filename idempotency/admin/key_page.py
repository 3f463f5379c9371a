"""What the page of a key shows beside its fields: where it stands, what happened, what comes next."""

from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.timesince import timeuntil

from idempotency import conf
from idempotency._request.lookup import on_abandon_of, options_for
from idempotency._request.stored_request import urlconf_of
from idempotency._states import KeyState
from idempotency._store.dialects import HISTORY_LIMIT
from idempotency._store.fence import CALL_BEGUN
from idempotency.admin.stuck_codes import STUCK_CODES
from idempotency.exceptions import StuckCode
from idempotency.models import FINISHED, STARTED, IdempotencyKey


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


@dataclass(frozen=True, slots=True)
class Event:
    """A line of the history."""

    name: str
    detail: str
    at: datetime | None
    seconds_later: float | None


def line(key: IdempotencyKey, points: tuple[str, ...] | None) -> list[Stop]:
    """Return the phases of the key in their order, with the place where it stands and the errors met at each."""
    reached, errors = _reached(key)
    order = list(points or (STARTED, FINISHED))
    unknown = key.recovery_point not in order
    if unknown:  # Which of the declared points it has passed, the history alone can tell.
        passed = [name for name in reached if name not in (FINISHED, key.recovery_point)]
        order = [*passed, key.recovery_point, *(name for name in order if name not in passed)]
    here = order.index(key.recovery_point)
    not_reached = "skipped" if _is_whole(key.history) else "unrecorded"
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


def _is_whole(history: list[dict[str, str]]) -> bool:
    """Return whether the history has all events since the first claim."""
    return bool(history) and history[0]["event"] == "claimed" and len(history) < HISTORY_LIMIT


def heading(key: Any) -> str:
    """Return the state of the key in a few words, with the stuck code or the stored status."""
    if key.state == KeyState.FINISHED:
        return f"Finished: answered {key.response_code}" if key.response_code else "Finished: without a response"
    state = str(key.state).capitalize()
    return f"{state}: {key.stuck_code}" if key.stuck_code else state


def _reached(key: IdempotencyKey) -> tuple[dict[str, datetime | None], Counter[str]]:
    """Return when each point was reached, and how many errors there were at it, as far as the history remembers."""
    reached: dict[str, datetime | None] = {STARTED: key.created_at, FINISHED: key.finished_at}
    errors: Counter[str] = Counter()
    here = STARTED
    for event in key.history:
        if event["event"] == "recovery point":
            here = event["detail"]
            reached[here] = parse_datetime(event["at"])
        elif event["event"] == "error":
            errors[here] += 1
    return reached, errors


def history_of(key: IdempotencyKey) -> list[Event]:
    """Return the history, the oldest first."""
    found: list[Event] = []
    before: datetime | None = None
    for event in key.history:
        at = parse_datetime(event["at"])
        if at is not None and timezone.is_naive(at):
            at = timezone.make_aware(at, timezone.get_default_timezone())
        later = (at - before).total_seconds() if at and before else None
        found.append(Event(event["event"], event["detail"], at, later))
        before = at or before
    return found


@dataclass(frozen=True, slots=True)
class LastCall:
    """A call under a derived key that no later phase has answered for."""

    name: str
    seconds_ago: float


def last_call(key: IdempotencyKey, now: datetime) -> LastCall | None:
    """Return the last call under a derived key since the key last moved; None if there is none, or the key is finished."""
    for event in reversed(history_of(key)) if key.finished_at is None else ():
        if event.name == "recovery point":
            break
        if event.name == CALL_BEGUN and event.at is not None:
            return LastCall(event.detail, max(0.0, (now - event.at).total_seconds()))
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
    local = timezone.localtime(at) if timezone.is_aware(at) else at
    distance = f"in {timeuntil(at, now, depth=1)}" if at > now else "now"
    return f"{local:%Y-%m-%d %H:%M:%S} ({distance})"


def facts(key: Any) -> dict[str, Any]:
    """Return what the page and each question say of ``key``, for the template: its state, its cause, its cure, its next run."""
    return {
        "heading": heading(key),
        "stuck_code": STUCK_CODES.get(key.stuck_code),
        "last_call": last_call(key, key.read_at),
        "next_step": next_step(key, has_view=key.declared is not None),
    }
