"""The states of a key, as conditions of the ORM; they compare times with the clock of the database.

Only this module defines them, but ``_engine/statements.py`` has the same conditions in SQL, for
claims and settlements.
"""

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.db import models
from django.db.models import Case, DurationField, ExpressionWrapper, F, IntegerField, Q, Value, When
from django.db.models.functions import Coalesce, Greatest, Now
from django.db.models.lookups import LessThanOrEqual
from django.utils.translation import gettext_lazy as _

from idempotency import conf
from idempotency.exceptions import WAITS_FOR_DEPLOY

if TYPE_CHECKING:
    from idempotency.models import IdempotencyKey  # noqa: F401 - a base class below names it


#: The first and the last recovery point of every key.
STARTED = "started"
FINISHED = "finished"
#: The scope of an expired key whose value is used again begins with this prefix. No scope function
#: may return such a scope.
RETIRED_SCOPE = "expired:"
#: The longest wait between two runs of one key. With it, 25 attempts span three days: a long
#: weekend.
MAX_DELAY_SECONDS = 4 * 3600
#: A run of a loop counts as hung if it has not renewed its lock for so many leases.
HUNG_AFTER_LEASES = 2
#: The age of a lock, in leases, from which the completer claims its key. Until then, the process
#: that holds the lock may find that its run hangs, and mark the key. Otherwise the next completer
#: would hang too.
ABANDONED_AFTER_LEASES = 2.5


class KeyState(models.TextChoices):
    """The states of a key, in the order in which pages list them: states that need manual review
    come first. Pages show the label of a state."""

    STUCK = "stuck", _("stuck")
    ACKNOWLEDGED = "acknowledged", _("acknowledged")
    ABANDONED = "abandoned", _("abandoned")
    WAITING = "waiting for a retry", _("waiting for a retry")
    IN_FLIGHT = "in flight", _("in flight")
    REFUSED = "refused", _("refused")
    FINISHED = "finished", _("finished")


#: The condition of a partial index. It is part of each state except FINISHED and REFUSED.
UNFINISHED = Q(finished_at__isnull=True, refused_at__isnull=True)
OVER = {
    KeyState.FINISHED: Q(finished_at__isnull=False),
    KeyState.REFUSED: Q(finished_at__isnull=True, refused_at__isnull=False),
}
#: The condition of keys that the completer may run. It includes keys that are stuck because of a
#: deploy: new code may declare their recovery point.
NOT_GIVEN_UP = Q(stuck_at__isnull=True) | Q(stuck_code__in=WAITS_FOR_DEPLOY)


#: The CHECK constraints are the state machine of a key.
CONSTRAINTS = [
    models.UniqueConstraint(fields=["scope", "idempotency_key"], name="idempotency_key_unique"),
    models.CheckConstraint(
        condition=~Q(scope="") & ~Q(idempotency_key="") & ~Q(recovery_point=""),
        name="idempotency_key_not_empty",
    ),
    models.CheckConstraint(
        condition=Q(finished_at__isnull=False, recovery_point=FINISHED)
        | Q(finished_at__isnull=True) & ~Q(recovery_point=FINISHED),
        name="idempotency_key_finished_point",
    ),
    models.CheckConstraint(
        condition=Q(expires_at__isnull=True)
        | Q(finished_at__isnull=False)
        | Q(refused_at__isnull=False),
        name="idempotency_key_expires_when_over",
    ),
    models.CheckConstraint(
        condition=Q(
            response_code__isnull=True,
            response_headers__isnull=True,
            response_body__isnull=True,
        )
        | Q(response_code__range=(100, 599), finished_at__isnull=False),
        name="idempotency_key_response_when_finished",
    ),
    models.CheckConstraint(
        condition=Q(stuck_at__isnull=True, stuck_code="", stuck_reason="")
        | Q(stuck_at__isnull=False, finished_at__isnull=True)
        & ~Q(stuck_code="")
        & ~Q(stuck_reason=""),
        name="idempotency_key_stuck_reason",
    ),
    models.CheckConstraint(
        condition=Q(locked_until__isnull=True) | Q(claim_token__isnull=False),
        name="idempotency_key_locked_by_claim",
    ),
]


def before_now(seconds: int) -> Any:
    """Return the time of the database, ``seconds`` before now."""
    return Now() - timedelta(seconds=seconds)


def held() -> Q:
    """Return the condition that a run holds the key: it is locked, and the lock has not expired."""
    return Q(locked_until__gt=Now())


def due_at() -> Greatest:
    """Return the time from which the completer takes an unlocked key. At this time the key is old
    enough and idle for long enough, its delay is over, and no process that holds an expired lock
    can still mark the key as hung."""
    limits = conf.get()
    # SQLite multiplies no other kind of integer.
    lease = ExpressionWrapper(F("lease_seconds"), output_field=IntegerField())
    silent = ExpressionWrapper(
        lease * Value(timedelta(seconds=ABANDONED_AFTER_LEASES - 1)), output_field=DurationField()
    )
    return Greatest(
        F("created_at") + timedelta(seconds=limits.COMPLETER_MIN_AGE_SECONDS),
        F("last_run_at") + timedelta(seconds=limits.COMPLETER_IDLE_SECONDS),
        Coalesce("next_run_at", "created_at"),
        Coalesce(F("locked_until") + silent, "created_at"),
    )


def completer_delay_seconds(attempts: int) -> float:
    """Return the least time from a run of the completer, after so many earlier ones, to the
    next."""
    delay: float = min(conf.get().COMPLETER_IDLE_SECONDS * 2**attempts, MAX_DELAY_SECONDS)
    return delay


def _due() -> Q:
    # The second condition is implied, and has an index.
    return Q(
        LessThanOrEqual(due_at(), Now()),
        created_at__lte=before_now(conf.get().COMPLETER_MIN_AGE_SECONDS),
    )


def _unfinished_states() -> dict[KeyState, Q]:
    """Return the condition of each state of an unfinished key in order of precedence: the first
    that holds is its state."""
    return {
        KeyState.IN_FLIGHT: held(),
        KeyState.ACKNOWLEDGED: Q(acknowledged_at__gte=F("stuck_at")),
        KeyState.STUCK: Q(stuck_at__isnull=False),
        KeyState.ABANDONED: _due(),
        KeyState.WAITING: UNFINISHED,
    }


class IdempotencyKeyQuerySet(models.QuerySet["IdempotencyKey"]):
    """The states of a key, by name; the completer, the reaper, the admin and the measurements read
    these."""

    def with_state(self) -> "IdempotencyKeyQuerySet":
        """Annotate each key with its ``state``, a value of ``KeyState``."""
        whens = [
            When(condition, then=Value(state.value))
            for state, condition in (OVER | _unfinished_states()).items()
        ]
        return self.annotate(state=Case(*whens, output_field=models.CharField()))

    def in_state(self, state: KeyState) -> "IdempotencyKeyQuerySet":
        """Keys in this state, through the partial index if they are unfinished."""
        if state in OVER:
            return self.filter(OVER[state])
        keys = self.unfinished()
        for name, condition in _unfinished_states().items():
            if name == state:
                break
            keys = keys.exclude(condition)
        return keys.filter(condition)

    def finished(self) -> "IdempotencyKeyQuerySet":
        """Keys with a stored response."""
        return self.in_state(KeyState.FINISHED)

    def unfinished(self) -> "IdempotencyKeyQuerySet":
        """Keys without a stored response. Stuck keys count, refused keys do not."""
        return self.filter(UNFINISHED)

    def refused(self) -> "IdempotencyKeyQuerySet":
        """Untouched keys that only a retry of the client runs: the client was refused, or a part of
        the request is not stored."""
        return self.in_state(KeyState.REFUSED)

    def stuck(self) -> "IdempotencyKeyQuerySet":
        """Keys that wait for a person: marked as stuck, not acknowledged since, and held by no
        run."""
        return self.in_state(KeyState.STUCK)

    def acknowledged(self) -> "IdempotencyKeyQuerySet":
        """Stuck keys that a person has taken off the list without finishing them."""
        return self.in_state(KeyState.ACKNOWLEDGED)

    def in_flight(self) -> "IdempotencyKeyQuerySet":
        """Keys that a run holds at the moment."""
        return self.in_state(KeyState.IN_FLIGHT)

    def unlocked(self) -> "IdempotencyKeyQuerySet":
        """Unfinished keys that no run holds: the lock is free or expired."""
        return self.unfinished().exclude(held())

    def abandoned(self) -> "IdempotencyKeyQuerySet":
        """Keys that the completer takes: those in the state abandoned, and due ones that are stuck
        because of a deploy."""
        return self.unlocked().filter(NOT_GIVEN_UP, _due())

    def expired(self, *, late_seconds: int = 0) -> "IdempotencyKeyQuerySet":
        """Keys whose retention has been over for ``late_seconds``. A request that finds an expired
        key handles it as a new key."""
        return self.filter(expires_at__lt=before_now(late_seconds))

    def overdue(self) -> "IdempotencyKeyQuerySet":
        """Unfinished keys past the retention that are not marked as stuck.

        The retention counts from ``created_at``, or from ``handed_back_at`` if a person gave the
        key back to the completer.
        """
        cutoff = before_now(conf.get().RETENTION_HOURS * 3600)
        handed_back_before = Q(handed_back_at__isnull=True) | Q(handed_back_at__lt=cutoff)
        return self.unlocked().filter(
            handed_back_before, stuck_at__isnull=True, created_at__lt=cutoff
        )
