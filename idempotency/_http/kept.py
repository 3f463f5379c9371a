"""Values of the session and of the request that ``keep=`` names: read when a key is claimed, given
back to the completer.

A rebuilt request passes no middleware, so it has none of them itself.
"""

import json
import logging
from collections.abc import Sequence
from copy import deepcopy
from typing import Any
from uuid import UUID

from django.contrib.sessions.backends.base import SessionBase
from django.core.handlers.wsgi import WSGIRequest
from django.http import HttpRequest
from django.utils.functional import LazyObject

from idempotency._engine.events import about
from idempotency._hidden import Hidden
from idempotency.models import IdempotencyKey

logger = logging.getLogger("idempotency")

_SESSION = "session."
#: Attributes that the rebuilt request has itself.
_OWN = (
    frozenset(dir(HttpRequest()))
    | frozenset(dir(WSGIRequest))
    | {"session", "auser", "urlconf", "environ"}
)
#: Only PREPARE_REQUEST may name the sender; its parts may be kept.
_SENDER = ("user", "auth")
_ABSENT = object()

#: "session": the values of the session by their keys, if the request had a session and a name of
#: one is kept; "request": the values of attributes by their paths.
Kept = dict[str, dict[str, Any]]


class KeptSession(SessionBase):
    """The session of a rebuilt request: a snapshot of the values that ``keep=`` names. It can be
    changed for the length of the run, and is never saved; the first change is logged."""

    def __init__(self, values: dict[str, Any], key: IdempotencyKey) -> None:
        self._key, self._modified = key, False
        super().__init__()
        self._session_cache = values

    @property
    def modified(self) -> bool:
        return self._modified

    @modified.setter
    def modified(self, value: bool) -> None:
        if value and not self._modified:
            logger.warning(
                "key %s: the view changed request.session in a run of the completer. The change is"
                " not saved, because this session is a copy of the values that keep= names.",
                self._key.key_hash,
                extra=about(self._key),
            )
        self._modified = value

    def load(self) -> dict[str, Any]:
        return {}

    def exists(self, session_key: str) -> bool:
        return False

    def create(self) -> None:
        """Write nothing."""

    def save(self, must_create: bool = False) -> None:
        """Write nothing."""

    def delete(self, session_key: str | None = None) -> None:
        """Delete nothing."""


def refuse_keep(names: Sequence[str]) -> None:
    """Raise ValueError for a name that is neither a key of the session nor an attribute that a
    middleware may set."""
    for name in names:
        if isinstance(name, str) and name.startswith(_SESSION) and name != _SESSION:
            continue
        parts = name.split(".") if isinstance(name, str) else [""]
        ours = parts[0].startswith(("_", "idempotency_")) or parts[0] in _OWN or name in _SENDER
        if ours or not all(part.isidentifier() for part in parts):
            raise ValueError(
                f"The option keep cannot have {name!r}. It must have names of session values"
                " (session.NAME) and of attributes that a middleware sets on the request (tenant,"
                " basket.pk)."
            )


def kept_values(request: HttpRequest, names: Sequence[str], view: str) -> Hidden[Kept]:
    """Return the values that the request has now; absent ones are left out. Raises TypeError for a
    value that is not JSON."""
    kept: Hidden[Kept] = Hidden({"request": {}})
    session = getattr(request, "session", None)
    for name in names:
        if not name.startswith(_SESSION):
            if (value := Hidden(_read(request, name))).value is not _ABSENT:
                kept.value["request"][name] = _json(value, name, view)
        elif session is not None:
            key, of_session = (
                name.removeprefix(_SESSION),
                Hidden(kept.value.setdefault("session", {})),
            )
            if key in session:
                of_session.value[key] = _json(Hidden(session[key]), name, view)
    return kept


def set_kept_values(request: HttpRequest, kept: Kept, key: IdempotencyKey) -> None:
    """Set the session and the attributes of a rebuilt request, and all values by their names as
    ``idempotency_kept``."""
    session, attributes = kept.get("session"), kept.get("request", {})
    every = {f"{_SESSION}{name}": value for name, value in (session or {}).items()} | attributes
    request.idempotency_kept = deepcopy(every)  # type: ignore[attr-defined]
    if session is not None:
        request.session = KeptSession(session, key)
    for name, value in attributes.items():
        if "." not in name:
            setattr(request, name, value)


def _read(request: HttpRequest, path: str) -> Any:
    value: Any = request
    for name in path.split("."):
        value = getattr(value, name, _ABSENT)
    if issubclass(type(value), LazyObject):
        _ = value.__class__  # Loads the object behind it.
        value = vars(value)["_wrapped"]
    # Only a path leads to an identifier of an object; an attribute must come back with its own
    # type.
    return str(value) if isinstance(value, UUID) and "." in path else value


def _json(value: Hidden[Any], name: str, view: str) -> Any:
    copy = Hidden(_copy(value.value))
    if copy.value is _ABSENT or copy.value != value.value:
        kind = value.value.__class__.__name__  # of the wrapped object, not of SimpleLazyObject
        raise TypeError(
            f"The option keep of the view {view} names {name!r}, which is not a JSON value, but of"
            f" type {kind}. Name an identifier in it, such as 'basket.pk', and let PREPARE_REQUEST"
            " build the object from it."
        )
    return copy.value


def _copy(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return _ABSENT
