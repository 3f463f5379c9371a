"""Users of the admin, and the rows that its lists show them."""

from typing import Any

from django.contrib.auth.models import Permission
from django.test import Client

from tests.factories import UserFactory

KEYS = "/admin/idempotency/idempotencykey/"


def person(*permissions: str) -> Client:
    """Return a client that is signed in as staff with these permissions, or as a superuser if none
    are given."""
    user = UserFactory(is_staff=True, is_superuser=not permissions)
    user.user_permissions.add(*Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    client.user = user
    return client


def listed(client: Client, query: dict[str, str], page: str = KEYS) -> list[Any]:
    answer = client.get(page, query)
    assert answer.status_code == 200
    return [row.pk for row in answer.context["cl"].result_list]


def pks(*rows: Any) -> list[Any]:
    return [row.pk for row in rows]
