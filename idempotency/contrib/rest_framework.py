"""Django REST framework: a base class that protects each unsafe handler, and error responses in its format.

A single view needs only ``idempotency.decorators.idempotent``, on the handler (``post``, ``create``, an ``@action``) or below
``@api_view``, inside authentication, permissions and throttling.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from django.http import JsonResponse

from idempotency.decorators import idempotent

_UNSAFE = ("post", "put", "patch", "delete")

#: The handlers that ``as_view()`` has protected, each with its class and the handler without protection.
_protected: dict[Any, tuple[type, Any]] = {}


class IdempotentMixin:
    """Protect each unsafe handler of a view or view set, ``@action`` methods included: the first base of your base class.

    ``as_view()``, which a router calls too, decorates the handlers that are not protected yet. A handler that has its own
    ``@idempotent`` keeps it. The attributes of a subclass also hold for the handlers that it inherits, or
    calls with ``super()``.
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
            if (inherited := getattr(cls, name, None)) is None:
                continue
            owner, handler = _protected.get(inherited, (cls, inherited))
            if owner is cls:
                handler = inherited
            if name not in cls.not_idempotent and not hasattr(handler, "idempotency"):
                _protected[made := idempotent(**cls.idempotent_options)(handler)] = cls, handler
                made.idempotency_owner = cls
                handler = made
            setattr(cls, name, handler)  # An unprotected one too: a parent may be protected later.
        more = {} if actions is None else {"actions": actions}
        return super().as_view(**more, **initkwargs)  # type: ignore[misc]


def render_error(*, status: int, code: str, detail: str, headers: Mapping[str, str], **members: object) -> JsonResponse:
    """Return an error in the format of Django REST framework: ``{"detail": ..., "code": ...}``.

    Set ``IDEMPOTENCY["ERROR_RENDERER"]`` to "idempotency.contrib.rest_framework.render_error".
    """
    return JsonResponse({"detail": detail, "code": code}, status=status, headers=dict(headers))
