"""The code blocks of the how-to guides, executed without changes."""

import re
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from django.test import Client
from pytest_django import Settings

from tests.factories import UserFactory
from tests.kit.printed import GUIDES, lead, versions
from tests.models import Account, Entry


def file_of(guide: str, path: str, version: int = -1) -> str:
    """Return the content of a file that a guide tells the reader to write, at the end or after an
    earlier step."""
    return versions((GUIDES / guide).read_text(), path)[version]


def blocks(guide: str, language: str) -> list[str]:
    """Return the code blocks of a guide."""
    return re.findall(rf"^```{language}\n(.*?)^```", (GUIDES / guide).read_text(), re.M | re.S)


#: Files of a guide that in-process tests replace with their own.
_REPLACED = ("settings.py", "models.py", "bank.py", "tests.py")


def _code(guide: str) -> list[str]:
    """Return the Python blocks of a guide, except those of the files in _REPLACED."""
    page = (GUIDES / guide).read_text()
    found = re.finditer(r"^```python\n(.*?)^```", page, re.M | re.S)
    files = ((lead(page, block.start()), block[1]) for block in found)
    return [block for file, block in files if not (file and file[2].endswith(_REPLACED))]


def _fails(**arguments: Any) -> None:
    raise ZeroDivisionError


def shop_modules(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """Return a function that creates the modules of the shop that the guides import, with the given
    contents."""

    def make(**modules: dict[str, Any]) -> SimpleNamespace:
        made = {
            name: ModuleType(f"shop.{name}")
            for name in ("models", "bank", "jobs", "views", *modules)
        }
        vars(made["models"]).update({"Order": Entry, "Account": Account})
        vars(made["jobs"]).update(dict.fromkeys(("send_receipt", "remind", "thank"), _fails))
        for name, contents in modules.items():
            vars(made[name]).update(contents)
        package = ModuleType("shop")
        vars(package).update(made)
        monkeypatch.setitem(sys.modules, "shop", package)
        for name, module in made.items():
            monkeypatch.setitem(sys.modules, f"shop.{name}", module)
        return SimpleNamespace(**made)

    make()
    return make


def serve_page(settings: Settings, guide: str) -> ModuleType:
    """Execute the Python blocks of a guide in order in one module, and serve their URLs."""
    return serve_code(settings, *_code(guide))


def serve_code(settings: Settings, *codes: str) -> ModuleType:
    """Execute pieces of code of the shop in order in one module, and serve their URLs."""
    module = ModuleType("example")
    # The monkeypatch of shop_modules() removes both.
    sys.modules["shop.views"] = sys.modules["shop"].views = module  # type: ignore[attr-defined]
    settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "JOB_MODULES": ["shop", "example", "tests"]}
    for code in codes:
        exec(compile(code, "example.py", "exec"), vars(module))
    if hasattr(module, "urlpatterns"):
        settings.ROOT_URLCONF = module
    return module


def serve_example(settings: Settings, monkeypatch: pytest.MonkeyPatch, guide: str) -> Client:
    """Serve the examples of a guide; return a client that is signed in."""
    shop_modules(monkeypatch)
    serve_page(settings, guide)
    client = Client()
    client.force_login(UserFactory())
    return client
