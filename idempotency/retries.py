"""Running a request again inside the process after a serialization failure, as if it had just come in."""

import logging
import time
from collections.abc import Callable
from copy import copy, deepcopy
from functools import cached_property as cached_property_of_python
from io import BytesIO
from typing import Any, TypeVar

from django.core.exceptions import ObjectDoesNotExist
from django.db import models
from django.http import QueryDict
from django.utils.datastructures import MultiValueDict
from django.utils.functional import SimpleLazyObject, cached_property

from idempotency import conf, problems
from idempotency.calls import Call
from idempotency.conf import Isolation
from idempotency.keys import about
from idempotency.transactions import backoff_seconds, retryable_failure

logger = logging.getLogger("idempotency")

Result = TypeVar("Result")

#: A unique violation above READ COMMITTED may be a race, and is tried again so often; then it is the view's own mistake.
_UNIQUE_RETRIES = 2
#: Where the request keeps who sent it: as a view asks, and as Django remembers it for ``user`` and for ``auser()``.
_USERS = ("user", "_cached_user", "_acached_user")
_MULTI_VALUED = frozenset({QueryDict, MultiValueDict})
_MUTABLE = (dict, list, set)
#: Of these types exactly: others may be shared, or dear to copy.
_CONTAINERS = frozenset(_MUTABLE) | _MULTI_VALUED


def retried(attempt: Callable[[], Result], before: "State", isolation: Callable[[], Isolation | None]) -> Result:
    """Make the attempt, again after each serialization failure, with the request as it was ``before`` the first.

    ``isolation`` tells the level of the transaction that failed. Each failed attempt was rolled back; what it did outside the
    database it does again. Raises Problem ``conflict`` after SERIALIZATION_RETRIES, and at once when the request cannot be put
    back as it would come in now.
    """
    unique_violations = 0
    for count in range(conf.get().SERIALIZATION_RETRIES + 1):
        if count:
            time.sleep(backoff_seconds(count))
            if not before.restore():
                break
        try:
            return attempt()
        except Exception as error:
            failure = retryable_failure(error, isolation())
            unique_violations += failure == "unique"
            if failure is None or unique_violations > _UNIQUE_RETRIES:
                raise
            key = getattr(before.request, "idempotency_key", None)
            logger.info(
                "a request%s is run again inside the process: %s",
                f" of key {key.key_hash}" if key is not None else "",
                f"{failure} failure ({type(error).__name__})",  # Its text may quote what redact= names.
                extra=about(key) if key is not None else None,
            )
    raise problems.conflict()


class State:
    """What a view finds, as it was before its first run: a second run would build on what the first did to an object.

    Held are the attributes of the request, of the view and of rows, and what lists, dicts and sets on the first two and among
    the arguments contain; not what a list in a list contains, nor the attributes of other objects.
    """

    def __init__(self, call: Call) -> None:
        self.request = call.request
        self.kept = False
        self._attributes = dict(vars(call.request))
        self._seen = None if call.seen_request is call.request else call.seen_request
        holders: list[tuple[Any, tuple[str, ...]]] = [
            (self._attributes.get("session"), ("_session_cache",)),
            (self._attributes.get("_messages"), ("_queued_messages",)),
            (_loaded(self._attributes.get("user")), ()),
            # What a class-based view keeps on itself, and what a framework keeps on its own request.
            (call.owner, ()),
        ]
        if self._seen is not None:
            parsed = ("_data", "_full_data")
            holders.append((self._seen, tuple(name for name in parsed if type(vars(self._seen).get(name)) in (dict, list))))
        self._contents: list[tuple[Any, Any]] = []
        rows: list[models.Model] = []
        owned, seen = ({} if holder is None else vars(holder) for holder in (call.owner, self._seen))
        for value in (*self._attributes.values(), *call.args, *call.kwargs.values(), *owned.values(), *seen.values()):
            # The type is asked, not isinstance(): that would load what is lazy.
            kind = type(value)
            if kind in _CONTAINERS:
                self._contents.append((value, _shallow(value)))
                if kind is QueryDict:
                    holders.append((value, ()))  # ``_mutable``
            elif kind is SimpleLazyObject:
                holders.append((value, ()))
                value = _loaded(value)
            if issubclass(type(value), models.Model):
                rows.append(value)
        self._rows = tuple(rows)
        for row in _with_their_rows(rows):
            mutable = tuple(name for name, value in vars(row).items() if isinstance(value, _MUTABLE))
            holders += [(row, mutable), (row._state, ("fields_cache",))]
        self._held = [
            (holder, dict(vars(holder)), {name: _copy(vars(holder)[name]) for name in names if name in vars(holder)})
            for holder, names in holders
            if hasattr(holder, "__dict__")
        ]

    def keep(self) -> None:
        """Note that the work of the view is committed: what the view has changed stays."""
        self.kept = True

    def put_back(self) -> None:
        """Put everything back, unless it is to be kept. No database is asked."""
        if self.kept:
            return
        _refill(vars(self.request), self._attributes)
        for container, contents in self._contents:
            _refill(container, contents)
        for holder, state, copied in self._held:
            _refill(vars(holder), state | {name: _copy(value) for name, value in copied.items()})

    def restore(self) -> bool:
        """Put everything back, rewind what was read, fetch the user anew.

        Return False if that is not how the request would come in now: an upload is gone, or somebody has changed a row that it
        carries since. A view that computes on such a row would write over what the other one did.
        """
        self.put_back()
        attributes = self._attributes
        if "_body" in attributes:
            vars(self.request)["_stream"] = BytesIO(attributes["_body"])
        for _, uploads in attributes["_files"].lists() if "_files" in attributes else ():
            for upload in uploads:
                if upload.closed:
                    return False
                upload.seek(0)
        loaded = (_loaded(attributes.get(name)) for name in _USERS)
        users = {id(user): user for user in loaded if issubclass(type(user), models.Model)}
        for user in users.values():
            _fetch_anew(user)
        # What else a middleware has read, it alone can read again as it did: perhaps it has changed a field in memory.
        others = _with_their_rows([row for row in self._rows if id(row) not in users])
        return all(_is_as_stored(row) for row in others if id(row) not in users)


def _loaded(value: Any) -> Any:
    """Return what stands behind a lazy object, without loading it; anything else as it is."""
    return vars(value).get("_wrapped") if type(value) is SimpleLazyObject else value


def _with_their_rows(rows: list[models.Model]) -> list[models.Model]:
    """Return the rows, each once, and those that were loaded through them: ``account.owner`` beside ``account``."""
    found: dict[int, models.Model] = {}
    while rows:
        row = rows.pop()
        if id(row) not in found:
            found[id(row)] = row
            held = (*vars(row).values(), *row._state.fields_cache.values())
            rows += [value for value in held if issubclass(type(value), models.Model)]
    return list(found.values())


def _fetch_anew(user: models.Model) -> None:
    """Read the fields of a user again, and what was computed from them; what a middleware has put beside them stays.

    One that came from no database is what its claims say, and one whose row is gone is what it was: neither is changed.
    """
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
    """Tell whether the database has the values that the row was loaded with; true of one that came from no database."""
    if row._state.db is None:
        return True
    fields = {field.attname: vars(row)[field.attname] for field in row._meta.concrete_fields if field.attname in vars(row)}
    stored = type(row)._base_manager.using(row._state.db).filter(pk=row.pk).values(*fields)
    return fields in stored


def _shallow(container: Any) -> Any:
    """Return what a container holds; of one with several values for each name, the lists of values too."""
    if type(container) in _MULTI_VALUED:
        return {name: values[:] for name, values in dict.items(container)}
    return container.copy()


def _refill(container: Any, contents: Any) -> None:
    """Give a container its contents back. It stays the same object, which a middleware may hold too.

    One that was only read, and which other threads may be reading, is at no moment empty.
    """
    if type(container) is list:
        container[:] = contents
    elif type(container) is set:
        container.intersection_update(contents)
        container.update(contents)
    else:
        if list(container) != list(contents):
            dict.clear(container)
        multi_valued = type(container) in _MULTI_VALUED
        dict.update(container, {name: values[:] for name, values in contents.items()} if multi_valued else contents)


def _copy(value: Any) -> Any:
    """Return a copy that a change of ``value`` does not reach; rows in it stay the same objects."""
    return deepcopy(value) if value and not _holds_rows(value) else copy(value)


def _holds_rows(value: Any) -> bool:
    return isinstance(value, dict) and any(issubclass(type(item), models.Model) for item in value.values())
