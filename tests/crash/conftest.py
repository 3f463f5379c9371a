"""A fake bank that honours keys, a fake text service that does not, and the line of the table that
a test proves."""

from collections.abc import Callable

import pytest
from django.db import DEFAULT_DB_ALIAS, connections

from idempotency.testing import Downstream
from idempotency.testing.plugin import survives  # noqa: F401 - a fixture
from tests.crash.views import systems
from tests.models import Account

#: The property of a test report that is a line of the table: what was tried, and what came of it.
LINE = "crash kit"


@pytest.fixture(autouse=True)
def _close_others() -> None:
    """Close the connections that tests of other databases left open: the kit opens all again that a
    death has cut."""
    for alias in connections:
        if alias != DEFAULT_DB_ALIAS:
            connections[alias].close()


@pytest.fixture
def texts(transactional_db: None) -> list[str]:
    """Connect the views to fakes, and return what the text service has sent."""
    Account.objects.create(name="till")
    sent: list[str] = []
    systems.charge = Downstream("bank", {"id": "ch_1"}, key="idempotency_key")
    systems.text = lambda text: sent.append(text) or "sent"
    return sent


@pytest.fixture
def line(record_property: Callable[[str, object], None]) -> Callable[[str, str], None]:
    """Return a function that puts a line into the table."""
    return lambda tried, result: record_property(LINE, (tried, result))
