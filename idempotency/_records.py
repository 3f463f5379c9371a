"""The tables of what the processes record: messages that took effect, heartbeats, numbers of requests."""

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

#: The condition of messages of jobs whose on_commit hooks raised.
HOOKS_FAILED = ~Q(hook_error="")


class ProcessedMessage(models.Model):
    """A message, webhook or job that took effect; its second delivery finds this row and does nothing."""

    source = models.CharField(_("source"), max_length=100)
    message_id = models.CharField(_("message id"), max_length=255)
    processed_at = models.DateTimeField(_("processed at"), db_default=Now())
    hook_error = models.TextField(
        _("hook error"),
        blank=True,
        default="",
        db_default="",
        help_text=_("The errors of on_commit hooks of the job, which are not called again."),
    )

    class Meta:
        verbose_name = _("processed message")
        verbose_name_plural = _("processed messages")
        constraints = [
            models.UniqueConstraint(fields=["source", "message_id"], name="idempotency_message_unique"),
            models.CheckConstraint(condition=~Q(source="") & ~Q(message_id=""), name="idempotency_message_not_empty"),
        ]
        indexes = [
            models.Index(fields=["processed_at"], name="idempotency_message_processed"),
            models.Index(fields=["processed_at"], name="idempotency_message_hooks", condition=HOOKS_FAILED),
        ]

    def __str__(self) -> str:
        return f"{self.source} {self.message_id}"


class ProcessHeartbeat(models.Model):
    """The last heartbeat of a loop in one process. It is deleted when the loop is stopped."""

    name = models.CharField(_("name"), max_length=50, help_text=_("The command, such as enqueue_jobs."))
    host = models.CharField(_("host"), max_length=100)
    pid = models.PositiveIntegerField(_("process id"))
    beat_at = models.DateTimeField(_("last heartbeat"), db_default=Now())

    class Meta:
        verbose_name = _("process heartbeat")
        verbose_name_plural = _("process heartbeats")
        constraints = [models.UniqueConstraint(fields=["name", "host", "pid"], name="idempotency_heartbeat_unique")]

    def __str__(self) -> str:
        return f"{self.name} on {self.host}, process {self.pid}"


class TrafficCount(models.Model):
    """The number of requests of one kind in one minute, of all processes; deleted after eight days."""

    minute = models.PositiveIntegerField(
        _("minute"), help_text=_("Minutes since 1970, by the clock of the process that counted.")
    )
    kind = models.CharField(
        _("kind"), max_length=20, help_text=_("The outcome of the counted requests, or their duration if they ran.")
    )
    count = models.PositiveBigIntegerField(_("count"))

    class Meta:
        verbose_name = _("traffic count")
        verbose_name_plural = _("traffic counts")
        constraints = [models.UniqueConstraint(fields=["minute", "kind"], name="idempotency_traffic_unique")]

    def __str__(self) -> str:
        return f"{self.count} {self.kind} in minute {self.minute}"
