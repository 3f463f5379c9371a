"""How the templates of the admin say things."""

from django import template

from idempotency._text import duration

register = template.Library()


register.filter("humanize_seconds", duration)
