"""What a view says of itself in ``@idempotent(...)``, and where to find it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from inspect import getclosurevars, isfunction
from typing import Any
from urllib.parse import unquote

from django.conf import settings
from django.db import router
from django.http import HttpRequest, HttpResponseBase
from django.urls import Resolver404, ResolverMatch, resolve
from django.utils import translation

from idempotency import conf
from idempotency.conf import ChosenIsolation, Isolation
from idempotency.models import FINISHED, STARTED, IdempotencyKey

OnAbandon = Callable[[IdempotencyKey], HttpResponseBase | Awaitable[HttpResponseBase]]
#: Called with the request, the key, and by name with the arguments of the view that it has parameters for.
ReplayCheck = Callable[..., HttpResponseBase | Awaitable[HttpResponseBase | None] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a view says of itself in ``@idempotent(...)``."""

    recovery_points: tuple[str, ...] | None
    required: bool
    validate: Callable[[HttpRequest], HttpResponseBase | None] | None
    scope: Callable[[HttpRequest], str] | None
    isolation: ChosenIsolation
    using: str | Callable[[HttpRequest], str] | None
    on_abandon: OnAbandon | None
    replay_check: ReplayCheck | None
    key_from: str | Callable[[Any], str | None] | None
    wait_seconds: float
    redact: tuple[str, ...]
    store_body: bool

    def every_point(self) -> tuple[str, ...]:
        """Return the recovery points in their order, the first and the last included; none for a plain view."""
        return (STARTED, *self.recovery_points, FINISHED) if self.recovery_points is not None else ()

    @property
    def withholds(self) -> bool:
        """Whether there are parts of the request that must not be kept."""
        return bool(self.redact) or not self.store_body

    def alias(self, request: HttpRequest) -> str:
        """Return the database of this request's key."""
        if callable(self.using):
            return self.using(request)
        return self.using or router.db_for_write(IdempotencyKey)

    def level(self) -> Isolation | None:
        """Return the isolation of a plain view."""
        return conf.get().PLAIN_ISOLATION if self.isolation == "from settings" else self.isolation


#: Under this name the URLconf of a request is kept among its headers, when a middleware has chosen one (per host).
URLCONF = "urlconf"


def match_of(key: IdempotencyKey) -> ResolverMatch:
    """Return what the path of a stored request leads to, in the URLconf that it came through. Raises Resolver404."""
    path = unquote(key.request_path.partition("?")[0])
    urlconf = key.request_headers.get(URLCONF)
    try:
        # Under i18n_patterns a path leads somewhere in its own language alone.
        with translation.override(translation.get_language_from_path(path) or settings.LANGUAGE_CODE):
            return resolve(path, urlconf)
    except ImportError as error:
        raise Resolver404({"path": path, "tried": [urlconf]}) from error


#: Further ways to find the options of a resolved view; ``contrib`` adds those of a framework that hides them.
FINDERS: list[Callable[[Callable[..., Any], str], Options | None]] = []


def class_of(view: Callable[..., Any]) -> Any:
    """Return the class of a resolved class-based view, None of a function."""
    return getattr(view, "view_class", None) or getattr(view, "cls", None)  # of Django, of Django REST framework


def options_of(view: Callable[..., Any], method: str) -> Options | None:
    """Return what a resolved view says in ``@idempotent``; of a class-based view, what its method for ``method`` says."""
    if found := getattr(view, "idempotency", None):
        return found  # type: ignore[no-any-return]
    # ``actions`` are the methods of a view set of Django REST framework.
    name = (getattr(view, "actions", None) or {}).get(method.lower(), method.lower())
    handler = getattr(class_of(view), name, None)
    # @api_view hides the function in a closure.
    inner = getclosurevars(handler).nonlocals.get("func") if isfunction(handler) else None
    candidates = [getattr(handler, "idempotency", None), getattr(inner, "idempotency", None)]
    candidates += [find(view, method) for find in FINDERS]
    return next((candidate for candidate in candidates if candidate is not None), None)
