"""A call over a socket inside a transaction is reported, except calls of the project's services."""

import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse
from pytest_django import Settings

from idempotency.decorators import idempotent
from idempotency.testing import DoesNotSurvive, assert_survives, cures
from tests.kit.serving import Sender
from tests.kit.views import phased, plain, two_phases

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def port() -> Iterator[int]:
    """Return a port on which another system listens. It accepts connections and data without a
    program."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def call(port: int) -> None:
    """Send a request to another system."""
    with socket.create_connection(("localhost", port)) as other:
        other.sendall(b"POST /charges HTTP/1.1\r\n\r\n")


def calls(port: int) -> Callable[[HttpRequest], HttpResponse]:
    """Return the work of a view that calls another system."""

    def work(request: HttpRequest) -> HttpResponse:
        call(port)
        return HttpResponse(status=201)

    return work


def caught(view: Any, serve: Callable[..., None], sender: Sender) -> list[Any]:
    """Return the failures of a view, each of which must be a call inside a transaction."""
    serve(view=view)
    with pytest.raises(DoesNotSurvive) as error:
        assert_survives(lambda key: sender.send(key=key), races=False)
    assert {failure.cure for failure in error.value.failures} == {cures.CALL_IN_TRANSACTION}
    return error.value.failures


@pytest.mark.parametrize("kind", [plain, phased])
def test_a_call_inside_a_transaction_is_reported(
    kind: Any, port: int, serve: Callable[..., None], sender: Sender
) -> None:
    connects, sends = caught(kind(calls(port)), serve, sender)
    for failure in (connects, sends):
        assert f"127.0.0.1:{port}" in failure.course
        assert "tests/crash/test_sockets.py" in failure.course
        assert "in call" in failure.cause


def test_a_call_of_an_async_view_is_reported(
    port: int, serve: Callable[..., None], sender: Sender
) -> None:
    @idempotent
    async def view(request: HttpRequest) -> HttpResponse:
        call(port)
        return HttpResponse(status=201)

    assert caught(view, serve, sender)


def test_a_connection_that_is_open_already_is_reported(
    port: int, serve: Callable[..., None], sender: Sender
) -> None:
    with socket.create_connection(("127.0.0.1", port)) as pooled:

        @plain
        def view(request: HttpRequest) -> HttpResponse:
            pooled.sendall(b"POST /charges HTTP/1.1\r\n\r\n")
            return HttpResponse(status=201)

        (failure,) = caught(view, serve, sender)
    assert f"127.0.0.1:{port}" in failure.course


def test_a_call_between_two_phases_is_not_reported(
    port: int, serve: Callable[..., None], sender: Sender
) -> None:
    view = two_phases(lambda request: None, lambda request: HttpResponse(), call=lambda: call(port))
    serve(view=view)
    assert_survives(lambda key: sender.send(key=key), races=False)


REDIS = {"BACKEND": "django.core.cache.backends.redis.RedisCache"}
MEMCACHED = {"BACKEND": "django.core.cache.backends.memcached.PyMemcacheCache"}


@pytest.mark.parametrize(
    "named",
    [
        lambda port: {
            "CACHES": {"default": REDIS | {"LOCATION": f"redis://:secret@localhost:{port}/1"}}
        },
        lambda port: {
            "CACHES": {
                "default": REDIS | {"LOCATION": ["redis://localhost", f"redis://127.0.0.1:{port}"]}
            }
        },
        lambda port: {
            "CACHES": {"default": MEMCACHED | {"LOCATION": f"unix:/none.sock;127.0.0.1:{port}"}}
        },
        lambda port: {"RQ_QUEUES": {"default": {"HOST": "localhost", "PORT": str(port)}}},
        lambda port: {"RQ_QUEUES": {"default": {"URL": f"redis://localhost:{port}"}}},
        lambda port: {
            "CELERY_BROKER_URL": f"amqp://guest@unknown.invalid//;amqp://guest@localhost:{port}//"
        },
    ],
)
def test_a_service_of_the_settings_may_be_called_inside_a_transaction(
    named: Callable[[int], dict[str, Any]],
    port: int,
    serve: Callable[..., None],
    sender: Sender,
    settings: Settings,
) -> None:
    for name, value in named(port).items():
        setattr(settings, name, value)
    serve(view=plain(calls(port)))
    assert_survives(lambda key: sender.send(key=key), races=False)


def test_an_address_that_the_test_names_may_be_called(
    port: int, serve: Callable[..., None], sender: Sender
) -> None:
    serve(view=plain(calls(port)))
    assert_survives(lambda key: sender.send(key=key), races=False, ignore=[f"localhost:{port}"])


def test_an_error_of_a_socket_that_is_not_connected_is_the_same(
    serve: Callable[..., None], sender: Sender
) -> None:
    raised: list[OSError] = []

    @plain
    def view(request: HttpRequest) -> HttpResponse:
        with closing(socket.socket()) as other:
            try:
                other.send(b"hello")
            except OSError as error:
                raised.append(error)
        return HttpResponse(status=201)

    serve(view=view)
    assert_survives(lambda key: sender.send(key=key), races=False)
    assert {type(error) for error in raised} == {BrokenPipeError}
