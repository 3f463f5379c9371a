"""Users, rides, audit records and receipts; pilots and their payouts.

Source: Brandur Leach, "Implementing Stripe-like Idempotency Keys in Postgres" (the schema of Rocket
Rides), constraints and lengths included. Pilots and payouts are not in the article.
"""

import hashlib
from decimal import Decimal

from django.contrib.auth.models import AbstractUser, UserManager
from django.core.serializers.json import DjangoJSONEncoder
from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

#: The price of a ride in cents: $20.00.
RIDE_AMOUNT = 2000
RIDE_CURRENCY = "usd"
#: The pilot's part of the price in cents: $14.00.
PILOT_AMOUNT = 1400


class RiderManager(UserManager["User"]):
    """The manager of users, with a lookup by API token."""

    def with_token(self, token: str) -> "User":
        """Return the active user of ``token``; raise User.DoesNotExist if there is none."""
        return self.get(api_token_hash=User.hash_token(token), is_active=True)


class User(AbstractUser):
    """A rider, or a person who signs in to the admin."""

    email = models.EmailField(max_length=255, unique=True)
    #: Null for users who book no rides.
    stripe_customer_id = models.CharField(max_length=50, unique=True, null=True, blank=True)
    #: A token is random, so one round of SHA-256 is enough, and a leaked table contains no usable
    #: token. The hash also keeps arbitrary bytes of a client out of SQL.
    api_token_hash = models.CharField(
        max_length=64, unique=True, null=True, blank=True, editable=False
    )

    objects = RiderManager()

    class Meta:
        db_table = "users"
        constraints = [
            models.CheckConstraint(
                condition=~Q(email="") & ~Q(stripe_customer_id="") & ~Q(api_token_hash=""),
                name="users_not_empty",
            ),
            models.CheckConstraint(
                condition=Q(api_token_hash__isnull=True) | Q(stripe_customer_id__isnull=False),
                name="users_riders_can_pay",
            ),
        ]

    @staticmethod
    def hash_token(token: str) -> str:
        """Return the hash of ``token`` that the table stores."""
        return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def _coordinate() -> models.DecimalField:
    return models.DecimalField(max_digits=13, decimal_places=10)


def _within(limit: int, *names: str) -> Q:
    condition = Q()
    for name in names:
        condition &= Q(**{f"{name}__range": (Decimal(-limit), Decimal(limit))})
    return condition


class Ride(models.Model):
    """A jetpack ride, booked with an idempotency key or with a reference chosen by the client."""

    created_at = models.DateTimeField(db_default=Now())
    user = models.ForeignKey(User, on_delete=models.PROTECT, related_name="rides")
    idempotency_key = models.OneToOneField(
        "idempotency.IdempotencyKey",
        null=True,
        blank=True,
        on_delete=models.SET_NULL,
        related_name="ride",
    )
    client_ref = models.UUIDField(
        null=True, blank=True, help_text="The id that the client chose (PUT /rides/by-ref/)."
    )
    origin_lat = _coordinate()
    origin_lon = _coordinate()
    target_lat = _coordinate()
    target_lon = _coordinate()
    stripe_charge_id = models.CharField(max_length=50, unique=True, null=True, blank=True)
    paid_at = models.DateTimeField(
        null=True, blank=True, help_text="Set by the webhook for the charge."
    )
    picked_up_at = models.DateTimeField(
        null=True, blank=True, help_text="After this time the target cannot change."
    )

    class Meta:
        db_table = "rides"
        constraints = [
            models.UniqueConstraint(fields=["user", "client_ref"], name="rides_client_ref_unique"),
            models.CheckConstraint(
                condition=_within(90, "origin_lat", "target_lat"), name="rides_latitudes"
            ),
            models.CheckConstraint(
                condition=_within(180, "origin_lon", "target_lon"), name="rides_longitudes"
            ),
            models.CheckConstraint(
                condition=~Q(stripe_charge_id=""), name="rides_charge_not_empty"
            ),
        ]

    def __str__(self) -> str:
        return f"Ride {self.pk}"

    @property
    def origin(self) -> list[float]:
        """Latitude and longitude of the start."""
        return [float(self.origin_lat), float(self.origin_lon)]

    @property
    def target(self) -> list[float]:
        """Latitude and longitude of the end."""
        return [float(self.target_lat), float(self.target_lon)]


class AuditRecord(models.Model):
    """A record of a change, written in the transaction of the change."""

    created_at = models.DateTimeField(db_default=Now())
    action = models.CharField(max_length=50)
    data = models.JSONField(encoder=DjangoJSONEncoder)
    origin_ip = models.GenericIPAddressField()
    resource_type = models.CharField(max_length=50)
    resource_id = models.BigIntegerField()
    user = models.ForeignKey(User, on_delete=models.PROTECT, related_name="audit_records")

    class Meta:
        db_table = "audit_records"

    def __str__(self) -> str:
        return f"{self.action} {self.resource_type} {self.resource_id}"


class Receipt(models.Model):
    """The receipt of a charged ride; a unique constraint allows one per ride."""

    created_at = models.DateTimeField(db_default=Now())
    ride = models.OneToOneField(Ride, on_delete=models.PROTECT, related_name="receipt")
    email = models.EmailField(max_length=255)

    class Meta:
        db_table = "receipts"

    def __str__(self) -> str:
        return f"Receipt of ride {self.ride_id}"


class Pilot(models.Model):
    """A pilot with an account at Stripe. The pilots of a service are fixed, and take its rides in
    turn."""

    name = models.CharField(max_length=50, unique=True)
    stripe_account_id = models.CharField(max_length=50, unique=True)

    class Meta:
        db_table = "pilots"

    def __str__(self) -> str:
        return self.name


class Payout(models.Model):
    """The earnings of a pilot on one day (UTC). They are paid as one transfer at Stripe."""

    created_at = models.DateTimeField(db_default=Now())
    pilot = models.ForeignKey(Pilot, on_delete=models.PROTECT, related_name="payouts")
    day = models.DateField()
    cents = models.PositiveIntegerField()
    stripe_transfer_id = models.CharField(max_length=50, unique=True, null=True, blank=True)

    class Meta:
        db_table = "payouts"
        constraints = [
            models.UniqueConstraint(fields=["pilot", "day"], name="payouts_one_a_day"),
            models.CheckConstraint(
                condition=Q(cents__gt=0) & ~Q(stripe_transfer_id=""), name="payouts_not_empty"
            ),
        ]

    def __str__(self) -> str:
        return f"Payout of {self.day} to pilot {self.pilot_id}"
