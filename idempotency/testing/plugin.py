"""The kit for pytest: ``pytest_plugins = ["idempotency.testing.plugin"]`` in the root ``conftest.py``."""

from collections.abc import Callable

import pytest

from idempotency.testing import Report, assert_survives


@pytest.fixture
def survives(transactional_db: None) -> Callable[..., Report]:
    """Return ``idempotency.testing.assert_survives``, with real transactions."""
    return assert_survives
