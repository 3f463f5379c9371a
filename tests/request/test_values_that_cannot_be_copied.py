"""A request may hold values that cannot be copied: locks, clients, open files. It runs, once in
each process."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib import messages
from django.core.files.uploadedfile import TemporaryUploadedFile
from django.db import OperationalError
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path
from ninja import NinjaAPI, Schema, Status
from ninja.decorators import decorate_view
from psycopg.errors import SerializationFailure
from pydantic import PrivateAttr
from pytest_django import Settings
from rest_framework.parsers import BaseParser, FileUploadParser
from rest_framework.permissions import BasePermission
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency.contrib.ninja import idempotent as idempotent_operation
from idempotency.decorators import idempotent
from tests.kit.serving import Sender, View
from tests.kit.views import both_kinds, create, plain
from tests.models import Account, Entry

Kind = Callable[..., View]
Serve = Callable[..., None]
Outer = Callable[[HttpRequest], None]


def everybody(request: HttpRequest) -> str:
    """Return one scope for all."""
    return "everybody"


def under(middleware: Outer, view: View) -> View:
    """Return the view inside a wrapper that changes its request, like a middleware."""

    def outer(request: HttpRequest) -> Any:
        middleware(request)
        return view(request)

    return outer


class Connected:
    """A client of another service: a copy raises its own error."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise NotImplementedError("connected")


def lines() -> Iterator[str]:
    """Yield a line."""
    yield "first"


UNCOPYABLE: list[Callable[[], Any]] = [threading.Lock, Connected, lines, Path(__file__).open]


@pytest.fixture(params=UNCOPYABLE, ids=["lock", "client", "generator", "file"])
def thing(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return something that cannot be copied."""
    made = request.param()
    yield made
    getattr(made, "close", lambda: None)()


def on_a_row(thing: Any) -> Outer:
    """Return a middleware that keeps the thing in a cache on a row."""

    def middleware(request: Any) -> None:
        request.tenant = Account(name="tenant")
        request.tenant.cache = {"thing": thing, "spent": 0}

    return middleware


def in_the_session(thing: Any) -> Outer:
    def middleware(request: Any) -> None:
        request.session["cache"] = thing
        request.session.modified = False

    return middleware


def in_a_message(thing: Any) -> Outer:
    def middleware(request: Any) -> None:
        messages.info(request, thing)

    return middleware


def among_loaded_rows(thing: Any) -> Outer:
    def middleware(request: Any) -> None:
        request.tenant = Account(name="tenant")
        request.tenant._state.fields_cache["thing"] = [thing]

    return middleware


@both_kinds
@pytest.mark.parametrize("place", [on_a_row, in_the_session, in_a_message, among_loaded_rows])
def test_a_view_runs_with_it(
    place: Callable[[Any], Outer], thing: Any, kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=under(place(thing), kind(create, scope=everybody)))
    first, second = sender.send(), sender.send()
    assert (first.status_code, second.status_code) == (201, 201)
    assert (second["Idempotent-Replayed"], second.content) == ("true", first.content)


@both_kinds
@pytest.mark.postgres
def test_a_serialization_failure_is_left_to_the_client(
    thing: Any, kind: Kind, serve: Serve, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    """The first attempt may have read the file, or have changed the value."""

    def spend(request: Any) -> HttpResponse:
        request.tenant.cache["spent"] += 10
        spent.append(request.tenant.cache["spent"])
        if len(spent) == 1:
            raise OperationalError from SerializationFailure()
        return HttpResponse(status=201)

    spent: list[int] = []
    serve(view=under(on_a_row(thing), kind(spend, scope=everybody)))
    caplog.set_level("INFO", "idempotency")
    refused = sender.send()
    assert "has values that cannot be copied, in the attributes cache" in caplog.text
    assert (refused.status_code, refused.json()["code"], refused["Retry-After"]) == (
        409,
        "conflict",
        "1",
    )
    assert (sender.send().status_code, spent) == (201, [10, 10])


def test_the_session_of_a_view_that_is_rolled_back_is_as_it_was(
    serve: Serve, sender: Sender
) -> None:
    seen = []

    def fail(request: HttpRequest) -> HttpResponse:
        request.session["cart"] = "chair"
        raise RuntimeError("out of luck")

    def outer(request: HttpRequest) -> Any:
        in_the_session(threading.Lock())(request)
        try:
            return plain(fail)(request)
        finally:
            seen.append(sorted(request.session.keys()))
            del request.session["cache"]

    serve(view=outer)
    assert sender.send().status_code == 500
    assert "cart" not in seen[0]


# Frameworks


class ReadsData(BasePermission):
    """Reads the body before the view does."""

    def has_permission(self, request: Any, view: Any) -> bool:
        return request.data is not None


class Streaming(BaseParser):
    """Parses lines as they are asked for."""

    media_type = "text/plain"

    def parse(self, stream: Any, *args: Any, **kwargs: Any) -> Any:
        return {"lines": lines(), "lock": threading.Lock()}


class Photo(FileUploadParser):
    """Takes the body for a file that does not fit into memory."""

    media_type = "text/plain"
    opened = list[TemporaryUploadedFile]()

    def parse(self, stream: Any, *args: Any, **kwargs: Any) -> Any:
        upload = TemporaryUploadedFile("a.txt", "text/plain", 0, None)
        upload.write(stream.read())
        upload.seek(0)
        self.opened.append(upload)
        return {"file": upload}


def read(request: HttpRequest) -> None:
    """Read the body, as a middleware that logs it does."""
    assert request.body


@pytest.mark.parametrize("parser", [Streaming, Photo])
def test_data_of_rest_framework(parser: type[BaseParser], serve: Serve, sender: Sender) -> None:
    class View(APIView):
        permission_classes = [ReadsData]
        parser_classes = [parser]

        @idempotent(scope=everybody)
        def post(self, request: Any) -> Response:
            name = (
                "".join(map(str, request.data.get("lines", ())))
                or request.data["file"].read().decode()
            )
            return Response({"made": Entry.objects.create(name=name).name}, status=201)

    serve(view=under(read, View.as_view()))
    responses = [sender.send(body="first", content_type="text/plain") for _ in range(2)]
    assert [response.status_code for response in responses] == [201, 201]
    assert responses[0].json() == {"made": "first"}
    assert Entry.objects.count() == 1
    for upload in Photo.opened:
        upload.close()


class Payment(Schema):
    """Parameters with a client of their own."""

    amount: int
    _client: Any = PrivateAttr(default_factory=Connected)


@pytest.mark.django_db(transaction=True)
def test_parameters_of_ninja(client: Client, settings: Settings) -> None:
    api = NinjaAPI(docs_url=None, openapi_url=None)

    @api.post("/pay", response={201: dict[str, Any]})
    @decorate_view(idempotent_operation(scope=everybody))
    def pay(request: HttpRequest, payment: Payment) -> Any:
        Entry.objects.create(name=str(payment.amount))
        return Status(201, {"amount": payment.amount})

    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": [path("", api.urls)]})
    send = {
        "data": {"amount": 5},
        "content_type": "application/json",
        "headers": {"Idempotency-Key": "key-1"},
    }
    assert [client.post("/pay", **send).json() for _ in range(2)] == [{"amount": 5}] * 2  # type: ignore[arg-type]
    assert Entry.objects.count() == 1
