"""``manage.py reap_keys``: delete what is past its retention."""

from idempotency.management.passes import PassCommand
from idempotency.reaper import reap_once


class Command(PassCommand):
    """Parse, and call ``reap_once``."""

    help = (
        "Delete finished keys and inbox messages past their retention, and mark unfinished keys past it stuck. Several may run "
        "at once. One pass and exit, or --loop to stay. Exit status: 0 pass done (stuck keys included) or SIGTERM, 1 database "
        "not reachable, 2 usage."
    )
    default_interval = 60.0
    run_pass = staticmethod(reap_once)
