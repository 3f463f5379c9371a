"""The events of a key's history. Each is an object with ``at``, ``event`` and ``detail``."""

from django.db.models import TextChoices
from django.utils.translation import gettext_lazy as _


class HistoryEvent(TextChoices):
    """The names of the events. The reference lists them, with their details. Pages show the
    label."""

    CLAIMED = "claimed", _("claimed")
    RECOVERY_POINT = "recovery point", _("recovery point")
    CALL_BEGUN = "call begun", _("call begun")
    FINISHED = "finished", _("finished")
    ERROR = "error", _("error")
    REFUSED = "refused", _("refused")
    STUCK = "stuck", _("stuck")
    #: A run of a loop made no progress for the time of two leases. ``detail`` is the place of its
    #: code.
    HUNG = "hung", _("hung")
    #: The lock of a run expired, and the run never released the key. ``at`` is the end of the lock;
    #: ``claimed_at``, which only this event has, is the start of the run.
    RUN_LOST = "run lost", _("run lost")
    LOCK_RELEASED = "lock released", _("lock released")
    HANDED_BACK = "handed back", _("handed back")
    ANSWERED = "answered", _("answered")
    ACKNOWLEDGED = "acknowledged", _("acknowledged")
    UNACKNOWLEDGED = "unacknowledged", _("unacknowledged")
