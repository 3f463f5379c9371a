"""Whose key a request carries. Each function here serves as ``@idempotent(scope=...)``; nobody sees another scope's keys.

A scope must be the same for the retry as for the first request, and nobody else's. It is read after authentication.
"""

from collections.abc import Callable
from typing import Any

from django.contrib.auth import get_user_model
from django.http import HttpRequest
from django.utils.crypto import salted_hmac

from idempotency import problems
from idempotency.sql import RETIRED_SCOPE

Scope = Callable[[HttpRequest], str]

_MAX_LENGTH = 200


def user(request: HttpRequest) -> str:
    """Return the scope of the signed-in user; nothing for an anonymous one."""
    who = user_of(request)
    return f"user:{who.pk}" if who is not None else ""


def session(request: HttpRequest) -> str:
    """Return the scope of the session: a random id kept in it, which survives a new session key; nothing without a session.

    The id is derived from the first session key, so that two first requests agree on it.
    """
    store = getattr(request, "session", None)
    if store is None:
        return ""
    if "idempotency_scope" not in store:
        if store.session_key is None:  # Asked after loading: the key of a session that is gone is gone as well.
            return ""
        store["idempotency_scope"] = salted_hmac("idempotency.scope", store.session_key, algorithm="sha256").hexdigest()
    return f"session:{store['idempotency_scope']}"


def user_or_session(request: HttpRequest) -> str:
    """Return the scope of the user, else of the session: the default."""
    return user(request) or session(request)


def attribute(path: str) -> Scope:
    """Return a scope that reads an attribute of the request, such as "tenant.pk" or "auth.account_id".

    One that is missing, None or empty leaves the request without a scope, and it is refused.
    """

    def scope(request: HttpRequest) -> str:
        value: Any = request
        for name in path.split("."):
            value = getattr(value, name, None)
        return "" if value in (None, "") else f"{path}:{value}"

    return scope


def joined(*scopes: Scope) -> Scope:
    """Return the scope that all of these make together, such as a tenant and a user in it; all of them must be there."""

    def scope(request: HttpRequest) -> str:
        parts = [part(request) for part in scopes]
        # Each is preceded by its length: no two lists look alike.
        return "".join(f"{len(part)}:{part}" for part in parts) if all(parts) else ""

    return scope


def scope_of(request: HttpRequest, scope: Scope | None) -> str:
    """Return whose key it is. Raises Problem when the request does not say: strangers must not share a scope."""
    found = (scope or user_or_session)(request)
    if not isinstance(found, str) or len(found) > _MAX_LENGTH or found.startswith(RETIRED_SCOPE) or "\x00" in found:
        raise ValueError(
            f"scope= must return a string of at most {_MAX_LENGTH} characters that does not begin with {RETIRED_SCOPE!r}."
        )
    if not found:
        raise problems.scope_missing()
    return found


def user_of(request: HttpRequest) -> Any:
    """Return the signed-in user, None if there is none."""
    who = getattr(request, "user", None)
    return who if isinstance(who, get_user_model()) and who.pk is not None else None
