"""System checks of settings, databases, views and operations. docs/reference.md lists the ids."""

from django.core.checks import Error, Warning


def error(check_id: str, text: str, hint: str | None = None) -> Error:
    return Error(text, hint=hint, id=check_id)


def warning(check_id: str, text: str, hint: str) -> Warning:
    return Warning(text, hint=hint, id=check_id)
