"""AGENTS.md: each of its examples is executed, in the example project."""

from pathlib import Path

import pytest

from tests.kit.printed import ROOT, Project, Write, included

AGENTS = (ROOT / "AGENTS.md").read_text()
PROJECT = "[the example project](../example-project.md)"
#: What the file leaves to the project of its reader.
BANK = """def charge_card(amount, idempotency_key):
    return {"id": "ch_1"}
"""
URLS = """from django.urls import path

from shop.views import create_order, rename_order

urlpatterns = [path("orders/", create_order), path("orders/<int:pk>/", rename_order)]
"""


def test_the_file_is_short() -> None:
    assert len(AGENTS.splitlines()) <= 120


@pytest.mark.processes
def test_its_examples_survive(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.follow(included(PROJECT))
    project.write(Write("shop/bank.py", BANK, at_the_end=False))
    project.write(Write("shop/urls.py", URLS, at_the_end=False))
    project.follow(AGENTS)
    assert "OK" in project.run("python manage.py test shop --verbosity 0")
    assert "no issues" in project.run("python manage.py check")
