"""ATOMIC_REQUESTS around a class in a URLconf that a middleware sets. ``tests/frameworks`` tests
the normal case."""

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.urls import path
from django.views import View
from pytest_django import Settings

from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from tests.frameworks import service
from tests.kit.serving import Sender
from tests.models import Entry


class Orders(View):
    """A class with a protected and an unprotected method."""

    aliases = ("default",)

    @idempotent
    def post(self, request: HttpRequest) -> HttpResponseBase:
        """Create an entry; in the first request, COMMIT refuses it."""
        nowhere = -1 if "first" in request.headers.get("Idempotency-Key", "") else None
        for alias in self.aliases:
            broken = nowhere if alias == self.aliases[-1] else None
            Entry.objects.using(alias).create(name="order", idempotency_key_id=broken)
        return HttpResponse(status=201)

    def get(self, request: HttpRequest) -> HttpResponseBase:
        """Return whether a transaction is open."""
        return HttpResponse(str(connection.in_atomic_block))


@pytest.fixture
def serve_elsewhere(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Return a function that serves a view at /view/ in the URLconf of the middleware, under
    ATOMIC_REQUESTS."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": []})
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{service.__name__}.by_host"]

    def put(view: Any) -> None:
        urls = type("Urls", (), {"urlpatterns": [path("view/", view)]})
        monkeypatch.setattr(service, "urls_of_the_host", urls, raising=False)

    return put


def test_the_methods_that_are_not_protected_keep_their_transaction(
    serve_elsewhere: Any, sender: Sender
) -> None:
    serve_elsewhere(Orders.as_view())
    assert sender.send().status_code == 201
    assert sender.client.get("/view/").content == b"True"
    assert sender.send()["Idempotent-Replayed"] == "true"


def calling(request: HttpRequest) -> HttpResponseBase:
    """Create an entry in the transaction of the request, then call a protected view."""
    Entry.objects.create(name="before")
    return Orders.as_view()(request)


def test_a_bound_method_has_the_mark_of_its_function(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, sender: Sender
) -> None:
    """It takes no attributes: the first request of the process, of any view, would fail."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)

    class Api:
        @idempotent
        def create(self, request: HttpRequest) -> HttpResponseBase:
            return HttpResponse(str(len(connection.savepoint_ids)))

    patterns = [path("view/", Api().create), path("other/", lambda request: HttpResponse())]
    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": patterns})
    assert sender.client.get("/other/").status_code == 200
    assert sender.send().content == b"0"


@pytest.mark.parametrize(
    "view", [calling, transaction.atomic(Orders.as_view())], ids=["calling", "atomic"]
)
def test_a_transaction_of_the_project_is_refused(
    view: Any, serve_elsewhere: Any, sender: Sender
) -> None:
    serve_elsewhere(view)
    assert sender.send().status_code == 500
    assert (Entry.objects.count(), IdempotencyKey.objects.count()) == (0, 0)


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
def test_the_key_commits_last_there_too(
    serve_elsewhere: Any, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections.settings["shard_b"], "ATOMIC_REQUESTS", True)
    monkeypatch.setattr(Orders, "aliases", ("default", "shard_b"))
    serve_elsewhere(Orders.as_view())
    assert sender.send(key="first").status_code == 500
    assert not Entry.objects.exists()
    assert not IdempotencyKey.objects.exists()
    assert [sender.send(key="other").status_code for _ in range(2)] == [201, 201]
    assert [Entry.objects.using(alias).count() for alias in ("default", "shard_b")] == [1, 1]
