"""``manage.py describe_idempotency``: print the policy of each protected view, or the unprotected
views."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser

from idempotency.policy import Policy, Unprotected, policies, unprotected


class Command(BaseCommand):
    help = (
        "Print the policy of each protected view of the URLconf: its path and methods, the place"
        " and form of the key, the stored statuses and the retention. With --unprotected, print the"
        " views that take unsafe methods without protection. No database is queried. Exit status: 0"
        " if printed, 2 for wrong usage."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="Print a JSON array of objects.")
        parser.add_argument(
            "--unprotected",
            action="store_true",
            help="Print the unprotected views with unsafe methods.",
        )
        parser.add_argument(
            "--urlconf", metavar="MODULE", help="The URLconf (default: ROOT_URLCONF)."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            views: Iterable[Policy | Unprotected] = (
                unprotected if options["unprotected"] else policies
            )(options["urlconf"])
            found = list(views)
        except (ImportError, ImproperlyConfigured) as error:
            if options["urlconf"] is None:
                raise
            raise CommandError(f"--urlconf {options['urlconf']}: {error}", returncode=2) from error
        if options["json"]:
            self.stdout.write(json.dumps([asdict(policy) for policy in found], indent=2))
            return
        what = "unprotected" if options["unprotected"] else "protected"
        for policy in found:
            self.stdout.write(f"{' '.join(policy.methods)} {policy.path}")
            for name, value in asdict(policy).items():
                if name not in ("methods", "path") and value not in ("", ()):
                    text = ", ".join(map(str, value)) if isinstance(value, tuple) else value
                    self.stdout.write(f"    {name.replace('_', ' ') + ':':<24}{text}")
            self.stdout.write("")
        self.stdout.write(f"{len(found)} {what} view{'' if len(found) == 1 else 's'}.")
