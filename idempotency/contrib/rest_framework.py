"""Django REST framework: a base class that protects each unsafe handler, and error responses in its format.

A single view needs only ``idempotency.decorators.idempotent``, on the handler (``post``, ``create``, an ``@action``) or below
``@api_view``, inside authentication, permissions and throttling.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from django.http import JsonResponse

from idempotency.decorators import idempotent

_UNSAFE = ("post", "put", "patch", "delete")


class IdempotentMixin:
    """Protect each unsafe handler of a view or view set, ``@action`` methods included: the first base of your base class.

    ``as_view()``, which a router calls too, decorates the handlers that are not protected yet. A handler that has its own
    ``@idempotent`` keeps it.
    Raises TypeError or ValueError for invalid options, as ``@idempotent`` does.
    """

    #: The options of ``@idempotent`` for these handlers.
    idempotent_options: ClassVar[Mapping[str, Any]] = {}
    #: The names of handlers that stay unprotected.
    not_idempotent: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def as_view(cls, actions: Mapping[str, str] | None = None, **initkwargs: Any) -> Any:
        """Protect the handlers of the unsafe methods, and return the view."""
        for method in _UNSAFE:
            name = method if actions is None else actions.get(method, "")
            handler = getattr(cls, name, None) if name not in cls.not_idempotent else None
            if handler is not None and not hasattr(handler, "idempotency"):
                setattr(cls, name, idempotent(**cls.idempotent_options)(handler))
        more = {} if actions is None else {"actions": actions}
        return super().as_view(**more, **initkwargs)  # type: ignore[misc]


def render_error(*, status: int, code: str, detail: str, headers: Mapping[str, str], **members: object) -> JsonResponse:
    """Return an error in the format of Django REST framework: ``{"detail": ..., "code": ...}``.

    Set ``IDEMPOTENCY["ERROR_RENDERER"]`` to "idempotency.contrib.rest_framework.render_error".
    """
    return JsonResponse({"detail": detail, "code": code}, status=status, headers=dict(headers))
