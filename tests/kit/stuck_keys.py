"""Keys that are stuck: a few of a factory, or many copies of one."""

from typing import Any
from uuid import uuid4

from idempotency.models import IdempotencyKey
from tests.factories import IdempotencyKeyFactory
from tests.kit.ageing import ago

#: Copies each key of the table, with these columns, so that there are so many.
MANY = """
    INSERT INTO idempotency_idempotencykey ({0}, idempotency_key, claim_token)
    SELECT {0}, 'bulk-' || n, gen_random_uuid()
    FROM idempotency_idempotencykey, generate_series(2, %s) AS n
"""


def stuck_keys(count: int, **changes: Any) -> list[IdempotencyKey]:
    """Create keys that a view gave up, unless ``changes`` say something else."""
    stuck = {"stuck_at": ago(minutes=1), "stuck_code": "view_gave_up", "stuck_reason": "Look."}
    return [IdempotencyKeyFactory(claim_token=uuid4(), **stuck | changes) for _ in range(count)]
