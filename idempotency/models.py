"""The tables. The state machine of a key is held by CHECK constraints, so that no code can break it.

Source: Brandur Leach, "Implementing Stripe-like Idempotency Keys in Postgres" (the schema of ``idempotency_keys`` and
``staged_jobs``), with what its users found missing: a scope, a fence, a fingerprint, a history.
"""

import hashlib
import hmac
import json
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import Any, ClassVar, Protocol
from urllib.parse import parse_qs

from django.conf import settings
from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now
from django.http import HttpResponseBase

from idempotency import conf
from idempotency.contexts import either_context
from idempotency.exceptions import DownstreamKeyExpired

#: The first and the last recovery point of every key.
STARTED = "started"
FINISHED = "finished"
#: The stuck code of a key that a deploy left behind. Code that knows its recovery point clears it.
UNKNOWN_RECOVERY_POINT = "unknown_recovery_point"
#: The stuck code of a key whose request is refused each time that the completer rebuilds it. A retry of the client clears it.
REFUSED_WHEN_REBUILT = "refused_when_rebuilt"
#: The stuck codes with which a retry of the client still runs.
OPEN_TO_RETRIES = (UNKNOWN_RECOVERY_POINT, REFUSED_WHEN_REBUILT)

_NOT_PHASED = (
    "No phased request works on this key: it was only read from the database, or its view is a plain one, whose row each "
    "attempt makes anew. Use request.idempotency_key inside a view decorated with @idempotent(recovery_points=[...])."
)


def random_seed() -> bytes:
    """Return the random bytes from which a key's downstream keys are derived."""
    return os.urandom(32)


def time_ordered_uuid() -> uuid.UUID:
    """Return a UUID version 7: ordered by creation, so that inserts stay at the end of the index. Source: RFC 9562, 5.7."""
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big")
    return uuid.UUID(int=value & ~(0xF << 76) & ~(0x3 << 62) | 0x7 << 76 | 0x2 << 62)


class Run(Protocol):
    """What a key is bound to while a request or the completer works on it (``idempotency.runs.PhasedRun``)."""

    def phases(self) -> Iterator[str]: ...

    def response(self) -> HttpResponseBase: ...


class IdempotencyKeyQuerySet(models.QuerySet["IdempotencyKey"]):
    """The states of a key, by name; the completer, the reaper and the admin all read these."""

    def finished(self) -> "IdempotencyKeyQuerySet":
        """Keys with a stored response."""
        return self.filter(finished_at__isnull=False)

    def unfinished(self) -> "IdempotencyKeyQuerySet":
        """Keys without a stored response, stuck ones included, refused ones not."""
        return self.filter(finished_at__isnull=True, refused=False)

    def refused(self) -> "IdempotencyKeyQuerySet":
        """Keys whose client was refused before anything was begun: only a retry of the client runs them."""
        return self.filter(finished_at__isnull=True, refused=True)

    def stuck(self) -> "IdempotencyKeyQuerySet":
        """Keys that wait for a person: given up on, and not acknowledged since."""
        unseen = Q(acknowledged_at__isnull=True) | Q(acknowledged_at__lt=F("stuck_at"))
        return self.unfinished().filter(unseen, stuck_at__isnull=False)

    def acknowledged(self) -> "IdempotencyKeyQuerySet":
        """Stuck keys that a person has taken off the list without finishing them."""
        return self.unfinished().filter(acknowledged_at__gte=F("stuck_at"))

    def in_flight(self) -> "IdempotencyKeyQuerySet":
        """Keys that a run holds at the moment."""
        return self.unfinished().filter(locked_at__gte=_ago(conf.get().LOCK_TIMEOUT_SECONDS))

    def unlocked(self) -> "IdempotencyKeyQuerySet":
        """Unfinished keys that no run holds: the lock is free or expired."""
        expired = Q(locked_at__lt=_ago(conf.get().LOCK_TIMEOUT_SECONDS))
        return self.unfinished().filter(Q(locked_at__isnull=True) | expired)

    def abandoned(self) -> "IdempotencyKeyQuerySet":
        """Keys that the completer takes: unlocked, old enough, idle long enough, due, and not given up on.

        One that is stuck only because of a deploy is among them: the code that runs now may know its recovery point.
        """
        limits = conf.get()
        return self.unlocked().filter(
            Q(stuck_at__isnull=True) | Q(stuck_code=UNKNOWN_RECOVERY_POINT),
            Q(next_run_at__isnull=True) | Q(next_run_at__lte=Now()),
            created_at__lt=_ago(limits.COMPLETER_MIN_AGE_SECONDS),
            last_run_at__lt=_ago(limits.COMPLETER_IDLE_SECONDS),
        )

    def expired(self, retention: timedelta | None = None) -> "IdempotencyKeyQuerySet":
        """Keys past their retention, counted from ``finished_at`` or ``refused_at``. Finished ones are new again on read."""
        cutoff = Now() - (timedelta(hours=conf.get().RETENTION_HOURS) if retention is None else retention)
        refused = Q(finished_at__isnull=True, refused=True, refused_at__lt=cutoff)
        # A key is created before it is finished or refused: the first condition is implied, and has an index.
        return self.filter(Q(finished_at__lt=cutoff) | refused, created_at__lt=cutoff)

    def overdue(self) -> "IdempotencyKeyQuerySet":
        """Unfinished keys past the retention that nobody has looked at yet.

        It counts from ``created_at``, or from ``handed_back_at``: whom a person gave back, the reaper must not undo.
        """
        cutoff = _ago(conf.get().RETENTION_HOURS * 3600)
        handed_back_before = Q(handed_back_at__isnull=True) | Q(handed_back_at__lt=cutoff)
        return self.unlocked().filter(handed_back_before, stuck_at__isnull=True, created_at__lt=cutoff)


def _ago(seconds: int) -> Any:
    return Now() - timedelta(seconds=seconds)


class IdempotencyKey(models.Model):
    """A request that runs once: its parameters, its lock, its recovery point, its stored response.

    All times are the database's clock. Rows are written by ``claims``, ``keys`` and ``interventions`` alone.
    """

    scope = models.CharField(max_length=200, help_text="Whose key it is: nobody sees another scope's keys.")
    idempotency_key = models.CharField(max_length=255, help_text="What the client sent.")
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        # A real constraint makes each claim wait for whoever holds the user's row FOR UPDATE, and blocks erasing the user.
        db_constraint=False,
        db_index=False,
        null=True,
        blank=True,
        on_delete=models.DO_NOTHING,
        related_name="+",
    )

    created_at = models.DateTimeField(db_default=Now())
    last_run_at = models.DateTimeField(db_default=Now(), help_text="The last claim.")
    locked_at = models.DateTimeField(null=True, blank=True, help_text="Since when a run holds the key; each phase renews it.")
    finished_at = models.DateTimeField(null=True, blank=True)
    stuck_at = models.DateTimeField(null=True, blank=True)
    acknowledged_at = models.DateTimeField(
        null=True, blank=True, help_text="When a person took the stuck key off the list; counts if it is not before stuck_at."
    )
    handed_back_at = models.DateTimeField(
        null=True, blank=True, help_text="When a person gave the key back to the completer; its retention counts from here."
    )

    claim_token = models.UUIDField(null=True, blank=True, help_text="The current claim: the fence.")
    attempts = models.PositiveIntegerField(default=0, help_text="Claims so far, by clients and by the completer.")
    # Equal to ``attempts``, not a mark of its own: code from before this column raises ``attempts`` alone, and what it has
    # begun is unknown. Such a key counts as touched, and as not refused.
    untouched_attempts = models.PositiveIntegerField(
        default=0, db_default=0, help_text="While it equals attempts, no attempt is known to have begun anything."
    )
    call_begun_at = models.DateTimeField(null=True, blank=True, help_text="When the last key.call() was entered.")
    refused_at = models.DateTimeField(
        null=True, blank=True, help_text="When the client was refused with a status that is never stored; each claim clears it."
    )
    refused = models.GeneratedField(
        expression=Q(refused_at__isnull=False, untouched_attempts=F("attempts")),  # type: ignore[arg-type]  # a Q is one
        output_field=models.BooleanField(),
        db_persist=True,
        help_text="Refused before any attempt had begun anything: only a retry of the client runs it.",
    )
    completer_attempts = models.PositiveIntegerField(default=0)
    next_run_at = models.DateTimeField(null=True, blank=True, help_text="Not before this will the completer run it again.")

    request_method = models.CharField(max_length=20)
    request_path = models.TextField(help_text="Path and query, percent-encoded.")
    request_body = models.BinaryField(null=True, blank=True, help_text="Null: the body was not kept.")
    request_content_type = models.TextField(blank=True, default="")
    request_headers = models.JSONField(default=dict, blank=True)
    remote_addr = models.CharField(max_length=45, blank=True, default="")
    request_fingerprint = models.CharField(max_length=80)

    seed = models.BinaryField(default=random_seed)
    recovery_point = models.CharField(max_length=50, default=STARTED)

    response_code = models.PositiveSmallIntegerField(null=True, blank=True)
    response_headers = models.JSONField(null=True, blank=True)
    response_body = models.BinaryField(null=True, blank=True, help_text="Null: the body was not kept.")

    stuck_code = models.CharField(max_length=50, blank=True, default="", help_text="Short and stable, for filters and alerts.")
    stuck_reason = models.TextField(blank=True, default="", help_text="For people.")
    last_error = models.TextField(blank=True, default="")
    history = models.JSONField(default=list, blank=True, help_text="The last 50 events, with their times.")

    objects: ClassVar[models.Manager["IdempotencyKey"]] = IdempotencyKeyQuerySet.as_manager()

    #: The run that works on this instance; None on an instance that was merely read.
    run: Run | None = None
    #: What writes down that a call under a derived key begins; None where no such call may be made.
    begin_call: Callable[[str], None] | None = None
    #: The token of the claim that this instance stands for. Not a field: refresh_from_db() must not adopt another claim's.
    fence: uuid.UUID | None = None
    #: Where the row was when it was last seen, on PostgreSQL (``ctid``).
    place: str | None = None
    #: When the row was created, on this process's monotonic clock; None on an instance that was merely read.
    born_monotonic: float | None = None

    class Meta:
        verbose_name = "idempotency key"
        permissions = [
            ("complete_idempotencykey", "Can have an idempotency key completed"),
            ("release_idempotencykey", "Can release the lock of an idempotency key"),
            ("answer_idempotencykey", "Can answer an idempotency key"),
            ("acknowledge_idempotencykey", "Can acknowledge a stuck idempotency key"),
        ]
        constraints = [
            models.UniqueConstraint(fields=["scope", "idempotency_key"], name="idempotency_key_unique"),
            models.CheckConstraint(
                condition=~Q(scope="") & ~Q(idempotency_key="") & ~Q(recovery_point=""), name="idempotency_key_not_empty"
            ),
            models.CheckConstraint(
                condition=Q(finished_at__isnull=False, recovery_point=FINISHED)
                | Q(finished_at__isnull=True) & ~Q(recovery_point=FINISHED),
                name="idempotency_key_finished_point",
            ),
            models.CheckConstraint(
                condition=Q(response_code__isnull=True, response_headers__isnull=True, response_body__isnull=True)
                | Q(response_code__range=(100, 599), finished_at__isnull=False),
                name="idempotency_key_response_when_finished",
            ),
            models.CheckConstraint(
                condition=Q(stuck_at__isnull=True, stuck_code="", stuck_reason="")
                | Q(stuck_at__isnull=False, finished_at__isnull=True) & ~Q(stuck_code="") & ~Q(stuck_reason=""),
                name="idempotency_key_stuck_reason",
            ),
            models.CheckConstraint(
                condition=Q(locked_at__isnull=True) | Q(claim_token__isnull=False), name="idempotency_key_locked_by_claim"
            ),
            models.CheckConstraint(
                condition=Q(untouched_attempts__lte=F("attempts")), name="idempotency_key_untouched_attempts"
            ),
        ]
        indexes = [
            # Neither an UPDATE of a phase nor that of a plain view touches an indexed column: they stay HOT.
            models.Index(fields=["created_at"], name="idempotency_key_created"),
            models.Index(
                fields=["created_at"], name="idempotency_key_unfinished", condition=Q(finished_at__isnull=True, refused=False)
            ),
        ]

    def __str__(self) -> str:
        return f"{self.request_method} {self.request_path} #{self.pk}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save a new row. Raises RuntimeError for a claimed key: its columns are written by fenced statements alone."""
        if self.fence is not None:
            raise RuntimeError("A claimed key is not saved by hand: that would bypass its fence. End a phase instead.")
        super().save(*args, **kwargs)

    def refresh_from_db(self, using: str | None = None, fields: Any = None, from_queryset: Any = None) -> None:
        """Read the row, or columns that were left out, where the key came from: a replica may lag, and another shard has
        another row with this number."""
        super().refresh_from_db(using or self._state.db, fields, from_queryset)

    @property
    def key_hash(self) -> str:
        """What log lines say instead of the key, which may be a secret of the client."""
        return hashlib.sha256(f"{len(self.scope)}:{self.scope}{self.idempotency_key}".encode()).hexdigest()[:12]

    @property
    def untouched(self) -> bool:
        """Whether no attempt has begun anything that outlives it: a phase, a ``foreign_call``, a ``key.call()``."""
        return self.recovery_point == STARTED and self.untouched_attempts == self.attempts

    @property
    def request_params(self) -> Any:
        """The stored body, decoded for people: JSON, the fields of a form, else text; None if it was not kept."""
        if self.request_body is None:
            return None
        text = bytes(self.request_body).decode("utf-8", "replace")
        if "json" in self.request_content_type:
            try:
                return json.loads(text)
            except (ValueError, RecursionError):
                return text
        if self.request_content_type.startswith("application/x-www-form-urlencoded"):
            return parse_qs(text, keep_blank_values=True)
        return text

    def derive(self, name: str, valid_seconds: int | None = None) -> str:
        """Return the key to pass to another system for the call ``name``: 64 hexadecimal digits.

        The same over all attempts of this request; unique over scopes, accounts and restored databases; never the
        client's own value. Nothing is read or written: make the call itself in ``key.call()``.

        Raises DownstreamKeyExpired when this key is older than ``valid_seconds``: the other system may have forgotten it.
        The decorator then marks this key stuck. Raises RuntimeError in a plain view: each attempt would get another one.
        """
        if self.born_monotonic is None:
            raise RuntimeError(_NOT_PHASED)
        if valid_seconds is not None and time.monotonic() - self.born_monotonic > valid_seconds:
            raise DownstreamKeyExpired(
                f"The key for {name!r} was valid for {valid_seconds} s after this request was created, and that is over: the "
                f"other system may have forgotten it, and calling again could do the work twice. Look there for what "
                f"happened, then answer this request from the admin."
            )
        return hmac.new(bytes(self.seed), name.encode(), hashlib.sha256).hexdigest()

    @either_context(holds_transaction=False)
    def call(self, name: str, valid_seconds: int | None = None) -> Iterator[str]:
        """Enter a block that makes the call ``name`` to another system, and give it the key to pass there.

        The key is that of ``derive()``. When the block begins, one fenced statement has committed that the request has begun
        something, and has renewed the lock; leaving the block writes nothing. A process that stands still inside the block for
        longer than the lock timeout may still make the call after the key was taken over.

        Raises what ``derive()`` raises; CallInDoubt beside a foreign call in doubt; LockLost when another claim has taken the
        key over, or the key is stuck; RuntimeError in a phase, in a transaction, and where no phased request works on the key.
        An async view enters it with ``async with``.
        """
        if self.begin_call is None:
            raise RuntimeError(_NOT_PHASED)
        downstream_key = self.derive(name, valid_seconds)
        self.begin_call(name)
        yield downstream_key

    def phases(self) -> Iterator[str]:
        """Yield the recovery point to go on from until the key is finished; see ``idempotency.runs``."""
        return self._bound().phases()

    async def aphases(self) -> AsyncIterator[str]:
        """Yield what ``phases()`` does, to an async view."""
        for recovery_point in self.phases():
            yield recovery_point

    def response(self) -> HttpResponseBase:
        """Return the response that a phase stored, of this run or of an earlier one; see ``idempotency.runs``."""
        return self._bound().response()

    def _bound(self) -> Run:
        if self.run is None:
            raise RuntimeError(_NOT_PHASED)
        return self.run


class StagedJob(models.Model):
    """A job that was inserted together with the work, and waits for the enqueuer to hand it to the broker.

    Its id is given at staging and becomes the broker's id of the job, so that a job handed over twice is known.
    """

    id = models.UUIDField(primary_key=True, default=time_ordered_uuid, editable=False)
    job_name = models.CharField(max_length=255, help_text="Dotted path of the function or name of the task.")
    job_args = models.JSONField(default=dict, blank=True, help_text="An object is keyword arguments, an array positional ones.")
    queue = models.CharField(max_length=100, default="default")
    run_at = models.DateTimeField(db_default=Now(), help_text="Not before this is it handed over.")
    created_at = models.DateTimeField(db_default=Now())
    attempts = models.PositiveIntegerField(default=0, help_text="Hand-overs that did not settle it.")
    failed_at = models.DateTimeField(null=True, blank=True, help_text="Given up on: a person must look.")
    last_error = models.TextField(blank=True, default="")
    # Django keeps it true; the database does not look. Under SERIALIZABLE that look would set phases of different keys, which
    # stage a job and finish, against each other.
    idempotency_key = models.ForeignKey(
        IdempotencyKey, null=True, blank=True, on_delete=models.SET_NULL, related_name="staged_jobs", db_constraint=False
    )

    class Meta:
        permissions = [
            ("retry_stagedjob", "Can hand a failed staged job over again"),
            ("discard_stagedjob", "Can discard a failed staged job"),
        ]
        constraints = [
            models.CheckConstraint(condition=~Q(job_name="") & ~Q(queue=""), name="idempotency_job_not_empty"),
        ]
        indexes = [
            models.Index(fields=["run_at"], name="idempotency_job_waiting", condition=Q(failed_at__isnull=True)),
            models.Index(fields=["failed_at"], name="idempotency_job_failed", condition=Q(failed_at__isnull=False)),
        ]

    def __str__(self) -> str:
        return f"{self.job_name} {self.id}"


class ForeignCall(models.Model):
    """A call to a service that is not idempotent: the intent is committed before it, the result after it."""

    key = models.ForeignKey(IdempotencyKey, on_delete=models.CASCADE, related_name="foreign_calls")
    name = models.CharField(max_length=100)
    token = models.UUIDField(help_text="The claim that wrote the intent: it alone may record the result.")
    started_at = models.DateTimeField(db_default=Now())
    recorded_at = models.DateTimeField(null=True, blank=True, help_text="Null: nobody knows whether the call took effect.")
    result = models.JSONField(null=True, blank=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["key", "name"], name="idempotency_call_unique")]

    def __str__(self) -> str:
        return f"{self.name} of key {self.key_id}"


class ProcessedMessage(models.Model):
    """A message, webhook or job that took effect; its second delivery finds this row and does nothing."""

    source = models.CharField(max_length=100)
    message_id = models.CharField(max_length=255)
    processed_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["source", "message_id"], name="idempotency_message_unique"),
            models.CheckConstraint(condition=~Q(source="") & ~Q(message_id=""), name="idempotency_message_not_empty"),
        ]
        indexes = [models.Index(fields=["processed_at"], name="idempotency_message_processed")]

    def __str__(self) -> str:
        return f"{self.source} {self.message_id}"


class ProcessHeartbeat(models.Model):
    """The last sign of life of a loop (enqueuer, completer, reaper) of one process; removed when it is told to stop."""

    name = models.CharField(max_length=50, help_text="The command, such as enqueue_jobs.")
    host = models.CharField(max_length=100)
    pid = models.PositiveIntegerField()
    beat_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [models.UniqueConstraint(fields=["name", "host", "pid"], name="idempotency_heartbeat_unique")]

    def __str__(self) -> str:
        return f"{self.name} on {self.host}, process {self.pid}"
