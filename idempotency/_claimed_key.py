"""The part of a key that works inside a protected run only: its phases, its response, and keys for other systems."""

import hashlib
import hmac
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from django.db import models
from django.http import HttpResponseBase

from idempotency._async import either_context
from idempotency._hidden import Hidden
from idempotency.exceptions import DownstreamKeyExpired

_NOT_PHASED = (
    "This key belongs to no phased request. It was only read from the database, or its view is a plain view, in which each "
    "attempt creates a new row. Use request.idempotency_key inside a view decorated with @idempotent(recovery_points=[...])."
)


class ClaimedKey(models.Model):
    """The base class of ``IdempotencyKey``, with the claim that an instance represents. It has no column."""

    #: The column of ``IdempotencyKey``.
    seed: Any

    #: The ``KeyRun`` of this instance; None on an instance that was only read.
    run: Any = None
    #: A function that commits the start of a call with a derived key; None where no such call may be made.
    begin_call: Callable[[str], None] | None = None
    #: The token of the claim that this instance represents, or that was current when ``rows.read()`` read the key. Not a field:
    #: refresh_from_db() must not adopt another claim's.
    fence: uuid.UUID | None = None
    #: The last known place of the row, on PostgreSQL (``ctid``).
    place: str | None = None
    #: When the row was created, on this process's monotonic clock; None on an instance of a QuerySet.
    born_monotonic: float | None = None

    class Meta:
        abstract = True

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save a new row. Raises RuntimeError for a claimed key: its columns are written by fenced statements alone."""
        if self.fence is not None:
            raise RuntimeError("A claimed key is not saved by hand: that would bypass its fence. End a phase instead.")
        super().save(*args, **kwargs)

    def refresh_from_db(self, using: str | None = None, fields: Any = None, from_queryset: Any = None) -> None:
        """Read the row from the database of the key. A replica may lag, and another shard may have a different row with this
        id."""
        super().refresh_from_db(using or self._state.db, fields, from_queryset)

    def derive(self, name: str, valid_seconds: int | None = None) -> str:
        """Return the key to pass to a downstream service for the call ``name``: 64 hexadecimal digits.

        It is the same in all attempts of this request. No other request has it, even after the database was restored from a
        backup. It is never the key that the client sent. Nothing is read or written. Make the call itself in ``key.call()``.

        Raises DownstreamKeyExpired when this key is older than ``valid_seconds``, because the service may have forgotten the
        downstream key. The decorator then marks this key as stuck.
        Raises RuntimeError in a plain view, in which each attempt would get a different key.
        """
        if self.born_monotonic is None:
            raise RuntimeError(_NOT_PHASED)
        if valid_seconds is not None and time.monotonic() - self.born_monotonic > valid_seconds:
            raise DownstreamKeyExpired(
                f"The key for {name!r} was valid for {valid_seconds} s after this request was created. The downstream service "
                f"may have forgotten it, and another call could repeat the work. Check that service, then answer this request "
                f"from the admin."
            )
        return hmac.new(bytes(self.seed), name.encode(), hashlib.sha256).hexdigest()

    @either_context(holds_transaction=False)
    def call(self, name: str, valid_seconds: int | None = None) -> Iterator[str]:
        """Open a block for the call ``name`` to a downstream service, and yield the key that ``derive()`` returns for the call.

        When the block begins, one fenced statement records that the request has begun a call, and renews the lock. It is
        committed before the block runs. The end of the block writes nothing. If the process is suspended inside the block for
        longer than the lock timeout, it may still make the call after another run has taken the key over. An async view uses
        ``async with``.

        Raises the errors of ``derive()``.
        Raises CallInDoubt while a foreign call is in doubt.
        Raises LockLost when another claim has taken the key over, or the key is stuck.
        Raises RuntimeError in a phase, in a transaction, and outside a phased request.
        """
        if self.begin_call is None:
            raise RuntimeError(_NOT_PHASED)
        downstream_key = Hidden(self.derive(name, valid_seconds))
        self.begin_call(name)
        yield downstream_key.value

    def phases(self) -> Iterator[str]:
        """Yield the recovery point to continue from, until the key is finished."""
        return self.bound_run().phases()  # type: ignore[no-any-return]

    async def aphases(self) -> AsyncIterator[str]:
        """Yield the same recovery points as ``phases()``, to an async view."""
        for recovery_point in self.phases():
            yield recovery_point

    def response(self) -> HttpResponseBase:
        """Return the response that a phase of this run or of an earlier one has stored."""
        return self.bound_run().result()  # type: ignore[no-any-return]

    def bound_run(self) -> Any:
        """Return the run of this instance. Raises RuntimeError if there is none."""
        if self.run is None:
            raise RuntimeError(_NOT_PHASED)
        return self.run
