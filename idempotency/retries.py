"""Running a request again inside the process after a serialization failure, as if it had just come in."""

import logging
import time
from collections.abc import Callable
from copy import deepcopy
from io import BytesIO
from typing import Any

from django.contrib.auth import get_user_model
from django.db import models
from django.http import HttpResponseBase
from django.utils.functional import SimpleLazyObject

from idempotency import conf, problems
from idempotency.calls import Call
from idempotency.conf import Isolation
from idempotency.keys import about
from idempotency.transactions import backoff_seconds, retryable_failure

logger = logging.getLogger("idempotency")

#: A unique violation above READ COMMITTED may be a race, and is tried again so often; then it is the view's own mistake.
_UNIQUE_RETRIES = 2


def retried(attempt: Callable[[], HttpResponseBase], call: Call, isolation: Callable[[], Isolation | None]) -> HttpResponseBase:
    """Make the attempt, again after each serialization failure, with the request as it was before the first.

    ``isolation`` tells the level of the transaction that failed. Each failed attempt was rolled back; what it did outside the
    database it does again. Raises Problem ``conflict`` after SERIALIZATION_RETRIES.
    """
    before = _State(call)
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
            key = getattr(call.request, "idempotency_key", None)
            logger.info(
                "a request%s is run again inside the process: %s",
                f" of key {key.key_hash}" if key is not None else "",
                str(error).partition("\n")[0],
                extra=about(key) if key is not None else None,
            )
    raise problems.conflict()


class _State:
    """What a view finds, as it was before its first run: a second run would build on what the first did to an object."""

    def __init__(self, call: Call) -> None:
        self._request = call.request
        self._attributes = dict(vars(call.request))
        holders: list[tuple[Any, tuple[str, ...]]] = [
            (self._attributes.get("session"), ("_session_cache",)),
            (self._attributes.get("_messages"), ("_queued_messages",)),
            # What a class-based view keeps on itself, and what a framework keeps on its own request.
            (call.owner, ()),
        ]
        self._seen = None if call.seen_request is call.request else call.seen_request
        if self._seen is not None:
            parsed = ("_data", "_full_data")
            holders.append((self._seen, tuple(name for name in parsed if type(vars(self._seen).get(name)) in (dict, list))))
        for instance in call.instances():
            mutable = tuple(name for name, value in vars(instance).items() if isinstance(value, dict | list | set))
            holders += [(instance, mutable), (instance._state, ("fields_cache",))]
        self._held = [
            (holder, dict(vars(holder)), {name: _copy(vars(holder)[name]) for name in names if name in vars(holder)})
            for holder, names in holders
            if hasattr(holder, "__dict__")
        ]

    def restore(self) -> bool:
        """Put everything back, rewind what was read, have the user fetched anew; False if an upload is gone."""
        request, attributes = self._request, self._attributes
        vars(request).clear()
        vars(request).update(attributes)
        for holder, state, contents in self._held:
            vars(holder).clear()
            vars(holder).update(state | {name: _copy(value) for name, value in contents.items()})
        if "_body" in attributes:
            vars(request)["_stream"] = BytesIO(attributes["_body"])
        for _, uploads in attributes["_files"].lists() if "_files" in attributes else ():
            for upload in uploads:
                if upload.closed:
                    return False
                upload.seek(0)
        if (pk := getattr(attributes.get("user"), "pk", None)) is not None:
            vars(request)["user"] = SimpleLazyObject(lambda: get_user_model()._default_manager.get(pk=pk))
            if self._seen is not None:
                vars(self._seen)["_user"] = vars(request)["user"]
        return True


def _copy(value: Any) -> Any:
    """Return a copy that a change of ``value`` does not reach; rows in it stay the same objects."""
    return deepcopy(value) if not _holds_rows(value) else type(value)(value)


def _holds_rows(value: Any) -> bool:
    return isinstance(value, dict) and any(issubclass(type(item), models.Model) for item in value.values())
