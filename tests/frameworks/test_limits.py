"""The limits of time of a role, over all kinds of view."""

import pytest
from django.db import connection
from django.http import HttpRequest

from tests.frameworks.service import Service
from tests.frameworks.work import Reply, Work, create

LIMITS = ("lock_timeout", "idle_in_transaction_session_timeout")


@pytest.mark.postgres
@pytest.mark.styles(False, True)
def test_58_a_view_keeps_stricter_limits(service: Service) -> None:
    seen: list[str] = []

    def do(request: HttpRequest) -> Reply:
        with connection.cursor() as cursor:
            for name in LIMITS:
                cursor.execute(f"SHOW {name}")
                seen.append(cursor.fetchone()[0])
        return create(request)

    service.serve(Work(do))
    with connection.cursor() as cursor:
        for name in LIMITS:
            cursor.execute(f"SET {name} = '3s'")
    try:
        assert service.send().status_code == 201
    finally:
        connection.close()
    assert seen == ["3s", "3s"]
