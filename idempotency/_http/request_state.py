"""The state of a request before its first attempt, for another attempt in the process after a
serialization failure."""

import logging
from collections.abc import Iterable, Sequence
from copy import copy, deepcopy
from datetime import datetime
from functools import cached_property as cached_property_of_python
from io import BytesIO
from itertools import chain
from typing import Any

from django.core.exceptions import ObjectDoesNotExist
from django.db import models
from django.http import QueryDict
from django.utils.datastructures import MultiValueDict
from django.utils.functional import SimpleLazyObject, cached_property

from idempotency._hidden import Hidden
from idempotency._http.bodies import RereadableStream
from idempotency._http.view import Call

logger = logging.getLogger("idempotency")

_USERS = ("user", "_cached_user", "_acached_user")
_MULTI_VALUED = frozenset({QueryDict, MultiValueDict})
_MUTABLE = (dict, list, set)
#: The types of most values of a row, so that isinstance() is rarely called.
_IMMUTABLE = frozenset({bool, datetime, int, str, type(None)})
#: Exactly these types; subclasses may be shared or expensive to copy.
_CONTAINERS = frozenset(_MUTABLE) | _MULTI_VALUED


class RequestState:
    """The state of a request before its first attempt, which a view may change and a second attempt
    must find unchanged. It contains the attributes of the request, the view and rows. It also
    contains the lists, dicts and sets in the first two and in the arguments, but neither nested
    lists nor attributes of other objects. A value that cannot be copied, such as a lock or an open
    file, is kept by reference. Then there is no second attempt, because the first may have changed
    the value."""

    def __init__(self, call: Call) -> None:
        self.request = call.request
        self.committed = False
        self._attributes = dict(vars(call.request))
        #: The names of attributes that cannot be copied.
        self._by_reference: list[str] = []
        #: The parsers of a framework use these in each attempt, and they may count.
        self._handlers = [copy(handler) for handler in self._attributes.get("_upload_handlers", ())]
        seen = None if call.view_request is call.request else call.view_request
        holders: list[tuple[Any, Sequence[str]]] = [
            (self._attributes.get("session"), ("_session_cache",)),
            (self._attributes.get("_messages"), ("_queued_messages",)),
            (_loaded(self._attributes.get("user")), ()),
            # The attributes of a class-based view, and below those of a framework's request.
            (call.owner, ()),
        ]
        if seen is not None:
            parsed = ("_data", "_full_data")
            holders.append(
                (seen, [name for name in parsed if type(vars(seen).get(name)) in (dict, list)])
            )
        #: Each container with its contents, and those of its values that may change and are
        #: therefore copied.
        self._saved: list[tuple[Any, Any, dict[str, Any]]] = [
            (vars(call.request), self._attributes, {})
        ]
        attributes = [vars(each).values() for each in (call.owner, seen) if each is not None]
        values = chain(self._attributes.values(), call.args, call.kwargs.values(), *attributes)
        rows = self._save_values(values, holders)
        self._rows = tuple(rows)
        for row in _with_their_rows(rows):
            mutable = [
                name
                for name, value in vars(row).items()
                if type(value) not in _IMMUTABLE and isinstance(value, _MUTABLE)
            ]
            holders += [(row, mutable), (row._state, ("fields_cache",))]
        for holder, names in holders:
            if holder is not None:
                self._save_attributes(holder, names)

    def _save_values(
        self, values: Iterable[Any], holders: list[tuple[Any, Sequence[str]]]
    ) -> list[models.Model]:
        """Save the containers among these values. Add the holders among them, and return the
        rows."""
        rows: list[models.Model] = []
        for value in values:
            # Check the exact type, because isinstance() would load a lazy object. Models have a
            # metaclass.
            kind = type(value)
            if kind in _CONTAINERS:
                self._save_contents(value)
                if kind is QueryDict:
                    holders.append((value, ()))  # ``_mutable``
            elif kind is SimpleLazyObject:
                holders.append((value, ()))
                value = _loaded(value)
            if type(type(value)) is not type and issubclass(type(value), models.Model):
                rows.append(value)
        return rows

    def _save_attributes(self, holder: Any, names: Sequence[str]) -> None:
        """Save the attributes of an object, and copies of those with these names."""
        if (state := getattr(holder, "__dict__", None)) is None:
            return
        copies = {}
        for name in names:
            if name in state:
                try:
                    copies[name] = _copy(state[name])
                except Exception:  # A lock, a client or an open file is in it, for example.
                    self._by_reference.append(name)
                    if type(state[name]) in _CONTAINERS:
                        self._save_contents(state[name])
        self._saved.append((state, dict(state), copies))

    def _save_contents(self, container: Any) -> None:
        self._saved.append((container, _shallow(container), {}))

    def note_committed(self) -> None:
        """Record that the work is committed: later calls of ``put_back`` do nothing."""
        self.committed = True

    def put_back(self) -> None:
        """Restore the state in memory, unless ``note_committed`` was called. No database is
        queried."""
        if self.committed:
            return
        for container, contents, copied in self._saved:
            if copied:
                contents = contents | {name: _copy(value) for name, value in copied.items()}
            _refill(container, contents)

    def restore(self) -> bool:
        """Restore the state, rewind body and files, and reload the user. Return False if that is
        not possible: a value could not be copied, an upload is closed, or another transaction has
        changed a row that the request holds. A view that computes with such a row would overwrite
        that change."""
        self.put_back()
        if self._by_reference:
            logger.info(
                "a request is not run again inside the process, because it has values that cannot"
                " be copied, in the attributes %s",
                ", ".join(self._by_reference),
            )
            return False
        # The body is among them, and code of the user model runs here.
        attributes = Hidden(self._attributes)
        if self._handlers:
            vars(self.request)["_upload_handlers"] = [copy(handler) for handler in self._handlers]
        if "_body" in attributes.value:
            vars(self.request)["_stream"] = BytesIO(attributes.value["_body"])
        elif isinstance(stream := attributes.value.get("_stream"), RereadableStream):
            stream.rewind()
        files = Hidden(attributes.value.get("_files") or MultiValueDict())
        for _, uploads in files.value.lists():
            for upload in uploads:
                if upload.closed:
                    return False
                upload.seek(0)
        loaded = (_loaded(attributes.value.get(name)) for name in _USERS)
        users = {id(user): user for user in loaded if issubclass(type(user), models.Model)}
        for user in users.values():
            _fetch_anew(user)
        # Do not reload other rows: a middleware may have changed a field in memory.
        others = _with_their_rows([row for row in self._rows if id(row) not in users])
        return all(_is_as_stored(row) for row in others if id(row) not in users)


def _loaded(value: Any) -> Any:
    """Return the object behind a lazy one without loading it; any other value unchanged."""
    return vars(value).get("_wrapped") if type(value) is SimpleLazyObject else value


def _with_their_rows(rows: list[models.Model]) -> list[models.Model]:
    """Return the rows, each once, and the rows loaded through them, such as ``account.owner``."""
    found: dict[int, models.Model] = {}
    while rows:
        row = rows.pop()
        if id(row) not in found:
            found[id(row)] = row
            held = (*vars(row).values(), *row._state.fields_cache.values())
            rows += [
                value
                for value in held
                if type(type(value)) is not type and issubclass(type(value), models.Model)
            ]
    return list(found.values())


def _fetch_anew(user: models.Model) -> None:
    """Reload the fields of a user and drop its cached properties; other attributes stay. A user
    that came from no database, or whose row is deleted, is not changed."""
    if user._state.db is None:
        return
    try:
        user.refresh_from_db(using=user._state.db)
    except ObjectDoesNotExist:
        return
    for name in list(vars(user)):
        if isinstance(getattr(type(user), name, None), cached_property | cached_property_of_python):
            del vars(user)[name]


def _is_as_stored(row: models.Model) -> bool:
    """Return whether the row equals the database; True for a row that came from no database."""
    if row._state.db is None:
        return True
    names = [field.attname for field in row._meta.concrete_fields]
    fields = {name: vars(row)[name] for name in names if name in vars(row)}
    stored = type(row)._base_manager.using(row._state.db).filter(pk=row.pk).values(*fields)
    return fields in stored


def _shallow(container: Any) -> Any:
    if type(container) in _MULTI_VALUED:
        return {name: values[:] for name, values in dict.items(container)}
    return container.copy()


def _refill(container: Any, contents: Any) -> None:
    """Restore the contents of a container in place, because a middleware may hold the same object.
    An unchanged container is never empty in between, because other threads may read it."""
    if type(container) is list:
        container[:] = contents
    elif type(container) is set:
        container.intersection_update(contents)
        container.update(contents)
    else:
        if list(container) != list(contents):
            dict.clear(container)
        if type(container) in _MULTI_VALUED:
            contents = {name: values[:] for name, values in contents.items()}
        dict.update(container, contents)


def _copy(value: Any) -> Any:
    """Return an independent copy of ``value``; rows in it are not copied."""
    return deepcopy(value) if value and not _holds_rows(value) else copy(value)


def _holds_rows(value: Any) -> bool:
    return isinstance(value, dict) and any(
        issubclass(type(item), models.Model) for item in value.values()
    )
