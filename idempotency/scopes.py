"""Scopes: the owner of each key. A request of one scope cannot access the keys of another scope.

Each function of this module can be passed as ``@idempotent(scope=...)``. The scope of a retry must
equal the scope of the first request, and no other sender may have it. It is read after
authentication.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any
from uuid import UUID

from django.conf import settings
from django.contrib.auth import get_user_model
from django.contrib.sessions.backends.base import UpdateError
from django.contrib.sessions.backends.signed_cookies import SessionStore as SignedCookies
from django.core.signals import setting_changed
from django.db.models import Model
from django.http import HttpRequest
from django.utils.crypto import salted_hmac

logger = logging.getLogger("idempotency")

Scope = Callable[[HttpRequest], str]

_MAX_LENGTH = 200
#: The types of identifiers that ``attribute()`` reads.
_IDENTIFIERS = (str, int, UUID)
#: The prefix of the scopes of a project's ``scope=`` function, so that they never equal
#: ``user:<pk>`` and the others here.
PROJECT_PREFIX = "scope="
_SESSION_SCOPE = "idempotency_scope"
#: The attribute of a request that ``set_other_sender()`` sets.
_OTHER_SENDER = "_idempotency_other_sender"


def user(request: HttpRequest) -> str:
    """Return the scope of the signed-in user, or an empty string for an anonymous one."""
    pk = user_pk(request)
    return f"user:{pk}" if pk is not None else ""


def session(request: HttpRequest) -> str:
    """Return the scope of the session, or an empty string without a session.

    The scope is an id that is derived from the first session key, so that two first requests get
    the same id. It is stored in the session and survives a new session key. On return it is saved,
    so that a retry finds it after a 500 or a login. With signed_cookies there is no scope, because
    different sessions may have equal cookies. A session that this request has created is no scope
    either, because a client that gets no answer retries without the cookie.
    Raises UpdateError if the session is deleted concurrently.
    """
    store = getattr(request, "session", None)
    if store is None:
        return ""
    if isinstance(store, SignedCookies):
        logger.warning(
            "No scope: with signed_cookies, sessions with the same content cannot be distinguished."
            " Store sessions in a database or a cache, sign the visitor in, or give the view"
            " another scope=."
        )
        return ""
    if _SESSION_SCOPE not in store:
        if store.session_key is None:  # Loading a deleted session resets its key.
            return ""
        cookie = request.COOKIES.get(settings.SESSION_COOKIE_NAME)
        if store.modified and store.session_key != cookie:
            logger.warning(
                "No scope: the session was created by this request, and a client that gets no"
                " answer does not get its cookie. Create the session earlier, for example with the"
                " page from which the request is sent."
            )
            return ""
        if not (scope := _saved_scope(store)):
            return ""
        modified = store.modified
        store[_SESSION_SCOPE] = scope
        store.modified = modified
    return f"session:{store[_SESSION_SCOPE]}"


def _saved_scope(store: Any) -> str:
    """Return the scope of a session, after it was saved in a separate store. The other changes of
    the request are saved with its response, or not at all."""
    saved = type(store)(store.session_key)
    if _SESSION_SCOPE not in saved:
        if saved.session_key is None:
            return ""
        digest = salted_hmac("idempotency.scope", saved.session_key, algorithm="sha256")
        saved[_SESSION_SCOPE] = digest.hexdigest()
        try:
            saved.save()
        except UpdateError:
            # At a high isolation level, save() also fails if another first request has just
            # saved the same id.
            if _SESSION_SCOPE not in type(store)(saved.session_key):
                raise
    scope: str = saved[_SESSION_SCOPE]
    return scope


def user_or_session(request: HttpRequest) -> str:
    """Return the scope of the user, or else of the session. This is the default scope.

    An authenticated sender that is not a Django user gets no scope, because the session may belong
    to another sender.
    """
    if (found := user(request)) or not is_no_user(request):
        return found or session(request)
    who = getattr(request, "user", None)
    if getattr(request, _OTHER_SENDER, False) or not getattr(who, "is_authenticated", bool(who)):
        who = request.auth  # type: ignore[attr-defined]
    logger.warning(
        "No scope: the sender is authenticated, but is not a saved %s: it is a %s. Give the view a"
        " scope= that names the account, for example with idempotency.scopes.attribute.",
        get_user_model().__name__,
        who.__class__.__name__,  # of the wrapped object, not of SimpleLazyObject
    )
    return ""


def attribute(path: str) -> Scope:
    """Return a scope that reads an identifier from the request, such as "tenant.pk" or
    "auth.account_id".

    The identifier is a string, an integer or a UUID. It is stored as it is, so it must not be a
    credential. The scope also has the type of the identifier, so 7 and "7" differ. If the
    identifier is an attribute of a model instance, the scope has the label of the model: the user 5
    and the partner 5 differ. Examples are ``request.auth:str:acme`` and
    ``request.tenant.pk:shop.tenant:int:7``. A request in which the identifier is missing, None or
    empty has no scope and is refused.

    The scope raises TypeError for any other type, because its text may change or may not be unique.
    """

    def scope(request: HttpRequest) -> str:
        owner: Any = None
        value: Any = request
        for name in path.split("."):
            owner, value = value, getattr(value, name, None)
        if value is None or value == "":
            return ""
        kinds = (each.__name__.lower() for each in _IDENTIFIERS if isinstance(value, each))
        kind = next(kinds, None)
        if kind is None or isinstance(value, bool):
            raise TypeError(
                f"The scope attribute({path!r}) found a {type(value).__name__}, not an identifier."
                f" Name a string, an integer or a UUID in it, such as {path + '.pk'!r}, or write"
                " a scope= function that returns one."
            )
        label = ""
        if isinstance(owner, Model):  # A proxy has the rows of its concrete model.
            concrete: Any = owner._meta.concrete_model
            label = f"{concrete._meta.label_lower}:"
        return f"request.{path}:{label}{kind}:{value}"

    scope.reads = (path,)  # type: ignore[attr-defined]
    return scope


def joined(*scopes: Scope) -> Scope:
    """Return a scope that joins several scopes, such as tenant and user. If one is missing, the
    request has no scope."""

    def scope(request: HttpRequest) -> str:
        parts = [_named(part, request) for part in scopes]
        # Length prefixes make the text unambiguous.
        return "".join(f"{len(part)}:{part}" for part in parts) if all(parts) else ""

    # With a user among them, no other attribute is needed to identify the sender.
    paths = tuple(path for part in scopes for path in reads_of(part))
    scope.reads = () if user in scopes else paths  # type: ignore[attr-defined]
    return scope


def reads_of(scope: Scope | None) -> tuple[str, ...]:
    """Return the attributes of the request that a scope of ``attribute()`` or ``joined()`` reads;
    empty for other scopes."""
    return getattr(scope, "reads", ())


def scope_of(request: HttpRequest, scope: Scope | None) -> str:
    """Return the scope of a request, or an empty string without one. Such a request is refused,
    because two senders must not share a scope. Raises ValueError for a scope that cannot be
    stored."""
    found = user_or_session(request) if scope is None else _named(scope, request)
    if not isinstance(found, str) or len(found) > _MAX_LENGTH or "\x00" in found:
        raise ValueError(
            "The function scope= must return a string of at most"
            f" {_MAX_LENGTH - len(PROJECT_PREFIX)} characters without NUL."
        )
    return found


def _named(scope: Scope, request: HttpRequest) -> str:
    """Return the scope, with a prefix if its function is not in this module."""
    found = scope(request)
    ours = getattr(scope, "__globals__", None) is globals()
    return found if ours or not found or not isinstance(found, str) else PROJECT_PREFIX + found


def user_pk(request: HttpRequest) -> Any:
    """Return the primary key of the signed-in user, or None."""
    who = getattr(request, "user", None)
    if not isinstance(who, _user_model()) or getattr(request, _OTHER_SENDER, False):
        return None
    return who.pk


@cache
def _user_model() -> type[Model]:
    return get_user_model()


def _forget(*, setting: str, **kwargs: object) -> None:
    if setting == "AUTH_USER_MODEL":
        _user_model.cache_clear()


setting_changed.connect(_forget)


def is_no_user(request: HttpRequest) -> bool:
    """Return whether the sender is authenticated but is not a Django user: an API key
    (``request.auth``) or its account."""
    who = getattr(request, "user", None)
    # An account need not have the attribute.
    authenticated = getattr(who, "is_authenticated", bool(who)) or getattr(request, "auth", None)
    return bool(authenticated) and user_pk(request) is None


def set_other_sender(request: HttpRequest) -> None:
    """Record that an API key or its account sent the request, although ``request.user`` is the user
    of a session cookie."""
    setattr(request, _OTHER_SENDER, True)
