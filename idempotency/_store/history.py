"""The events of a key's history. Each is an object with ``at``, ``event`` and ``detail``."""

from enum import StrEnum


class HistoryEvent(StrEnum):
    """The names of the events. The reference lists them, with their details."""

    CLAIMED = "claimed"
    RECOVERY_POINT = "recovery point"
    CALL_BEGUN = "call begun"
    FINISHED = "finished"
    ERROR = "error"
    REFUSED = "refused"
    STUCK = "stuck"
    #: The lock of a run expired, and the run never released the key. ``at`` is the end of the lock; ``claimed_at``, which
    #: only this event has, is the start of the run.
    RUN_LOST = "run lost"
    LOCK_RELEASED = "lock released"
    HANDED_BACK = "handed back"
    ANSWERED = "answered"
    ACKNOWLEDGED = "acknowledged"
