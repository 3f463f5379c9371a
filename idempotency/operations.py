"""Operations: functions that run once per key, and return the same result to every caller.

An app defines its operations in its module ``operations.py``, which is imported at the start of the
project. Without ``call=`` and ``after=`` an operation is *plain*: one transaction contains the
claim, the writes and the result. With ``call=`` or ``after=`` it is *phased*: it may have several
transactions, and no transaction is open during a call of a downstream service. After a crash, the
completer continues a phased operation.
"""

import logging
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    NoReturn,
    ParamSpec,
    TypeVar,
    cast,
    overload,
)

from asgiref.sync import SyncToAsync, ThreadSensitiveContext
from django.contrib.auth import get_user_model
from django.db import connections

from idempotency._async import in_thread
from idempotency._hidden import Hidden
from idempotency._operations.call import MAX_SCOPE, refuse_key, run
from idempotency._operations.definition import Definition, Retention, find, register
from idempotency._operations.results import encoded
from idempotency._operations.steps import ServiceCall, Step, Steps
from idempotency._records import STAGED_OPERATION
from idempotency.exceptions import Rejected
from idempotency.jobs import refuse_operation, stage_job
from idempotency.models import StagedJob

__all__ = ["Operation", "Rejected", "at_most_once", "keyed", "operation", "step"]

logger = logging.getLogger("idempotency")

Given = ParamSpec("Given")
Result = TypeVar("Result")
Made = TypeVar("Made")


def keyed(
    function: Callable[Concatenate[str, Given], Made], *, valid_hours: float
) -> ServiceCall[Given, Made]:
    """Return a call of a downstream service that a later attempt repeats with the same key.

    The function gets the key of the call, then the arguments of the operation by name. No
    transaction is open. The value is never stored: after a crash the call is repeated, and the
    service must repeat its first answer. Set ``valid_hours`` an hour below the time for which the
    service remembers a key. After ``valid_hours`` no call is repeated, and the key becomes stuck.
    """
    if not isinstance(valid_hours, int | float) or not 0 < valid_hours <= 87_600:
        raise ValueError(f"valid_hours must be above 0, and at most 87,600, not {valid_hours!r}.")
    return ServiceCall(function, valid_hours)


def at_most_once(function: Callable[Concatenate[str, Given], Made]) -> ServiceCall[Given, Made]:
    """Return a call of a downstream service that does not support idempotency keys.

    The value of the function must be JSON. It is stored, and later attempts get it without a call.
    If the process dies during the call, or the function raises an exception other than Rejected,
    the call may have taken effect. The next attempt then marks the key as stuck.
    """
    return ServiceCall(function, None)


def step(
    *,
    call: ServiceCall[Given, Made],
    after: Step[Given] | Callable[Given, Rejected | None] | None = None,
) -> Callable[[Callable[Concatenate[Made, Given], Rejected | None]], Step[Given]]:
    """Make a step for the ``after=`` of a longer operation. A step consists of a call and of a
    transaction. The decorated function runs in the transaction, and gets the value of the call."""
    return lambda function: Step(function, call, after)


class Operation(Generic[Given, Result]):
    """A function with ``@operation``. It is called by ``once``, ``aonce`` or ``stage``."""

    def __init__(self, definition: Definition, function: Callable[..., Any]) -> None:
        update_wrapper(cast(Any, self), function)
        #: The last function, for its unit tests.
        self.function = function
        self._definition = definition
        self._scope, self._user_id = "", None

    def by(self, user: Any, *, scope: str = "") -> "Operation[Given, Result]":
        """Return this operation for keys that ``user`` chose: each user has separate keys. The
        user is stored with the key. The caller must check permissions before each call.

        The argument ``scope`` names another owner of the keys, such as a session or a tenant.
        Raises ValueError without ``scope`` if ``user`` is not a saved user of Django.
        """
        pk: Any = user.pk if isinstance(user, get_user_model()) else None  # Partners have ids too.
        if pk is None and not scope:
            raise ValueError(
                f"{user.__class__.__name__} is not a saved user. Require one, or pass scope= that"
                " names the owner, such as idempotency.scopes.user_or_session(request)."
            )
        bound: Operation[Given, Result] = object.__new__(type(self))
        vars(bound).update(vars(self))
        bound._user_id, bound._scope = pk, scope or f"user:{pk}"
        if len(bound._scope) > MAX_SCOPE:
            raise ValueError(f"A scope has at most {MAX_SCOPE} characters.")
        return bound

    def once(self, key: str, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """Run the operation, continue it, or return its stored result.

        The key has 1 to 255 characters, and belongs to this operation and the scope of ``by()``.
        The arguments must be JSON, and are compared as passed. In an open transaction, a plain
        operation is a savepoint: key, writes and result commit or roll back with the transaction.

        After an exception of a plain operation other than Rejected, nothing is stored. A phased
        operation that fails before any commit and downstream call runs again only by ``once``.
        Raises Rejected if the operation was refused, now or in an earlier call.
        Raises Unfinished if the operation failed after a commit or call. The completer continues.
        Raises InProgress while another run has the key.
        Raises KeyReused if the key was used with other arguments.
        Raises InterventionRequired if the key is stuck.
        Raises Unavailable if the operation cannot run or be confirmed now.
        Raises TypeError for arguments, and for results of a plain operation, that are not JSON.
        Raises ValueError for an invalid key.
        Raises RuntimeError for a phased operation in an open transaction.
        """
        hidden, named = Hidden(key), self._named(args, kwargs)
        del key, args, kwargs
        result: Result = self._run(hidden, named)
        return result

    async def aonce(self, key: str, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """Call ``once`` from async code. Outside of a request, it has a thread of its own."""
        call = partial(self._run, Hidden(key), self._named(args, kwargs))
        del key, args, kwargs
        if SyncToAsync.thread_sensitive_context.get(None) is not None:
            return cast(Result, await in_thread(call))
        async with ThreadSensitiveContext():
            return cast(Result, await in_thread(_without_leftovers, call))

    def stage(self, key: str, /, *args: Given.args, **kwargs: Given.kwargs) -> StagedJob:
        """Stage a job in the open transaction. After the COMMIT, a worker runs the job, which calls
        ``once``. The result or the refusal is stored in the key, for a later call of ``once``.

        Raises the errors of ``once`` for arguments and keys.
        Raises NoOpenTransaction outside a transaction.
        Raises JobNotAllowed if no module ``operations.py`` of an app defines or imports it.
        """
        refuse_key(key)
        refuse_operation(name := self._definition.name)
        named = self._named(args, kwargs)
        encoded(named.value, f"The arguments of {name}")
        job: Hidden[dict[str, Any]] = Hidden({"operation": name, "key": key})
        del key, args, kwargs
        job.value["arguments"] = named.value
        if self._scope:
            job.value |= {"scope": self._scope, "user_id": self._user_id and str(self._user_id)}
        return stage_job(STAGED_OPERATION, job.value, using=self._definition.alias_of_jobs)

    if not TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
            raise TypeError(
                f"Call {self.__name__}.once(key, ...), so that it takes effect once per key. A test"
                f" of the function alone may call {self.__name__}.function(...)."
            )

    def _run(self, key: Hidden[str], named: Hidden[dict[str, Any]]) -> Any:
        return run(self._definition, key, named, self._scope, self._user_id)

    def _named(self, args: Any, kwargs: Any) -> Hidden[dict[str, Any]]:
        """Return the arguments by name, as passed."""
        return Hidden(self._definition.steps.named(args, kwargs))


@overload
def operation(function: Callable[Given, Result | Rejected], /) -> Operation[Given, Result]: ...
@overload
def operation(
    name: str,
    /,
    *,
    call: ServiceCall[Given, Made],
    after: Step[Given] | Callable[Given, Rejected | None] | None = None,
    undo: Callable[Concatenate[Rejected, Given], None] | None = None,
    retention_hours: Retention = None,
    lease_seconds: int | None = None,
    wait_seconds: float = 0,
    using: str | None = None,
) -> Callable[
    [Callable[Concatenate[Made, Given], Result | Rejected]], Operation[Given, Result]
]: ...
@overload
def operation(
    name: str,
    /,
    *,
    after: Step[Given] | Callable[Given, Rejected | None],
    undo: Callable[Concatenate[Rejected, Given], None] | None = None,
    retention_hours: Retention = None,
    lease_seconds: int | None = None,
    wait_seconds: float = 0,
    using: str | None = None,
) -> Callable[[Callable[Given, Result | Rejected]], Operation[Given, Result]]: ...
@overload
def operation(
    name: str = "",
    /,
    *,
    retention_hours: Retention = None,
    lease_seconds: int | None = None,
    wait_seconds: float = 0,
    using: str | None = None,
) -> Callable[[Callable[Given, Result | Rejected]], Operation[Given, Result]]: ...
def operation(
    name: Any = "",
    /,
    *,
    call: Any = None,
    after: Any = None,
    undo: Any = None,
    **options: Any,
) -> Any:
    """Make an operation of a function, which runs in the last transaction and returns the result.

    - ``name``: stored in each key, and required with ``call`` or ``after``. Do not change it: the
      same work under another name would run again. The default is the path of the function.
    - ``call``: ``keyed(function, valid_hours=23)`` or ``at_most_once(function)``. The decorated
      function gets the value of the call as its first argument.
    - ``after``: a function of the arguments, which runs in the first transaction; or a ``step``,
      which runs before the decorated function. The name of either is stored as a recovery point.
    - ``undo(why, ...)``: a function that undoes the writes of earlier transactions. It runs in the
      transaction that stores a refusal. Without ``undo``, a refusal after a committed transaction
      makes the key stuck.
    - ``retention_hours``: the hours for which a key is kept after it is finished or refused, or
      "forever". Hours below RETENTION_HOURS have no effect. Phased operations must set this option.
      The arguments of a key that is kept forever are deleted when the key is finished.
    - ``lease_seconds``: the lock timeout; the default is LOCK_TIMEOUT_SECONDS.
    - ``wait_seconds``: the seconds for which a second call waits for the first before it raises
      InProgress. In an open transaction a call does not wait.
    - ``using``: the alias of the key's database; by default the alias that the router chooses.

    All functions have the same parameters, and get all arguments by name. The writes must go to the
    database of the key.
    """

    def decorate(function: Callable[..., Any]) -> Operation[Any, Any]:
        path = f"{function.__module__}.{function.__qualname__}"
        steps = Steps(Step(function, call, after), undo, given or path)
        if not given and (steps.is_phased or "<" in path or path.startswith("__main__.")):
            raise TypeError(
                f"The operation {path} needs a name, which is stored in its keys: write"
                f' @operation("app.{function.__name__}", ...).'
            )
        definition = Definition(name=given or path, steps=steps, path=path, **options)
        register(definition)
        return Operation(definition, function)

    given = "" if callable(name) else name
    return decorate(name) if callable(name) else decorate


def run_staged(
    operation: str,
    key: str,
    arguments: dict[str, Any],
    scope: str = "",
    user_id: Any = None,
    using: str | None = None,
) -> Any:
    """Run the operation of a staged job; ``using`` is the database of the job's row. A refusal is
    logged, and ends the job without an error.

    Raises the errors of ``Operation.once``, and JobNotAllowed for an unknown name.
    """
    given = Hidden(key), Hidden(arguments), scope, get_user_model()._meta.pk.to_python(user_id)
    del key, arguments
    refuse_operation(operation)
    definition: Any = find(operation)
    try:
        return run(definition, *given, using=definition.using or using, staged=True)
    except Rejected as why:
        logger.info("the staged operation %s was rejected: %s", operation, why.code)
        return None


def _without_leftovers(run: Callable[[], Any]) -> Any:
    """Run in a new thread, and close the connections that it opens there."""
    is_new = not connections.all(initialized_only=True)
    try:
        return run()
    finally:
        if is_new:
            connections.close_all()
