"""The time limits of transactions: which limit of the project the app has found."""

import pytest
from django.db import connection

from idempotency._engine.limits import IDLE, LOCK, found_seconds
from idempotency._engine.transactions import durable_transaction

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.postgres]


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("0", 0), ("1500ms", 1.5), ("7s", 7), ("3min", 180), ("2h", 7200), ("2d", 172_800)],
)
def test_a_limit_of_the_session_is_found_in_each_unit(limit: str, seconds: float) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SET {IDLE} = '{limit}'; SET {LOCK} = '{limit}'")
    try:
        with durable_transaction(None, using="default", of_phase=True):
            pass
        assert [found_seconds(name, "default") for name in (IDLE, LOCK)] == [seconds, seconds]
    finally:
        connection.close()
