"""Django REST framework: a base class that protects each unsafe handler, and error responses in its
format.

A single view needs only ``idempotency.decorators.idempotent``, on the handler (``post``,
``create``, an ``@action``) or below ``@api_view``, inside authentication, permissions and
throttling.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from django.http import JsonResponse

from idempotency.decorators import idempotent

_UNSAFE = ("post", "put", "patch", "delete")


class IdempotentMixin:
    """Protect each unsafe handler of a view or view set, ``@action`` methods included: the first
    base of your base class.

    The method ``as_view()``, which a router calls too, makes the view of a subclass with protected
    handlers. The class itself is not changed: ``idempotent_options`` and ``not_idempotent`` of a
    class apply to all handlers of its own views, also to inherited ones, and not to views of its
    parent classes. A handler that has its own ``@idempotent`` keeps it.
    Raises TypeError or ValueError for invalid options, as ``@idempotent`` does.
    """

    #: The options of ``@idempotent`` for these handlers.
    idempotent_options: ClassVar[Mapping[str, Any]] = {}
    #: The names of handlers that stay unprotected.
    not_idempotent: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def as_view(cls, actions: Mapping[str, str] | None = None, **initkwargs: Any) -> Any:
        """Return the view of a subclass in which the handlers of the unsafe methods are
        protected."""
        attributes: dict[str, Any] = {
            name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")
        }
        for method in _UNSAFE:
            name = method if actions is None else actions.get(method, "")
            handler = getattr(cls, name, None) if name not in cls.not_idempotent else None
            if handler is not None and not hasattr(handler, "idempotency"):
                attributes[name] = idempotent(**cls.idempotent_options)(handler)
        protected: Any = type(cls.__name__, (cls,), attributes)
        more = {} if actions is None else {"actions": actions}
        return super(IdempotentMixin, protected).as_view(**more, **initkwargs)  # type: ignore[misc]


def render_error(
    *,
    status: int,
    code: str,
    detail: str,
    headers: Mapping[str, str],
    data: object = None,
    **members: object,
) -> JsonResponse:
    """Return an error in the format of Django REST framework: ``{"detail": ..., "code": ...}``, and
    ``data`` for a refusal of an operation that has data.

    Set ``IDEMPOTENCY["ERROR_RENDERER"]`` to "idempotency.contrib.rest_framework.render_error".
    """
    content = {"detail": detail, "code": code} | ({} if data is None else {"data": data})
    return JsonResponse(content, status=status, headers=dict(headers))
