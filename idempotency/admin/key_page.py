"""Texts on the page of a key, in addition to its fields: its state and its next step."""

from datetime import datetime
from typing import Any

from django.utils.text import capfirst
from django.utils.translation import gettext as _
from django.utils.translation import npgettext

from idempotency import conf
from idempotency._engine.history import HistoryEvent
from idempotency._http.routes import has_on_abandon
from idempotency._operations.definition import METHOD
from idempotency._states import KeyState
from idempotency._text import duration
from idempotency.admin.history import history_of
from idempotency.admin.operations import result_word
from idempotency.admin.reading import encodable, first_line_of
from idempotency.admin.recovery_points import progress
from idempotency.admin.stuck_codes import STUCK_CODES
from idempotency.exceptions import OPEN_TO_RETRIES, WAITS_FOR_DEPLOY, StuckCode
from idempotency.models import IdempotencyKey
from idempotency.templatetags.idempotency_admin import ago, aware, written

#: The maximum number of at-most-once calls of a key that are searched for a call in doubt.
MAX_CALLS = 100


def since(key: Any) -> datetime:
    """Return the time at which the key entered its state. For a waiting or abandoned key, return
    the start of its last run."""
    times = {
        KeyState.FINISHED: key.finished_at,
        KeyState.REFUSED: key.refused_at,
        KeyState.STUCK: key.stuck_at,
        KeyState.ACKNOWLEDGED: key.acknowledged_at,
    }
    found: datetime = times.get(key.state) or key.last_run_at
    return found


def heading(key: Any) -> str:
    """Return the state of the key in a few words, with its age and the stuck code, or with the
    stored status."""
    if key.state == KeyState.FINISHED:
        if key.request_method == METHOD:
            return _("Finished: %(result)s") % {"result": result_word(key)}
        with_status = _("Finished: answered %(status)s") % {"status": key.response_code}
        return with_status if key.response_code else _("Finished: without a response")
    state = capfirst(short_state(key))
    return f"{state}: {key.stuck_code}" if key.stuck_code else state


def short_state(key: Any) -> str:
    """Return the state of the key and its age, for a cell of a table: ``stuck for 9 min``."""
    told = {"state": KeyState(key.state).label, "duration": duration(key.read_at - since(key))}
    is_event = key.state in (KeyState.FINISHED, KeyState.REFUSED, KeyState.ACKNOWLEDGED)
    return (_("%(state)s %(duration)s ago") if is_event else _("%(state)s for %(duration)s")) % told


def state_line(key: Any) -> str:
    """Return the state of the key, its time and the number of runs, in one or more sentences."""
    number = key.attempts
    runs = npgettext(
        '"after %(runs)s" or "in %(runs)s"', "%(count)s run", "%(count)s runs", number
    ) % {"count": number}
    told = {"place": progress(key, key.declared), "ago": ago(key.read_at - since(key))}
    told |= {"number": number, "runs": runs}
    match key.state:
        case KeyState.FINISHED:
            events = history_of(key)
            if events and events[-1].name == HistoryEvent.ANSWERED:
                told["detail"] = events[-1].detail
                return _("A person answered it %(ago)s (%(detail)s), after %(runs)s.") % told
            told["duration"] = duration(key.finished_at - key.created_at)
            text = _("It was finished %(ago)s, %(duration)s after its creation, in %(runs)s.")
        case KeyState.REFUSED:
            text = _(
                "It was refused %(ago)s, in %(runs)s. No phase was committed, and no call was"
                " begun."
            )
        case KeyState.IN_FLIGHT:
            text = _(
                "Run %(number)s began %(ago)s and holds its lock. The key stands at %(place)s."
            )
        case KeyState.STUCK:
            text = _("It was given up %(ago)s at %(place)s, after %(runs)s. It is not finished.")
        case KeyState.ACKNOWLEDGED:
            text = _(
                "It is stuck at %(place)s, after %(runs)s. A person took it off the list %(ago)s."
                " It is not finished."
            )
        case _:
            text = _(
                "No run holds it. Its last run, number %(number)s, began %(ago)s. The key stands at"
                " %(place)s."
            )
    return text % told


def best_action(key: Any) -> str:
    """Return the name of the recommended button; "" for a key that is in flight, refused or
    finished, and for a stuck key whose reason decides."""
    if key.state in (KeyState.IN_FLIGHT, KeyState.FINISHED, KeyState.REFUSED):
        return ""
    if key.stuck_code == StuckCode.CALL_IN_DOUBT:
        calls = list(key.downstream_calls.values_list("recorded_at", flat=True)[:MAX_CALLS])
        # Late results may be recorded.
        return "complete" if calls and None not in calls else "answer"
    if key.stuck_code:
        return STUCK_CODES[key.stuck_code].best if key.stuck_code in STUCK_CODES else ""
    return "complete"


def last_call(key: Any) -> dict[str, str] | None:
    """Return the name and the age of the last ``key.call()`` after which no phase was committed;
    None without one, or if the key is finished."""
    for event in reversed(history_of(key)) if key.finished_at is None else ():
        if event.name == HistoryEvent.RECOVERY_POINT:
            break
        if event.name == HistoryEvent.CALL_BEGUN and event.at is not None:
            return {"name": event.detail, "ago": ago(aware(key.read_at) - event.at)}
    return None


def next_step(key: Any, *, has_view: bool) -> str:
    """Return a text about the next step: its time, and the process or client that takes it."""
    now = key.read_at
    match key.state:
        case KeyState.FINISHED | KeyState.REFUSED:
            return _until_deletion(key)
        case KeyState.IN_FLIGHT:
            text = _(
                "A run holds the key. If that run crashes or hangs, its lock expires at %(time)s."
                " Then a retry, or later the completer, continues from the recovery point."
            )
            return text % {"time": _moment(key.locked_until, now)}
        case KeyState.STUCK | KeyState.ACKNOWLEDGED if key.stuck_code in WAITS_FOR_DEPLOY:
            text = _(
                "When a deploy has ended this cause, a retry continues, or the completer at"
                " %(time)s."
            )
            return text % {"time": _moment(max(key.due_at, now), now)}
        case KeyState.STUCK | KeyState.ACKNOWLEDGED if key.stuck_code in OPEN_TO_RETRIES:
            return _("The completer does not run the request again. A retry of the client runs it.")
        case KeyState.STUCK:
            return _(
                "Nothing: it waits for a person. A retry is refused, and changes nothing: a client"
                " gets 409 key_stuck, and the caller of an operation InterventionRequired."
            )
        case KeyState.ACKNOWLEDGED:
            return _(
                "Nothing: a person has taken it off the list, and it is not finished. A retry is"
                " refused."
            )
    if has_view:
        return _next_run(key)
    if key.request_method == METHOD:
        lost = _("The running code does not have the operation: a run would mark the key as stuck.")
        return f"{_next_run(key)} {lost}"
    lost = _("No protected view answers the path now: a run would mark the key as stuck.")
    return f"{_next_run(key)} {lost}"


def _until_deletion(key: Any) -> str:
    """Return a text about the retries and the deletion of a finished or refused key."""
    now, is_finished = key.read_at, key.state == KeyState.FINISHED
    if key.expires_at is None:
        if is_finished:
            return _(
                "Nothing: each retry gets the stored response or result. The key is kept forever."
            )
        return _("Only a retry of the caller runs it. The key is kept forever.")
    if is_finished and key.expires_at <= now:
        return _(
            "The retention is over. The reaper deletes the key, and a further request or call with"
            " this key runs as a new one."
        )
    text = _("Nothing: each retry gets the stored response or result, until %(time)s.")
    if not is_finished:
        text = _("Only a retry of the caller runs it. The reaper deletes the key at %(time)s.")
    return text % {"time": _moment(key.expires_at, now)}


def _next_run(key: Any) -> str:
    """Return a text about the next run of the completer: its time and its number. No run holds the
    key."""
    number, limit = key.completer_attempts + 1, conf.get().COMPLETER_MAX_ATTEMPTS
    told = {"time": _moment(key.due_at, key.read_at), "run": _("run %(number)s of %(limit)s")}
    if number > limit:
        used_up = _("all %(limit)s runs are used up: it marks the key as stuck")
        until = _("run %(number)s, until on_abandon settles it")
        is_settled = key.request_method != METHOD and has_on_abandon(key)
        told["run"] = until if is_settled else used_up
    told["run"] %= {"number": number, "limit": limit}
    if key.state == KeyState.ABANDONED:
        text = _(
            "The completer takes the key in its next pass (%(run)s), unless a retry comes first."
        )
        return text % told
    text = _(
        "A retry continues it at once. Without a retry, the completer takes the key at %(time)s"
        " (%(run)s)."
    )
    return text % told


def _moment(at: datetime, now: datetime) -> str:
    if at <= now:
        return _("%(time)s (now)") % {"time": written(at)}
    told = {"time": written(at), "duration": duration(at - now)}
    return _("%(time)s (in %(duration)s)") % told


def facts(key: Any) -> dict[str, Any]:
    """Return the data about ``key`` for the templates of its page and of each confirmation: state,
    cause, cure, next step."""
    return {
        "heading": heading(key),
        "state_line": state_line(key),
        **_last_error(key),
        "stuck_code": STUCK_CODES.get(key.stuck_code),
        "last_call": last_call(key),
        "next_step": next_step(key, has_view=key.declared is not None),
    }


def _last_error(key: IdempotencyKey) -> dict[str, str]:
    """Return the last error of an unfinished key: its first line, and the whole text if it is
    longer."""
    line = "" if key.finished_at else first_line_of(key.last_error)
    return {
        "error_line": encodable(line),
        "whole_error": encodable("" if key.finished_at or is_error_on_top(key) else key.last_error),
    }


def is_error_on_top(key: IdempotencyKey) -> bool:
    """Return whether the first line in ``facts`` is the whole last error of the key."""
    return key.finished_at is None and first_line_of(key.last_error) == key.last_error.strip()
