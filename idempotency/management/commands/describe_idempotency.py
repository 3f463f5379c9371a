"""``manage.py describe_idempotency``: print the policy of each protected view."""

import json
from dataclasses import asdict
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser

from idempotency.policy import Policy, policies


class Command(BaseCommand):
    help = (
        "Print the policy of each protected view of the URLconf: its path and methods, the place and form of the key, the "
        "stored statuses and the retention. No database is queried. Exit status: 0 if printed, 2 for wrong usage."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="Print a JSON array of objects.")
        parser.add_argument("--urlconf", metavar="MODULE", help="The URLconf (default: ROOT_URLCONF).")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            found = list(policies(options["urlconf"]))
        except (ImportError, ImproperlyConfigured) as error:
            if options["urlconf"] is None:
                raise
            raise CommandError(f"--urlconf {options['urlconf']}: {error}", returncode=2) from error
        if options["json"]:
            self.stdout.write(json.dumps([asdict(policy) for policy in found], indent=2))
            return
        for policy in found:
            self.stdout.write(f"{' '.join(policy.methods)} {policy.path}")
            for name, value in _lines(policy):
                self.stdout.write(f"    {name + ':':<17}{value}")
            self.stdout.write("")
        self.stdout.write(f"{len(found)} protected view{'' if len(found) == 1 else 's'}.")


def _lines(policy: Policy) -> list[tuple[str, str]]:
    elsewhere = f", else {policy.key_from}" if policy.key_from else ""
    validator = f"; {policy.key_validator}" if policy.key_validator else ""
    never = ", ".join(map(str, policy.never_stored_statuses))
    applies = [("applies", f"only if {policy.applies} returns True; other requests run unprotected")] if policy.applies else []
    lines = [
        ("view", policy.view + (f" ({policy.name})" if policy.name else "")),
        *applies,
        ("header", ", ".join(policy.headers) + elsewhere),
        ("required", "yes" if policy.required else "no: without a key the request runs unprotected"),
        ("key", f"{policy.key_min_length} to {policy.key_max_length} characters, {policy.key_format}{validator}"),
        ("scope", policy.scope),
        ("recovery points", ", ".join(policy.recovery_points) or "none: one transaction"),
        ("isolation", policy.isolation),
        ("stored", f"{', '.join(policy.stored_statuses)}, for {policy.retention_hours} hours after it finished"),
        ("never stored", never + ("" if "5xx" in policy.stored_statuses else ", 5xx")),
        ("another request", f"{policy.mismatch_status} for the same key"),
        ("in flight", f"waits {policy.wait_seconds:g} s, then 409" if policy.wait_seconds else "409 at once"),
        ("taken over", f"after {policy.lock_timeout_seconds} s without a renewal of the lock"),
    ]
    if policy.runs_before:
        lines.append(("runs before it", ", ".join(policy.runs_before)))
    if policy.using:
        lines.append(("database", policy.using))
    if policy.replay_check:
        lines.append(("replays", f"only if {policy.replay_check} permits them"))
    if policy.redact:
        lines.append(("not kept", ", ".join(policy.redact)))
    if not policy.store_body:
        lines.append(("not kept", "the body of the request"))
    if policy.keep:
        lines.append(("kept besides", ", ".join(policy.keep)))
    return lines
