"""``manage.py describe_idempotency``: print the policy of each protected view, or the unprotected
views."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser

from idempotency.policy import (
    OperationPolicy,
    Policy,
    Unprotected,
    operation_policies,
    policies,
    unprotected,
)


class Command(BaseCommand):
    help = (
        "Print the policy of each protected view of the URLconf: its path and methods, the place"
        " and form of the key, the stored statuses and the retention. With --operations, print the"
        " policy of each operation: its recovery points, its calls and its retention. With"
        " --unprotected, print the views that take unsafe methods without protection. No database"
        " is queried. Exit status: 0 if printed, 2 for wrong usage."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        add, add_one = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
        add("--json", action="store_true", help="Print a JSON array of objects.")
        text = "Print the operations of all installed apps."
        add_one("--operations", action="store_true", help=text)
        text = "Print the unprotected views with unsafe methods."
        add_one("--unprotected", action="store_true", help=text)
        add("--urlconf", metavar="MODULE", help="The URLconf (default: ROOT_URLCONF).")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["operations"]:
            self._write([*operation_policies()], "operation", options)
            return
        try:
            views: Iterable[Policy | Unprotected] = (
                unprotected if options["unprotected"] else policies
            )(options["urlconf"])
            found = list(views)
        except (ImportError, ImproperlyConfigured) as error:
            if options["urlconf"] is None:
                raise
            raise CommandError(f"--urlconf {options['urlconf']}: {error}", returncode=2) from error
        what = "unprotected view" if options["unprotected"] else "protected view"
        self._write(found, what, options)

    def _write(
        self,
        found: list[Policy | Unprotected] | list[OperationPolicy],
        what: str,
        options: dict[str, Any],
    ) -> None:
        if options["json"]:
            self.stdout.write(json.dumps([asdict(policy) for policy in found], indent=2))
            return
        for policy in found:
            if isinstance(policy, OperationPolicy):
                self.stdout.write(policy.operation + policy.parameters)
            else:
                self.stdout.write(f"{' '.join(policy.methods)} {policy.path}")
            for name, value in asdict(policy).items():
                if name not in _IN_HEADING and value not in ("", (), {}):
                    text = _text(name, value)
                    self.stdout.write(f"    {name.replace('_', ' ') + ':':<24}{text}")
            self.stdout.write("")
        self.stdout.write(f"{len(found)} {what}{'' if len(found) == 1 else 's'}.")


#: The values that the first line of a view or an operation contains.
_IN_HEADING = ("methods", "path", "operation", "parameters")


def _text(name: str, value: Any) -> str:
    if name == "retention_hours" and value is None:
        return "forever"
    if isinstance(value, dict):
        value = [
            f"{call} (at most once)" if hours is None else f"{call} (key valid for {hours:g} hours)"
            for call, hours in value.items()
        ]
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
