"""The seed data: the demo's riders with cards at Stripe, and the admin."""

import pytest
from django.contrib.auth import authenticate
from django.core.management import CommandError, call_command
from django.test import Client

from rides_demo.models import User
from rides_demo.processes.ports import free_port
from rides_demo.sandbox.server import Sandbox
from tests.kit.rides import RIDE

pytestmark = pytest.mark.django_db


def book(token, key):
    headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": key}
    return Client().post("/rides", RIDE, "application/json", headers=headers).status_code


def seeded(settings, server):
    settings.STRIPE_API_BASE = server.url
    call_command("seed", verbosity=0)
    return dict(
        User.objects.exclude(stripe_customer_id=None).values_list("email", "stripe_customer_id")
    )


def test_riders_can_book_and_the_admin_can_sign_in(settings):
    with Sandbox() as server:
        riders = seeded(settings, server)

        assert set(riders) == {"jane@example.com", "joe@example.com", "max@example.com"}
        assert [book(token, "k") for token in ("demo-jane", "demo-joe", "demo-max")] == [
            201,
            402,
            201,
        ]
    assert authenticate(username="admin", password="admin").is_superuser
    assert authenticate(username="jane", password="") is None


def test_seeding_again_changes_nothing(settings):
    with Sandbox() as server:
        first = seeded(settings, server)

        assert seeded(settings, server) == first
        assert len(server.account.customers) == 3
    assert User.objects.count() == 4


def test_a_sandbox_that_was_started_anew_gets_its_customers_again(settings):
    with Sandbox() as server:
        seeded(settings, server)
    with Sandbox() as server:
        seeded(settings, server)

        assert book("demo-jane", "k") == 201


def test_without_stripe_the_message_says_where_it_was_looked_for(settings):
    settings.STRIPE_API_BASE = f"http://127.0.0.1:{free_port()}"

    with pytest.raises(CommandError, match=settings.STRIPE_API_BASE):
        call_command("seed")
