"""SQS in ``test_sqs.py``: the backend, and the consumer of the guide."""

from typing import Any

from idempotency.contrib.sqs import SQSBackend
from tests.kit.examples import file_of
from tests.processes.service import TakesTime


class Backend(TakesTime, SQSBackend):
    """A job whose message is lost goes out again soon."""

    follow_up_seconds = 5


if __name__ == "__main__":
    guide: dict[str, Any] = {}
    exec(file_of("jobs-on-a-broker.md", "shop/management/commands/consume_sqs.py"), guide)
    guide["Command"]().handle(queue="killed")
