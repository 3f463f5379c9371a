"""``manage.py idempotency_doctor``: what ails the tables and the processes, and what to do."""

import json
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from idempotency.doctor import Diagnosis, diagnose
from idempotency.management.passes import add_database_argument, exit_1_explained


class Command(BaseCommand):
    """Parse, print what ``diagnose`` returns, and exit by it."""

    help = (
        "Look for stuck keys, late and silent processes, and an ailing table, and say what to do. Writes nothing. Exit status: "
        "0 nothing found, 1 something found or database not reachable, 2 usage."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="As a JSON object.")
        add_database_argument(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        with exit_1_explained("idempotency_doctor", options["database"]):
            diagnosis = diagnose(using=options["database"])
        if options["json"]:
            self.stdout.write(json.dumps(asdict(diagnosis), indent=2))
        else:
            self._write(diagnosis)
        if diagnosis.findings:
            raise SystemExit(1)

    def _write(self, diagnosis: Diagnosis) -> None:
        for name, value in diagnosis.measured.items():
            if name != "processes":
                self.stdout.write(f"{name.replace('_', ' ')}: {'-' if value is None else value}")
        for process in diagnosis.measured["processes"]:
            self.stdout.write(f"{process['name']} on {process['process']}: a sign of life {process['lag_seconds']:g} s ago")
        for finding in diagnosis.findings:
            self.stdout.write(f"\n{self.style.ERROR(finding.code)}: {finding.seen}\n    {finding.cure}")
        for unknown in diagnosis.cannot_tell:
            self.stdout.write(f"\nCannot tell: {unknown}")
        self.stdout.write(f"\n{len(diagnosis.findings)} found.")
