"""Settings of the benchmark of staged jobs: the settings of the demo, with the job of the
benchmark."""

import os

from rides_demo.settings import *  # noqa: F403
from rides_demo.settings import IDEMPOTENCY

IDEMPOTENCY = {**IDEMPOTENCY, "JOB_MODULES": ["benchmarks"]}
RABBITMQ_URL = os.environ.get("RABBITMQ_URL")
KAFKA = {"bootstrap.servers": os.environ.get("KAFKA_URL")}
