"""Staged jobs for Amazon SQS, through boto3: a backend, and the function that a consumer calls for
each message."""

import logging
import threading
from asyncio import CancelledError
from collections.abc import Mapping
from typing import Any

import boto3  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]
from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]

from idempotency._hidden import Hidden
from idempotency.backends import BROKER_TIMEOUT_SECONDS, BrokerUnavailable, OneByOne
from idempotency.contrib._messages import message_of, run_message
from idempotency.exceptions import MessageInProgress
from idempotency.models import StagedJob

logger = logging.getLogger("idempotency")

_NO_QUEUE = ("AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist")
#: The cause is the message or the name of its queue. Any other error may be a matter of the
#: network, of credentials or of a limit, and counts only if SQS takes another job.
_INVALID = ("InvalidMessageContents", "InvalidParameterValue", "MissingParameter")
#: Two attempts, of which each may wait for the connection and for the answer.
_CONFIG = Config(
    connect_timeout=BROKER_TIMEOUT_SECONDS / 4,
    read_timeout=BROKER_TIMEOUT_SECONDS / 4,
    retries={"mode": "standard", "total_max_attempts": 2},
)


class SQSBackend(OneByOne):
    """Send staged jobs to queues of SQS. Consumers run them with ``on_message``.

    The queue of a staged job is the name of a queue of SQS, which must exist. Credentials, region
    and endpoint are those of boto3. In a FIFO queue the id of the job is the deduplication id.
    """

    runs_functions = True
    uses_database = False
    uses_inbox = True
    #: SQS deletes a message at the end of the retention of its queue, by default after four days.
    #: Ten hand-overs take a week.
    follow_up_seconds: float | None = 600
    #: Arguments of ``boto3.client("sqs", ...)``, such as ``region_name``.
    client_options: Mapping[str, Any] = {}

    def __init__(self) -> None:
        self._thread = threading.local()

    def group_of(self, job: StagedJob) -> str:
        """Return the message group of a job in a FIFO queue. Each job is a group of its own, so
        that a failed job holds back no other."""
        return str(job.id)

    def hand_over_one(self, queue: str, job: StagedJob) -> None:
        """Send one message.

        Raises BrokerUnavailable if SQS cannot be reached, or if credentials or permissions are
        missing.
        Raises LookupError if there is no such queue.
        Raises ClientError if SQS does not permit the message, for example because of its size.
        """
        message = message_of(job)
        options = {}
        if queue.endswith(".fifo"):
            options = {
                "MessageGroupId": self.group_of(job),
                "MessageDeduplicationId": str(job.id),
            }
        try:
            client, url = self._connected(queue)
            client.send_message(QueueUrl=url, MessageBody=message.value.decode(), **options)
        except (BotoCoreError, ClientError, ValueError) as error:
            code = error.response["Error"]["Code"] if isinstance(error, ClientError) else None
            if code in _INVALID:
                raise
            # The next hand-over reads credentials and the URLs of queues again.
            vars(self._thread).clear()
            if code in _NO_QUEUE:
                raise LookupError(
                    f"SQS has no queue {queue!r} in this account and region. Create it and start a"
                    " consumer for it. Or stage these jobs on another queue."
                ) from None
            raise BrokerUnavailable(f"SQS takes no jobs at the moment: {error}") from error

    def _connected(self, queue: str) -> tuple[Any, str]:
        """Return this thread's client, and the URL of the queue."""
        thread = self._thread
        if not hasattr(thread, "client"):
            # The default session of boto3 is not safe for threads.
            options = {"config": _CONFIG} | dict(self.client_options)
            thread.client = boto3.session.Session().client("sqs", **options)
            thread.urls = {}
        if queue not in thread.urls:
            thread.urls[queue] = thread.client.get_queue_url(QueueName=queue)["QueueUrl"]
        return thread.client, thread.urls[queue]


def on_message(client: Any, queue_url: str, message: dict[str, Any]) -> None:
    """Run the job of a message once, and delete the message from the queue.

    On deletion the effects of the job are committed. If the job raises, they are rolled back, the
    error is logged, and the message stays: SQS delivers it again after the visibility timeout, and
    moves it to the dead letter queue after ``maxReceiveCount`` deliveries. A message that is not of
    SQSBackend stays too. So does a message whose job another consumer is running.
    """
    message_id, handle, body = (message[name] for name in ("MessageId", "ReceiptHandle", "Body"))
    content = Hidden(body)
    del message, body
    try:
        run_message(content)
    except MessageInProgress:
        logger.info("another consumer runs the job of the message %s of SQS", message_id)
        return
    except (Exception, CancelledError):
        logger.exception("the job of the message %s of SQS failed", message_id)
        return
    try:
        client.delete_message(QueueUrl=queue_url, ReceiptHandle=handle)
    except (BotoCoreError, ClientError) as error:
        # The visibility timeout is over, or the network is lost. The next delivery does nothing.
        text = "the message %s of SQS took effect, and cannot be deleted: %s"
        logger.warning(text, message_id, error)
