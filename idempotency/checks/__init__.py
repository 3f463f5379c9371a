"""System checks of settings, databases and views. The ids are listed in docs/reference.md."""

from django.core.checks import Error, Warning


def error(check_id: str, text: str, hint: str | None = None) -> Error:
    return Error(text, hint=hint, id=check_id)


def warning(check_id: str, text: str, hint: str) -> Warning:
    return Warning(text, hint=hint, id=check_id)
