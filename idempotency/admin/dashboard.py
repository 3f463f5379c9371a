"""The dashboard: how much waits, where, for how long, and whether the processes are alive.

It reads what is unfinished through the partial indexes, a bounded number of rows: however large a table is, it costs the same.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from django.contrib.admin import AdminSite
from django.db.models.functions import Now
from django.http import HttpRequest
from django.urls import reverse

from idempotency import heartbeats
from idempotency.admin.states import AGES, STATES, state_of
from idempotency.models import STARTED, IdempotencyKey, IdempotencyKeyQuerySet, StagedJob

#: How many rows of a kind are read, the oldest first. More is said to be more.
MAX_READ = 5000
#: The loops that a site needs, each once at least.
LOOPS = ("enqueue_jobs", "complete_keys", "reap_keys")
_COLUMNS = (
    *("created_at", "last_run_at", "locked_at", "finished_at", "stuck_at", "acknowledged_at", "next_run_at"),
    *("recovery_point", "stuck_code", "refused"),
)


@dataclass(frozen=True, slots=True)
class Bar:
    """A number with its share of the largest one beside it, in percent, and the list behind it."""

    label: str
    count: int
    percent: float
    url: str
    alarming: bool = False


@dataclass(frozen=True, slots=True)
class Process:
    """A loop of a process, by its last sign of life."""

    name: str
    where: str
    seconds: float | None
    silent: bool


def numbers(request: HttpRequest, site: AdminSite) -> dict[str, Any]:
    """Return what the template shows, in two queries, and in two more for who may see staged jobs."""
    keys = list(
        IdempotencyKeyQuerySet(IdempotencyKey)
        .unfinished()
        .order_by("created_at")
        .only(*_COLUMNS)
        .annotate(read_at=Now())[:MAX_READ]
    )
    shown: dict[str, Any] = _of_keys(keys, _list_url(site, "idempotencykey"))
    shown |= {"max_read": MAX_READ, "more_keys": len(keys) == MAX_READ, "processes": list(_processes())}
    if request.user.has_perm("idempotency.view_stagedjob"):
        shown |= _of_jobs(_list_url(site, "stagedjob"))
    return shown


def _of_keys(keys: list[Any], url: str) -> dict[str, Any]:
    states = Counter(state_of(key, key.read_at) for key in keys)
    stuck = Counter(key.stuck_code for key in keys if state_of(key, key.read_at) == "stuck")
    points: dict[str, Counter[str]] = {}
    for key in keys:
        points.setdefault(key.recovery_point, Counter())[_age_name(key.created_at, key.read_at)] += 1
    largest = max((count for ages in points.values() for count in ages.values()), default=0)
    by_point = [
        (
            point,
            [
                _bar(age.label, ages[age.name], largest, url, state="unfinished", recovery_point=point, age=age.name)
                for age in AGES
            ],
        )
        for point, ages in sorted(points.items(), key=lambda item: (item[0] != STARTED, item[0]))
    ]
    return {
        "unfinished": len(keys),
        "unfinished_url": f"{url}?state=unfinished",
        "ages": AGES,
        "by_state": [
            _bar(state, states[state], max(states.values(), default=0), url, state == "stuck", state=state.replace(" ", "_"))
            for state in STATES
            if state not in ("refused", "finished")
        ],
        "by_point": by_point,
        "by_code": [
            _bar(code, count, max(stuck.values()), url, True, state="stuck", stuck_code=code)
            for code, count in stuck.most_common()
        ],
    }


def _of_jobs(url: str) -> dict[str, Any]:
    jobs = StagedJob.objects.filter(failed_at__isnull=True).order_by("run_at").annotate(read_at=Now())
    waiting = list(jobs.values_list("run_at", "read_at")[:MAX_READ])
    failed = (
        StagedJob.objects.filter(failed_at__isnull=False).order_by("failed_at").values_list("job_name", flat=True)[:MAX_READ]
    )
    names = Counter(failed)
    ages = Counter("later" if run_at > read_at else _age_name(run_at, read_at) for run_at, read_at in waiting)
    largest = max(ages.values(), default=0)
    bars = [_bar(f"due for {age.label}", ages[age.name], largest, url, state="waiting", age=age.name) for age in AGES]
    return {
        "may_see_jobs": True,
        "more_jobs": len(waiting) == MAX_READ,
        "jobs_by_age": [_bar("not due yet", ages["later"], largest, url, state="later"), *bars],
        "jobs_failed": [
            _bar(name, count, max(names.values()), url, True, state="failed", job_name=name)
            for name, count in names.most_common(20)
        ],
    }


def _processes() -> Iterable[Process]:
    """Yield the loops that have given signs of life, and those of which none has."""
    beats: list[Any] = list(heartbeats.recent().order_by("name", "host", "pid")[:100])
    for beat in beats:
        seconds = max(0.0, beat.age.total_seconds())
        yield Process(beat.name, f"{beat.host}, process {beat.pid}", seconds, seconds > heartbeats.SILENT_SECONDS)
    alive = {beat.name for beat in beats}
    for name in LOOPS:
        if name not in alive:
            yield Process(name, "no sign of life: it does not run, or works on another database", None, True)


def _age_name(since: datetime, now: datetime) -> str:
    seconds = max(0.0, (now - since).total_seconds())
    return next((age.name for age in AGES if age.of(seconds)), AGES[-1].name)


def _bar(label: str, count: int, largest: int, url: str, alarming: bool = False, **chosen: str) -> Bar:
    return Bar(label, count, round(100 * count / largest, 1) if largest else 0, f"{url}?{urlencode(chosen)}", alarming)


def _list_url(site: AdminSite, model: str) -> str:
    return reverse(f"{site.name}:idempotency_{model}_changelist")
