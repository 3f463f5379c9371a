"""What a person with few rights is told: which permission is missing, and which groups have it."""

from typing import Any

from django.contrib.auth.models import Group, Permission
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

#: How many groups a refusal names.
MAX_GROUPS = 20


def refused(request: HttpRequest, row_admin: Any, codename: str) -> HttpResponse:
    """Return the page with status 403 that names a permission of this app, and the groups that have it."""
    app = row_admin.opts.app_label
    permission = Permission.objects.filter(content_type__app_label=app, codename=codename).first()
    groups = Group.objects.filter(permissions=permission).order_by("name").values_list("name", flat=True)
    shown = {
        "title": "Not allowed",
        "opts": row_admin.opts,
        "permission": f"{app}.{codename}",
        "permission_name": permission.name if permission else "",
        "groups": list(groups[:MAX_GROUPS]) if permission else [],
    }
    context = row_admin.admin_site.each_context(request) | shown
    return TemplateResponse(request, "admin/idempotency/refused.html", context, status=403)
