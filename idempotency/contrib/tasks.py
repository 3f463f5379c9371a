"""Django Tasks, both ways: staged jobs to a task backend, and a task backend that stages.

Django's own ``django.tasks`` from 6.0 on, the package ``django-tasks`` before. ``TasksBackend`` needs a backend with a worker,
such as ``django_tasks_db.DatabaseBackend``; ``StagedBackend`` makes a plain ``task.enqueue()`` inside a phase a staged job.
"""

from datetime import timedelta
from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ImproperlyConfigured
from django.db import InterfaceError, OperationalError, router
from django.utils import timezone

from idempotency.enqueuer import BrokerUnavailable, OneByOne
from idempotency.inbox import STAGED_JOBS, process_once
from idempotency.jobs import JobArgs, call_job, stage_job
from idempotency.models import ProcessedMessage, StagedJob

if TYPE_CHECKING or not find_spec("django.tasks"):
    from django_tasks import TaskContext, TaskResult, TaskResultStatus, task, task_backends
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import Task
    from django_tasks.exceptions import InvalidTaskError as InvalidTask
    from django_tasks.signals import task_enqueued
else:  # Django 6.0 and later
    from django.tasks import Task, TaskContext, TaskResult, TaskResultStatus, task, task_backends
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.exceptions import InvalidTask
    from django.tasks.signals import task_enqueued

#: How long after each delivery the next one comes: a dozen tries, over about three hours.
AGAIN_SECONDS = (30, 30, 60, 120, 300, 600, 900, 1200, 1800, 2400, 3600)


class TasksBackend(OneByOne):
    """Hand staged jobs to Django Tasks, in the wrapper task ``run_staged``: a backend of theirs takes no id from outside.

    The jobs go to the task backend "default"; if that one is a ``StagedBackend``, to the one that its OPTIONS name.
    """

    def hand_over_one(self, queue: str, job: StagedJob) -> None:
        """Enqueue the wrapper task. Raises BrokerUnavailable when the database of the tasks cannot be reached."""
        alias = "default"
        if isinstance(backend := task_backends[alias], StagedBackend):
            alias = backend.hands_to
        wrapper = run_staged.using(backend=alias, queue_name=queue)
        try:
            wrapper.enqueue(job.job_name, job.job_args, str(job.pk), 0)
            _enqueue_again(wrapper, job.job_name, job.job_args, str(job.pk), 0)
        except (OperationalError, InterfaceError) as error:
            raise BrokerUnavailable(f"The database of the tasks takes none at the moment: {error}") from error


class StagedBackend(BaseTaskBackend):
    """A task backend that stages: ``task.enqueue()`` inserts a staged job in the open transaction, and needs one.

    ::

        TASKS = {
            "default": {"BACKEND": "idempotency.contrib.tasks.StagedBackend", "OPTIONS": {"backend": "worker"}},
            "worker": {"BACKEND": "django_tasks_db.DatabaseBackend"},
        }

    ``OPTIONS["backend"]`` names the task backend that the ``TasksBackend`` of ``ENQUEUERS`` hands the jobs to. The result has
    the id of the staged job; it cannot be fetched later.
    """

    supports_defer = True

    @property
    def hands_to(self) -> str:
        """The alias of the backend with the workers; raise ImproperlyConfigured when OPTIONS name none."""
        alias = self.options.get("backend")
        if not isinstance(alias, str) or isinstance(task_backends[alias], StagedBackend):
            raise ImproperlyConfigured(
                f"TASKS[{self.alias!r}]['OPTIONS']['backend'] must be the alias of the task backend with the workers."
            )
        return alias

    def validate_task(self, task: Task[Any, Any]) -> None:
        """Refuse what a staged job cannot be, besides what every backend refuses."""
        super().validate_task(task)
        if task.takes_context and task.module_path != f"{__name__}.run_staged":
            raise InvalidTask("A staged task gets no context: it may run on any queue.")

    def enqueue(self, task: Task[Any, Any], args: Any, kwargs: Any) -> TaskResult[Any]:
        """Stage the task in the open transaction. Raises NoOpenTransaction outside of one."""
        self.validate_task(task)
        if args and kwargs:
            bound = signature(task.func).bind(*args, **kwargs)
            args, kwargs = (), bound.arguments
        job = stage_job(task.module_path, dict(kwargs) or list(args), queue=task.queue_name, run_at=task.run_after)
        result: TaskResult[Any] = TaskResult(
            task=task,
            id=str(job.pk),
            status=TaskResultStatus.READY,
            enqueued_at=timezone.now(),
            started_at=None,
            finished_at=None,
            last_attempted_at=None,
            args=list(args),
            kwargs=dict(kwargs),
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )
        task_enqueued.send(type(self), task_result=result)
        return result


# Below StagedBackend: the decorator asks for the default backend, which may be that one.
@task(takes_context=True)
def run_staged(context: TaskContext, job_name: str, job_args: JobArgs, job_id: str, delivery: int) -> None:
    """Run a staged job in the worker, through the inbox.

    Django Tasks know no second try, and a task whose worker was killed stays behind as running. So each delivery is followed by
    another one, enqueued for later before this one runs. That one finds that the job took effect, and is the last; or it finds
    the job failed, killed or still at work, and is the next try.
    """
    if delivery > 0:  # The first two are enqueued together.
        messages = ProcessedMessage.objects.using(router.db_for_write(ProcessedMessage))
        if messages.filter(source=STAGED_JOBS, message_id=job_id).exists():
            return
        _enqueue_again(context.task_result.task, job_name, job_args, job_id, delivery)
    with process_once(STAGED_JOBS, job_id) as first:
        if first:
            call_job(job_name, job_args)


def _enqueue_again(this: Task[Any, Any], job_name: str, job_args: JobArgs, job_id: str, delivery: int) -> None:
    """Enqueue the delivery after ``delivery`` for later, unless that was the last, or the backend knows no later."""
    if this.get_backend().supports_defer and delivery < len(AGAIN_SECONDS):
        later = timezone.now() + timedelta(seconds=AGAIN_SECONDS[delivery])
        this.using(run_after=later).enqueue(job_name, job_args, job_id, delivery + 1)
