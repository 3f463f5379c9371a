"""The tables of bulk work, which ``_bulk_work`` writes."""

import uuid

from django.db import models
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from idempotency import conf

conf.require_app()


class BulkWork(models.Model):
    """An action of a person on many keys or jobs. Completers do it, and count the changed rows."""

    id = models.UUIDField(
        _("id"),
        primary_key=True,
        default=uuid.uuid4,
        editable=False,
        help_text=_("The form of the confirmation has it, so that a form sent twice begins once."),
    )
    action = models.CharField(_("action"), max_length=50)
    by = models.CharField(
        _("by"), max_length=100, help_text=_("The name of the person, for the history.")
    )
    user_id = models.CharField(
        _("user id"), max_length=255, help_text=_("The person, for the log of the admin.")
    )
    note = models.CharField(_("note"), max_length=150, default="")
    answer = models.JSONField(_("answer"), null=True, help_text=_("What the action Answer stores."))
    log_message = models.CharField(_("message in the log of the admin"), max_length=300)
    log_flag = models.PositiveSmallIntegerField(_("kind of the entries in the log of the admin"))
    created_at = models.DateTimeField(_("created at"), db_default=Now())
    worked_at = models.DateTimeField(
        _("worked at"), null=True, help_text=_("Time of the last progress.")
    )
    stopped_at = models.DateTimeField(
        _("stopped at"),
        null=True,
        help_text=_("Time at which a person or an error stopped it. Null: it is not stopped."),
    )
    finished_at = models.DateTimeField(_("finished at"), null=True)
    error = models.TextField(_("error"), default="", help_text=_("The error that stopped it."))
    expected = models.PositiveIntegerField(
        _("expected"), help_text=_("Number of rows that the confirmation counted.")
    )
    done = models.PositiveIntegerField(
        _("done"), default=0, help_text=_("Number of rows that were changed.")
    )
    unchanged = models.JSONField(
        _("unchanged"),
        default=dict,
        help_text=_("Numbers of rows that were not changed, by reason."),
    )

    class Meta:
        verbose_name = _("bulk work")
        verbose_name_plural = _("bulk works")
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.action} {self.id}"

    @property
    def visited(self) -> int:
        """The number of rows that were processed, changed or not."""
        return int(self.done + sum(self.unchanged.values()))


class BulkRow(models.Model):
    """A key or job that a bulk work has still to change, as it was at the confirmation."""

    work = models.ForeignKey(
        BulkWork, verbose_name=_("bulk work"), on_delete=models.CASCADE, related_name="rows"
    )
    row = models.CharField(_("row"), max_length=36, help_text=_("The id of the key or job."))
    seen = models.UUIDField(_("seen"), null=True, help_text=_("The claim token of the key."))
    at = models.CharField(_("at"), max_length=50, help_text=_("The recovery point of the key."))
    calls = models.TextField(_("calls"), help_text=_("The calls of the key."))

    class Meta:
        verbose_name = _("row of a bulk work")
        verbose_name_plural = _("rows of bulk works")
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.row} of {self.work_id}"
