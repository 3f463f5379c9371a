"""How the pages of the admin write times and durations."""

from datetime import datetime

from django import template
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString

register = template.Library()


@register.filter
def humanize_seconds(seconds: float) -> str:
    """Return a duration with the unit that suits it: ``20 ms``, ``1.4 s``, ``45 s``, ``3 min``, ``2 h``, ``5 d``."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


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
