"""The tables. CHECK constraints (``_states.CONSTRAINTS``) enforce the state machine of a key.

Source: Brandur Leach, "Implementing Stripe-like Idempotency Keys in Postgres" (the schema of
``idempotency_keys`` and ``staged_jobs``). This app adds a scope, a fence, a fingerprint and a
history.
"""

import hashlib
import json
import os
from typing import Any, ClassVar
from urllib.parse import parse_qs

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _
from django.utils.translation import gettext_noop

from idempotency import conf
from idempotency._bulk_records import BulkRow as BulkRow
from idempotency._bulk_records import BulkWork as BulkWork
from idempotency._groups import JobGroup as JobGroup
from idempotency._records import Dashboard as Dashboard
from idempotency._records import DownstreamCall as DownstreamCall
from idempotency._records import ProcessedMessage as ProcessedMessage
from idempotency._records import ProcessHeartbeat as ProcessHeartbeat
from idempotency._records import StagedJob as StagedJob
from idempotency._records import TrafficCount as TrafficCount
from idempotency._records import time_ordered_uuid as time_ordered_uuid
from idempotency._states import CONSTRAINTS, OVER, UNFINISHED, IdempotencyKeyQuerySet, KeyState
from idempotency._states import FINISHED as FINISHED
from idempotency._states import RETIRED_SCOPE as RETIRED_SCOPE
from idempotency._states import STARTED as STARTED


def random_seed() -> bytes:
    """Return the random bytes from which a key's downstream keys are derived."""
    return os.urandom(32)


def default_lease_seconds() -> int:
    """Return the lock timeout of the settings."""
    return conf.get().LOCK_TIMEOUT_SECONDS


class IdempotencyKey(models.Model):
    """A request that runs once: its parameters, its lock, its recovery point, its stored response.

    All times come from the clock of the database. The statements of ``idempotency._engine`` insert
    and update the rows, with two exceptions: a key is marked after a failover has lost the intent
    of a call, and the completer postpones a key with an unknown recovery point. The reaper deletes
    rows.
    """

    # PostgreSQL leaves the beginning of a row out of the WAL if an update does not change it. The
    # columns that no run changes come first, so that the WAL of a request contains its body once.
    scope = models.CharField(
        _("scope"),
        max_length=200,
        help_text=_(
            "The user, session or account that the key belongs to. Keys of other scopes are not"
            " visible."
        ),
    )
    idempotency_key = models.CharField(
        _("idempotency key"), max_length=255, help_text=_("The value that the caller sent.")
    )
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        verbose_name=_("user"),
        # A constraint would make each claim wait for a transaction that locks the user's row FOR
        # UPDATE. It would also prevent the deletion of the user.
        db_constraint=False,
        db_index=False,
        null=True,
        on_delete=models.DO_NOTHING,
        related_name="+",
    )
    created_at = models.DateTimeField(_("created at"), db_default=Now())
    request_method = models.CharField(_("request method"), max_length=20)
    request_path = models.TextField(
        _("request path"), help_text=_("Path and query, percent-encoded.")
    )
    request_content_type = models.TextField(_("request content type"), default="")
    remote_addr = models.CharField(_("remote address"), max_length=45, default="")
    request_fingerprint = models.CharField(_("request fingerprint"), max_length=80)
    request_headers = models.JSONField(_("request headers"), default=dict)
    request_body = models.BinaryField(
        _("request body"), null=True, help_text=_("Null: the body was not stored.")
    )
    traceparent = models.CharField(
        _("traceparent"),
        max_length=55,
        null=True,
        help_text=_("The W3C trace context of the request."),
    )
    seed = models.BinaryField(_("seed"), default=random_seed)
    retention_hours = models.PositiveIntegerField(
        _("retention in hours"),
        null=True,
        help_text=_(
            "The time for which the key is kept after it is finished or refused. Null: forever."
        ),
    )
    lease_seconds = models.PositiveIntegerField(
        _("lease in seconds"),
        default=default_lease_seconds,
        help_text=_(
            "Lock timeout: the time for which a run holds the key without renewing the lock."
        ),
    )

    acknowledged_at = models.DateTimeField(
        _("acknowledged at"),
        null=True,
        help_text=_(
            "Time at which a person acknowledged the stuck key. If the key becomes stuck again,"
            " this has no effect any more."
        ),
    )
    handed_back_at = models.DateTimeField(
        _("handed back at"),
        null=True,
        help_text=_(
            "Time at which a person handed the key back to the completer. The retention counts from"
            " here."
        ),
    )
    next_run_at = models.DateTimeField(
        _("next run at"),
        null=True,
        help_text=_("The completer does not run the key before this time."),
    )
    completer_attempts = models.PositiveIntegerField(_("completer attempts"), default=0)
    hangs = models.PositiveSmallIntegerField(
        _("hangs"),
        default=0,
        db_default=0,
        help_text=_("Number of runs that hung since the key was created or handed back."),
    )
    attempts = models.PositiveIntegerField(
        _("attempts"), default=0, help_text=_("Number of claims, by callers and by the completer.")
    )
    begun = models.BooleanField(
        _("begun"),
        default=False,
        db_default=False,
        help_text=_("Whether an attempt has committed a phase or begun a downstream call."),
    )
    refused_at = models.DateTimeField(
        _("refused at"),
        null=True,
        help_text=_(
            "Time at which the untouched key was refused. From then on, only a retry of the client"
            " runs the request."
        ),
    )
    call_begun_at = models.DateTimeField(
        _("call begun at"),
        null=True,
        help_text=_("Time at which the last key.call() began, or ended with call.retryable()."),
    )
    claim_token = models.UUIDField(
        _("claim token"),
        null=True,
        help_text=_("The random token of the current claim, which the fence compares."),
    )
    last_run_at = models.DateTimeField(
        _("last run at"), db_default=Now(), help_text=_("Time of the last claim.")
    )
    stuck_at = models.DateTimeField(_("stuck at"), null=True)
    stuck_code = models.CharField(
        _("stuck code"),
        max_length=50,
        default="",
        help_text=_("Short and stable code, for filters and alerts."),
    )
    stuck_reason = models.TextField(
        _("stuck reason"), default="", help_text=_("The reason in words.")
    )
    last_error = models.TextField(_("last error"), default="")
    finished_at = models.DateTimeField(_("finished at"), null=True)
    expires_at = models.DateTimeField(
        _("expires at"),
        null=True,
        help_text=_(
            "End of the retention. Null: the key is neither finished nor refused, or is kept"
            " forever."
        ),
    )
    response_code = models.PositiveSmallIntegerField(_("response code"), null=True)
    response_headers = models.JSONField(_("response headers"), null=True)
    response_body = models.BinaryField(
        _("response body"), null=True, help_text=_("Null: the body was not stored.")
    )
    locked_until = models.DateTimeField(
        _("locked until"),
        null=True,
        help_text=_("End of the current lock; each phase renews it. Null: not locked."),
    )
    recovery_point = models.CharField(_("recovery point"), max_length=50, default=STARTED)
    history = models.JSONField(
        _("history"), default=list, help_text=_("The last 50 events, with their times.")
    )

    objects: ClassVar[models.Manager["IdempotencyKey"]] = IdempotencyKeyQuerySet.as_manager()

    class Meta:
        verbose_name = _("idempotency key")
        verbose_name_plural = _("idempotency keys")
        permissions = [
            ("complete_idempotencykey", gettext_noop("Can have an idempotency key completed")),
            ("release_idempotencykey", gettext_noop("Can release the lock of an idempotency key")),
            ("answer_idempotencykey", gettext_noop("Can answer an idempotency key")),
            ("acknowledge_idempotencykey", gettext_noop("Can acknowledge a stuck idempotency key")),
            ("view_bodies", gettext_noop("Can view bodies, and export idempotency keys")),
        ]
        constraints = CONSTRAINTS
        indexes = [
            # Neither an UPDATE of a phase nor that of a plain view touches an indexed column: they
            # stay HOT. Therefore no index contains locked_until, not even in its condition.
            models.Index(fields=["created_at"], name="idempotency_key_created"),
            models.Index(
                fields=["created_at"], name="idempotency_key_unfinished", condition=UNFINISHED
            ),
            # Few keys are refused, so this index is small. Its condition has no columns that the
            # condition of the index above does not have.
            models.Index(
                fields=["created_at"],
                name="idempotency_key_refused",
                condition=OVER[KeyState.REFUSED],
            ),
            models.Index(
                fields=["expires_at"],
                name="idempotency_key_expires",
                condition=Q(expires_at__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        """Return the id alone: the log of the admin keeps this text when the key is deleted, and
        other pages show it to people who may not view keys."""
        return f"#{self.pk}"

    def refresh_from_db(
        self, using: str | None = None, fields: Any = None, from_queryset: Any = None
    ) -> None:
        """Read the row from the database of the key. A replica may lag, and another shard may have
        a different row with this id."""
        super().refresh_from_db(using or self._state.db, fields, from_queryset)

    @property
    def key_hash(self) -> str:
        """The hash that log lines contain instead of the key, which may be a secret of the
        client."""
        return hashlib.sha256(
            f"{len(self.scope)}:{self.scope}{self.idempotency_key}".encode()
        ).hexdigest()[:12]

    @property
    def untouched(self) -> bool:
        """True until an attempt commits a phase or begins a ``key.call()``."""
        return self.recovery_point == STARTED and not self.begun

    @property
    def request_params(self) -> Any:
        """The stored body, decoded for people: JSON, the fields of a form, else text; None if it
        was not kept."""
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
