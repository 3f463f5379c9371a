"""``manage.py idempotency_doctor``: find problems of the tables and the processes, and their
cures."""

import json
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser, no_translations

from idempotency.management.failures import exit_1_explained
from idempotency.management.passes import add_database_argument, database_of
from idempotency.monitoring.doctor import Diagnosis, diagnose
from idempotency.monitoring.heartbeats import LOOPS, SILENT_SECONDS, silent_here


class Command(BaseCommand):
    help = (
        "Find stuck keys, processes that lag or have no heartbeat, and problems of the tables."
        " Print what to do about each. Nothing is written. With --process, check only the"
        " heartbeats of loops on this host, as a container probe. Exit status: 0 if nothing is"
        " found; 1 if something is found or the database cannot be reached; 2 for wrong usage."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        add_one = parser.add_mutually_exclusive_group().add_argument
        add_one("--json", action="store_true", help="Print a JSON object.")
        text = (
            "Exit with 1 if at least one of the named loops has written no heartbeat on this host"
            f" in the last {SILENT_SECONDS:g} seconds. The loops are: {', '.join(LOOPS)}."
        )
        add_one("--process", nargs="+", choices=tuple(LOOPS), metavar="LOOP", help=text)
        text = "Cron runs the passes: accept that no loop has a heartbeat."
        parser.add_argument("--cron", action="store_true", help=text)
        add_database_argument(parser)

    @no_translations
    def handle(self, *args: Any, **options: Any) -> None:
        using = database_of(options)
        with exit_1_explained("idempotency_doctor", using):
            if options["process"]:
                self._probe(options["process"], using)
                return
            diagnosis = diagnose(using=using)
        if options["cron"]:
            found = [each for each in diagnosis.findings if each.code != "no_process"]
            diagnosis.findings = found
        if options["json"]:
            self.stdout.write(json.dumps(asdict(diagnosis), indent=2))
        else:
            self._write(diagnosis)
        if diagnosis.findings:
            raise SystemExit(1)

    def _probe(self, names: list[str], using: str) -> None:
        if silent := silent_here(names, using=using):
            raise CommandError(
                f"No heartbeat of {', '.join(silent)} on this host. See the log of the loop for the"
                " reason.",
                returncode=1,
            )
        self.stdout.write("Heartbeats found.")

    def _write(self, diagnosis: Diagnosis) -> None:
        for name, value in diagnosis.measured.items():
            if name != "processes":
                self.stdout.write(f"{name.replace('_', ' ')}: {'-' if value is None else value}")
        for process in diagnosis.measured["processes"]:
            self.stdout.write(
                f"{process['name']} on {process['process']}: last heartbeat"
                f" {process['lag_seconds']:g} s ago"
            )
        for finding in diagnosis.findings:
            self.stdout.write(
                f"\n{self.style.ERROR(finding.code)}: {finding.seen}\n    {finding.cure}"
            )
        for unknown in diagnosis.cannot_tell:
            self.stdout.write(f"\nCannot tell: {unknown}")
        self.stdout.write(f"\n{len(diagnosis.findings)} found.")
