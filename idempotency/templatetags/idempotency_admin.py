"""How the templates of the admin say things."""

from django import template

register = template.Library()


@register.filter
def humanize_seconds(seconds: float) -> str:
    """Return a duration with the unit that suits it: ``0.2 s``, ``45 s``, ``3 min``, ``2 h``, ``5 d``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
