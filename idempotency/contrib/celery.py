"""Staged jobs for Celery, and ``OnceTask``, the base class of tasks that take effect once.

The protection is a base class, not a wrapper task, so that each job keeps its name in monitoring
and its own time limits, routes and retries. The backend refuses tasks without the base class.
"""

from asyncio import CancelledError
from collections.abc import Awaitable
from contextlib import nullcontext, suppress
from importlib import import_module
from inspect import isawaitable
from typing import Any

from amqp.exceptions import ConnectionError as LostConnection  # type: ignore[import-untyped]
from asgiref.sync import async_to_sync
from celery import Task, current_app, shared_task
from celery.exceptions import Ignore, Reject, Retry
from django.db import Error, transaction
from kombu.exceptions import OperationalError as BrokerError

from idempotency._async import in_own_context
from idempotency._hidden import Arguments, Hidden
from idempotency._job_run import RETRIED, is_uncounted, job_run
from idempotency._records import STAGED_OPERATION
from idempotency._text import error_text
from idempotency.backends import OneByOne
from idempotency.contrib.celery_delivery import (
    QUEUE_HEADER,
    Broker,
    OnceRequest,
    keep_queue,
    retry_of_option,
    retry_or_return,
    unavailable,
    was_cut,
)
from idempotency.exceptions import JobNotAllowed, MessageInProgress
from idempotency.jobs import call_job, refuse_generator, refuse_module, shard_of, trace_of
from idempotency.models import StagedJob

#: The header with the database of the job's inbox row, in a project with several databases.
SHARD_HEADER = "idempotency_shard"
#: The headers with the number of runs that are not counted as tries, and with the trace of the job.
_OUTAGES_HEADER, _TRACE_HEADER = "idempotency_outages", "idempotency_trace"
_OF_JOB = SHARD_HEADER, _TRACE_HEADER, QUEUE_HEADER
#: The attribute of a request whose run has begun. Each delivery has its own request.
_UNDER_WAY = "idempotency_under_way"
#: The longest wait in seconds: RabbitMQ permits no worker to hold a message for 30 minutes.
_MAX_WAIT = 900


#: The options of a task that calls an operation: ``@shared_task(**RETRIES)``. The broker keeps the
#: message until the task has run, also if its process is killed. If the operation is in progress,
#: unavailable or unfinished, the task is retried without limit, after waits of up to ten minutes.
RETRIES: dict[str, Any] = {
    "retry": retry_of_option,
    "acks_late": True,
    "reject_on_worker_lost": True,
    "Request": OnceRequest,
    "autoretry_for": RETRIED,
    "retry_backoff": True,
    "max_retries": None,
}


class OnceTask(Task):  # type: ignore[misc]
    """A Celery task that takes effect once per task id: ``@shared_task(base=OnceTask)``. A task
    that calls a phased operation needs ``RETRIES`` instead, because such an operation cannot run in
    the transaction of the inbox.

    It runs in one transaction with its row in the inbox; the function may be ``async def``. If it
    raises, the transaction is rolled back, and the task is retried ``max_retries`` times, after
    waits that double up to 15 minutes. While the database is unavailable, or another delivery or an
    operation that it calls is in progress, the task is retried without limit. An error of a time
    limit counts as a try. The method ``self.retry()`` works as in any task; ``autoretry_for`` works
    unless the task is async. Tasks that this task calls directly are part of its run.

    A hook of ``transaction.on_commit()`` that raises does not fail the task, whose work is
    committed. The error is logged and recorded in the inbox, and the hook is not called again.

    The broker keeps the message until the task has run (``acks_late``). The message returns if the
    worker process dies (``reject_on_worker_lost``) or is killed at its ``time_limit``. Both
    settings must stay on; otherwise a crash loses the job. So a task must not call ``sys.exit()``,
    which ends the process: the task would run again without limit.

    A second delivery returns None, because the result of the first is unknown. With a ``link``,
    chain or chord it raises RuntimeError instead, and ``link_error`` is not called. The first
    delivery has sent the next task, unless its worker died right after COMMIT. If the next task
    must not be lost, stage it in the task with ``stage_job``.
    """

    abstract = True
    acks_late = True
    reject_on_worker_lost = True
    max_retries = 14
    Request = OnceRequest

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task once per task id. A direct call without an id, or inside the run of this
        task, runs the task without protection."""
        # The request has the arguments too.
        given, request = Arguments(args, kwargs), Hidden(self.request)
        del args, kwargs
        if request.value.id is None:
            return given.passed_to(super().__call__)
        if request.value.get(_UNDER_WAY):
            return given.passed_to(self.run)
        setattr(request.value, _UNDER_WAY, True)
        return self._run_once(request, given)

    @in_own_context
    def _run_once(self, request: Hidden[Any], given: Arguments) -> Any:
        try:
            headers = map(request.value.get, (SHARD_HEADER, _TRACE_HEADER))
            with job_run(self.name, request.value.id, *headers) as first:
                result = given.passed_to(self.run) if first else None
                if isawaitable(result):
                    result = async_to_sync(self._finish)(result, request)
                refuse_generator(self.name, result)
        except MessageInProgress as error:
            # RabbitMQ drops a message that has returned to a quorum queue 20 times.
            raise self._uncounted_retry(request, error) from error
        except (Exception, CancelledError) as error:  # also from COMMIT
            is_sent = isinstance(error, Retry) and error.sig is not None
            if is_sent or isinstance(error, (Ignore, Reject)):
                raise
            # A Retry without a message was raised by a task that this one called directly.
            reason = error.__cause__ if isinstance(error, Retry) else error
            if isinstance(reason, CancelledError):
                # After the last try, a CancelledError would end the worker, and the message would
                # return to the broker.
                reason = RuntimeError(error_text(reason))
            if reason and is_uncounted(reason, request.value.get(SHARD_HEADER)):
                raise self._uncounted_retry(request, reason) from error
            raise self.retry(
                exc=reason, countdown=min(2**request.value.retries, _MAX_WAIT)
            ) from error
        if not first and (request.value.callbacks or request.value.chain or request.value.chord):
            request.value.errbacks = None  # They may undo work that took effect.
            raise RuntimeError(
                f"The task {self.name}[{self.request.id}] took effect in an earlier delivery, and"
                " its result is unknown now. Check whether the next task of its link, chain or"
                " chord was sent then. To make both commit together, stage the next job in the"
                " task with stage_job()."
            )
        return result

    def retry(self, *args: Any, **options: Any) -> Any:
        """Retry as in any task, in the queue of the job. If the next try cannot be published, the
        message of this try returns to the broker."""
        found = {name: self.request.get(name) for name in (*_OF_JOB, _OUTAGES_HEADER)}
        headers = {name: value for name, value in found.items() if value is not None}
        # Headers that are given here, or that a tracer has sent, replace those of the message.
        if headers:
            keep_queue(self.app, headers, options)
            former = self.request.as_execution_options()["headers"]
            options["headers"] = former | headers | (options.get("headers") or {})
        given = Arguments(args, options)
        del args, options
        return retry_or_return(super().retry, given)

    def _uncounted_retry(self, request: Hidden[Any], reason: BaseException) -> Any:
        """Retry without counting a try; the wait doubles with each such run."""
        outages, tries = request.value.get(_OUTAGES_HEADER) or 0, request.value.retries
        most = tries if self.max_retries is None else self.max_retries
        request.value.retries = min(tries, most) - 1  # Celery adds one.
        headers = {_OUTAGES_HEADER: outages + 1}
        return self.retry(exc=reason, countdown=min(2**outages, _MAX_WAIT), headers=headers)

    async def _finish(self, awaitable: Awaitable[Any], request: Hidden[Any]) -> Any:
        """Await the result of run() with the request on Celery's stack: the thread of the event
        loop has a separate stack."""
        self.request_stack.push(request.value)
        try:
            return await awaitable
        finally:
            self.request_stack.pop()


@shared_task(bind=True, base=OnceTask, name=STAGED_OPERATION)  # type: ignore[untyped-decorator]
def run_operation(self: OnceTask, **job_args: Any) -> Any:
    """Call the operation of a staged job. ``OnceTask`` runs this task outside of the transaction of
    the inbox."""
    given, shard = Hidden(job_args), self.request.get(SHARD_HEADER)
    del job_args
    return call_job(STAGED_OPERATION, given.value, using=shard)


class CeleryBackend(OneByOne):
    """Hand staged jobs to Celery. A job has the name of a task with the base ``OnceTask``; its id
    becomes the task id.

    The queue "default" means that Celery's routes decide; other names are queues of Celery. Results
    are ignored. For another Celery app than the current one, make a subclass with the attribute
    ``app``.
    """

    #: With Redis as the broker, a message is lost if its worker is killed right after it took the
    #: message. The job is then handed over again, after waits that double. Its ten hand-overs and
    #: the waits after them take a week. With another broker, only a subclass that sets it does so.
    follow_up_seconds: float | None = 600
    uses_database = False
    uses_inbox = True
    app: Any = None

    def __init__(self) -> None:
        self.app = self.app or current_app._get_current_object()
        self._broker, self._imported = Broker(), False
        setter = next(each for each in type(self).__mro__ if "follow_up_seconds" in vars(each))
        is_redis = self.app.connection_for_write().transport.driver_type == "redis"
        if setter is CeleryBackend and not is_redis:
            self.follow_up_seconds = None

    def hand_over_one(self, queue: str, job: StagedJob) -> None:
        """Publish one message.

        Raises BrokerUnavailable if the broker cannot be reached.
        Raises JobNotAllowed for an unknown task.
        Raises TypeError for a task that could be lost or take effect twice.
        """
        # The module of an unknown task is imported. A query of it may fail.
        is_known = job.job_name in self.app.tasks
        with nullcontext() if is_known else transaction.atomic(using=job._state.db):
            self._refuse_name(job.job_name)
        was_connected = self._broker.is_connected
        producer = self._broker.producer(self.app)
        by_name = isinstance(job.job_args, dict)
        chosen = None if queue == "default" else queue
        own = zip(_OF_JOB, (shard_of(job), trace_of(job), chosen), strict=True)
        try:
            self.app.send_task(
                job.job_name,
                args=[] if by_name else job.job_args,
                kwargs=job.job_args if by_name else {},
                task_id=str(job.id),
                producer=producer,
                retry=False,
                ignore_result=True,
                add_to_parent=False,
                headers={name: value for name, value in own if value is not None} or None,
                **({"queue": chosen} if chosen else {}),
            )
        except BrokerError as error:
            self._broker.disconnect()
            if isinstance(error.__cause__, KeyError):  # kombu treats it as a lost connection.
                raise error.__cause__ from None
            if was_cut(error.__cause__):
                if was_connected:  # The connection may have been closed before this job.
                    return self.hand_over_one(queue, job)
                # Raises BrokerUnavailable if the broker also refuses a new connection.
                self._broker.producer(self.app)
                raise self._broker.too_large(producer, error) from error
            raise unavailable(producer.connection, error) from error
        except LostConnection:
            # The message of this job may be the cause, unless the broker refuses a new connection.
            self._broker.disconnect()
            self._broker.producer(self.app)
            raise

    def _refuse_name(self, name: str) -> None:
        """Raise JobNotAllowed or TypeError, as ``hand_over_one`` does."""
        if name not in self.app.tasks:
            self._register(name.rpartition(".")[0], name)
        task = self.app.tasks.get(name)
        if task is None:
            raise JobNotAllowed(
                f"No Celery task has the name {name!r}: decorate its function with"
                " @shared_task(base=OnceTask)."
            )
        if not (isinstance(task, OnceTask) and task.acks_late and task.reject_on_worker_lost):
            raise TypeError(
                f"The Celery task {name!r} could be lost or take effect twice: set base=OnceTask,"
                " and leave acks_late and reject_on_worker_lost on."
            )

    def _register(self, module: str, name: str) -> None:
        """Import the modules of a worker, and that of the task if JOB_MODULES permits it."""
        try:
            # The workers report them. Another module may have this task.
            with suppress(ImportError, SystemExit):
                if not self._imported:
                    self._imported = True
                    self.app.loader.import_default_modules()
        except Error as error:
            self._imported = False
            text = f"The modules of Celery cannot be imported: {error_text(error)}"
            raise JobNotAllowed(text) from error
        try:
            with suppress(ImportError, JobNotAllowed):
                refuse_module(name, module)
                import_module(module)
        except (SystemExit, Error) as error:
            text = f"The module {module} cannot be imported: {error_text(error)}"
            raise JobNotAllowed(text) from error
