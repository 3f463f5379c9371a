"""The work of a run that a request asks for: its view. The adapter of HTTP; see
``idempotency._engine.adapter``."""

import logging
import threading
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from django.http import HttpResponseBase, StreamingHttpResponse

from idempotency import conf
from idempotency._engine.adapter import Outcome, Run
from idempotency._engine.claimed_key import ClaimedKey
from idempotency._engine.fence import StoredResponse
from idempotency._http import responses
from idempotency._http.nesting import ViewRun
from idempotency._http.not_stored import keeps_writes
from idempotency._http.options import Options
from idempotency._http.request_state import RequestState
from idempotency._http.view import Call, atomic_aliases
from idempotency.conf import Isolation
from idempotency.exceptions import CONFLICTS, ResponseNotCommitted

logger = logging.getLogger("idempotency")


class ViewWork:
    """A view with its request."""

    kind = "view"
    rollback_causes = "by set_rollback(True), by the exception handler of Django REST framework,"
    nests = False

    def __init__(self, call: Call, options: Options, *, by_completer: bool = False) -> None:
        self._call, self._options = call, options
        #: None before the first attempt.
        self._before: RequestState | None = None
        self.by_completer = by_completer
        #: Whether the value of the run is the stored response of another run.
        self.is_replayed = False
        self.request = None if by_completer else call.request
        # The worker of a request in the main thread has only this thread.
        waits = options.wait_seconds and threading.current_thread() is not threading.main_thread()
        self.wait_seconds = options.wait_seconds if waits else 0
        self.points = options.every_point()
        self.hides_errors = not options.store_body

    @property
    def name(self) -> str:
        return self._call.name

    # What a plain run asks

    def level(self) -> Isolation | None:
        return self._options.level()

    def other_databases(self, using: str) -> list[str]:
        return atomic_aliases(self._call.view, using)

    def check_outer_transaction(self, using: str) -> None:
        """Raise RuntimeError in the transaction of ATOMIC_REQUESTS. Django opened it around an
        unprotected view that has called this one. The protection would depend on that view, and
        retries in the process would be lost unnoticed."""
        match = self._call.request.resolver_match
        if using in atomic_aliases(match.func if match is not None else None):
            raise RuntimeError(
                f"The view {self.name} was entered inside the transaction of ATOMIC_REQUESTS."
                " Exclude the view that calls it: transaction.non_atomic_requests(view)."
            )

    # The call

    def bind(self, run: Run) -> AbstractContextManager[None]:
        self._before = self._before or RequestState(self._call)
        return ViewRun(self._call, self._options, run)

    def call(self) -> Outcome:
        try:
            return self._outcome(self._call.response())
        except CONFLICTS as refusal:
            raise RuntimeError(
                f"The view {self.name} raised {type(refusal).__name__} of another key. Handle it in"
                " the view."
            ) from refusal

    def outcome(self, value: HttpResponseBase) -> Outcome:
        return self._outcome(self._call.rendered(value))

    def outcome_of(self, error: Exception) -> Outcome | None:
        if (answer := responses.response_to(error, self._call)) is not None:
            return self._outcome(answer, error)
        return self.refusal_of(error)

    def refusal_of(self, error: Exception) -> Outcome | None:
        if isinstance(error, responses.HTTP_EXCEPTIONS):
            return Outcome(
                None, responses.status_of(error), is_stored=False, cause=error, is_raised=True
            )
        return None

    def _outcome(self, response: HttpResponseBase, cause: Exception | None = None) -> Outcome:
        is_stored = responses.is_stored(response)
        if is_stored and self.by_completer:
            is_stored = not responses.is_login_redirect(response, self._call.request)
        return Outcome(response, response.status_code, is_stored, keeps_writes(response), cause)

    # What is stored

    def require_storable(self, value: HttpResponseBase) -> None:
        try:
            storable = responses.is_storable(value) or responses.is_refusal(value)
        except AttributeError as error:
            raise TypeError(
                f"phase.set_response() got {type(value).__name__}, not a response."
            ) from error
        if not storable:
            raise ResponseNotCommitted(
                f"A response with status {value.status_code} is never stored. Return it outside the"
                " phase: the key is released, and a retry continues from the last recovery point."
            )

    def stored(self, value: HttpResponseBase) -> StoredResponse:
        parts = responses.stored_parts(value)
        if parts.body is None and type(value) is StreamingHttpResponse:
            _warn_of_stream(self.name)
        return parts

    def restored(self, key: ClaimedKey) -> HttpResponseBase:
        return responses.stored_response(key)

    def replayed(self, key: ClaimedKey) -> HttpResponseBase:
        self.is_replayed = True
        response = responses.stored_response(key)
        response[conf.get().REPLAYED_HEADER] = "true"
        return response

    def described(self, value: Any) -> str:
        return f"The view responded with {responses.described(value, withheld=self.hides_errors)}"

    # The state before the first attempt

    @property
    def is_committed(self) -> bool:
        return self._before is not None and self._before.committed

    def note_committed(self) -> None:
        if self._before is not None:
            self._before.note_committed()

    def restore(self) -> bool:
        return self._before is None or self._before.restore()

    def put_back(self) -> None:
        if self._before is not None:
            self._before.put_back()


@cache
def _warn_of_stream(view: str) -> None:
    """Log once for each view that work in a generator is not protected."""
    logger.warning(
        "The view %s streams its response. The generator runs after COMMIT, when the key is"
        " finished: if the client leaves, no retry continues it. Do all work before the view"
        " returns.",
        view,
    )
