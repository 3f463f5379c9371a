"""Settings of the processes of ``test_hangs.py``: a short lease, and views that hang."""

import os

from tests.settings import *  # noqa: F403

ROOT_URLCONF = "tests.processes.hanging"
IDEMPOTENCY = {
    "LOCK_TIMEOUT_SECONDS": int(os.environ["TEST_LOCK_TIMEOUT"]),
    "COMPLETER_MIN_AGE_SECONDS": 1,
    "COMPLETER_IDLE_SECONDS": 1,
}
