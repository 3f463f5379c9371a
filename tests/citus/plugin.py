"""Leaves out what the tests of the core ask of one server, and says why; ``tests.kit.tiers`` allows no other skip."""

from typing import Any

import pytest

from tests.kit import tiers

#: The name of a test, and what it needs.
NOT_ON_CITUS: dict[str, str] = {}
_REASON = "on Citus: "
tiers.ALLOWED_SKIPS = (*tiers.ALLOWED_SKIPS, _REASON)


def _databases(item: pytest.Item) -> Any:
    marker = item.get_closest_marker("django_db")
    return (marker.kwargs.get("databases") if marker else None) or ()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests with two databases, and those of NOT_ON_CITUS."""
    for item in items:
        reason = NOT_ON_CITUS.get(getattr(item, "originalname", item.name))
        if "shard_b" in _databases(item):
            reason = "the cluster has one database"
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"{_REASON}{reason}"))
