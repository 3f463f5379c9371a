"""The dashboard: how much waits, where, for how long, and whether the processes are alive.

The numbers are those of ``monitoring.measures``: however large a table is, the page costs the same.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any
from urllib.parse import urlencode

from django.contrib.admin import AdminSite
from django.db import router
from django.http import HttpRequest
from django.urls import reverse

from idempotency._states import KeyState
from idempotency.admin.filters import AGES, Age
from idempotency.models import STARTED, IdempotencyKey
from idempotency.monitoring import heartbeats, measures

#: How many rows of a kind are read, the oldest first. More is said to be more.
MAX_READ = 5000
#: How many processes are shown, those with the youngest heartbeats.
MAX_PROCESSES = 100


@dataclass(frozen=True, slots=True)
class Bar:
    """A number with its share of the largest one beside it, in percent, and the list behind it."""

    label: str
    count: int
    percent: float
    url: str
    alarming: bool = False


def numbers(request: HttpRequest, site: AdminSite) -> dict[str, Any]:
    """Return what the template shows, in two queries, and in two more for who may see staged jobs."""
    alias = router.db_for_read(IdempotencyKey)
    keys = measures.unfinished_keys(alias, MAX_READ)
    shown: dict[str, Any] = _of_keys(keys, _list_url(site, "idempotencykey"))
    shown |= {"max_read": MAX_READ, "more_keys": keys.count == MAX_READ, **_processes(alias)}
    if request.user.has_perm("idempotency.view_stagedjob"):
        shown |= _of_jobs(measures.staged_jobs(alias, MAX_READ), _list_url(site, "stagedjob"))
    return shown


def _of_keys(keys: measures.UnfinishedKeys, url: str) -> dict[str, Any]:
    points = {point: _by_age(ages) for point, ages in keys.ages_by_point.items()}
    largest = max((count for ages in points.values() for count in ages.values()), default=0)

    def bar(point: str, age: Age) -> Bar:
        count = points[point][age.name]
        return _bar(age.label, count, largest, url, state="unfinished", recovery_point=point, age=age.name)

    states, stuck = keys.by_state, keys.stuck_by_code
    most = max(states.values(), default=0)
    return {
        "unfinished": keys.count,
        "unfinished_url": f"{url}?state=unfinished",
        "by_state": [
            _bar(state, states[state], most, url, state == KeyState.STUCK, state=state.replace(" ", "_"))
            for state in KeyState
            if state not in (KeyState.REFUSED, KeyState.FINISHED)
        ],
        "by_point": [
            (point, [bar(point, age) for age in AGES]) for point in sorted(points, key=lambda name: (name != STARTED, name))
        ],
        "by_code": [
            _bar(code, count, max(stuck.values()), url, True, state="stuck", stuck_code=code)
            for code, count in stuck.most_common()
        ],
    }


def _of_jobs(jobs: measures.StagedJobs, url: str) -> dict[str, Any]:
    ages, failed = _by_age(jobs.waiting), jobs.failed_by_name
    largest = max(ages.values(), default=0)
    bars = [_bar(f"due for {age.label}", ages[age.name], largest, url, state="waiting", age=age.name) for age in AGES]
    return {
        "may_see_jobs": True,
        "more_jobs": len(jobs.waiting) == MAX_READ,
        "jobs_by_age": [_bar("not due yet", ages["later"], largest, url, state="later"), *bars],
        "jobs_failed": [
            _bar(name, count, max(failed.values()), url, True, state="failed", job_name=name)
            for name, count in failed.most_common(20)
        ],
    }


def _processes(alias: str) -> dict[str, Any]:
    """Return the heartbeats of the last KEPT_DAYS, and the loops without."""
    recent = [process for process in measures.processes(alias) if process.age < heartbeats.KEPT_DAYS * 86400]
    shown = sorted(recent[:MAX_PROCESSES], key=attrgetter("name", "host", "pid"))
    return {"processes": shown, "absent": [name for name in heartbeats.LOOPS if name not in measures.lags(recent)]}


def _by_age(ages: Iterable[float]) -> Counter[str]:
    """Count the spans of AGES; what has a negative age is "later"."""
    return Counter(next((age.name for age in reversed(AGES) if seconds >= age.begin), "later") for seconds in ages)


def _bar(label: str, count: int, largest: int, url: str, alarming: bool = False, **chosen: str) -> Bar:
    return Bar(label, count, round(100 * count / largest, 1) if largest else 0, f"{url}?{urlencode(chosen)}", alarming)


def _list_url(site: AdminSite, model: str) -> str:
    return reverse(f"{site.name}:idempotency_{model}_changelist")
