"""Settings of the processes that ``test_processes_killed.py`` kills: short waits, and their own
views."""

import os

from tests.settings import *  # noqa: F403

ROOT_URLCONF = "tests.processes.service"
IDEMPOTENCY = {
    # A killed completer leaves its keys locked for so long.
    "LOCK_TIMEOUT_SECONDS": 3,
    "COMPLETER_MIN_AGE_SECONDS": 1,
    "COMPLETER_IDLE_SECONDS": 1,
    "JOB_MODULES": ["tests.processes.service"],
    "ENQUEUERS": {"*": os.environ["TEST_BACKEND"]},
}
