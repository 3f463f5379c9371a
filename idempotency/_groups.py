"""Groups of staged jobs: the jobs of a group take effect one at a time, in the order of the commits
that staged them.

- ``stage_job`` gives a job the next position of its group. The row of the group stays locked until
  the transaction ends, so the positions are in the order of the commits.
- The enqueuer reads a job only if its group has no earlier job. No earlier one can be inserted, so
  this stays true: neither an old snapshot nor a second enqueuer can hand over two jobs of a group.
- A job of a group leaves the table after its effect is committed. See ``_hand_over``.
"""

from django.db import connections, models
from django.db.models import OuterRef, Q, Subquery
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from idempotency._records import StagedJob


class JobGroup(models.Model):
    """The last position in a group of staged jobs. The row is locked until the transaction that
    stages a job ends, so the positions are in the order of the commits."""

    name = models.CharField(_("name"), max_length=200, primary_key=True)
    position = models.PositiveBigIntegerField(_("last position"))
    used_at = models.DateTimeField(
        _("used at"), db_default=Now(), help_text=_("Time at which a job was staged last.")
    )

    class Meta:
        default_permissions = ()
        verbose_name = _("group of staged jobs")
        verbose_name_plural = _("groups of staged jobs")

    def __str__(self) -> str:
        return self.name


def _first_position() -> Subquery:
    # The order makes PostgreSQL use the index, also for a group that has half of the table.
    jobs = StagedJob.objects.filter(group=OuterRef("group")).order_by("group_position")
    return Subquery(jobs.values("group_position")[:1])


#: The condition of jobs whose group has an earlier job. Without a group nothing is looked up.
HELD = Q(group__isnull=False, group_position__gt=_first_position())
#: The condition of all other jobs.
IN_TURN = Q(group__isnull=True) | Q(group_position__lte=_first_position())


def next_position(group: str, *, using: str) -> int:
    """Lock the row of a group for this transaction, and return the next position."""
    connection = connections[using]
    table = connection.ops.quote_name(JobGroup._meta.db_table)
    # The default of used_at is the time of the statement.
    sql = (
        f"INSERT INTO {table} (name, position) VALUES (%s, 1) ON CONFLICT (name) DO UPDATE SET"  # noqa: S608
        f" position = {table}.position + 1, used_at = EXCLUDED.used_at RETURNING position"
    )
    with connection.cursor() as cursor:
        cursor.execute(sql, [group])
        (position,) = cursor.fetchone()
    return int(position)
