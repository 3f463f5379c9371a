"""Django Tasks: a backend that hands staged jobs to tasks, and a task backend that stages jobs.

It uses ``django.tasks`` of Django 6.0, or the package ``django-tasks``. The ``TasksBackend`` needs
a task backend with workers, such as ``django_tasks_db.DatabaseBackend``. With ``StagedBackend``,
``task.enqueue()`` inserts a staged job.
"""

from importlib.util import find_spec
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ImproperlyConfigured
from django.db import InterfaceError, OperationalError
from django.utils import timezone

from idempotency._async import in_own_context
from idempotency._hidden import Hidden
from idempotency._job_run import job_run
from idempotency.backends import BrokerUnavailable, OneByOne
from idempotency.jobs import JobArgs, call_job, shard_of, stage_job, trace_of
from idempotency.models import StagedJob

if TYPE_CHECKING or not find_spec("django.tasks"):
    from django_tasks import TaskResult, TaskResultStatus, task, task_backends
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import Task
    from django_tasks.exceptions import InvalidTaskError as InvalidTask
    from django_tasks.signals import task_enqueued
else:  # Django 6.0 and later
    from django.tasks import Task, TaskResult, TaskResultStatus, task, task_backends
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.exceptions import InvalidTask
    from django.tasks.signals import task_enqueued


class TasksBackend(OneByOne):
    """Hand staged jobs to Django Tasks in the wrapper task ``run_staged``, because Django Tasks
    generates the id of a task.

    The jobs go to the task backend "default". If that is a ``StagedBackend``, they go to the task
    backend in its OPTIONS.
    """

    runs_functions = True
    uses_inbox = True
    #: Django Tasks does not retry, and a task of a killed worker stays "running". Ten hand-overs
    #: take 8.5 hours.
    follow_up_seconds: float | None = 30

    def hand_over_one(self, queue: str, job: StagedJob) -> None:
        """Enqueue the wrapper task. Raises BrokerUnavailable if the database of the tasks cannot be
        reached."""
        alias = "default"
        if isinstance(backend := task_backends[alias], StagedBackend):
            alias = backend.hands_to
        wrapper = run_staged.using(backend=alias, queue_name=queue)
        traced: dict[str, Any] = {"trace": trace} if (trace := trace_of(job)) else {}
        given = (job.job_name, job.job_args, str(job.id), *filter(None, [shard_of(job)]))
        try:
            wrapper.enqueue(*given, **traced)
        except (OperationalError, InterfaceError) as error:
            raise BrokerUnavailable(
                f"The database of the tasks cannot be reached: {error}"
            ) from error


class StagedBackend(BaseTaskBackend):
    """A task backend that stages jobs: ``task.enqueue()`` inserts a staged job in the open
    transaction.

    ::

        TASKS = {
            "default": {
                "BACKEND": "idempotency.contrib.tasks.StagedBackend",
                "OPTIONS": {"backend": "worker"},
            },
            "worker": {"BACKEND": "django_tasks_db.DatabaseBackend"},
        }

    ``OPTIONS["backend"]`` names the task backend to which ``TasksBackend`` hands the jobs. The
    result has the id of the staged job, and cannot be fetched later.
    """

    supports_defer = True

    @property
    def hands_to(self) -> str:
        """The alias of the backend with workers. Raises ImproperlyConfigured if the OPTIONS do not
        name such a backend."""
        alias = self.options.get("backend")
        if not isinstance(alias, str) or isinstance(task_backends[alias], StagedBackend):
            raise ImproperlyConfigured(
                f"The option TASKS[{self.alias!r}]['OPTIONS']['backend'] must be the alias of a"
                " task backend with workers."
            )
        return alias

    def validate_task(self, task: Task[Any, Any]) -> None:
        """Raise InvalidTask for a task that takes a context, and for a task that every backend
        rejects."""
        super().validate_task(task)
        if task.takes_context:
            raise InvalidTask(
                "A staged task cannot take a context: its job may go to a queue whose workers"
                " cannot pass one."
            )

    def enqueue(self, task: Task[Any, Any], args: Any, kwargs: Any) -> TaskResult[Any]:
        """Stage the task in the open transaction.

        Raises NoOpenTransaction outside a transaction.
        Raises InvalidTask for arguments that can be passed neither all by position nor all by name.
        """
        given = Hidden((args, kwargs))
        del args, kwargs
        self.validate_task(task)
        if all(given.value):
            given.value = (), _by_name(task, given)
        job = stage_job(
            task.module_path,
            dict(given.value[1]) or list(given.value[0]),
            queue=task.queue_name,
            run_at=task.run_after,
        )
        result: Hidden[TaskResult[Any]] = Hidden(
            TaskResult(
                task=task,
                id=str(job.id),
                status=TaskResultStatus.READY,
                enqueued_at=timezone.now(),
                started_at=None,
                finished_at=None,
                last_attempted_at=None,
                args=list(given.value[0]),
                kwargs=dict(given.value[1]),
                backend=self.alias,
                errors=[],
                worker_ids=[],
            )
        )
        task_enqueued.send(type(self), task_result=result.value)
        return result.value


def _by_name(task: Task[Any, Any], given: Hidden[tuple[Any, Any]]) -> dict[str, Any]:
    """Return all arguments as keyword arguments, because a staged job has either positional or
    keyword arguments."""
    parameters = signature(task.func).parameters
    bound = Hidden(signature(task.func).bind(*given.value[0], **given.value[1]).arguments)
    for name in bound.value:
        if parameters[name].kind in (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL):
            raise InvalidTask(
                f"A staged task takes all arguments by name or all by position; {name!r} cannot be"
                " passed by name."
            )
    named: dict[str, Any] = {}
    for name, value in bound.value.items():
        named |= value if parameters[name].kind is Parameter.VAR_KEYWORD else {name: value}
    return named


# This task is defined after StagedBackend, because the decorator reads the default backend.
@task
@in_own_context
def run_staged(
    job_name: str,
    job_args: JobArgs,
    job_id: str,
    using: str | None = None,
    trace: list[Any] | None = None,
) -> None:
    """Run a staged job through the inbox; a second delivery does nothing."""
    given = Hidden(job_args)
    del job_args
    with job_run(job_name, job_id, using, trace) as first:
        if first:
            call_job(job_name, given.value, using=using)
