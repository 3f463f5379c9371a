"""Create two tenants, send requests to the host of each, and print a line for each response."""

import os
from datetime import timedelta

import django

os.environ["DJANGO_SETTINGS_MODULE"] = "tests.citus.tenants_project.settings"
django.setup()

from django.core.management import call_command  # noqa: E402
from django.db import connection  # noqa: E402
from django.db.models.functions import Now  # noqa: E402
from django.test import Client  # noqa: E402
from django_tenants.utils import schema_context  # noqa: E402

from idempotency.models import IdempotencyKey  # noqa: E402
from tests.citus.tenants_project.customers.models import Customer, Domain  # noqa: E402

NAMES = ("shop_a", "shop_b")


def send(name: str, url: str, key: str, **headers: str) -> None:
    host = f"{name.replace('_', '-')}.example"
    client = Client(raise_request_exception=False)
    answer = client.post(
        url,
        {},
        content_type="application/json",
        headers={"Host": host, "Idempotency-Key": key, **headers},
    )
    body = answer.json() if answer.status_code == 201 else {}
    replayed = "replayed" * ("Idempotent-Replayed" in answer)
    print(name, url, answer.status_code, body.get("tenant"), body.get("order"), replayed)  # noqa: T201 - the test reads it


def main() -> None:
    """Create the tenants and send the requests; leave an expired key in the first tenant, an
    abandoned key in the second."""
    with connection.cursor() as cursor:
        for name in NAMES:
            cursor.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE")
        cursor.execute(
            "DROP TABLE IF EXISTS customers_domain, customers_customer, django_migrations"
        )
        cursor.execute("SET citus.enable_schema_based_sharding TO on")
    call_command("migrate_schemas", verbosity=0)
    for name in NAMES:
        customer = Customer(schema_name=name)
        customer.save(verbosity=0)
        Domain.objects.create(
            domain=f"{name.replace('_', '-')}.example", tenant=customer, is_primary=True
        )
    for url in ("/plain/", "/phased/"):
        for name in NAMES:
            for _ in range(2):
                send(name, url, f"key-of-{url.strip('/')}")
    send(NAMES[1], "/phased/", "abandoned", **{"X-Fail": "yes"})
    with schema_context(NAMES[0]):
        past = Now() - timedelta(hours=100)
        IdempotencyKey.objects.filter(idempotency_key="key-of-plain").update(
            created_at=past, finished_at=past, expires_at=past
        )
    with schema_context(NAMES[1]):
        past = Now() - timedelta(hours=1)
        IdempotencyKey.objects.filter(finished_at=None).update(created_at=past, last_run_at=past)


if __name__ == "__main__":
    main()
