"""Rows for tests."""

from datetime import timedelta

import factory
from django.utils import timezone
from factory.django import DjangoModelFactory

from idempotency.models import IdempotencyKey, StagedJob
from rides_demo.models import AuditRecord, Receipt, Ride, User


class UserFactory(DjangoModelFactory):
    """A rider; ``token="..."`` is what the client sends."""

    class Meta:
        model = User

    username = factory.Sequence(lambda n: f"rider{n}")
    email = factory.LazyAttribute(lambda user: f"{user.username}@example.com")
    stripe_customer_id = factory.Sequence(lambda n: f"cus_test{n}")
    api_token_hash = factory.LazyAttribute(lambda user: User.hash_token(user.token))

    class Params:
        token = factory.Sequence(lambda n: f"token-{n}")


class IdempotencyKeyFactory(DjangoModelFactory):
    """A key at ``started`` that nobody holds; ``finished=True`` gives it a stored 201."""

    class Meta:
        model = IdempotencyKey

    scope = factory.Sequence(lambda n: f"scope-{n}")
    idempotency_key = factory.Sequence(lambda n: f"key-{n}")
    request_method = "POST"
    request_path = "/rides"
    request_headers = factory.LazyFunction(lambda: {"HOST": "TESTSERVER"})
    request_body = b"{}"
    request_content_type = "application/json"
    request_fingerprint = factory.Sequence(lambda n: f"v1:{n:064x}")
    retention_hours = 72

    class Params:
        finished = factory.Trait(
            recovery_point="finished",
            finished_at=factory.LazyFunction(timezone.now),
            expires_at=factory.LazyAttribute(
                lambda key: key.finished_at + timedelta(hours=key.retention_hours)
            ),
            response_code=201,
            response_headers={"Content-Type": "application/json"},
            response_body=b"{}",
        )


class StagedJobFactory(DjangoModelFactory):
    """A job that is due."""

    class Meta:
        model = StagedJob

    job_name = "rides_demo.jobs.send_ride_receipt"
    job_args = factory.LazyFunction(dict)


class RideFactory(DjangoModelFactory):
    """A ride that was not charged yet."""

    class Meta:
        model = Ride

    user = factory.SubFactory(UserFactory)
    origin_lat, origin_lon = "0.0", "0.0"
    target_lat, target_lon = "1.0", "1.0"


class AuditRecordFactory(DjangoModelFactory):
    """What was recorded when a ride was created."""

    class Meta:
        model = AuditRecord

    action = "ride.created"
    data = factory.LazyFunction(dict)
    origin_ip = "127.0.0.1"
    resource_type = "ride"
    resource_id = factory.Sequence(int)
    user = factory.SubFactory(UserFactory)


class ReceiptFactory(DjangoModelFactory):
    """The receipt of a ride."""

    class Meta:
        model = Receipt

    ride = factory.SubFactory(RideFactory)
    email = factory.LazyAttribute(lambda receipt: receipt.ride.user.email)
