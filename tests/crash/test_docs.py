"""The examples of README and docs that have a decorated view, as they stand there."""

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from django.test import Client
from django.urls import path
from pytest_django import Settings

from idempotency.testing import DoesNotSurvive, Downstream, assert_survives
from tests.factories import UserFactory
from tests.kit.examples import file_of, serve_example
from tests.models import Entry

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.processes]

ROOT = Path(__file__).parents[2]
Line = Callable[[str, str], None]
#: The rides of the README: an entry whose name is its charge.
RIDE = SimpleNamespace(
    objects=SimpleNamespace(
        create=lambda user, idempotency_key: Entry.objects.create(
            name="ride", idempotency_key=idempotency_key
        ),
        get=lambda idempotency_key: Entry.objects.get(idempotency_key=idempotency_key),
        filter=lambda pk: SimpleNamespace(
            update=lambda charge_id: Entry.objects.filter(pk=pk).update(name=charge_id)
        ),
    )
)
TRANSFER = SimpleNamespace(
    objects=SimpleNamespace(create=lambda amount, user: Entry.objects.create(name=amount))
)


@pytest.fixture
def example(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, transactional_db: None
) -> Callable[[str], Client]:
    """Return a function that serves the first example of a guide, and returns a client that is
    signed in."""
    return partial(serve_example, settings, monkeypatch)


@pytest.mark.parametrize("view", ["create_transfer", "create_ride"])
def test_an_example_of_the_readme_survives(view: str, settings: Settings, line: Line) -> None:
    bank = Downstream("bank", SimpleNamespace(id="ch_1"), key="idempotency_key")
    names: dict[str, Any] = {
        "__name__": "readme",
        "Ride": RIDE,
        "Transfer": TRANSFER,
        "charge_card": bank,
    }
    code = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    # The second example uses the imports of the first one.
    for block in code[: [f"def {view}(" in block for block in code].index(True) + 1]:
        exec(compile(block, "README.md", "exec"), names)
    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": [path("view/", names[view])]})
    client = Client()
    client.force_login(UserFactory())
    report = assert_survives(
        lambda key: client.post("/view/", {"amount": "5"}, headers={"Idempotency-Key": key})
    )
    line(f"README: {view}", f"passes: {report}")


@pytest.mark.parametrize(
    ("guide", "url", "content_type"),
    [
        ("django-rest-framework.md", "/generic/", "application/json"),
        ("django-rest-framework.md", "/class/", "application/json"),
        ("django-rest-framework.md", "/function/", "application/json"),
        ("django-ninja.md", "/api/orders", "application/json"),
        ("class-based-and-async-views.md", "/class/", None),
        ("class-based-and-async-views.md", "/dispatch/", None),
        ("class-based-and-async-views.md", "/async/", None),
        ("class-based-and-async-views.md", "/phases/", None),
    ],
)
def test_an_example_of_a_guide_survives(
    example: Callable[[str], Client], guide: str, url: str, content_type: str | None, line: Line
) -> None:
    client = example(guide)
    sent = {"content_type": content_type} if content_type else {}
    report = assert_survives(
        lambda key: client.post(url, {"name": "one"}, headers={"Idempotency-Key": key}, **sent)
    )
    line(f"{guide}: {url}", f"passes: {report}")


def test_the_example_of_a_form_survives(example: Callable[[str], Client], line: Line) -> None:
    client = example("forms.md")
    report = assert_survives(
        lambda key: client.post("/order/", {"name": "one", "idempotency_key": key}), races=False
    )
    line("forms.md: /order/", f"passes: {report}")


class Shop:
    """The shop of the guide to this kit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
        names = ("shop", "shop.bank", "shop.jobs", "shop.models", "shop.views")
        self.modules = {name: ModuleType(name) for name in names}
        for name, module in self.modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        self.modules["shop"].views = self.modules["shop.views"]  # type: ignore[attr-defined]
        self.modules["shop.models"].Order = Entry  # type: ignore[attr-defined]
        settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "JOB_MODULES": ["shop"]}
        self._execute("shop/bank.py", "shop.bank")
        self._execute("shop/jobs.py", "shop.jobs")
        settings.ROOT_URLCONF = self.modules["shop.views"]

    def open(self, change: tuple[str, str] = ("", "")) -> None:
        """Serve the view of the guide."""
        for file in ("shop/views.py", "shop/urls.py"):
            self._execute(file, "shop.views", change)

    def _execute(self, file: str, module: str, change: tuple[str, str] = ("", "")) -> None:
        code = file_of("test-your-views.md", file).replace(*change)
        exec(compile(code, file, "exec"), vars(self.modules[module]))


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> Shop:
    """Return a shop that is not open yet."""
    return Shop(monkeypatch, settings)


def with_pytest(admin_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test of the guide."""
    names: dict[str, Any] = {}
    exec(compile(file_of("test-your-views.md", "test_orders.py"), "test_orders.py", "exec"), names)
    names["test_an_order_survives"](admin_client, monkeypatch)


def test_the_guide_to_this_kit_runs_with_pytest(
    shop: Shop, admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.open()
    with_pytest(admin_client, monkeypatch)


def test_the_message_that_the_guide_shows_is_that_of_the_kit(
    shop: Shop, admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.open(("idempotency_key=call.key", 'idempotency_key=str(__import__("uuid").uuid4())'))
    with pytest.raises(DoesNotSurvive) as caught:
        with_pytest(admin_client, monkeypatch)
    (shown,) = re.findall(
        r"^```\n(The request.*?)\n```",
        (ROOT / "docs/how-to/test-your-views.md").read_text(),
        re.M | re.S,
    )
    assert str(caught.value).startswith(shown)
