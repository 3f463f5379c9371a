"""Settings of the traced processes of ``test_processes.py``: their own view, and the operations."""

from tests.processes.settings import *  # noqa: F403
from tests.processes.settings import INSTALLED_APPS

ROOT_URLCONF = "tests.traces.service"
INSTALLED_APPS = [*INSTALLED_APPS, "tests.traces"]
