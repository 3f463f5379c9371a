"""Staging: a job is a row, inserted in the transaction of the work that it belongs to.

Both commit or neither does: no job runs for work that was rolled back, and no work commits without its job. The enqueuer moves
the rows to the broker afterwards. Source: Brandur Leach, "Transactionally Staged Job Drains in Postgres".
"""

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from inspect import isasyncgen, isgenerator
from typing import Any
from uuid import UUID

from asgiref.sync import sync_to_async
from django.apps import apps
from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, router, transaction
from django.utils import timezone
from django.utils.module_loading import import_string

from idempotency import conf
from idempotency.contexts import awaited
from idempotency.exceptions import JobNotAllowed, NoOpenTransaction
from idempotency.keys import current
from idempotency.models import StagedJob

#: What a job is called with: an object is keyword arguments, an array positional ones.
JobArgs = dict[str, Any] | list[Any]


def stage_job(
    name: str,
    args: JobArgs | None = None,
    *,
    queue: str = "default",
    run_at: datetime | None = None,
    using: str | None = None,
) -> StagedJob:
    """Insert a job in the open transaction and return it; it is handed to the broker after COMMIT, and never without it.

    ``name`` is the dotted path of the function; a dict in ``args`` becomes keyword arguments, a list positional ones;
    the job is not handed over before ``run_at``. The row lies in the database ``using``, by default that of the key whose
    request is under way, else where the router writes jobs; its id becomes the broker's id of the job.

    Raises NoOpenTransaction when nothing would commit the job; TypeError, naming the argument, when one is not JSON;
    ValueError when the name, the queue or the time cannot be right; JobNotAllowed, a ValueError, when the queue runs functions
    and the name leads to none in JOB_MODULES. Nothing was written then.
    """
    _refuse_path(name)
    _refuse_queue(queue)
    args = {} if args is None else args
    _refuse_arguments(name, args)
    if run_at is not None and settings.USE_TZ and timezone.is_naive(run_at):
        raise ValueError(f"run_at={run_at!r} has no time zone: pass an aware datetime.")
    key = current.get()
    of_key = key._state.db if key is not None else None
    alias = using or of_key or router.db_for_write(StagedJob)
    if transaction.get_autocommit(using=alias):
        raise NoOpenTransaction
    if _runs_functions(queue):
        function_of(name)
    key_id = key.pk if key is not None and alias == of_key else None
    job = StagedJob(job_name=name, job_args=args, queue=queue, idempotency_key_id=key_id)
    if run_at is not None:
        job.run_at = run_at
    job.save(using=alias, force_insert=True)
    return job


async def astage_job(
    name: str,
    args: JobArgs | None = None,
    *,
    queue: str = "default",
    run_at: datetime | None = None,
    using: str | None = None,
) -> StagedJob:
    """Insert a job as ``stage_job`` does, from an async view."""
    return await sync_to_async(stage_job)(name, args, queue=queue, run_at=run_at, using=using)


def shard_of(job: StagedJob) -> str | None:
    """Return the database that a worker must be told of, where its inbox row belongs; None in a project that has one."""
    alias = job._state.db
    return None if alias == DEFAULT_DB_ALIAS == router.db_for_write(StagedJob) else alias


def call_job(name: str, args: JobArgs) -> Any:
    """Call the function, or the task of Django Tasks, that a delivered job names, with its arguments; return what it returns.

    Workers call it inside ``process_once(STAGED_JOBS, job_id)``. Raises JobNotAllowed when the function is not in JOB_MODULES;
    TypeError when it is a generator function.
    """
    call = function_of(name)
    # After the inbox has committed, nobody would await what it returned, or not again.
    result = awaited(call(**args) if isinstance(args, dict) else call(*args))
    refuse_generator(name, result)
    return result


def function_of(name: str) -> Callable[..., Any]:
    """Return what a call of the job ``name`` calls: a function, or the method of a task of Django Tasks.

    Raises JobNotAllowed when JOB_MODULES has neither its module, which then is not imported, nor the module in which the
    function is defined; also when the import fails.
    """
    refuse_module(name, name.rpartition(".")[0])
    try:
        job = import_string(name)
    except Exception as error:  # Whatever a module may raise on import.
        raise JobNotAllowed(f"The job {name} cannot be imported: {type(error).__name__}: {error}") from error
    # A module may hold names that it has imported. A task, and a partial, is an object of another module than its function.
    refuse_module(name, getattr(getattr(job, "func", job), "__module__", None))
    call: Callable[..., Any] = getattr(job, "call", job)
    if not callable(call):
        raise JobNotAllowed(f"The job {name} is no function: it cannot be called.")
    return call


def refuse_module(name: str, module: str | None) -> None:
    """Raise JobNotAllowed unless JOB_MODULES has the module."""
    allowed = conf.get().JOB_MODULES or [app.name for app in apps.get_app_configs()]
    if not any(f"{module}.".startswith(f"{root}.") for root in allowed):
        raise JobNotAllowed(
            f"The job {name} leads to the module {module!r}, from which no job may run. Add it to IDEMPOTENCY['JOB_MODULES'], "
            "or move the function to a module that is listed (by default, each module of an installed app)."
        )


def not_allowed(jobs: Iterable[StagedJob]) -> dict[UUID, Exception]:
    """Return the jobs whose function must not run, by their ids, with the reason; each name is looked up once."""
    problems: dict[str, JobNotAllowed] = {}
    jobs = list(jobs)
    for name in {job.job_name for job in jobs}:
        try:
            function_of(name)
        except JobNotAllowed as error:
            problems[name] = error
    return {job.pk: problems[job.job_name] for job in jobs if job.job_name in problems}


def backend_path(queue: str) -> str | None:
    """Return the dotted path that ``IDEMPOTENCY["ENQUEUERS"]`` has for a queue, or None."""
    enqueuers = conf.get().ENQUEUERS
    return enqueuers.get(queue) or enqueuers.get("*")


def _runs_functions(queue: str) -> bool:
    """Tell whether the workers of a queue import what a job's name says."""
    try:
        return bool(getattr(import_string(backend_path(queue) or ""), "runs_functions", False))
    except Exception:  # The enqueuer refuses the job with this error.
        return False


def refuse_generator(name: str, result: Any) -> None:
    """Raise TypeError when a call returned a generator: its work has not begun, and nobody would do it."""
    if isgenerator(result) or isasyncgen(result):
        raise TypeError(f"{name} is a generator function: calling it does nothing. Write it without yield.")


def _refuse_path(name: str) -> None:
    width = StagedJob._meta.get_field("job_name").max_length or 0
    parts = name.split(".") if isinstance(name, str) else []
    if len(parts) < 2 or not all(part.isidentifier() for part in parts) or len(name) > width:
        raise ValueError(
            f"The name of a job is the dotted path of its function, such as 'shop.jobs.send_receipt', with at most {width} "
            f"characters; {name!r} is not."
        )


def _refuse_queue(queue: str) -> None:
    width = StagedJob._meta.get_field("queue").max_length or 0
    if not isinstance(queue, str) or not 0 < len(queue) <= width or "\0" in queue:
        raise ValueError(f"The name of a queue is a string of 1 to {width} characters, not {queue!r}.")


def _refuse_arguments(name: str, args: JobArgs) -> None:
    """Raise TypeError unless every argument survives a trip through the database's JSON."""
    named: Sequence[tuple[Any, Any]]
    if isinstance(args, dict):
        named = list(args.items())
    elif isinstance(args, list):
        named = list(enumerate(args))
    else:
        raise TypeError(f"The arguments of {name} must be a dict (by name) or a list (by position), not {type(args).__name__}.")
    for argument, value in named:
        if isinstance(args, dict) and not isinstance(argument, str):
            raise TypeError(f"An argument of {name} is named {argument!r}: the names of keyword arguments are strings.")
        if problem := _json_problem([argument, value]):
            raise TypeError(f"Argument {argument!r} of {name} cannot be kept as JSON: {problem}. Pass ids.")


def _json_problem(value: Any) -> str:
    """Return why ``value`` cannot be kept as JSON, or nothing."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
        if not _has_names_only(value):
            return "a key of an object in it is no string, and would become one"
    except (TypeError, ValueError, RecursionError) as error:
        return str(error)
    # PostgreSQL's jsonb has no character for it, and the failed INSERT would take the caller's transaction with it.
    return "it contains a NUL character" if "\\u0000" in text.replace("\\\\", "") else ""


def _has_names_only(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(name, str) and _has_names_only(inner) for name, inner in value.items())
    return not isinstance(value, list | tuple) or all(map(_has_names_only, value))
