"""The tables beside that of the keys: at-most-once calls, staged jobs, messages that took effect,
heartbeats, numbers of requests."""

import os
import time
import uuid

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now
from django.utils.translation import gettext, gettext_noop
from django.utils.translation import gettext_lazy as _

from idempotency import conf

conf.require_app()

#: The name of staged jobs that call an operation. Their arguments name it.
STAGED_OPERATION = "idempotency.operations.run_staged"
#: The condition of messages of jobs whose on_commit hooks raised.
HOOKS_FAILED = ~Q(hook_error="")


def time_ordered_uuid() -> uuid.UUID:
    """Return a UUID version 7: ordered by creation, so that inserts stay at the end of the index.
    Source: RFC 9562, 5.7."""
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big")
    return uuid.UUID(int=value & ~(0xF << 76) & ~(0x3 << 62) | 0x7 << 76 | 0x2 << 62)


class DownstreamCall(models.Model):
    """An at-most-once call: the intent is committed before the call, the result after it."""

    key = models.ForeignKey(
        "idempotency.IdempotencyKey",
        verbose_name=_("key"),
        on_delete=models.CASCADE,
        related_name="downstream_calls",
    )
    name = models.CharField(_("name"), max_length=100)
    token = models.UUIDField(
        _("token"),
        help_text=_(
            "Token of the claim that began the call. Only this claim may record the result."
        ),
    )
    started_at = models.DateTimeField(_("started at"), db_default=Now())
    recorded_at = models.DateTimeField(
        _("recorded at"),
        null=True,
        help_text=_("Null: the result is unknown, and the call may have taken effect."),
    )
    result = models.JSONField(_("result"), null=True)

    class Meta:
        verbose_name = _("downstream call")
        verbose_name_plural = _("downstream calls")
        constraints = [
            models.UniqueConstraint(fields=["key", "name"], name="idempotency_call_unique")
        ]

    def __str__(self) -> str:
        return gettext("%(name)s of key %(key)s") % {"name": self.name, "key": self.key_id}


class StagedJob(models.Model):
    """A job that was inserted together with the work, and waits for the enqueuer to hand it to the
    broker.

    Its id is set when it is staged, and becomes the broker's id of the job. The receiver can thus
    detect a job that is handed over twice.
    """

    id = models.UUIDField(_("id"), primary_key=True, default=time_ordered_uuid, editable=False)
    job_name = models.CharField(
        _("job name"),
        max_length=255,
        help_text=_("Dotted path of the function or name of the task."),
    )
    job_args = models.JSONField(
        _("arguments"),
        default=dict,
        help_text=_("An object is keyword arguments, an array positional ones."),
    )
    queue = models.CharField(_("queue"), max_length=100, default="default")
    run_at = models.DateTimeField(
        _("due at"), db_default=Now(), help_text=_("The job is not handed over before this time.")
    )
    created_at = models.DateTimeField(_("created at"), db_default=Now())
    hand_overs = models.PositiveIntegerField(
        _("hand-overs"),
        default=0,
        help_text=_("Number of hand-overs since the job was staged or retried."),
    )
    refusals = models.PositiveIntegerField(
        _("refusals"), default=0, help_text=_("Number of refusals since the last hand-over.")
    )
    failed_at = models.DateTimeField(
        _("failed at"),
        null=True,
        help_text=_("Time at which the job failed for good. It needs manual review."),
    )
    last_error = models.TextField(_("last error"), default="")
    traceparent = models.CharField(
        _("traceparent"),
        max_length=55,
        null=True,
        help_text=_("The W3C trace context in which it was staged."),
    )
    group = models.CharField(
        _("group"),
        max_length=200,
        null=True,
        help_text=_(
            "The jobs of a group take effect one at a time, in the order of their commits."
        ),
    )
    group_position = models.PositiveBigIntegerField(_("position in the group"), null=True)
    handed_over_at = models.DateTimeField(
        _("handed over at"),
        null=True,
        help_text=_(
            "Time of the last hand-over, if the job is in a group and has not taken effect."
        ),
    )
    # Django's SET_NULL keeps this reference valid, without a constraint in the database. Under
    # SERIALIZABLE the check of a constraint would cause conflicts between phases of different keys
    # that stage a job and finish.
    idempotency_key = models.ForeignKey(
        "idempotency.IdempotencyKey",
        verbose_name=_("idempotency key"),
        null=True,
        on_delete=models.SET_NULL,
        related_name="staged_jobs",
        db_constraint=False,
    )

    class Meta:
        verbose_name = _("staged job")
        verbose_name_plural = _("staged jobs")
        permissions = [
            ("retry_stagedjob", gettext_noop("Can hand a failed staged job over again")),
            ("discard_stagedjob", gettext_noop("Can discard a failed staged job")),
        ]
        constraints = [
            models.CheckConstraint(
                condition=~Q(job_name="") & ~Q(queue=""), name="idempotency_job_not_empty"
            ),
            models.CheckConstraint(
                condition=Q(group__isnull=True, group_position__isnull=True)
                | Q(group__isnull=False, group_position__isnull=False) & ~Q(group=""),
                name="idempotency_job_position_in_group",
            ),
            # The enqueuer finds earlier jobs of a group by its index, which has no other jobs.
            models.UniqueConstraint(
                fields=["group", "group_position"],
                name="idempotency_job_group_unique",
                condition=Q(group__isnull=False),
            ),
        ]
        indexes = [
            models.Index(
                fields=["run_at"],
                name="idempotency_job_waiting",
                condition=Q(failed_at__isnull=True),
            ),
            models.Index(
                fields=["failed_at"],
                name="idempotency_job_failed",
                condition=Q(failed_at__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.label} {self.id}"

    @property
    def operation(self) -> str:
        """The name of the operation that the job calls; empty for other jobs."""
        calls_one = self.job_name == STAGED_OPERATION and isinstance(self.job_args, dict)
        return str(self.job_args.get("operation", "")) if calls_one else ""

    @property
    def label(self) -> str:
        """The name that lists and log lines show."""
        return f"operation {self.operation}" if self.operation else self.job_name


class ProcessedMessage(models.Model):
    """A message, webhook or job that took effect; its second delivery finds this row and does
    nothing."""

    source = models.CharField(_("source"), max_length=100)
    message_id = models.CharField(_("message id"), max_length=255)
    processed_at = models.DateTimeField(_("processed at"), db_default=Now())
    hook_error = models.TextField(
        _("hook error"),
        default="",
        db_default="",
        help_text=_("The errors of on_commit hooks of the job, which are not called again."),
    )

    class Meta:
        verbose_name = _("processed message")
        verbose_name_plural = _("processed messages")
        constraints = [
            models.UniqueConstraint(
                fields=["source", "message_id"], name="idempotency_message_unique"
            ),
            models.CheckConstraint(
                condition=~Q(source="") & ~Q(message_id=""), name="idempotency_message_not_empty"
            ),
        ]
        indexes = [
            models.Index(fields=["processed_at"], name="idempotency_message_processed"),
            models.Index(
                fields=["processed_at"], name="idempotency_message_hooks", condition=HOOKS_FAILED
            ),
        ]

    def __str__(self) -> str:
        return f"{self.source} {self.message_id}"


class ProcessHeartbeat(models.Model):
    """The last heartbeat of a loop in one process. It is deleted when the loop is stopped."""

    name = models.CharField(
        _("name"), max_length=50, help_text=_("The command, such as enqueue_jobs.")
    )
    host = models.CharField(_("host"), max_length=100)
    pid = models.PositiveIntegerField(_("process id"))
    beat_at = models.DateTimeField(_("last heartbeat"), db_default=Now())

    class Meta:
        verbose_name = _("process heartbeat")
        verbose_name_plural = _("process heartbeats")
        constraints = [
            models.UniqueConstraint(
                fields=["name", "host", "pid"], name="idempotency_heartbeat_unique"
            )
        ]

    def __str__(self) -> str:
        return f"{self.name} on {self.host}, process {self.pid}"


class Dashboard(ProcessHeartbeat):
    """The line of the dashboard on the first page of the admin. It has no rows of its own."""

    class Meta:
        proxy = True
        default_permissions = ()
        verbose_name = verbose_name_plural = _("dashboard")


class TrafficCount(models.Model):
    """The number of requests of one kind in one minute, of all processes; deleted after eight
    days."""

    minute = models.PositiveIntegerField(
        _("minute"), help_text=_("Minutes since 1970, by the clock of the process that counted.")
    )
    kind = models.CharField(
        _("kind"),
        max_length=20,
        help_text=_("The outcome of the counted requests, or their duration if they ran."),
    )
    count = models.PositiveBigIntegerField(_("count"))

    class Meta:
        verbose_name = _("traffic count")
        verbose_name_plural = _("traffic counts")
        constraints = [
            models.UniqueConstraint(fields=["minute", "kind"], name="idempotency_traffic_unique")
        ]

    def __str__(self) -> str:
        return f"{self.count} {self.kind} in minute {self.minute}"
