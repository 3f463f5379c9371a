"""Settings of the processes of the lab: the views of ``service.py``, and short waits of the
completer."""

import os

from rides_demo.settings import *  # noqa: F403
from rides_demo.settings import INSTALLED_APPS, LOGGING, MIDDLEWARE

INSTALLED_APPS = [*INSTALLED_APPS, "tests"]
MIDDLEWARE = [name for name in MIDDLEWARE if name.startswith("django.contrib.")]
ROOT_URLCONF = "tests.failover.service"
IDEMPOTENCY = {
    "COMPLETER_MIN_AGE_SECONDS": 1,
    "COMPLETER_IDLE_SECONDS": 1,
    "ENQUEUERS": {"*": "tests.failover.service.hand_over"},
}
if os.environ.get("FAILOVER_CONFIRM_REPLICATED") == "1":
    IDEMPOTENCY["CONFIRM_REPLICATED"] = True
LOGGING["root"]["level"] = "WARNING"
