"""The environment of a stored key: the values that PREPARE_REQUEST sets before project code runs
for the key.

The completer and the reaper run no middleware. They run all project code for a key in this
environment.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass
from inspect import isasyncgen, isgenerator
from typing import Any, TypeVar

from django.utils import timezone

from idempotency import conf
from idempotency._async import FAILURES, awaited
from idempotency._boundary import boundary
from idempotency._engine import events
from idempotency._engine.claimed_key import ClaimedKey
from idempotency._engine.hung import watched_key
from idempotency._engine.outer_transactions import require_no_transaction, roll_back_unknown

logger = logging.getLogger("idempotency")

Result = TypeVar("Result")


@dataclass(slots=True, repr=False)
class Environment:
    """The request that an adapter has rebuilt, or the error that prevented this.

    After a ``failure`` no project code may run for the key, because the environment could be that
    of another tenant.
    """

    #: None for an operation, and if the request could not be rebuilt.
    request: Any = None
    #: Whether PREPARE_REQUEST has set the sender of the request.
    sender_set: bool = False
    failure: BaseException | None = None

    def required(self) -> Any:
        """Return the rebuilt request. Raises ``failure``."""
        if self.failure is not None:
            raise self.failure
        return self.request


Enter = Callable[[ExitStack, Environment, ClaimedKey], None]


def in_environment(key: ClaimedKey, enter: Enter, work: Callable[[Environment], Result]) -> Result:
    """Call ``work`` in the environment that ``enter`` makes, and return the result of ``work``. On
    return, the context variables of the environment are unset, its context manager is closed, and
    the connections are checked. An error of ``enter``, or a transaction that it leaves open,
    becomes the ``failure`` of the environment; an error at the end of the environment is logged."""
    return copy_context().run(_in_environment, key, enter, work)


def _in_environment(key: ClaimedKey, enter: Enter, work: Callable[[Environment], Result]) -> Result:
    environment, raised, results, using = Environment(), None, [], str(key._state.db)
    try:
        with (
            watched_key(key),
            boundary(),
            ExitStack() as stack,
            timezone.override(None),
        ):
            try:
                enter(stack, environment, key)
                require_no_transaction(using)
            except FAILURES as error:
                # The rollback would undo what is written for the key next.
                roll_back_unknown(using)
                environment.failure = error
            try:
                results.append(work(environment))
            except BaseException as error:
                # The context manager of PREPARE_REQUEST could suppress this exception.
                raised = error
    except FAILURES:
        text = "the context manager of PREPARE_REQUEST failed after key %s"
        logger.exception(text, key.key_hash, extra=events.about(key))
    if raised is not None:
        raise raised
    return results[0]


def prepare(stack: ExitStack, request: Any, key: ClaimedKey) -> None:
    """Call PREPARE_REQUEST. If it returns a context manager, enter the context manager."""
    if (named := conf.get().PREPARE_REQUEST) is None:
        return
    returned = awaited(conf.named(named)(request, key))
    if hasattr(type(returned), "__enter__"):
        stack.enter_context(returned)
    elif isgenerator(returned) or isasyncgen(returned) or hasattr(type(returned), "__aenter__"):
        raise TypeError(
            "IDEMPOTENCY['PREPARE_REQUEST'] must be a function that returns None, or a context"
            " manager for `with`: decorate a generator function with contextlib.contextmanager. It"
            f" returned {type(returned).__name__}."
        )
