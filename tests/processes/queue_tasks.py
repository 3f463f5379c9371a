"""Django Tasks in ``test_processes_killed.py``: its backend."""

from idempotency.contrib.tasks import TasksBackend
from tests.processes.service import TakesTime


class Backend(TakesTime, TasksBackend):
    """A job that was lost goes out again soon."""

    follow_up_seconds = 5
