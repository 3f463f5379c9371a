"""``manage.py enqueue_jobs``: hand staged jobs to their broker."""

from typing import Any

from idempotency.enqueuer import EnqueuePass, enqueue_once
from idempotency.management.passes import PassCommand


class Command(PassCommand):
    """Parse, and call ``enqueue_once``."""

    help = (
        "Hand the staged jobs that are due to their broker and delete the rows. Several may run at once. One pass and exit, or "
        "--loop to stay. Exit status: 0 pass done or SIGTERM, 1 database or broker not reachable, 2 usage."
    )
    default_interval = 1.0

    def run_pass(self, **options: Any) -> EnqueuePass:
        """Hand over all jobs that are due."""
        stop = options.pop("stop")
        return enqueue_once(stop=stop.requested, **options)
