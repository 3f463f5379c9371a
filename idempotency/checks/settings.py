"""System checks of settings. They query no database."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from inspect import signature
from typing import Any

from django.apps import apps
from django.conf import settings
from django.contrib.sessions.backends.signed_cookies import SessionStore as SignedCookies
from django.core.checks import CheckMessage, register
from django.utils.module_loading import import_string

from idempotency import conf, jobs, scopes
from idempotency._http.problems import RENDERED_FROM
from idempotency.checks import error, warning
from idempotency.policy import views_to_check


@register
def check_settings(app_configs: Any, **kwargs: Any) -> Iterator[CheckMessage]:
    """E001: an invalid setting. W001, W002: settings that contradict each other."""
    if problems := conf.mistakes(getattr(settings, "IDEMPOTENCY", {})):
        yield from (error("idempotency.E001", problem) for problem in problems)
        return
    limits = conf.get()
    if limits.COMPLETER_MIN_AGE_SECONDS <= limits.LOCK_TIMEOUT_SECONDS:
        yield warning(
            "idempotency.W001",
            "The setting COMPLETER_MIN_AGE_SECONDS of IDEMPOTENCY is not above"
            " LOCK_TIMEOUT_SECONDS: the completer may run a request that its client is about to"
            " retry.",
            "Work is not repeated, but the client gets 409 meanwhile. The defaults are 300 and 90.",
        )
    if limits.COMPLETER_MIN_AGE_SECONDS >= limits.RETENTION_HOURS * 3600:
        yield warning(
            "idempotency.W002",
            "The setting COMPLETER_MIN_AGE_SECONDS of IDEMPOTENCY is not below RETENTION_HOURS:"
            " the reaper marks each abandoned request as stuck before the completer has"
            " run it.",
            "The defaults are 300 seconds and 72 hours.",
        )


@register
def check_names(app_configs: Any, **kwargs: Any) -> Iterator[CheckMessage]:
    """W021: a setting of the project that is probably meant as IDEMPOTENCY, or as an item of it."""
    items = {f"IDEMPOTENCY_{field.name}": field.name for field in fields(conf.Settings)}
    given = getattr(settings, "IDEMPOTENCY", {})
    for name in dir(settings):
        item = items.get(name)
        # Other packages have settings such as IDEMPOTENCY_KEY.
        is_close = "_" not in name and get_close_matches(name, ["IDEMPOTENCY"], cutoff=0.8)
        if (item and item not in given) or (is_close and name != "IDEMPOTENCY"):
            yield warning(
                "idempotency.W021",
                f"The setting {name} is not a setting of this app, and has no effect.",
                f"Did you mean IDEMPOTENCY{f' = {{{item!r}: ...}}' if item else ''}?",
            )


@register
def check_callables(app_configs: Any, **kwargs: Any) -> Iterator[CheckMessage]:
    """E012: a setting whose dotted path cannot be imported, is not callable, or does not take the
    required arguments."""
    for name in conf.CALLABLES if conf.are_valid() else ():
        if (path := getattr(conf.get(), name)) is None:
            continue
        if problem := _problem(path, _PROBLEMS.get(name, _not_callable)):
            yield error(
                "idempotency.E012",
                f"The setting IDEMPOTENCY[{name!r}] is {path!r}, which cannot be called:"
                f" {problem}.",
                "Name a function as 'package.module.function', or omit the setting.",
            )


@register
def check_sessions(app_configs: Any, **kwargs: Any) -> Iterator[CheckMessage]:
    """E011: a view whose scope is the session, with sessions in signed cookies."""
    if not issubclass(import_string(f"{settings.SESSION_ENGINE}.SessionStore"), SignedCookies):
        return
    for view in views_to_check():
        if view.options.scope is scopes.session:
            yield error(
                "idempotency.E011",
                f"The scope of the view {view.path} is the session. Sessions with the same content"
                " cannot be distinguished with signed_cookies, so each request is refused.",
                "Set SESSION_ENGINE to one that stores sessions in a database or a cache, or give"
                " the view another scope=.",
            )


@register
def check_enqueuers(app_configs: Any, **kwargs: Any) -> Iterator[CheckMessage]:
    """E003: an invalid backend of staged jobs. E004, W003: a backend whose app is not installed.

    The default is not checked, because a project without staged jobs does not need its queue
    library.
    """
    if not conf.are_valid():
        return
    given: Mapping[str, str] = getattr(settings, "IDEMPOTENCY", {}).get("ENQUEUERS", {})
    for queue, path in given.items():
        if problem := _problem(path, _not_a_backend):
            yield error(
                "idempotency.E003",
                f"The setting IDEMPOTENCY['ENQUEUERS'][{queue!r}] is {path!r}, which is not a"
                f" backend: {problem}.",
                "Name a function, or a class with hand_over(queue, jobs) such as"
                " 'idempotency.contrib.rq.RQBackend'.",
            )
    paths = set(given.values())
    if "idempotency.contrib.rq.RQBackend" in paths and not apps.is_installed("django_rq"):
        yield warning(
            "idempotency.W003",
            "The setting IDEMPOTENCY['ENQUEUERS'] hands jobs to RQ, but 'django_rq' is not in"
            " INSTALLED_APPS: the command rqworker is missing.",
            "Add 'django_rq' to INSTALLED_APPS.",
        )
    tasks = [str(each.get("BACKEND", "")) for each in getattr(settings, "TASKS", {}).values()]
    in_database = any(backend.startswith("django_tasks_db.") for backend in tasks)
    uses_tasks = "idempotency.contrib.tasks.TasksBackend" in paths
    if uses_tasks and in_database and not apps.is_installed("django_tasks_db"):
        yield error(
            "idempotency.E004",
            "The setting IDEMPOTENCY['ENQUEUERS'] hands jobs to Django Tasks, and TASKS stores"
            " them in the database. But 'django_tasks_db' is not in INSTALLED_APPS, so each"
            " hand-over fails.",
            "Add 'django_tasks_db' to INSTALLED_APPS, and migrate.",
        )


@register(deploy=True)
def check_job_modules(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """W019: JOB_MODULES permits functions that were not written as jobs."""
    if not conf.are_valid() or not (
        wide := [root for root in conf.get().JOB_MODULES or () if _is_wide(root)]
    ):
        return []
    return [
        warning(
            "idempotency.W019",
            "The setting JOB_MODULES of IDEMPOTENCY permits more than modules of jobs:"
            f" {', '.join(wide)}. A row that is written into the table of staged jobs can run any"
            " function there.",
            "List the modules that define your jobs, such as 'shop.jobs', or remove the setting.",
        )
    ]


def _is_wide(root: str) -> bool:
    """Return whether this is not a module of jobs, nor another module inside an app of the
    project."""
    parts, installed = root.split("."), [app.name for app in apps.get_app_configs()]
    if parts[0] in ("django", "idempotency"):
        return True
    return jobs.JOB_NAMES.isdisjoint(parts) and not any(
        root.startswith(f"{name}.") for name in installed
    )


def _problem(path: str | Callable[..., Any], problem_of: Callable[[Any], str]) -> str:
    try:
        return problem_of(conf.named(path))
    except Exception as error:  # The import of a module may raise any exception.
        return f"{type(error).__name__}: {error}"


def _not_callable(named: Any) -> str:
    return "" if callable(named) else f"it is of type {type(named).__name__}"


def _not_a_validator(named: Any) -> str:
    if isinstance(named, type):
        return "it is a validator class, not a validator"
    return _not_callable(named)


def _not_a_renderer(named: Any) -> str:
    if problem := _not_callable(named):
        return problem
    try:
        signature(named).bind(**dict.fromkeys(RENDERED_FROM))
    except ValueError:  # A built-in callable may have no signature.
        return ""
    except TypeError as error:
        return f"it does not take the arguments {', '.join(RENDERED_FROM)}: {error}"
    return ""


def _not_a_backend(named: Any) -> str:
    right = hasattr(named, "hand_over") if isinstance(named, type) else callable(named)
    return "" if right else "it is neither a class with a method hand_over() nor a function"


#: The functions that find the problem of a setting whose value must be more than callable.
_PROBLEMS = {"KEY_VALIDATOR": _not_a_validator, "ERROR_RENDERER": _not_a_renderer}
