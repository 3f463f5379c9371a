"""The memory of the enqueuer, which a test must not leave to the next one."""

import pytest

from idempotency import _batch, _unwritten, enqueuer


@pytest.fixture(autouse=True)
def fresh_enqueuer() -> None:
    """Forget results of hand-overs that a test left unwritten, and the sizes of batches."""
    _unwritten._left.clear()
    enqueuer._sizes.clear()
    _batch.claim_sizes.clear()
