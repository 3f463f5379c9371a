"""Staged jobs to Celery, by the name of the task; and ``OnceTask``, the base of the tasks that take effect once.

The protection is a base class and not a wrapper task: each job stays the Celery task that it is, with its own name in the
monitoring, its own time limits, routes and retries. What is not protected so is refused by the backend, with the cure in
the error: nothing runs unprotected because somebody forgot a line.
"""

import logging
import sys
import threading
from collections.abc import Awaitable
from contextlib import suppress
from importlib import import_module
from inspect import isawaitable
from typing import Any

from asgiref.sync import async_to_sync
from celery import Celery, Task, current_app
from celery.exceptions import Ignore, Reject, Retry, TimeLimitExceeded
from celery.worker.request import Request
from celery.worker.state import task_ready
from django.db import InterfaceError, OperationalError
from kombu.exceptions import OperationalError as BrokerError

from idempotency.backends import BROKER_TIMEOUT_SECONDS, BrokerUnavailable, OneByOne
from idempotency.exceptions import JobNotAllowed, MessageInProgress
from idempotency.inbox import STAGED_JOBS, process_once
from idempotency.jobs import refuse_generator, refuse_module, shard_of
from idempotency.models import StagedJob

logger = logging.getLogger("idempotency")

#: Names the database that a job was staged in, in a project with several: its inbox row belongs there.
SHARD_HEADER = "idempotency_shard"

#: Marks the request of a delivery whose run has begun. Each delivery has a request of its own.
_UNDER_WAY = "idempotency_under_way"

#: No call to the broker without an end, and no tries of its own: the next pass is the next try.
_BOUNDS = {
    "redis": {"max_retries": 0, "socket_connect_timeout": 5, "socket_timeout": BROKER_TIMEOUT_SECONDS},
    # RabbitMQ confirms that it has a message before the staged row is deleted.
    "amqp": {
        "max_retries": 0,
        "confirm_publish": True,
        "read_timeout": BROKER_TIMEOUT_SECONDS,
        "write_timeout": BROKER_TIMEOUT_SECONDS,
    },
}


class OnceRequest(Request):  # type: ignore[misc]
    """A delivery that goes back to the broker when its process is killed at the hard ``time_limit``, and has not failed.

    Celery would throw it away and call ``link_error``; its ``acks_on_timeout``, from 5.7 on, changes the first alone.
    """

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """Give the message back to the broker at a hard limit; at a soft one the task itself gets an exception."""
        if soft:
            super().on_timeout(soft, timeout)
            return
        task_ready(self)
        logger.error("The Celery task %s[%s] is killed at its time limit, %s s, and tried again.", self.name, self.id, timeout)
        self.reject(requeue=True)

    def on_failure(self, exc_info: Any, **options: Any) -> None:
        """Leave a hard limit to ``on_timeout``, which a pool of processes calls next."""
        if exc_info.type is not TimeLimitExceeded:
            super().on_failure(exc_info, **options)


class OnceTask(Task):  # type: ignore[misc]
    """A Celery task that takes effect once, however often it is delivered: ``@shared_task(base=OnceTask)``.

    It runs in one transaction with the row of the inbox that has its task id; the function may be ``async def``. When it
    raises, nothing is kept, and it is tried again, ``max_retries`` times, after waits that double up to an hour; while the
    database cannot be reached, without end. ``self.retry()`` works as in any task, ``autoretry_for`` unless it is async. A
    delivery that meets another one goes back to the broker. What the task calls directly, itself too, is a part of its run.

    The broker keeps the message until the task has run (``acks_late``), and gets it back when the worker process dies
    (``reject_on_worker_lost``) or is killed at its ``time_limit``. Both settings must stay on, or a crash loses the job.

    A second delivery does not know the result of the first, and returns None. A ``link``, chain or chord would go on with
    that: there the second delivery fails with RuntimeError, without calling ``link_error``. What follows was sent by the first
    delivery, or is lost if that died right after COMMIT: what must not be lost is staged in the task, with ``stage_job``.
    """

    abstract = True
    acks_late = True
    reject_on_worker_lost = True
    max_retries = 12
    Request = OnceRequest

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task once for its id; a direct call, which has no id or is made within that run, just runs it."""
        request = self.request
        if request.id is None:
            return super().__call__(*args, **kwargs)
        if request.get(_UNDER_WAY):
            return self.run(*args, **kwargs)
        setattr(request, _UNDER_WAY, True)
        try:
            with process_once(STAGED_JOBS, request.id, using=request.get(SHARD_HEADER)) as first:
                result = self.run(*args, **kwargs) if first else None
                if isawaitable(result):
                    result = async_to_sync(self._finish)(result, request)
                refuse_generator(self.name, result)
        except MessageInProgress as error:
            # Not retry(): that would use up the tries that the task has for its own failures.
            raise Reject(error, requeue=True) from error
        except Exception as error:  # COMMIT may fail too, after run() has returned.
            if isinstance(error, (Ignore, Reject)) or (isinstance(error, Retry) and error.sig is not None):
                raise
            # A Retry for which no message was sent is that of a task that this one called directly.
            reason = error.__cause__ if isinstance(error, Retry) else error
            tries = sys.maxsize if isinstance(reason, (OperationalError, InterfaceError)) else None
            raise self.retry(exc=reason, countdown=min(2**request.retries, 3600), max_retries=tries) from error
        if not first and (request.callbacks or request.chain or request.chord):
            request.errbacks = None  # They may undo the work, and it was done.
            raise RuntimeError(
                f"The task {self.name}[{request.id}] took effect in an earlier delivery, and its result is not known any more. "
                "What follows it was sent then, or never: look whether it ran. In place of a link, chain or chord, stage the "
                "next job with stage_job() in the task: then both commit, or neither."
            )
        return result

    async def _finish(self, awaitable: Awaitable[Any], request: Any) -> Any:
        """Await what run() returned; Celery keeps a request by thread, and the event loop is in another one."""
        self.request_stack.push(request)
        try:
            return await awaitable
        finally:
            self.request_stack.pop()


class CeleryBackend(OneByOne):
    """Hand staged jobs to Celery: ``name`` is that of a task with the base ``OnceTask``, the staged id becomes the task id.

    The queue "default" leaves the choice to Celery's routes; any other name is that of a Celery queue. Results are not kept:
    nobody waits for them. A backend for another app than the current one, or for tasks that are idempotent in themselves, is
    a subclass.
    """

    #: False hands over tasks without the base OnceTask too: a second delivery then runs them again.
    protected = True
    #: With Redis as the broker: a worker takes a message and then notes that it has it, and one that is killed in between
    #: loses it. Ten times, over a week.
    follow_up_seconds: float | None = 600
    uses_database = False

    def __init__(self) -> None:
        self.app: Celery = current_app._get_current_object()
        self._kept = threading.local()
        self._imported = False
        if not self.protected or self.app.connection_for_write().transport.driver_type != "redis":
            self.follow_up_seconds = None

    def hand_over_one(self, queue: str, job: StagedJob) -> None:
        """Publish one message. Raises BrokerUnavailable, JobNotAllowed for unknown tasks, TypeError for unprotected ones."""
        self._refuse_unsafe(job.job_name)
        by_name = isinstance(job.job_args, dict)
        try:
            self.app.send_task(
                job.job_name,
                args=[] if by_name else job.job_args,
                kwargs=job.job_args if by_name else {},
                task_id=str(job.pk),
                producer=self._producer(),
                retry=False,
                ignore_result=True,
                add_to_parent=False,
                headers={SHARD_HEADER: shard} if (shard := shard_of(job)) else None,
                **({} if queue == "default" else {"queue": queue}),
            )
        except BrokerError as error:
            self._drop_producer()
            if isinstance(error.__cause__, KeyError):  # kombu counts it among the lost connections.
                raise error.__cause__ from None
            raise BrokerUnavailable(f"Celery's broker takes no jobs at the moment: {error}") from error

    def _refuse_unsafe(self, name: str) -> None:
        """Raise for a task that a worker would throw away as unknown, or that a second delivery would run again."""
        if name not in self.app.tasks:
            self._register(name.rpartition(".")[0], name)
        task = self.app.tasks.get(name)
        if task is None:
            raise JobNotAllowed(f"No Celery task is named {name!r}: decorate it with @shared_task(base=OnceTask).")
        if self.protected and not (isinstance(task, OnceTask) and task.acks_late and task.reject_on_worker_lost):
            raise TypeError(
                f"The Celery task {name!r} could be lost, or take effect twice: give it base=OnceTask, and leave acks_late on, "
                "and reject_on_worker_lost."
            )

    def _register(self, module: str, name: str) -> None:
        """Import the modules that register tasks: those that a worker imports, and the task's own if JOB_MODULES has it."""
        with suppress(ImportError):
            if not self._imported:
                self._imported = True
                self.app.loader.import_default_modules()
        with suppress(ImportError, JobNotAllowed):
            refuse_module(name, module)
            import_module(module)

    def _producer(self) -> Any:
        """Return this thread's producer: connecting for each job would take longer than the hand-over."""
        if not hasattr(self._kept, "producer"):
            connection = self.app.connection_for_write()
            bounds = _BOUNDS.get(connection.transport.driver_type, {})
            connection = self.app.connection_for_write(connect_timeout=5, transport_options=bounds)
            self._kept.producer = self.app.amqp.Producer(connection, auto_declare=False)
        return self._kept.producer

    def _drop_producer(self) -> None:
        connection = self._kept.producer.connection
        del self._kept.producer
        with suppress(Exception):  # It is broken already.
            connection.close()
