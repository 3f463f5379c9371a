"""The delivery of Celery's tasks: the connection to the broker, the request of a worker, and the
retry of a task."""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from celery import Celery, Task
from celery.exceptions import Reject, TimeLimitExceeded
from celery.worker.request import Request
from celery.worker.state import task_ready
from kombu.entity import Queue
from kombu.exceptions import OperationalError as BrokerError

from idempotency._hidden import Arguments
from idempotency.backends import BROKER_TIMEOUT_SECONDS, BrokerUnavailable

logger = logging.getLogger("idempotency")

#: The header with the queue of a staged job, which Celery does not tell the task.
QUEUE_HEADER = "idempotency_queue"
_DESTINATION = "queue", "exchange", "routing_key"

#: The time limits of calls to the broker. A failed call is not retried at once, but by the next
#: pass.
_REDIS = {"max_retries": 0, "socket_connect_timeout": 5, "socket_timeout": BROKER_TIMEOUT_SECONDS}
# With confirm_publish, RabbitMQ confirms the message before the staged row is deleted.
_AMQP = {"max_retries": 0, "confirm_publish": True} | dict.fromkeys(
    ("read_timeout", "write_timeout"), BROKER_TIMEOUT_SECONDS
)
BOUNDS = {"redis": _REDIS, "amqp": _AMQP}


class Broker:
    """The broker, with a connected producer for each thread, because a connection for each job
    would be slow."""

    def __init__(self) -> None:
        self._thread = threading.local()

    @property
    def is_connected(self) -> bool:
        return hasattr(self._thread, "producer")

    def producer(self, app: Celery) -> Any:
        """Return this thread's connected producer for an app.

        Raises BrokerUnavailable if the broker refuses the connection, also because of the user or
        the virtual host. kombu does not wrap these errors, and raises the status 403 as the error
        of a channel.
        """
        if not self.is_connected:
            connection = app.connection_for_write()
            bounds: dict[str, Any] = BOUNDS.get(connection.transport.driver_type, {})
            if connection.transport_cls == "sentinel":
                bounds = bounds | {"sentinel_kwargs": _of_sentinels(connection, bounds)}
            connection = app.connection_for_write(connect_timeout=5, transport_options=bounds)
            errors = (*connection.connection_errors, *connection.channel_errors)
            try:
                connection.default_channel  # noqa: B018
            except (BrokerError, *errors) as error:
                with suppress(Exception):
                    connection.close()
                raise unavailable(connection, error) from error
            self._thread.producer = app.amqp.Producer(connection, auto_declare=False)
        return self._thread.producer

    def too_large(self, producer: Any, error: Exception) -> ValueError:
        """Return the exception for a job at which the broker closes each connection."""
        return ValueError(
            f"Celery's broker {producer.connection.as_uri()} closed the connection when it got this"
            " job. If the job is larger than a limit of the broker, stage less data or raise the"
            f" limit. The error: {error}"
        )

    def disconnect(self) -> None:
        """Close this thread's connection, which may be broken already."""
        with suppress(Exception):
            vars(self._thread).pop("producer").connection.close()


class OnceRequest(Request):  # type: ignore[misc]
    """A delivery of a task. If its process is killed at the hard ``time_limit``, the message
    returns to the broker.

    Celery would discard the message and call ``link_error``. Its option ``acks_on_timeout`` (since
    5.7) keeps the message, but still calls ``link_error``.
    """

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """Return the message to the broker at a hard limit. At a soft limit, the task gets an
        exception."""
        if soft:
            super().on_timeout(soft, timeout)
            return
        task_ready(self)
        text = "The Celery task %s[%s] was killed at its time limit of %s s, and will run again."
        logger.error(text, self.name, self.id, timeout)
        self.reject(requeue=True)

    def on_failure(self, exc_info: Any, **options: Any) -> None:
        """Ignore the failure at a hard limit, because a process pool calls ``on_timeout`` next."""
        if exc_info.type is not TimeLimitExceeded:
            super().on_failure(exc_info, **options)


def keep_queue(app: Celery, headers: dict[str, Any], options: dict[str, Any]) -> None:
    """Send a retry to the queue in its headers, unless its options name another destination. If
    they name a queue, later retries go there too.

    Behind a topic exchange, RabbitMQ delays retries, and Celery sends them to the default queue. If
    the app does not know the queue of a job, which another project may have staged, Celery decides.
    """
    queue, given = headers.get(QUEUE_HEADER), options.get("queue")
    if queue and any(map(options.get, _DESTINATION)):
        headers[QUEUE_HEADER] = given.name if isinstance(given, Queue) else given
    elif queue in app.amqp.queues:
        options["queue"] = queue


def retry_or_return(retry: Callable[..., Any], given: Arguments) -> Any:
    """Retry a task by its method ``retry``. If the next try cannot be published, the message of
    this try returns to the broker; Celery would discard the message."""
    try:
        return given.passed_to(retry)
    except Reject as error:
        raise Reject(error.reason, requeue=True) from error


def retry_of_option(self: Task, *args: Any, **options: Any) -> Any:
    """Retry a task whose option ``retry`` is this function."""
    given = Arguments(args, options)
    del args, options
    # Celery makes a subclass of the task's base, whose attributes are the options.
    owners: Any = [it for it in type(self).__mro__ if vars(it).get("retry") is retry_of_option]
    return retry_or_return(super(owners[-1], self).retry, given)


def _of_sentinels(connection: Any, bounds: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the connections to Sentinels, which by default try eleven times."""
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    given = connection.transport_options.get("sentinel_kwargs") or {}
    timeouts = {name: value for name, value in bounds.items() if name.startswith("socket_")}
    return given | timeouts | {"retry": Retry(NoBackoff(), 0)}


def was_cut(error: BaseException | None) -> bool:
    """Return whether Redis has closed the connection. The class of the error does not tell, because
    other errors share it."""
    cause = getattr(error, "__context__", None)
    return isinstance(cause, ConnectionError) or "closed by server" in str(error)


def unavailable(connection: Any, error: Exception) -> BrokerUnavailable:
    """Return the exception for an error of the broker; as_uri() masks the password."""
    return BrokerUnavailable(
        f"Celery's broker {connection.as_uri()} takes no jobs at the moment: {error}"
    )
