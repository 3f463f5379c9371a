"""People of the admin, and what its lists show them."""

from typing import Any

from django.contrib.auth.models import Permission
from django.test import Client

from tests.factories import UserFactory

KEYS = "/admin/idempotency/idempotencykey/"


def person(*permissions: str) -> Client:
    """Return a client signed in as staff with these permissions; a superuser without any."""
    user = UserFactory(is_staff=True, is_superuser=not permissions)
    user.user_permissions.add(*Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


def listed(client: Client, query: dict[str, str], page: str = KEYS) -> list[Any]:
    """Return the ids of the rows that a list shows."""
    answer = client.get(page, query)
    assert answer.status_code == 200
    return pks(*answer.context["cl"].result_list)


def pks(*rows: Any) -> list[Any]:
    return [row.pk for row in rows]
