"""Template filters for times and durations in the admin."""

import json
from datetime import datetime, timedelta
from typing import Any

from django import template
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe
from django.utils.text import capfirst
from django.utils.translation import gettext

from idempotency._text import Grouped, duration

register = template.Library()


register.filter("humanize_seconds", duration)


@register.filter
def grouped(number: int) -> str:
    """Return a number with the separators of the language."""
    return str(Grouped(number))


@register.filter
def labelled(rows: Any, headers: Any) -> list[list[str]]:
    """Return the cells of a list, each with the label of its column as ``data-label``."""
    labels = [format_html('<td data-label="{}"', capfirst(header["text"])) for header in headers]
    return [
        [_labelled(cell, label) for cell, label in zip(row, labels, strict=True)] for row in rows
    ]


def _labelled(cell: str, label: str) -> str:
    if "action-checkbox" in cell:
        return cell
    return mark_safe(cell.replace("<td", label, 1))  # nosec B308 B703  # both are escaped already


@register.filter
def as_json(value: Any) -> str:
    """Return a value as JSON in one line."""
    return json.dumps(value, ensure_ascii=False)


@register.filter
def ago(time: float | timedelta) -> str:
    """Return a text such as ``3 min ago``; a negative time counts as 0."""
    return gettext("%(duration)s ago") % {"duration": duration(time)}


@register.filter
def moment(at: datetime | None) -> SafeString | str:
    """Return an HTML ``time`` element with the time as text and in ISO format; "" for None."""
    if at is None:
        return ""
    return format_html('<time datetime="{}">{}</time>', aware(at).isoformat(), written(at))


def written(at: datetime) -> str:
    """Return a time as text in the current time zone: ``2026-11-21 06:00:00 UTC``."""
    local = timezone.localtime(aware(at))
    return f"{local:%Y-%m-%d %H:%M:%S} {local.tzname()}"


def aware(at: datetime) -> datetime:
    """Return a time with a time zone. A time without one, as with USE_TZ=False, gets the zone of
    the settings."""
    return timezone.make_aware(at, timezone.get_default_timezone()) if timezone.is_naive(at) else at
