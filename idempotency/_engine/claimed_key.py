"""The key of a run: its phases, its response, and its downstream calls."""

import hashlib
import hmac
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, overload

from django.db.models.base import ModelBase, model_unpickle

from idempotency._async import EitherContext
from idempotency._engine.call_handles import AtMostOnceCall, KeyedCall
from idempotency.exceptions import DownstreamKeyExpired
from idempotency.models import IdempotencyKey

if TYPE_CHECKING:  # ``response`` is the spelling of HTTP.
    from django.http import HttpResponseBase

NOT_PHASED = (
    "This key belongs to no phased run. It was only read from the database, or its run is plain,"
    " and each attempt of a plain run creates a new row. In a view with"
    " @idempotent(recovery_points=[...]), use request.idempotency_key."
)


class Phases(Protocol):
    """The run of a phased request, as its key calls it."""

    def phases(self) -> Iterator[str]: ...

    def result(self) -> Any: ...


class RecoveryPoints:
    """The recovery points of a run, for a ``for`` without ``async``."""

    __slots__ = ("_points",)

    def __init__(self, points: Iterator[str]) -> None:
        self._points = points

    def __iter__(self) -> Iterator[str]:
        return self._points

    def __aiter__(self) -> NoReturn:
        raise TypeError("In an async view, iterate over key.aphases(), not over key.phases().")


class CallBlocks(Protocol):
    """The calls of an attempt or of ``on_abandon``, as the key calls them."""

    def keyed(self, name: str, valid_seconds: int | None) -> EitherContext[KeyedCall]: ...

    def at_most_once(self, name: str) -> EitherContext[AtMostOnceCall]: ...


class _NoModelOfItsOwn(ModelBase):
    """The metaclass of a subclass of a model that only adds methods: it has no table and no app,
    and migrations do not see it."""

    def __new__(cls, name: str, bases: tuple[type, ...], attributes: dict[str, Any]) -> Any:
        return type.__new__(cls, name, bases, attributes)


class ClaimedKey(IdempotencyKey, metaclass=_NoModelOfItsOwn):
    """The key of a run: the row that its claim has read, with the methods that a protected view
    calls.

    It may be the value of a foreign key to ``IdempotencyKey``. A key that a QuerySet returns has
    none of these methods.
    """

    #: None outside of a phased request.
    run: Phases | None = None
    #: None where no call may be made.
    calls: CallBlocks | None = None
    #: The token of the claim that this instance represents, or that was current when
    #: ``rows.read()`` read the key. Not a field: refresh_from_db() must not adopt another claim's.
    fence: uuid.UUID | None = None
    #: The last known physical position of the row, on PostgreSQL.
    ctid: str | None = None
    #: The call that the claim has begun, until it is made.
    begun_call: str = ""
    #: When the row was created, on this process's monotonic clock; None in a plain run, whose
    #: attempts have different seeds.
    created_monotonic: float | None = None

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Raise RuntimeError: the columns of a claimed key are written by fenced statements
        alone."""
        raise RuntimeError(
            "A claimed key must not be saved: that would bypass its fence. End a phase instead."
        )

    def delete(self, *args: Any, **kwargs: Any) -> Any:
        """Raise RuntimeError: a retry of the client would run the request again."""
        raise RuntimeError(
            "A claimed key must not be deleted: a retry of its client would run the request again."
        )

    def __reduce__(self) -> Any:
        """Keep the class in a copy, which must not be saved either."""
        reduced: Any = super().__reduce__()
        return model_unpickle, (type(self),), reduced[2]

    def derive(self, name: str, valid_seconds: int | None = None) -> str:
        """Return the key to pass to a downstream service for the call ``name``: 64 hexadecimal
        digits.

        It is the same in all attempts of this request. No other request has it, even after the
        database was restored from a backup. It is never the key that the client sent. Nothing is
        read or written. Make the call itself in ``key.call()``.

        Raises DownstreamKeyExpired when this key is older than ``valid_seconds``, because the
        service may have forgotten the downstream key. The decorator then marks this key as stuck.
        Raises RuntimeError in a plain view, in which each attempt would get a different key.
        """
        if self.created_monotonic is None:
            raise RuntimeError(NOT_PHASED)
        if valid_seconds is not None and time.monotonic() - self.created_monotonic > valid_seconds:
            raise DownstreamKeyExpired(
                f"The key for {name!r} was valid for {valid_seconds} s after this request was"
                " created. The downstream service may have forgotten it, and another call could"
                " repeat the work. Check that service, then answer this request from the admin."
            )
        return hmac.new(bytes(self.seed), name.encode(), hashlib.sha256).hexdigest()

    @overload
    def call(
        self, name: str, valid_seconds: int | None = None, *, at_most_once: Literal[False] = False
    ) -> EitherContext[KeyedCall]: ...

    @overload
    def call(
        self, name: str, valid_seconds: None = None, *, at_most_once: Literal[True]
    ) -> EitherContext[AtMostOnceCall]: ...

    def call(
        self, name: str, valid_seconds: int | None = None, *, at_most_once: bool = False
    ) -> EitherContext[KeyedCall] | EitherContext[AtMostOnceCall]:
        """Open a block for the call ``name`` to a downstream service: ``with key.call(name) as
        call:``. An async view uses ``async with``.

        The attribute ``call.key`` is the key to pass to the service. It is the value of
        ``derive(name)``.

        When the block begins, one fenced statement records that the request has begun a call, and
        renews the lock. The statement is committed before the block runs. If the process is
        suspended inside the block for longer than the lock timeout, it may still make the call
        after another run has taken the key over.

        Set ``at_most_once=True`` if the service does not support idempotency keys. In the block, if
        ``call.due``, call the service and then ``call.record(result)``. The intent to call is
        committed before the block. When the block ends, also by an exception, the recorded result
        is committed, even if another claim has taken over the key. If a failover has lost the row
        of the intent, the end of the block inserts the row again. After a block without a recorded
        result, the next phase or call raises CallInDoubt, even if the view catches the exception of
        the block. After ``call.retryable()`` the next phase raises CallNotRecorded.

        Raises the errors of ``derive()``.
        Raises CallInDoubt if an at-most-once call of the key was begun before and has no recorded
        result. The key then becomes stuck.
        Raises LockLost if another claim has taken over the key, or the key is stuck.
        Raises RuntimeError in a phase, in a transaction, and outside a phased request.
        With ``at_most_once=True``:
        Raises CallNotRecorded if the block recorded nothing.
        Raises NotReplicated if the standbys do not confirm the recorded result
        (CONFIRM_REPLICATED).
        Raises RuntimeError if this run has already made a call of this name.
        Raises ValueError if ``valid_seconds`` is set, because no retry repeats the call.
        """
        if self.calls is None:
            raise RuntimeError(NOT_PHASED)
        if not at_most_once:
            return self.calls.keyed(name, valid_seconds)
        if valid_seconds is not None:
            raise ValueError(
                "No retry repeats a call with at_most_once=True, so valid_seconds has no effect."
                " Remove it."
            )
        return self.calls.at_most_once(name)

    def phases(self) -> Iterable[str]:
        """Yield the recovery point to continue from, until the key is finished."""
        return RecoveryPoints(self.bound_run().phases())

    async def aphases(self) -> AsyncIterator[str]:
        """Yield the same recovery points as ``phases()``, to an async view."""
        for recovery_point in self.phases():
            yield recovery_point

    def response(self) -> "HttpResponseBase":
        """Return the response that a phase of this run or of an earlier one has stored."""
        response: HttpResponseBase = self.bound_run().result()
        return response

    def bound_run(self) -> Phases:
        """Return the run of this instance. Raises RuntimeError if there is none."""
        if self.run is None:
            raise RuntimeError(NOT_PHASED)
        return self.run
