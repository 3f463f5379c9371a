"""Whose key a request carries. Each function here serves as ``@idempotent(scope=...)``; nobody sees another scope's keys.

A scope must be the same for the retry as for the first request, and nobody else's. It is read after authentication.
"""

import logging
from collections.abc import Callable
from typing import Any
from uuid import UUID

from django.contrib.auth import get_user_model
from django.contrib.sessions.backends.base import UpdateError
from django.contrib.sessions.backends.signed_cookies import SessionStore as SignedCookies
from django.http import HttpRequest
from django.utils.crypto import salted_hmac

from idempotency import problems
from idempotency.sql import RETIRED_SCOPE

logger = logging.getLogger("idempotency")

Scope = Callable[[HttpRequest], str]

_MAX_LENGTH = 200
#: Stands before what a scope from outside this module returns: it shares no name space with ``user:<pk>`` and the others here.
OWN = "scope="


def user(request: HttpRequest) -> str:
    """Return the scope of the signed-in user; nothing for an anonymous one."""
    who = user_of(request)
    return f"user:{who.pk}" if who is not None else ""


def session(request: HttpRequest) -> str:
    """Return the scope of the session: a random id kept in it, which survives a new session key; nothing without a session.

    The id is derived from the first session key, so that two first requests agree on it. On return it is saved: the retry
    finds it after a 500, and after a login meanwhile. Nothing with signed_cookies, where two sessions may be the same cookie.
    Raises UpdateError when the session is deleted at this moment.
    """
    store = getattr(request, "session", None)
    if store is None:
        return ""
    if isinstance(store, SignedCookies):
        logger.warning(
            "No scope: with signed_cookies, sessions with the same content cannot be told apart. Keep them in a database or a "
            "cache, sign the visitor in, or give the view another scope=."
        )
        return ""
    if "idempotency_scope" not in store:
        if store.session_key is None:  # Asked after loading: the key of a session that is gone is gone as well.
            return ""
        # In a store of its own: whatever else this request changes in the session is saved with its answer, or not at all.
        saved = type(store)(store.session_key)
        if "idempotency_scope" not in saved:
            if saved.session_key is None:
                return ""
            saved["idempotency_scope"] = salted_hmac("idempotency.scope", saved.session_key, algorithm="sha256").hexdigest()
            try:
                saved.save()
            except UpdateError:
                # At a high level of isolation another first request may have saved the same at this moment.
                if "idempotency_scope" not in type(store)(saved.session_key):
                    raise
        modified = store.modified
        store["idempotency_scope"] = saved["idempotency_scope"]
        store.modified = modified
    return f"session:{store['idempotency_scope']}"


def user_or_session(request: HttpRequest) -> str:
    """Return the scope of the user, else of the session: the default.

    Nothing for somebody signed in who is no user of Django's: the session may be another's.
    """
    who = getattr(request, "user", None)
    if user_of(request) is None and getattr(who, "is_authenticated", False):
        logger.warning(
            "No scope: request.user is signed in and is no saved %s but a %s. Give the view a scope= that names the account, "
            "such as one made by idempotency.scopes.attribute.",
            get_user_model().__name__,
            who.__class__.__name__,  # not of the lazy object around it
        )
        return ""
    return user(request) or session(request)


def attribute(path: str) -> Scope:
    """Return a scope that reads an identifier from the request, such as "tenant.pk" or "auth.account_id".

    It is a string, an integer or a UUID, and is kept as it stands: no credential. Where it is missing, None or empty the
    request has no scope and is refused. Raises TypeError for any other type: its text may change, or be somebody else's too.
    """

    def scope(request: HttpRequest) -> str:
        value: Any = request
        for name in path.split("."):
            value = getattr(value, name, None)
        if value is None or value == "":
            return ""
        if isinstance(value, bool) or not isinstance(value, str | int | UUID):
            raise TypeError(
                f"scopes.attribute({path!r}) found a {type(value).__name__}, which is no identifier. Name a string, an integer "
                f"or a UUID in it, such as {path + '.pk'!r}, or give scope= a function that returns one."
            )
        return f"{path}:{value}"

    scope.reads = (path,)  # type: ignore[attr-defined]
    return scope


def joined(*scopes: Scope) -> Scope:
    """Return the scope that all of these make together, such as a tenant and a user in it; all of them must be there."""

    def scope(request: HttpRequest) -> str:
        parts = [_named(part, request) for part in scopes]
        # Each is preceded by its length: no two lists look alike.
        return "".join(f"{len(part)}:{part}" for part in parts) if all(parts) else ""

    # With a user among them the sender is known.
    scope.reads = () if user in scopes else tuple(path for part in scopes for path in reads_of(part))  # type: ignore[attr-defined]
    return scope


def reads_of(scope: Scope | None) -> tuple[str, ...]:
    """Return the attributes of the request from which ``attribute()``, or ``joined()`` of it, makes a scope; none of others."""
    return getattr(scope, "reads", ())


def scope_of(request: HttpRequest, scope: Scope | None) -> str:
    """Return whose key it is. Raises Problem when the request does not say: strangers must not share a scope.

    Raises ValueError for a scope that cannot be kept.
    """
    found = _named(scope or user_or_session, request)
    if not isinstance(found, str) or len(found) > _MAX_LENGTH or found.startswith(RETIRED_SCOPE) or "\x00" in found:
        raise ValueError(
            f"scope= must return a string of at most {_MAX_LENGTH - len(OWN)} characters without NUL, and "
            f"idempotency.scopes.attribute() none that begins with {RETIRED_SCOPE!r}."
        )
    if not found:
        raise problems.scope_missing()
    return found


def _named(scope: Scope, request: HttpRequest) -> str:
    """Return a scope in its name space: as it is if it comes from this module, else with a prefix."""
    found = scope(request)
    ours = getattr(scope, "__globals__", None) is globals()
    return found if ours or not found or not isinstance(found, str) else OWN + found


def user_of(request: HttpRequest) -> Any:
    """Return the signed-in user, None if there is none."""
    who = getattr(request, "user", None)
    return who if isinstance(who, get_user_model()) and who.pk is not None else None


def is_no_user(request: HttpRequest) -> bool:
    """Tell whether somebody was authenticated who is no user of Django's: an API key (``request.auth``), or its account."""
    authenticated = getattr(getattr(request, "user", None), "is_authenticated", False) or getattr(request, "auth", None)
    return bool(authenticated) and user_of(request) is None
