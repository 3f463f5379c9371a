"""``manage.py enqueue_jobs``: hand staged jobs to their broker."""

from idempotency.enqueuer import enqueue_once
from idempotency.management.passes import PassCommand


class Command(PassCommand):
    """Parse, and call ``enqueue_once``."""

    help = (
        "Hand the staged jobs that are due to their broker and delete the rows. Several may run at once. One pass and exit, or "
        "--loop to stay. Exit status: 0 pass done or SIGTERM, 1 database or broker not reachable, 2 usage."
    )
    default_interval = 1.0
    run_pass = staticmethod(enqueue_once)
