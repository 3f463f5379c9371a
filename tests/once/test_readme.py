"""The operation of the README, as it stands there."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from idempotency._operations import definition
from idempotency.exceptions import Unfinished
from idempotency.models import IdempotencyKey
from tests.models import Entry
from tests.operations import Bank

pytestmark = pytest.mark.django_db(transaction=True)
README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_operation_of_the_readme_pays_once(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    (section,) = re.findall(r"^## Protect a function\n.*?(?=^## )", README, re.M | re.S)
    assert len(section.strip().splitlines()) <= 25
    (definitions,) = re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)
    (call,) = re.findall(r"`(pay_out\.once\(.*?\))`", section)
    payout = Entry.objects.create(pk=17, name="not paid")

    def rows(pk: int) -> Any:
        found = Entry.objects.filter(pk=pk)
        return SimpleNamespace(update=lambda transfer_id: found.update(name=f"paid {transfer_id}"))

    names: dict[str, Any] = {
        "__name__": "readme",
        "Payout": SimpleNamespace(
            objects=SimpleNamespace(get=lambda pk: SimpleNamespace(cents=5), filter=rows)
        ),
        "bank": SimpleNamespace(
            transfer=lambda cents, idempotency_key: bank.transfer(idempotency_key, cents)
        ),
    }
    # As operations.py is imported before the apps are ready, in a project of its own.
    monkeypatch.setattr(definition, "_operations", {})
    monkeypatch.setattr("django.apps.apps.ready", False)
    exec(compile(definitions, "README.md", "exec"), names)
    monkeypatch.setattr("django.apps.apps.ready", True)
    monkeypatch.setattr(bank, "after", lambda: 1 / 0)
    with pytest.raises(Unfinished):
        exec(compile(call, "README.md", "exec"), names)
    monkeypatch.setattr(bank, "after", lambda: None)
    for _ in range(2):
        assert eval(compile(call, "README.md", "eval"), names) == {"transfer": 0}
    payout.refresh_from_db()
    assert payout.name == "paid 0"
    assert (len(bank.transfers), bank.requests) == (1, 2)
    assert IdempotencyKey.objects.get().request_body in (None, b"")
