"""Staged jobs for RabbitMQ without Celery, through pika: a backend, and the callback of a consumer.

A message is persistent, and the broker confirms it. Its ``message_id`` is the id of the job.
"""

import logging
import threading
from asyncio import CancelledError
from contextlib import suppress
from functools import partial
from typing import Any

import pika  # type: ignore[import-untyped]
from django.conf import settings
from pika import exceptions as errors
from pika.adapters.utils.connection_workflow import (  # type: ignore[import-untyped]
    AMQPConnectorException,
)

from idempotency._hidden import Hidden
from idempotency.backends import BROKER_TIMEOUT_SECONDS, BrokerUnavailable, OneByOne
from idempotency.contrib._messages import message_of, run_message
from idempotency.models import StagedJob

logger = logging.getLogger("idempotency")

#: The broker and this process end a connection without a message for two of these.
_HEARTBEAT_SECONDS = BROKER_TIMEOUT_SECONDS // 2
#: The connection is lost or cannot be made, or the broker has closed it.
_LOST = (
    errors.AMQPConnectionError,
    errors.ChannelWrongStateError,
    AMQPConnectorException,
    OSError,
)


class RabbitMQBackend(OneByOne):
    """Publish staged jobs to the queues of the broker ``settings.RABBITMQ_URL``. Consumers run them
    with ``on_message``.

    The queue of a staged job is the name of a queue of RabbitMQ, which must exist. For another
    broker make a subclass with its own ``url``.
    """

    runs_functions = True
    uses_database = False
    uses_inbox = True
    #: A consumer does not retry: a failed job is handed over again after waits that double. Ten
    #: hand-overs take 8.5 hours.
    follow_up_seconds: float | None = 30
    #: An AMQP URL; None is ``settings.RABBITMQ_URL``.
    url: str | None = None

    def __init__(self) -> None:
        self._thread = threading.local()

    def hand_over_one(self, queue: str, job: StagedJob) -> None:
        """Publish one message, and wait for the confirmation of the broker.

        Raises BrokerUnavailable if the broker cannot be reached or does not confirm the message, if
        the queue is full, or if the address of the broker is missing or invalid.
        Raises LookupError if the broker has no such queue.
        """
        body = message_of(job)
        properties = pika.BasicProperties(
            message_id=str(job.id), content_type="application/json", delivery_mode=2
        )
        was_connected = hasattr(self._thread, "channel")
        try:
            self._publish(queue, body, properties)
        except errors.UnroutableError:
            raise LookupError(
                f"RabbitMQ has no queue {queue!r}. Declare it, durable and of the type quorum, and"
                " start a consumer for it. Or stage these jobs on another queue."
            ) from None
        except errors.NackError as error:
            raise BrokerUnavailable(f"The queue {queue!r} of RabbitMQ is full.") from error
        except (errors.ChannelClosedByBroker, BrokerUnavailable):
            # Because of this message, or it is not confirmed.
            self._disconnect()
            raise
        except _LOST as error:
            self._disconnect()
            if was_connected:  # The connection may have been lost before this job.
                return self.hand_over_one(queue, job)
            raise BrokerUnavailable(
                f"RabbitMQ takes no jobs at the moment: {str(error) or type(error).__name__}"
            ) from error

    def _publish(self, queue: str, body: Hidden[bytes], properties: Any) -> None:
        channel = self._channel()
        # pika waits for the confirmation without end. A quorum queue without a majority does not
        # confirm, while the broker answers heartbeats. pika calls the timers of a connection only
        # after such a wait, but those of its loop during it.
        loop = channel.connection._impl.ioloop
        timer = loop.call_later(BROKER_TIMEOUT_SECONDS, partial(_raise_unconfirmed, queue))
        try:
            channel.basic_publish("", queue, body.value, properties, mandatory=True)
        finally:
            loop.remove_timeout(timer)

    def _channel(self) -> Any:
        """Return this thread's channel, whose messages are confirmed."""
        if not hasattr(self._thread, "channel"):
            connection = pika.BlockingConnection(self._parameters())
            self._thread.channel = connection.channel()
            self._thread.channel.confirm_delivery()
        return self._thread.channel

    def _parameters(self) -> pika.URLParameters:
        address = Hidden(self.url or getattr(settings, "RABBITMQ_URL", None))
        try:
            parameters = pika.URLParameters(address.value)
        except Exception:
            # The error may quote a part of the password.
            raise BrokerUnavailable(
                'RabbitMQBackend needs the address of the broker: RABBITMQ_URL = "amqp://user:'
                'password@host:5672/%2F" in the settings. In the password, write %2F for a slash,'
                " and percent-encode other special characters too."
            ) from None
        parameters.heartbeat = _HEARTBEAT_SECONDS
        parameters.socket_timeout = parameters.stack_timeout = _HEARTBEAT_SECONDS
        parameters.blocked_connection_timeout = _HEARTBEAT_SECONDS
        return parameters

    def _disconnect(self) -> None:
        """Close this thread's connection, which may be broken already."""
        with suppress(Exception):
            vars(self._thread).pop("channel").connection.close()


def _raise_unconfirmed(queue: str) -> None:
    raise BrokerUnavailable(
        f"RabbitMQ did not confirm a message for the queue {queue!r} within"
        f" {BROKER_TIMEOUT_SECONDS} s. A quorum queue needs a majority of its nodes."
    )


def on_message(channel: Any, method: Any, properties: Any, body: bytes) -> None:
    """Run the job of a message once, and acknowledge the message: the callback of
    ``channel.basic_consume``, without ``auto_ack``.

    On return the effects of the job are committed. If the job raises, they are rolled back, the
    error is logged, and the message is rejected. A dead letter exchange of the queue then gets it.
    The enqueuer hands the job over again. A message that is not of RabbitMQBackend is rejected too.
    """
    content = Hidden(body)
    del body
    try:
        run_message(content)
    except (Exception, CancelledError):
        logger.exception("the job %s of RabbitMQ failed", properties.message_id)
        channel.basic_reject(method.delivery_tag, requeue=False)
    else:
        channel.basic_ack(method.delivery_tag)
