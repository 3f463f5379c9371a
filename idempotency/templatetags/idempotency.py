"""The template tag ``{% idempotency_key %}``: a key for an HTML form, so that a double submission
takes effect once."""

from typing import Any

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString

from idempotency.models import time_ordered_uuid
from idempotency.scopes import session, user

register = template.Library()


@register.simple_tag(takes_context=True)
def idempotency_key(context: template.Context, name: str = "idempotency_key") -> SafeString:
    """Render a hidden field with a new key, for a view with ``key_from="form:idempotency_key"``.

    A page that shows the errors of a form also gets a new key, because the corrected form is a
    different request. If the template is rendered with a request of a visitor without a session, a
    session is created: it is the scope of the key.
    """
    request: Any = getattr(context, "request", None)
    if hasattr(request, "session") and not (
        user(request) or session(request) or request.session.session_key
    ):
        request.session.create()
    return format_html('<input type="hidden" name="{}" value="{}">', name, time_ordered_uuid())
