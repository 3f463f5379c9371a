"""``manage.py enqueue_jobs``: hand staged jobs to their broker."""

from idempotency.enqueuer import enqueue_once
from idempotency.management.passes import PassCommand
from idempotency.models import StagedJob


class Command(PassCommand):
    help = (
        "Hand all due staged jobs to their broker, and delete their rows. Several instances of this"
        " command may run at once. The command does one pass and exits, or repeats passes with"
        " --loop. Exit status 0: the pass is done, or the loop got SIGTERM. 1: the database or the"
        " broker cannot be reached. 2: wrong usage. 3: a batch in a loop does not end after"
        " SIGTERM."
    )
    default_interval = 1.0
    model = StagedJob
    run_pass = staticmethod(enqueue_once)
