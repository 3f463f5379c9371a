"""System checks of settings, databases, views and operations. docs/reference.md lists the ids."""

from collections.abc import Iterator
from typing import Any

from django.core.checks import Error, Warning
from django.db import connections


def error(check_id: str, text: str, hint: str | None = None) -> Error:
    return Error(text, hint=hint, id=check_id)


def warning(check_id: str, text: str, hint: str) -> Warning:
    return Warning(text, hint=hint, id=check_id)


def unknown_database(owner: str, using: Any) -> Iterator[Error]:
    """E005: a view or an operation whose ``using=`` names no database."""
    if isinstance(using, str) and using not in connections.settings:
        yield error(
            "idempotency.E005",
            f"{owner} has using={using!r}, which is not a database.",
            f"The databases are: {', '.join(connections.settings)}.",
        )
