"""System checks (ids ``idempotency.E001`` and on): mistakes are found before the first request, not at it.

None of them asks a database: ``manage.py check`` works without one. The ids stand in docs/reference.md. Here are those of the
settings; those of views are in ``idempotency.view_checks``.
"""

from collections.abc import Callable
from typing import Any

from django.apps import apps
from django.conf import settings
from django.contrib.sessions.backends.signed_cookies import SessionStore as SignedCookies
from django.core.checks import CheckMessage, Error, Info, Warning, register
from django.db import connections, router
from django.db.models import DO_NOTHING, PROTECT, RESTRICT, ForeignObjectRel
from django.utils.module_loading import import_string

from idempotency import conf, scopes
from idempotency import view_checks as view_checks  # registers itself
from idempotency.models import ForeignCall, IdempotencyKey, ProcessedMessage, StagedJob
from idempotency.policy import protected_views


@register
def check_settings(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """E001: a setting that the app cannot work with. W001, W002: two that contradict what they are for."""
    values = getattr(settings, "IDEMPOTENCY", {})
    if problems := conf.problems(values):
        return [Error(problem, id="idempotency.E001") for problem in problems]
    limits = conf.get()
    found: list[CheckMessage] = []
    if limits.COMPLETER_MIN_AGE_SECONDS <= limits.LOCK_TIMEOUT_SECONDS:
        found.append(
            Warning(
                "IDEMPOTENCY['COMPLETER_MIN_AGE_SECONDS'] is not above LOCK_TIMEOUT_SECONDS: the completer may run a request "
                "whose client is about to retry it.",
                hint="Nothing runs twice, but the client gets 409 meanwhile. The defaults are 300 and 90.",
                id="idempotency.W001",
            )
        )
    if limits.COMPLETER_MIN_AGE_SECONDS >= limits.RETENTION_HOURS * 3600:
        found.append(
            Warning(
                "IDEMPOTENCY['COMPLETER_MIN_AGE_SECONDS'] is not below RETENTION_HOURS: the reaper hands each abandoned "
                "request to a person before the completer has tried to finish it.",
                hint="The defaults are 300 seconds and 72 hours.",
                id="idempotency.W002",
            )
        )
    return found


@register
def check_callables(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """E012: a setting whose dotted path cannot be imported, or leads to nothing that can be called."""
    values = getattr(settings, "IDEMPOTENCY", {})
    if conf.problems(values):
        return []  # E001 has said it.
    return [
        Error(
            f"IDEMPOTENCY[{name!r}] is {path!r}, which cannot be called: {problem}.",
            hint="Name a function as 'package.module.function', or leave the setting out.",
            id="idempotency.E012",
        )
        for name in conf.CALLABLES
        if isinstance(path := values.get(name), str)
        and (problem := _problem(path, _no_validator if name == "KEY_VALIDATOR" else _not_callable))
    ]


@register
def check_database(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """E002, E006, E009: the keys are kept in a database, in a mode of it, or apart, so that the promises cannot be held."""
    alias = _alias()
    vendor = connections[alias].vendor
    found: list[CheckMessage] = []
    if vendor not in ("postgresql", "sqlite"):
        found.append(
            Error(
                f"The database {alias!r}, where idempotency keys are kept, is {vendor}.",
                hint="Keep them in PostgreSQL (or, for development, in SQLite): set a database router for 'idempotency'.",
                id="idempotency.E002",
            )
        )
    if not connections[alias].settings_dict.get("AUTOCOMMIT", True):
        found.append(
            Error(
                f"AUTOCOMMIT is off for the database {alias!r}, where idempotency keys are kept: nothing would commit them.",
                hint="Leave it on: @idempotent and atomic_phase open the transactions that they need.",
                id="idempotency.E006",
            )
        )
    places = {
        model.__name__: router.db_for_write(model) for model in (IdempotencyKey, ForeignCall, StagedJob, ProcessedMessage)
    }
    if len(set(places.values())) > 1:
        found.append(
            Error(
                f"The router sends models that must share a transaction to different databases: {places}.",
                hint="Let it name one database for all models of the app 'idempotency'; using= chooses another for a request.",
                id="idempotency.E009",
            )
        )
    return found


@register
def check_references(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """E010: a row that keeps a staged job from being deleted, after it was handed over: it would be handed over for ever."""
    return [
        Error(
            f"{relation.field} points at staged jobs, which are deleted when the broker has them, and forbids that.",
            hint="Give it on_delete=SET_NULL or CASCADE, or keep the id of the job in a UUIDField.",
            id="idempotency.E010",
        )
        for relation in StagedJob._meta.get_fields(include_hidden=True)
        if isinstance(relation, ForeignObjectRel) and relation.on_delete in (PROTECT, RESTRICT, DO_NOTHING)
    ]


@register
def check_sessions(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """E011: a view whose scope is the session, where a session is nothing but its content in a cookie."""
    if not getattr(settings, "ROOT_URLCONF", None) or conf.problems(getattr(settings, "IDEMPOTENCY", {})):
        return []
    if not issubclass(import_string(f"{settings.SESSION_ENGINE}.SessionStore"), SignedCookies):
        return []
    return [
        Error(
            f"{view.path}: its scope is the session, and with signed_cookies equal sessions cannot be told apart, so each "
            "request is refused.",
            hint="Set SESSION_ENGINE to one that keeps sessions in a database or a cache, or give the view another scope=.",
            id="idempotency.E011",
        )
        for view in protected_views()
        if view.options.scope is scopes.session
    ]


@register(deploy=True)
def check_deployed_database(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """W007: SQLite in production. I001: statements that are parsed and planned each time."""
    alias = _alias()
    if connections[alias].vendor == "sqlite":
        return [
            Warning(
                f"The database {alias!r}, where idempotency keys are kept, is SQLite: one request writes at a time.",
                hint="SQLite is for development; the promises are made on PostgreSQL.",
                id="idempotency.W007",
            )
        ]
    if connections[alias].vendor == "postgresql" and "prepare_threshold" not in connections[alias].settings_dict["OPTIONS"]:
        return [
            Info(
                f"DATABASES[{alias!r}]['OPTIONS'] do not set prepare_threshold: each claim and each replay is parsed and "
                "planned anew.",
                hint="Set it to 5. Behind a pooler in transaction mode that cannot hold prepared statements (PgBouncer before "
                "1.21), set it to None.",
                id="idempotency.I001",
            )
        ]
    return []


@register
def check_enqueuers(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """E003: a backend of staged jobs that cannot be imported, or is none. E004, W003: one whose app is not installed.

    The default is not checked: its queue library is an extra that a project without staged jobs does without.
    """
    values = getattr(settings, "IDEMPOTENCY", {})
    if conf.problems(values):
        return []  # E001 has said it.
    found: list[CheckMessage] = []
    for queue, path in values.get("ENQUEUERS", {}).items():
        if problem := _problem(path, _no_backend):
            found.append(
                Error(
                    f"IDEMPOTENCY['ENQUEUERS'][{queue!r}] is {path!r}, which is not a backend: {problem}.",
                    hint="Name a function, or a class with hand_over(queue, jobs) such as 'idempotency.contrib.rq.RQBackend'.",
                    id="idempotency.E003",
                )
            )
    paths = set(values.get("ENQUEUERS", {}).values())
    if "idempotency.contrib.rq.RQBackend" in paths and not apps.is_installed("django_rq"):
        found.append(
            Warning(
                "IDEMPOTENCY['ENQUEUERS'] hands jobs to RQ, but 'django_rq' is not in INSTALLED_APPS: there is no manage.py "
                "rqworker to take them.",
                hint="Add 'django_rq' to INSTALLED_APPS.",
                id="idempotency.W003",
            )
        )
    kept_in_database = any(
        str(tasks.get("BACKEND", "")).startswith("django_tasks_db.") for tasks in getattr(settings, "TASKS", {}).values()
    )
    if "idempotency.contrib.tasks.TasksBackend" in paths and kept_in_database and not apps.is_installed("django_tasks_db"):
        found.append(
            Error(
                "IDEMPOTENCY['ENQUEUERS'] hands jobs to Django Tasks, which TASKS keep in the database, but 'django_tasks_db' "
                "is not in INSTALLED_APPS: each hand-over fails.",
                hint="Add 'django_tasks_db' to INSTALLED_APPS, and migrate.",
                id="idempotency.E004",
            )
        )
    return found


def _problem(path: str, problem_of: Callable[[Any], str]) -> str:
    """Return why a dotted path cannot be imported, or else what is wrong with the thing that it names; empty if nothing is."""
    try:
        return problem_of(import_string(path))
    except Exception as error:  # Whatever a module may raise on import.
        return f"{type(error).__name__}: {error}"


def _not_callable(named: Any) -> str:
    return "" if callable(named) else f"it is of type {type(named).__name__}"


def _no_validator(named: Any) -> str:
    return "it is a class of validators, not one" if isinstance(named, type) else _not_callable(named)


def _no_backend(named: Any) -> str:
    right = hasattr(named, "hand_over") if isinstance(named, type) else callable(named)
    return "" if right else "it is neither a class with a method hand_over() nor a function"


def _alias() -> str:
    return router.db_for_write(IdempotencyKey)
