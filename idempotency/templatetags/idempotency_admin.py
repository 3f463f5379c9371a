"""How the pages of the admin write times, durations and numbers."""

from datetime import datetime

from django import template
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext

from idempotency._text import duration

register = template.Library()


register.filter("humanize_seconds", duration)


@register.filter
def ago(seconds: float) -> str:
    """Return how long ago a moment was; a time of the future was just now."""
    return gettext("%(duration)s ago") % {"duration": duration(max(0.0, seconds))}


@register.filter
def moment(at: datetime | None) -> SafeString | str:
    """Return a time as all pages write it, for people and for machines; "" without one."""
    if at is None:
        return ""
    return format_html('<time datetime="{}">{}</time>', aware(at).isoformat(), written(at))


def written(at: datetime) -> str:
    """Return a time with its zone: ``2026-11-21 06:00:00 UTC``."""
    local = timezone.localtime(aware(at))
    return f"{local:%Y-%m-%d %H:%M:%S} {local.tzname()}"


def aware(at: datetime) -> datetime:
    """Return a time with its zone; without USE_TZ it is that of the settings."""
    return timezone.make_aware(at, timezone.get_default_timezone()) if timezone.is_naive(at) else at
