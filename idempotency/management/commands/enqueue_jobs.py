"""``manage.py enqueue_jobs``: hand staged jobs to their broker."""

from idempotency.enqueuer import enqueue_once
from idempotency.management.passes import LOOP_HELP, PassCommand
from idempotency.models import StagedJob


class Command(PassCommand):
    help = f"Hand all due staged jobs to their broker, and delete their rows. {LOOP_HELP}"
    default_interval = 1.0
    model = StagedJob
    run_pass = staticmethod(enqueue_once)
