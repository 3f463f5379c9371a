"""The recovery points of a key: those that its view declares, and those that it has reached."""

from collections import Counter
from dataclasses import dataclass
from datetime import datetime

from idempotency._engine.history import HistoryEvent
from idempotency._http.routes import options_for
from idempotency._operations.definition import METHOD, find
from idempotency.admin.history import history_of, is_whole
from idempotency.models import FINISHED, STARTED, IdempotencyKey


def declared_points(key: IdempotencyKey) -> tuple[str, ...] | None:
    """Return the recovery points of the view or the operation of a key: empty if it is plain, None
    if the running code does not have it."""
    if key.request_method != METHOD:
        return options.every_point() if (options := options_for(key)) else None
    if (operation := find(key.request_path)) is None:
        return None
    return operation.steps.points if operation.steps.is_phased else ()


def progress(key: IdempotencyKey, points: tuple[str, ...] | None) -> str:
    """Return the recovery point with its position among the declared points, as in ``ride_created
    (2/4)``."""
    if not points or key.recovery_point not in points:
        return key.recovery_point
    return f"{key.recovery_point} ({points.index(key.recovery_point) + 1}/{len(points)})"


@dataclass(frozen=True, slots=True)
class Stop:
    """A recovery point on the line of the page.

    ``place`` is "passed", "here", "unknown" (the point of the key, but the view does not declare
    it) or "ahead". An earlier point that is not in the history is "skipped", or "unrecorded" if the
    history is cut or empty.
    """

    name: str
    place: str
    at: datetime | None
    errors: int = 0


def line(key: IdempotencyKey, points: tuple[str, ...] | None) -> list[Stop]:
    """Return the recovery points of the key in order, each with its place and the number of errors
    at it."""
    reached, errors = _reached(key)
    order = list(points or (STARTED, FINISHED))
    unknown = key.recovery_point not in order
    if unknown:  # Only the history shows which points the key has passed.
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


def _reached(key: IdempotencyKey) -> tuple[dict[str, datetime | None], Counter[str]]:
    """Return the time at which each point was reached, and the number of errors at it, according to
    the history."""
    reached: dict[str, datetime | None] = {STARTED: key.created_at, FINISHED: key.finished_at}
    errors: Counter[str] = Counter()
    here, before = STARTED, ""
    for event in history_of(key):
        if event.name == HistoryEvent.RECOVERY_POINT:
            here = event.detail
            reached[here] = event.at
        elif event.name in (HistoryEvent.ERROR, HistoryEvent.STUCK):
            # A run that raises KeyStuck has no error beside this event.
            errors[here] += event.name == HistoryEvent.ERROR or before != HistoryEvent.ERROR
        before = event.name
    return reached, errors
