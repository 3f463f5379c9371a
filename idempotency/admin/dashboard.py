"""The dashboard: findings, unfinished keys and staged jobs by age, charts of requests, and the
heartbeats of processes.

The numbers come from ``monitoring.measures`` and ``charts``. The database counts all unfinished
keys and all staged jobs by partial indexes, so the page costs more with more of them, and not with
more finished keys.
"""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any
from urllib.parse import urlencode

from django.http import HttpRequest
from django.urls import reverse
from django.utils import timezone
from django.utils.functional import Promise
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from idempotency._states import KeyState
from idempotency._text import Grouped
from idempotency.admin import charts, error_groups
from idempotency.admin.bulk_keys import KeyAction
from idempotency.admin.bulk_pages import BulkAdmin
from idempotency.admin.bulk_works import works_of
from idempotency.admin.filters import AGES, DUE, FOR_REVIEW, Age
from idempotency.exceptions import StuckCode
from idempotency.models import STARTED, StagedJob
from idempotency.monitoring import findings, heartbeats, measures

#: The maximum number of processes that are shown, those with the youngest heartbeats. The same
#: holds for crashed processes.
MAX_PROCESSES = 100
#: The maximum number of groups of each kind that are shown, the largest first.
MAX_GROUPS = 20


@dataclass(frozen=True, slots=True)
class Bar:
    """A number, its percentage of the largest number in the same table, and the URL of the list of
    the counted rows."""

    label: str | Promise
    count: int
    percent: float
    url: str
    alarming: bool = False


@dataclass(frozen=True, slots=True)
class _Part:
    """The numbers of keys or of jobs: the context of the template, and the lines of the banner with
    their URLs. ``notes`` restrict the result without being findings."""

    context: dict[str, Any]
    findings: list[tuple[findings.Finding, str]]
    notes: list[tuple[str, str]]


def numbers(request: HttpRequest, key_admin: Any) -> dict[str, Any]:
    """Return the context of the template, with the keys and the jobs that the person may view.

    Keys and jobs are those that ``get_queryset`` of their admins returns. The charts and the
    processes are those of the whole database. The page takes three queries, one more for keys
    and five more for jobs.
    """
    every, site = key_admin.get_queryset(request), key_admin.admin_site
    processes = _known_processes(every.db)
    parts = [
        part(request, rows)
        if rows.has_view_permission(request)
        else _Part({}, [], [(_hidden(rows.opts), "")])
        for rows, part in ((key_admin, _keys), (site._registry.get(StagedJob), _jobs))
        if rows is not None
    ]
    found = [(finding, "") for finding in findings.of_processes(processes)]
    shown: dict[str, Any] = _of_processes(processes) | {"as_of": timezone.now()}
    for part in parts:
        shown |= part.context
    shown["findings"] = [*found, *(finding for part in parts for finding in part.findings)]
    shown["works"] = works_of(request, key_admin, site._registry.get(StagedJob))
    shown["notes"] = [note for part in parts for note in part.notes]
    chosen, keys_url = request.GET.get("span", ""), shown.get("keys_url", "")
    return shown | charts.of_traffic(every.db, chosen, keys_url)


def _hidden(opts: Any) -> str:
    """Return the note that the person may not view a kind of rows."""
    permission = f"{opts.app_label}.view_{opts.model_name}"
    text = gettext("Not counted here: %(rows)s. You need the permission %(permission)s.")
    return text % {"rows": opts.verbose_name_plural, "permission": permission}


def _keys(request: HttpRequest, key_admin: Any) -> _Part:
    every, url = key_admin.get_queryset(request), _list_url(key_admin)
    keys, groups = error_groups.unfinished_keys(every)
    shown: dict[str, Any] = _of_keys(keys, groups, url)
    shown |= {"keys_url": url, "key_actions": _key_actions(request, key_admin)}
    behind = {"stuck_keys": f"{url}?state={FOR_REVIEW}", "completer_late": f"{url}?state={DUE}"}
    found = [(finding, behind.get(finding.code, "")) for finding in findings.of_keys(keys)]
    notes = []
    if count := keys.by_state[KeyState.ACKNOWLEDGED]:
        text = gettext("Acknowledged keys, which are not finished: %(count)s.")
        notes.append((text % {"count": Grouped(count)}, f"{url}?state=acknowledged"))
    if count := keys.for_clients:
        text = gettext("Stuck keys that wait for a retry of their clients: %(count)s.")
        of_clients = f"{url}?state=stuck&stuck_code={StuckCode.REFUSED_WHEN_REBUILT}"
        notes.append((text % {"count": Grouped(count)}, of_clients))
    return _Part(shown, found, notes)


def _jobs(request: HttpRequest, job_admin: Any) -> _Part:
    every, url = job_admin.get_queryset(request), _list_url(job_admin)
    jobs = measures.staged_jobs(every)
    shown: dict[str, Any] = _of_jobs(jobs, error_groups.groups_of_failed_jobs(every), url)
    shown |= {"jobs_url": url, "job_actions": _actions(request, job_admin)}
    states = {"jobs_late": "due", "jobs_not_deleted": "not_deleted", "jobs_failed": "failed"}
    behind = {code: f"{url}?state={state}" for code, state in states.items()}
    found = [(finding, behind.get(finding.code, "")) for finding in findings.of_jobs(jobs)]
    return _Part(shown, found, [])


def _of_keys(
    keys: measures.UnfinishedKeys, groups: list[error_groups.ErrorGroup], url: str
) -> dict[str, Any]:
    points = keys.spans_by_point
    largest = max((count for spans in points.values() for count in spans.values()), default=0)

    def bar(point: str, span: int, age: Age) -> Bar:
        chosen = {"state": "unfinished", "recovery_point": point, "age": age.name}
        return _bar(age.label, points[point][span], largest, url, False, **chosen)

    def state_bar(state: KeyState) -> Bar:
        alarming, chosen = state == KeyState.STUCK, state.replace(" ", "_")
        return _bar(state.label, states[state], most, url, alarming, state=chosen)

    def group_url(group: error_groups.ErrorGroup) -> str:
        chosen = {"stuck_code": group.cause, "error_group": group.error}
        return _link("", state="stuck", **chosen, request_group=group.place)

    states = keys.by_state
    most = max(states.values(), default=0)
    others = (KeyState.REFUSED, KeyState.FINISHED)
    return {
        "may_see_keys": True,
        "unfinished": keys.count,
        "unfinished_url": f"{url}?state=unfinished",
        "by_state": [state_bar(state) for state in KeyState if state not in others],
        "by_point": [
            (point, [bar(point, *each) for each in enumerate(AGES)])
            for point in sorted(points, key=lambda name: (name != STARTED, name))
        ],
        "groups": [(group, group_url(group)) for group in groups[:MAX_GROUPS]],
        "other_groups": _counts(groups[MAX_GROUPS:]),
    }


def _counts(groups: list[error_groups.ErrorGroup]) -> tuple[int, int]:
    """Return the number of groups and the number of their rows."""
    return len(groups), sum(group.count for group in groups)


def _of_jobs(
    jobs: measures.StagedJobs, groups: list[error_groups.ErrorGroup], url: str
) -> dict[str, Any]:
    spans, failed = jobs.waiting, jobs.failed_by_name
    largest = max(*spans.values(), jobs.held)
    due = gettext("due for %(age)s")

    def group_url(group: error_groups.ErrorGroup) -> str:
        chosen = {"job_name": group.cause, "queue": group.place}
        return _link("", state="failed", **chosen, error_group=group.error)

    bars = [
        _bar(due % {"age": age.label}, spans[span], largest, url, state="due", age=age.name)
        for span, age in enumerate(AGES)
    ]
    return {
        "may_see_jobs": True,
        "jobs_by_age": [
            _bar(_("not due yet"), spans[-1], largest, url, state="later"),
            *bars,
            _bar(_("held by their group"), jobs.held, largest, url, state="held"),
        ],
        "jobs_failed": [
            _bar(name, count, max(failed.values()), url, True, state="failed", job_name=name)
            for name, count in failed.most_common(20)
        ],
        "job_groups": [(group, group_url(group)) for group in groups[:MAX_GROUPS]],
        "other_job_groups": _counts(groups[MAX_GROUPS:]),
    }


def _known_processes(alias: str) -> list[measures.Process]:
    """Return the processes with a heartbeat in the last KEPT_DAYS, and for each loop the process
    with the youngest heartbeat. The youngest heartbeat is first."""
    known = measures.processes(alias)
    lags = measures.lags(known)
    most = heartbeats.KEPT_DAYS * 86400
    return [each for each in known if each.age < most or each.age == lags[each.name]]


def _of_processes(processes: list[measures.Process]) -> dict[str, Any]:
    """Return the processes; separately, those without a recent heartbeat whose loop runs in another
    process, and their number; the names of the loops without a process; and the state of each
    loop."""
    lags, loops = measures.lags(processes), heartbeats.LOOPS.items()
    gone = [each for each in processes if each.age > heartbeats.SILENT_SECONDS and not each.silent]
    present = [process for process in processes if process not in gone]
    by_place = attrgetter("name", "host", "pid")
    return {
        "processes": sorted(present[:MAX_PROCESSES], key=by_place),
        "gone": sorted(gone[:MAX_PROCESSES], key=by_place),
        "gone_count": len(gone),
        "absent": [name for name in heartbeats.LOOPS if name not in lags],
        "loops": [(name, _state_of(lags.get(name), consequence)) for name, consequence in loops],
    }


def _state_of(lag: float | None, consequence: str | Promise) -> str:
    if lag is None:
        text = gettext("no heartbeat (if cron does not run it, %(consequence)s)")
        return text % {"consequence": consequence}
    return gettext("silent") if lag > heartbeats.SILENT_SECONDS else gettext("ok")


def _bar(
    label: str | Promise, count: int, largest: int, url: str, alarming: bool = False, **chosen: str
) -> Bar:
    percent = round(100 * count / largest, 1) if largest else 0
    return Bar(label, count, percent, _link(url, **chosen), alarming)


def _link(url: str, **chosen: str) -> str:
    return f"{url}?{urlencode(chosen)}"


def _actions(request: HttpRequest, rows: Any, state: str = "") -> list[tuple[str | Promise, str]]:
    """Return the actions that the person may use on all rows of a group, whose keys have ``state``:
    the label, and the URL of the confirmation. The template adds the filters of the group to the
    URL. An admin that is not of this app has no actions."""
    name = f"{rows.admin_site.name}:idempotency_{rows.opts.model_name}_bulk"
    actions = rows.bulk if isinstance(rows, BulkAdmin) else ()
    return [
        (action.label, reverse(name, args=(action.name,)))
        for action in actions
        if rows.holds(request, action.permission)
        and (not isinstance(action, KeyAction) or state in action.states)
    ]


def _key_actions(request: HttpRequest, keys: Any) -> list[tuple[str | Promise, str]]:
    """Return the actions on a group of keys, behind the link to the page of its first key."""
    one_by_one = reverse(f"{keys.admin_site.name}:idempotency_next")
    return [(_("One by one"), one_by_one), *_actions(request, keys, KeyState.STUCK)]


def _list_url(rows: Any) -> str:
    return reverse(f"{rows.admin_site.name}:idempotency_{rows.opts.model_name}_changelist")
