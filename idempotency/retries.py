"""Running a request again inside the process after a serialization failure, as if it had just come in."""

import logging
import time
from collections.abc import Callable
from copy import deepcopy
from io import BytesIO

from django.contrib.auth import get_user_model
from django.http import HttpRequest, HttpResponseBase
from django.utils.functional import SimpleLazyObject

from idempotency import conf, problems
from idempotency.conf import Isolation
from idempotency.transactions import backoff_seconds, retryable_failure

logger = logging.getLogger("idempotency")

#: A unique violation under SERIALIZABLE may be a race, and is tried again so often; then it is the view's own mistake.
_UNIQUE_RETRIES = 2


def retried(attempt: Callable[[], HttpResponseBase], request: HttpRequest, isolation: Isolation | None) -> HttpResponseBase:
    """Make the attempt, again after each serialization failure, with the request as it was before the first.

    Each failed attempt was rolled back; what it did outside the database it does again. Raises Problem ``conflict`` after
    SERIALIZATION_RETRIES.
    """
    before = _RequestState(request)
    unique_violations = 0
    for count in range(conf.get().SERIALIZATION_RETRIES + 1):
        if count:
            time.sleep(backoff_seconds(count))
            before.restore()
        try:
            return attempt()
        except Exception as error:
            failure = retryable_failure(error, isolation)
            unique_violations += failure == "unique"
            if failure is None or unique_violations > _UNIQUE_RETRIES:
                raise
            logger.info("a request is run again inside the process: %s", error)
    raise problems.conflict()


class _RequestState:
    """A request as it was before the view ran: a view that changed a cached object would count on it in its second run."""

    def __init__(self, request: HttpRequest) -> None:
        self._request = request
        self._attributes = dict(vars(request))
        self._changing = [
            (holder, dict(vars(holder)), {name: deepcopy(vars(holder)[name]) for name in names if name in vars(holder)})
            for holder, names in (
                (self._attributes.get("session"), ("_session_cache",)),
                (self._attributes.get("_messages"), ("_queued_messages",)),
            )
            if holder is not None
        ]

    def restore(self) -> None:
        """Put the attributes back, rewind what was read, and have the user fetched anew."""
        request, attributes = self._request, self._attributes
        vars(request).clear()
        vars(request).update(attributes)
        for holder, state, contents in self._changing:
            vars(holder).clear()
            vars(holder).update(state | deepcopy(contents))
        if "_body" in attributes:
            vars(request)["_stream"] = BytesIO(attributes["_body"])
        for _, uploads in attributes["_files"].lists() if "_files" in attributes else ():
            for upload in uploads:
                upload.seek(0)
        if (pk := getattr(attributes.get("user"), "pk", None)) is not None:
            vars(request)["user"] = SimpleLazyObject(lambda: get_user_model()._default_manager.get(pk=pk))
