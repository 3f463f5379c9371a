"""System checks of settings and databases. The ids are listed in docs/reference.md. Only
E013 and W017 query a database.
"""

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

from django.apps import apps
from django.conf import settings
from django.contrib.sessions.backends.signed_cookies import SessionStore as SignedCookies
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.db import OperationalError, connections, router
from django.utils.module_loading import import_string

from idempotency import conf, scopes
from idempotency._engine import database_product
from idempotency._engine.errors import effective_isolation
from idempotency._http.problems import RENDERED_FROM
from idempotency._text import first_line
from idempotency.models import DownstreamCall, IdempotencyKey, ProcessedMessage, StagedJob
from idempotency.policy import views_to_check


@register
def check_settings(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """E001: an invalid setting. W001, W002: settings that contradict each other."""
    if problems := conf.mistakes(getattr(settings, "IDEMPOTENCY", {})):
        return [Error(problem, id="idempotency.E001") for problem in problems]
    limits = conf.get()
    found: list[CheckMessage] = []
    if limits.COMPLETER_MIN_AGE_SECONDS <= limits.LOCK_TIMEOUT_SECONDS:
        found.append(
            Warning(
                "The setting COMPLETER_MIN_AGE_SECONDS of IDEMPOTENCY is not above"
                " LOCK_TIMEOUT_SECONDS: the completer may run a request that its client is about to"
                " retry.",
                hint=(
                    "Work is not repeated, but the client gets 409 meanwhile. The defaults are 300"
                    " and 90."
                ),
                id="idempotency.W001",
            )
        )
    if limits.COMPLETER_MIN_AGE_SECONDS >= limits.RETENTION_HOURS * 3600:
        found.append(
            Warning(
                "The setting COMPLETER_MIN_AGE_SECONDS of IDEMPOTENCY is not below RETENTION_HOURS:"
                " the reaper marks each abandoned request as stuck before the completer has"
                " run it.",
                hint="The defaults are 300 seconds and 72 hours.",
                id="idempotency.W002",
            )
        )
    return found


@register
def check_callables(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """E012: a setting whose dotted path cannot be imported, is not callable, or does not take the
    required arguments."""
    if not conf.are_valid():
        return []
    return [
        Error(
            f"The setting IDEMPOTENCY[{name!r}] is {path!r}, which cannot be called: {problem}.",
            hint="Name a function as 'package.module.function', or omit the setting.",
            id="idempotency.E012",
        )
        for name in conf.CALLABLES
        if (path := getattr(conf.get(), name)) is not None
        and (problem := _problem(path, _PROBLEMS.get(name, _not_callable)))
    ]


@register
def check_database(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """E002, E006, E009: an unsupported database, autocommit that is off, or models in different
    databases. W014: a setting without effect on SQLite."""
    alias = _alias()
    vendor = connections[alias].vendor
    found: list[CheckMessage] = []
    if vendor not in ("postgresql", "sqlite"):
        found.append(
            Error(
                f"The database {alias!r}, which stores the idempotency keys, is {vendor}.",
                hint=(
                    "Route the models of the app 'idempotency' to PostgreSQL, or to SQLite for"
                    " development."
                ),
                id="idempotency.E002",
            )
        )
    if not connections[alias].settings_dict.get("AUTOCOMMIT", True):
        found.append(
            Error(
                f"The database {alias!r}, which stores the idempotency keys, has AUTOCOMMIT off:"
                " nothing would commit them.",
                hint=(
                    "Turn AUTOCOMMIT on: @idempotent and atomic_phase open their own transactions."
                ),
                id="idempotency.E006",
            )
        )
    if vendor == "sqlite" and conf.are_valid() and conf.get().CONFIRM_REPLICATED:
        found.append(
            Warning(
                "The setting CONFIRM_REPLICATED of IDEMPOTENCY has no effect: the database"
                f" {alias!r} is SQLite.",
                hint=(
                    "Remove the setting from settings files that use SQLite, which has no standby"
                    " to confirm a commit."
                ),
                id="idempotency.W014",
            )
        )
    places = {
        model.__name__: router.db_for_write(model)
        for model in (IdempotencyKey, DownstreamCall, StagedJob, ProcessedMessage)
    }
    if len(set(places.values())) > 1:
        found.append(
            Error(
                "The router sends models that must share a transaction to different databases:"
                f" {places}.",
                hint=(
                    "Route all models of the app 'idempotency' to one database; using= chooses"
                    " another one for a request."
                ),
                id="idempotency.E009",
            )
        )
    return found


@register(Tags.database)
def check_engine(
    app_configs: Any, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """E013: a database that cannot be reached, or that uses PostgreSQL's protocol but is another
    product, or Citus with distributed or replicated tables. W017: two isolation levels in one
    database.

    ``manage.py check --database`` and ``migrate`` run it.
    """
    found: list[CheckMessage] = []
    for alias in databases or ():
        connection = connections[alias]
        if connection.vendor == "postgresql" and router.allow_migrate_model(alias, IdempotencyKey):
            try:
                connection.ensure_connection()
            except OperationalError as error:
                text = f"The database {alias!r} cannot be reached: {first_line(error)}"
                found.append(
                    Error(text, hint="Start it, or correct DATABASES.", id="idempotency.E013")
                )
                continue
            problem, _ = database_product.examine(connection)
            hint = "Route the models of the app 'idempotency' to PostgreSQL."
            found += (
                [Error(problem, hint=hint, id=database_product.CHECK_ID)]
                if problem
                else _mixed_levels(alias)
            )
    return found


def _mixed_levels(alias: str) -> list[CheckMessage]:
    if not conf.are_valid():
        return []
    others, limits = effective_isolation(None, alias), conf.get()
    return [
        Warning(
            f"{setting} is {level!r}, but other transactions in the database {alias!r} run at"
            f" {others!r}.",
            hint=(
                "Above 'read committed', a transaction that waits for a lock reads data from before"
                " the lock. Remove the setting, or set OPTIONS['isolation_level'] of the database"
                " to the same level."
            ),
            id="idempotency.W017",
        )
        for setting, level in (
            ("PHASE_ISOLATION", limits.PHASE_ISOLATION),
            ("PLAIN_ISOLATION", limits.PLAIN_ISOLATION),
        )
        if level not in (None, others)
    ]


@register
def check_sessions(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """E011: a view whose scope is the session, with sessions in signed cookies."""
    if not issubclass(import_string(f"{settings.SESSION_ENGINE}.SessionStore"), SignedCookies):
        return []
    return [
        Error(
            f"The scope of the view {view.path} is the session. Sessions with the same content"
            " cannot be distinguished with signed_cookies, so each request is refused.",
            hint=(
                "Set SESSION_ENGINE to one that stores sessions in a database or a cache, or give"
                " the view another scope=."
            ),
            id="idempotency.E011",
        )
        for view in views_to_check()
        if view.options.scope is scopes.session
    ]


@register(deploy=True)
def check_deployed_database(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """W007: SQLite in production. W015: statements that are not prepared."""
    alias = _alias()
    if connections[alias].vendor == "sqlite":
        return [
            Warning(
                f"The database {alias!r}, which stores the idempotency keys, is SQLite: one request"
                " writes at a time.",
                hint="SQLite is for development. The guarantees hold on PostgreSQL.",
                id="idempotency.W007",
            )
        ]
    if (
        connections[alias].vendor == "postgresql"
        and "prepare_threshold" not in connections[alias].settings_dict["OPTIONS"]
    ):
        return [
            Warning(
                f"The option prepare_threshold is not set in DATABASES[{alias!r}]['OPTIONS']:"
                " PostgreSQL plans each statement of this app again, so that a protected request"
                " takes 1.5 to 2.7 times as long.",
                hint=(
                    "Set it to 5. Set it to None behind a pooler in transaction mode without"
                    " prepared statements (PgBouncer before 1.21)."
                ),
                id="idempotency.W015",
            )
        ]
    return []


@register
def check_enqueuers(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """E003: an invalid backend of staged jobs. E004, W003: a backend whose app is not installed.

    The default is not checked, because a project without staged jobs does not need its queue
    library.
    """
    if not conf.are_valid():
        return []
    found: list[CheckMessage] = []
    given: Mapping[str, str] = getattr(settings, "IDEMPOTENCY", {}).get("ENQUEUERS", {})
    for queue, path in given.items():
        if problem := _problem(path, _no_backend):
            found.append(
                Error(
                    f"The setting IDEMPOTENCY['ENQUEUERS'][{queue!r}] is {path!r}, which is not a"
                    f" backend: {problem}.",
                    hint=(
                        "Name a function, or a class with hand_over(queue, jobs) such as"
                        " 'idempotency.contrib.rq.RQBackend'."
                    ),
                    id="idempotency.E003",
                )
            )
    paths = set(given.values())
    if "idempotency.contrib.rq.RQBackend" in paths and not apps.is_installed("django_rq"):
        found.append(
            Warning(
                "The setting IDEMPOTENCY['ENQUEUERS'] hands jobs to RQ, but 'django_rq' is not in"
                " INSTALLED_APPS: the command rqworker is missing.",
                hint="Add 'django_rq' to INSTALLED_APPS.",
                id="idempotency.W003",
            )
        )
    kept_in_database = any(
        str(tasks.get("BACKEND", "")).startswith("django_tasks_db.")
        for tasks in getattr(settings, "TASKS", {}).values()
    )
    if (
        "idempotency.contrib.tasks.TasksBackend" in paths
        and kept_in_database
        and not apps.is_installed("django_tasks_db")
    ):
        found.append(
            Error(
                "The setting IDEMPOTENCY['ENQUEUERS'] hands jobs to Django Tasks, and TASKS stores"
                " them in the database. But 'django_tasks_db' is not in INSTALLED_APPS, so each"
                " hand-over fails.",
                hint="Add 'django_tasks_db' to INSTALLED_APPS, and migrate.",
                id="idempotency.E004",
            )
        )
    return found


def _problem(path: str | Callable[..., Any], problem_of: Callable[[Any], str]) -> str:
    try:
        return problem_of(conf.named(path))
    except Exception as error:  # The import of a module may raise any exception.
        return f"{type(error).__name__}: {error}"


def _not_callable(named: Any) -> str:
    return "" if callable(named) else f"it is of type {type(named).__name__}"


def _no_validator(named: Any) -> str:
    return (
        "it is a validator class, not a validator"
        if isinstance(named, type)
        else _not_callable(named)
    )


def _no_renderer(named: Any) -> str:
    if problem := _not_callable(named):
        return problem
    try:
        signature(named).bind(**dict.fromkeys(RENDERED_FROM))
    except ValueError:  # A built-in callable may have no signature.
        return ""
    except TypeError as error:
        return f"it does not take the arguments {', '.join(RENDERED_FROM)}: {error}"
    return ""


def _no_backend(named: Any) -> str:
    right = hasattr(named, "hand_over") if isinstance(named, type) else callable(named)
    return "" if right else "it is neither a class with a method hand_over() nor a function"


#: The functions that find the problem of a setting whose value must be more than callable.
_PROBLEMS = {"KEY_VALIDATOR": _no_validator, "ERROR_RENDERER": _no_renderer}


def _alias() -> str:
    return router.db_for_write(IdempotencyKey)
