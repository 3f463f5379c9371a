"""The page for a person without a permission: it names the missing permission, and the groups that
have it."""

from typing import Any

from django.contrib.auth import get_permission_codename
from django.contrib.auth.models import Permission
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext, gettext_noop

#: The maximum number of groups that the page names.
MAX_GROUPS = 20
#: Names of permissions that Django stores in English, and pages translate. The models have those of
#: the app's own permissions.
_STORED = (
    gettext_noop("Can view idempotency key"),
    gettext_noop("Can view staged job"),
    gettext_noop("Can view downstream call"),
    gettext_noop("Can view processed message"),
)


def refused(model_admin: Any, request: HttpRequest, permission: str = "") -> HttpResponse:
    """Return a 403 that names the missing permission, and the groups that have it. The missing
    permission is that to view the rows if the person lacks it, or else ``permission``."""
    if not permission or not model_admin.has_view_permission(request):
        permission = get_permission_codename("view", model_admin.opts)
    app_label = model_admin.opts.app_label
    found = Permission.objects.filter(
        content_type__app_label=app_label, codename=permission
    ).first()
    names = found.group_set.order_by("name").values_list("name", flat=True) if found else ()
    groups = names[:MAX_GROUPS]
    context: dict[str, Any] = {
        "title": gettext("Not allowed"),
        "permission": f"{app_label}.{permission}",
        "groups": list(groups),
    }
    context["description"] = gettext(found.name) if found else ""
    response: HttpResponse = model_admin.page(request, "refused", context, status=403)
    return response
