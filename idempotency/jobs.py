"""Staged jobs (transactional outbox): a job is a row that is inserted in the transaction of its
work.

Both commit or neither does. The enqueuer then moves the rows to the broker.
Source: Brandur Leach, "Transactionally Staged Job Drains in Postgres".
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import partial
from inspect import isasyncgen, isgenerator
from typing import Any
from uuid import UUID

from asgiref.sync import sync_to_async
from django.apps import apps
from django.conf import settings
from django.db import Error, connections, router, transaction
from django.utils import timezone
from django.utils.module_loading import import_string

from idempotency import conf
from idempotency._async import FAILURES, awaited
from idempotency._engine.errors import hide_row
from idempotency._engine.phased_run import current_key
from idempotency._groups import next_position
from idempotency._hidden import Arguments, Hidden
from idempotency._records import STAGED_OPERATION
from idempotency._text import error_text, refuse_text, storable_json
from idempotency.exceptions import JobNotAllowed, NoOpenTransaction
from idempotency.models import StagedJob

#: The modules and packages of installed apps that may define functions of jobs by default.
JOB_NAMES = frozenset({"jobs", "tasks", "operations"})

#: The names of the operations that were registered at the start of the project.
OPERATIONS: set[str] = set()

JobArgs = dict[str, Any] | list[Any]


def stage_job(
    name: str,
    args: JobArgs | None = None,
    *,
    queue: str = "default",
    run_at: datetime | None = None,
    group: str | None = None,
    using: str | None = None,
) -> StagedJob:
    """Insert a job in the open transaction and return it. It is handed to the broker only after
    COMMIT. The id of the row becomes the broker's id of the job.

    - ``name``: the dotted path of the function.
    - ``args``: JSON; a dict becomes keyword arguments, a list positional arguments.
    - ``run_at``: the job is not handed over before this time.
    - ``group``: the jobs of a group take effect one at a time, in the order of their commits. Until
      the open transaction ends, other transactions that stage a job of this group wait for it.
    - ``using``: the database of the row. By default it is the database of the current request's
      key, or else the one that the router chooses.

    On an exception nothing was written.
    Raises NoOpenTransaction outside a transaction.
    Raises TypeError if an argument is not JSON.
    Raises ValueError for an invalid name, queue, group or time, or if the arguments are longer than
    MAX_JOB_BYTES.
    Raises JobNotAllowed, a ValueError, if the queue runs functions and JOB_MODULES does not permit
    this function.
    """
    _refuse_path(name)
    refuse_text("The name of a queue", queue, StagedJob._meta.get_field("queue"))
    if group is not None:
        refuse_text("The name of a group", group, StagedJob._meta.get_field("group"))
    given: Hidden[JobArgs] = Hidden({} if args is None else args)
    # Errors are raised, and code of the project runs below: modules, and receivers of signals.
    del args
    if mistake := _mistake_in(name, given.value):
        raise mistake
    if run_at is not None and settings.USE_TZ and timezone.is_naive(run_at):
        raise ValueError(f"The time run_at={run_at!r} has no time zone: pass an aware datetime.")
    key = current_key.get()
    of_key = key._state.db if key is not None else None
    alias = using or of_key or router.db_for_write(StagedJob)
    if transaction.get_autocommit(using=alias):
        raise NoOpenTransaction
    if _runs_functions(queue):
        function_of(name)
    key_id = key.pk if key is not None and alias == of_key else None
    job = StagedJob(job_name=name, job_args=given.value, queue=queue, idempotency_key_id=key_id)
    if run_at is not None:
        job.run_at = run_at
    if group is not None:
        job.group, job.group_position = group, next_position(group, using=alias)
    try:
        job.save(using=alias, force_insert=True)
    except Error as error:
        hide_row(error)
        raise
    return job


async def astage_job(
    name: str,
    args: JobArgs | None = None,
    *,
    queue: str = "default",
    run_at: datetime | None = None,
    group: str | None = None,
    using: str | None = None,
) -> StagedJob:
    """Insert a job as ``stage_job`` does, from an async view."""
    staging = sync_to_async(stage_job)(
        name, args, queue=queue, run_at=run_at, group=group, using=using
    )
    del args
    return await staging


def shard_of(job: StagedJob) -> str | None:
    """Return the alias of the database that the worker must use for the inbox row of the job; None
    in a project with one database. The router of a worker may choose another database than the
    router of the process that staged the job."""
    return job._state.db if len(connections.settings) > 1 else None


def trace_of(job: StagedJob) -> list[Any] | None:
    """Return the trace that the worker continues: the traceparent of the job, and the number of
    its earlier hand-overs. Without a tracer, return None."""
    return [job.traceparent, job.hand_overs] if job.traceparent else None


def call_job(name: str, args: JobArgs, *, using: str | None = None) -> Any:
    """Call the function or Django task of a delivered job with its arguments, and return its
    result.

    Workers call it inside ``process_once(STAGED_JOBS, job_id)``. Only the job of a staged operation
    is called outside any transaction. ``using`` is the database of the staged row.
    Raises JobNotAllowed if JOB_MODULES does not permit the function.
    Raises TypeError for a generator function.
    """
    if name == STAGED_OPERATION:
        given = Arguments((), {**dict(args), "using": using})
    else:
        given = Arguments((), args) if isinstance(args, dict) else Arguments(args, {})
    del args
    # Await a coroutine here: after the COMMIT of the inbox it would never run.
    result = awaited(given.passed_to(function_of(name)))
    refuse_generator(name, result)
    return result


def function_of(name: str) -> Callable[..., Any]:
    """Return the function of a job; for a task of Django, its function.

    Raises JobNotAllowed if the function cannot be imported.
    Raises JobNotAllowed before the import if JOB_MODULES does not permit the module in ``name``.
    Raises JobNotAllowed if JOB_MODULES does not permit the module that defines the function.
    """
    refuse_module(name, name.rpartition(".")[0])
    try:
        job = import_string(name)
        # Whatever is called is also checked. A module may contain imported names.
        call: Callable[..., Any] = job if callable(job) else job.func
        module = getattr(call.func if isinstance(call, partial) else call, "__module__", None)
    except FAILURES as error:  # A module, or an attribute of an object, may raise anything.
        raise JobNotAllowed(f"The job {name} cannot be imported: {error_text(error)}") from error
    refuse_module(name, module)
    if not callable(call):
        raise JobNotAllowed(f"The job {name} is not callable.")
    return call


def refuse_module(name: str, module: str | None) -> None:
    """Raise JobNotAllowed unless JOB_MODULES permits the module. A job that calls an operation is
    not checked here, because it can call only registered operations."""
    listed = conf.get().JOB_MODULES
    if name != STAGED_OPERATION and not (
        _is_of_jobs(str(module))
        if listed is None
        else any(f"{module}.".startswith(f"{root}.") for root in listed)
    ):
        raise JobNotAllowed(
            f"The job {name} is in the module {module!r}, which may not run jobs. Add it to"
            " IDEMPOTENCY['JOB_MODULES'], or move the function to a module that is listed (by"
            " default, the modules 'jobs', 'tasks' and 'operations' of installed apps)."
        )


def _is_of_jobs(module: str) -> bool:
    """Return whether the module, or a package around it, has one of the names JOB_NAMES in an
    installed app."""
    if module.startswith(("django.", "idempotency.")):
        return False
    inside = (
        module.removeprefix(root)
        for app in apps.get_app_configs()
        if module.startswith(root := f"{app.name}.")
    )
    return any(not JOB_NAMES.isdisjoint(path.split(".")) for path in inside)


def refuse_operation(name: str) -> None:
    """Raise JobNotAllowed unless the operation was registered at the start of the project."""
    if name not in OPERATIONS:
        raise JobNotAllowed(
            f"The running code has no operation {name!r} in a module operations.py of an installed"
            " app, so no worker can run it. Move it there, or restore its name."
        )


def not_allowed(jobs: Sequence[StagedJob]) -> dict[UUID, Exception]:
    """For each job whose function or operation may not run, map the id of the job to the error.
    Each name is looked up once."""
    problems: dict[tuple[str, str], Exception] = {}
    for name, operation in {(job.job_name, job.operation) for job in jobs}:
        try:
            # A query of the module may fail. Without a savepoint, the open transaction would be
            # lost.
            with transaction.atomic(using=jobs[0]._state.db):
                function_of(name)
            if operation:
                refuse_operation(operation)
        except (JobNotAllowed, Error) as error:
            problems[name, operation] = error
    return {
        job.id: problems[job.job_name, job.operation]
        for job in (jobs if problems else ())
        if (job.job_name, job.operation) in problems
    }


def backend_path(queue: str) -> str | None:
    """Return the dotted path of ``IDEMPOTENCY["ENQUEUERS"]`` for a queue, or None."""
    enqueuers = conf.get().ENQUEUERS
    return enqueuers.get(queue) or enqueuers.get("*")


def _runs_functions(queue: str) -> bool:
    """Return whether the workers of a queue import the function of a job by its name."""
    try:
        return bool(getattr(import_string(backend_path(queue) or ""), "runs_functions", False))
    except Exception:  # The enqueuer refuses the job with this error.
        return False


def refuse_generator(name: str, result: Any) -> None:
    """Raise TypeError if a call returned a generator, because its body has not run."""
    if isgenerator(result) or isasyncgen(result):
        raise TypeError(
            f"{name} is a generator function: calling it does nothing. Write it without yield."
        )


def _refuse_path(name: str) -> None:
    width = StagedJob._meta.get_field("job_name").max_length or 0
    parts = name.split(".") if isinstance(name, str) else []
    if len(parts) < 2 or not all(part.isidentifier() for part in parts) or len(name) > width:
        raise ValueError(
            "The name of a job must be the dotted path of its function, such as"
            f" 'shop.jobs.send_receipt', with at most {width} characters, not {name!r}."
        )


def _mistake_in(name: str, args: JobArgs) -> TypeError | ValueError | None:
    """Return the error of arguments that cannot be stored."""
    if not isinstance(args, dict | list):
        return TypeError(
            f"The arguments of {name} must be a dict (by name) or a list (by position), not"
            f" {type(args).__name__}."
        )
    size, most = 0, conf.get().MAX_JOB_BYTES
    arguments: Iterable[tuple[Any, Any]] = (
        args.items() if isinstance(args, dict) else enumerate(args)
    )
    for argument, value in arguments:
        if isinstance(args, dict) and not isinstance(argument, str):
            return TypeError(
                f"An argument of {name} is named {argument!r}: the names of keyword arguments must"
                " be strings."
            )
        try:
            size += len(storable_json([argument, value]))
        except (TypeError, ValueError, RecursionError) as error:
            return TypeError(
                f"Argument {argument!r} of {name} cannot be stored as JSON: {error}. Pass ids."
            )
    if size <= most:
        return None
    return ValueError(
        f"The arguments of {name} have {size} bytes as JSON, and a job may have {most}. Store the"
        " data in a table or a file, and pass its id. Or raise IDEMPOTENCY['MAX_JOB_BYTES']."
    )
