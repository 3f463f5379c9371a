"""System checks (ids ``idempotency.E001`` and on): mistakes are found before the first request, not at it.

None of them asks a database: ``manage.py check`` works without one.
"""

from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register
from django.db import connections, router
from django.utils.module_loading import import_string

from idempotency import conf


@register
def check_settings(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """E001: a setting that the app cannot work with. W001: two that contradict what they are for."""
    values = getattr(settings, "IDEMPOTENCY", {})
    if found := conf.problems(values):
        return [Error(problem, id="idempotency.E001") for problem in found]
    limits = conf.get()
    if limits.COMPLETER_MIN_AGE_SECONDS > limits.LOCK_TIMEOUT_SECONDS:
        return []
    return [
        Warning(
            "IDEMPOTENCY['COMPLETER_MIN_AGE_SECONDS'] is not above LOCK_TIMEOUT_SECONDS: the completer may run a request whose "
            "client is about to retry it.",
            hint="Nothing runs twice, but the client gets 409 meanwhile. The defaults are 300 and 90.",
            id="idempotency.W001",
        )
    ]


@register
def check_database(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """E002: the keys are kept in a database on which the promises cannot be held."""
    from idempotency.models import IdempotencyKey

    alias = router.db_for_write(IdempotencyKey)
    vendor = connections[alias].vendor
    if vendor in ("postgresql", "sqlite"):
        return []
    return [
        Error(
            f"The database {alias!r}, where idempotency keys are kept, is {vendor}.",
            hint="Keep them in PostgreSQL (or, for development, in SQLite): set a database router for the app 'idempotency'.",
            id="idempotency.E002",
        )
    ]


@register
def check_enqueuers(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """E003: a backend of staged jobs that cannot be imported, or is none.

    The default is not checked: its queue library is an extra that a project without staged jobs does without.
    """
    values = getattr(settings, "IDEMPOTENCY", {})
    if conf.problems(values):
        return []  # E001 has said it.
    found: list[CheckMessage] = []
    for queue, path in values.get("ENQUEUERS", {}).items():
        try:
            named = import_string(path)
            right = hasattr(named, "hand_over") if isinstance(named, type) else callable(named)
            problem = None if right else "it is neither a class with a method hand_over() nor a function"
        except Exception as error:  # Whatever a module may raise on import.
            problem = f"{type(error).__name__}: {error}"
        if problem:
            found.append(
                Error(
                    f"IDEMPOTENCY['ENQUEUERS'][{queue!r}] is {path!r}, which is not a backend: {problem}.",
                    hint="Name a function, or a class with hand_over(queue, jobs) such as 'idempotency.contrib.rq.RQBackend'.",
                    id="idempotency.E003",
                )
            )
    return found
