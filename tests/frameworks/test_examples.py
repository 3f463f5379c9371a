"""The examples of the how-to guides run as they stand there."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from pytest_django import Settings

from tests.kit.examples import blocks, serve_example
from tests.models import Entry


@pytest.fixture
def example(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, transactional_db: None
) -> Callable[[str], Client]:
    """Return a function that serves the first example of a guide, and returns a client that is
    signed in."""
    return partial(serve_example, settings, monkeypatch)


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
def test_example_takes_effect_once(
    example: Callable[[str], Client], guide: str, url: str, content_type: str | None
) -> None:
    client = example(guide)
    sent: dict[str, Any] = {"headers": {"Idempotency-Key": "key-1"}} | (
        {"content_type": content_type} if content_type else {}
    )
    first, second = (client.post(url, {"name": "one"}, **sent) for _ in range(2))
    assert (first.status_code, second.content, second["Idempotent-Replayed"]) == (
        201,
        first.content,
        "true",
    )
    assert Entry.objects.get().name == "one"


def test_example_of_a_form_takes_effect_once(
    example: Callable[[str], Client], settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "order.html").write_text(blocks("forms.md", "html")[0])
    settings.TEMPLATES = [{**settings.TEMPLATES[0], "DIRS": [tmp_path]}]
    client = example("forms.md")
    field = re.compile(r'name="idempotency_key" value="([^"]+)"')

    def key(response: Any) -> str:
        return field.search(response.content.decode())[1]  # type: ignore[index]

    refused = client.post(
        "/order/", {"name": "much too long", "idempotency_key": key(client.get("/order/"))}
    )
    assert refused.status_code == 422
    answers = [
        client.post("/order/", {"name": "short", "idempotency_key": key(refused)}) for _ in range(2)
    ]
    (target,) = {answer["Location"] for answer in answers}
    assert [answer.status_code for answer in answers] == [302, 302]
    assert str(Entry.objects.get(name="short").pk) in client.get(target).content.decode()
