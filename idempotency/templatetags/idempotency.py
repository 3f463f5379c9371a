"""``{% load idempotency %}{% idempotency_key %}``: a key for an HTML form, so that a double submission takes effect once."""

from typing import Any

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString

from idempotency.models import time_ordered_uuid
from idempotency.scopes import session, user

register = template.Library()


@register.simple_tag(takes_context=True)
def idempotency_key(context: template.Context, name: str = "idempotency_key") -> SafeString:
    """Render a hidden field with a key, a new one each time, for a view with ``key_from="form:idempotency_key"``.

    A page that is rendered again with the errors of its form has a new key as well: the answer with the errors may be stored
    under the old one, and the corrected form is another request. A visitor who is not signed in is given a session, if the
    template is rendered with a request: it is what tells this visitor's keys from a stranger's.
    """
    request: Any = getattr(context, "request", None)
    if hasattr(request, "session") and not (user(request) or session(request)):
        request.session.create()
    return format_html('<input type="hidden" name="{}" value="{}">', name, time_ordered_uuid())
