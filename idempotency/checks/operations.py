"""System checks of operations. Like the checks of views, they report only definite mistakes."""

import sys
from collections.abc import Callable, Iterator
from inspect import getclosurevars, isfunction, unwrap
from typing import Any

from django.core.checks import CheckMessage, register

from idempotency import conf
from idempotency._operations.definition import Definition, registered
from idempotency.checks import error, unknown_database, warning
from idempotency.operations import Operation

_CALLS = frozenset({"once", "aonce"})


@register
def check_operations(app_configs: Any, **kwargs: Any) -> Iterator[CheckMessage]:
    """E005, W016: an operation with an unknown ``using=``, or a ``retention_hours`` without effect.
    E014: a phased operation without ``retention_hours``. E015: a phased operation that a Celery
    task with ``OnceTask`` calls."""
    for each in registered() if conf.are_valid() else ():
        yield from unknown_database(f"The operation {each.name}", each.using)
        yield from _retention(each)
    for task in _once_tasks():
        for name in _phased_operations(getattr(task, "_orig_run", task.run)):
            yield error(
                "idempotency.E015",
                f"The Celery task {task.name} has the base OnceTask, and calls the operation"
                f" {name}. Each run is refused, because the operation commits its own transactions,"
                " and the task runs in the transaction of the inbox.",
                "Replace base=OnceTask by **RETRIES of idempotency.contrib.celery, because the key"
                " of the operation replaces the inbox. Or stage the operation in the task.",
            )


def _retention(operation: Definition) -> Iterator[CheckMessage]:
    hours, least = operation.retention_hours, conf.get().RETENTION_HOURS
    if operation.steps.is_phased and hours is None:
        yield error(
            "idempotency.E014",
            f"The operation {operation.name} ({operation.path}) has no retention_hours. Its key"
            f" would be deleted {least} hours after its end, and a later repeat would call the"
            " downstream service again.",
            "Set it to the hours within which a caller may repeat a key that a client has chosen."
            " Set it to 'forever' for a key that follows from your data, such as the number of an"
            " invoice.",
        )
    if isinstance(hours, int) and hours < least:
        yield warning(
            "idempotency.W016",
            f"The operation {operation.name} has retention_hours={hours}, without effect:"
            f" RETENTION_HOURS is {least}.",
            f"Set retention_hours to at least {least}, or to 'forever'. Or lower RETENTION_HOURS:"
            " existing keys keep their retention.",
        )


def _once_tasks() -> list[Any]:
    """Return the tasks with ``OnceTask`` of the modules that are imported."""
    celery: Any = sys.modules.get("idempotency.contrib.celery")
    try:
        tasks = celery.current_app.tasks.values() if celery else ()
    except Exception:  # A mistake in the configuration of Celery, which Celery itself reports.
        return []
    return [task for task in tasks if isinstance(task, celery.OnceTask)]


def _phased_operations(run: Callable[..., Any]) -> list[str]:
    """Return the names of the phased operations that the function of a task calls. Return none for
    a function that also refers to a plain operation, or stages an operation."""
    found = [run, getattr(run, "__self__", None)]
    if not any(isinstance(each, Operation) for each in found):
        function = unwrap(getattr(run, "__func__", run))
        names = frozenset(function.__code__.co_names) if isfunction(function) else frozenset()
        if not names & _CALLS or "stage" in names:
            return []
        try:
            variables = getclosurevars(function)
        except ValueError:  # A variable of an outer function has no value.
            return []
        found = [*variables.globals.values(), *variables.nonlocals.values()]
    definitions = [each._definition for each in found if isinstance(each, Operation)]
    is_certain = all(each.steps.is_phased for each in definitions)
    return [each.name for each in definitions] if is_certain else []
