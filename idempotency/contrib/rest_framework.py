"""Django REST framework. Views need nothing from here: ``idempotency.decorators.idempotent`` protects them.

It stands on the handler (``post``, ``create``, an ``@action``), or below ``@api_view``: after authentication, permissions and
throttling. The function below makes the refusals of this app look like those of the framework.
"""

from collections.abc import Mapping

from django.http import JsonResponse


def render_error(*, status: int, code: str, detail: str, headers: Mapping[str, str], **members: object) -> JsonResponse:
    """Return an error in the shape of Django REST framework: ``{"detail": ..., "code": ...}``.

    Set ``IDEMPOTENCY["ERROR_RENDERER"]`` to "idempotency.contrib.rest_framework.render_error".
    """
    return JsonResponse({"detail": detail, "code": code}, status=status, headers=dict(headers))
