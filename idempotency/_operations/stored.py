"""The operation of a stored key, for the completer; see ``idempotency._engine.adapter``."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from django.conf import settings
from django.db import connections
from django.utils import translation

from idempotency._async import FAILURES
from idempotency._engine.adapter import Abandoned, RerunResult
from idempotency._engine.claimed_key import ClaimedKey
from idempotency._engine.fence import StoredResponse
from idempotency._engine.phased_run import PhasedRun
from idempotency._engine.run import run_claimed
from idempotency._environment import Environment, in_environment, prepare
from idempotency._operations.definition import Definition, find
from idempotency._operations.results import stored
from idempotency._operations.work import OperationWork
from idempotency._text import error_text
from idempotency.exceptions import InProgress, InterventionRequired, StuckCode


class OperationAdapter:
    """The adapter of operations."""

    def with_stored_work(self, key: ClaimedKey, use: Callable[["StoredOperation"], Any]) -> Any:
        return in_environment(
            key, _enter, lambda environment: use(StoredOperation(key, environment))
        )

    def answer(self, value: Any) -> StoredResponse:
        """Return what is stored of the answer of an operator: a JSON value, or a Rejected."""
        try:
            return stored(value, "the operation")
        except TypeError as error:
            raise ValueError(
                f"{error} The answer to the key of an operation is its result, a JSON value, or"
                " Rejected(code, message)."
            ) from None


def _enter(stack: ExitStack, environment: Environment, key: ClaimedKey) -> None:
    """Call PREPARE_REQUEST, without a request, in a project with several databases. It can set the
    shard of the key."""
    stack.enter_context(translation.override(settings.LANGUAGE_CODE))
    if len(list(connections)) > 1:
        prepare(stack, None, key)


class StoredOperation:
    """The operation of a stored key."""

    is_whole = True
    hides_errors = False

    def __init__(self, key: ClaimedKey, environment: Environment) -> None:
        self._key, self._environment = key, environment
        self._definition: Definition | None = find(key.request_path)

    def _arguments(self) -> bytes:
        return bytes(self._key.request_body or b"{}")

    def _obstacle(self) -> tuple[str, str] | None:
        """Return the stuck code and the reason if the running code cannot continue the key."""
        name, definition = self._key.request_path, self._definition
        if definition is None or not definition.steps.is_phased:
            return StuckCode.OPERATION_MISSING, (
                f"The running code has no operation {name!r} with a call or several transactions."
                " Define it in the module operations.py of an installed app. After the deploy, the"
                " completer continues."
            )
        if why := definition.misfit(json.loads(self._arguments())):
            return StuckCode.ARGUMENTS_CHANGED, (
                f"The stored arguments do not fit {name}{definition.steps.signature}: {why}. Deploy"
                " a default for each new parameter, or restore the removed parameters. After the"
                " deploy, the completer continues."
            )
        return None

    def declares(self, recovery_point: str) -> bool:
        definition = self._definition
        return self._obstacle() is None and (
            definition is not None and recovery_point in definition.steps.points
        )

    def run(self) -> RerunResult:
        if (failure := self._environment.failure) is not None:
            return RerunResult(error_text(failure), error=failure)
        if (obstacle := self._obstacle()) is not None:
            return RerunResult(f"The completer cannot run this: {obstacle[1]}", stuck=obstacle)
        definition: Any = self._definition
        work = OperationWork(definition, self._arguments(), by_completer=True)
        run = PhasedRun(self._key, work)
        try:
            run_claimed(run)
        except (InProgress, InterventionRequired) as refusal:
            return RerunResult(error_text(refusal), run)
        except FAILURES as error:
            return RerunResult(error_text(error), run, error=error)
        return RerunResult("The operation ended.", run)

    def has_on_abandon(self) -> bool:
        return False

    def require_on_abandon(self) -> bool:
        return False

    def abandon(self, key: ClaimedKey) -> Abandoned:
        raise RuntimeError("An operation has no on_abandon.")
