"""Django REST framework: error responses of this app in its format.

Views need only ``idempotency.decorators.idempotent``, on the handler (``post``, ``create``, an ``@action``) or below
``@api_view``, inside authentication, permissions and throttling.
"""

from collections.abc import Mapping

from django.http import JsonResponse


def render_error(*, status: int, code: str, detail: str, headers: Mapping[str, str], **members: object) -> JsonResponse:
    """Return an error in the format of Django REST framework: ``{"detail": ..., "code": ...}``.

    Set ``IDEMPOTENCY["ERROR_RENDERER"]`` to "idempotency.contrib.rest_framework.render_error".
    """
    return JsonResponse({"detail": detail, "code": code}, status=status, headers=dict(headers))
