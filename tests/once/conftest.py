import pytest

from tests import operations


@pytest.fixture(autouse=True)
def bank(monkeypatch: pytest.MonkeyPatch) -> operations.Bank:
    """Give each test a new bank."""
    new = operations.Bank()
    monkeypatch.setattr(operations, "bank", new)
    return new
