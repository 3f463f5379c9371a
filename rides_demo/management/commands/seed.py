"""Create the users of the demo and their Stripe customers, and its pilots."""

import hashlib

import stripe
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from rides_demo import payments
from rides_demo.models import Pilot, User
from rides_demo.sharding import shard_of_request
from rides_demo.tenants import shards

#: Name, token and the source of the card.
RIDERS = (
    ("jane", "demo-jane", "tok_visa"),
    ("joe", "demo-joe", "tok_chargeCustomerFail"),
    ("max", "demo-max", "tok_visa"),
)
PILOTS = ("amelia", "bessie", "charles", "orville")


class Command(BaseCommand):
    help = (
        "Create jane, joe and max with their Stripe customers, the pilots, and the superuser"
        " admin/admin. Can be repeated."
    )

    def handle(self, *args: object, **options: object) -> None:
        for shard in shards().values():
            # The router sends the riders of a tenant to the database of the tenant.
            shard_of_request.set(shard)
            for name, token, source in RIDERS:
                self._seed_rider(name, token, source)
            for name in PILOTS:
                # The sandbox makes transfers to each account whose id begins with "acct_".
                account = {"stripe_account_id": f"acct_{shard}_{name}"}
                Pilot.objects.get_or_create(name=name, defaults=account)
        shard_of_request.set("default")
        if not User.objects.filter(username="admin").exists():
            User.objects.create_superuser("admin", "admin@example.com", "admin")
        self.stdout.write("seed: ok")

    def _seed_rider(self, name: str, token: str, source: str) -> None:
        email = f"{name}@example.com"
        user = User.objects.filter(email=email).first() or User.objects.create_user(name, email)
        # The sandbox loses its customers at a restart, so each seed creates them again. The
        # idempotency key is derived from the user's row.
        if not user.stripe_customer_id or settings.STRIPE_API_BASE:
            row = f"seed {user.pk} {email} {user.date_joined.isoformat()}"
            try:
                user.stripe_customer_id = payments.create_customer(
                    email, source, hashlib.sha256(row.encode()).hexdigest()
                )
            except stripe.StripeError as error:
                where = settings.STRIPE_API_BASE or "Stripe"
                raise CommandError(
                    f"The customer of {email} could not be created at {where}: {error}"
                ) from error
        user.api_token_hash = User.hash_token(token)
        user.save(update_fields=["stripe_customer_id", "api_token_hash"])
