"""Settings of the benchmark of staged jobs: the settings of the demo, with the job of the
benchmark."""

from rides_demo.settings import *  # noqa: F403
from rides_demo.settings import IDEMPOTENCY

IDEMPOTENCY = {**IDEMPOTENCY, "JOB_MODULES": ["benchmarks"]}
