"""Notice calls to downstream services: data on Python's sockets, and keys that are derived for
calls."""

import socket
import ssl
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

from idempotency._engine.claimed_key import ClaimedKey
from idempotency.testing.observing import Run, active_run
from idempotency.testing.services import Address


@contextmanager
def downstream_calls_noticed(permitted: Container[Address]) -> Iterator[None]:
    """Record the data that observed runs send over Python's sockets, and the keys that they derive.

    The ``permitted`` addresses may be called inside a transaction. psycopg does not use Python's
    sockets.
    """
    with ExitStack() as stack:
        for kind in (ssl.SSLSocket, socket.socket):  # TLS sockets have their own methods
            for name in ("send", "sendall"):
                noticing = _noticing_send(getattr(kind, name), permitted)
                stack.enter_context(patch.object(kind, name, noticing))
            for name in ("recv", "recv_into"):
                noticing = _noticing_receive(getattr(kind, name))
                stack.enter_context(patch.object(kind, name, noticing))
        connect = _noticing_connect(socket.socket.connect, permitted)
        stack.enter_context(patch.object(socket.socket, "connect", connect))
        derive = _noticing_derive(ClaimedKey.derive)
        stack.enter_context(patch.object(ClaimedKey, "derive", derive))
        yield


def _noticing_connect(
    original: Callable[..., Any], permitted: Container[Address]
) -> Callable[..., Any]:
    def connect(self: socket.socket, address: Any) -> Any:
        if run := _observing(self):
            _check(run, address, permitted)
        return original(self, address)

    return connect


def _noticing_send(
    original: Callable[..., Any], permitted: Container[Address]
) -> Callable[..., Any]:
    def send(self: socket.socket, data: Any, *args: Any) -> Any:
        if run := _observing(self):
            with suppress(OSError):  # send() itself raises the error of an unconnected socket.
                _check(run, self.getpeername(), permitted)
            run.sends(data)
        return original(self, data, *args)

    return send


def _noticing_receive(original: Callable[..., Any]) -> Callable[..., Any]:
    def receive(self: socket.socket, *args: Any, **kwargs: Any) -> Any:
        received = original(self, *args, **kwargs)
        if run := _observing(self):
            run.receives()
        return received

    return receive


def _noticing_derive(original: Callable[..., str]) -> Callable[..., str]:
    def derive(self: ClaimedKey, name: str, valid_seconds: int | None = None) -> str:
        derived = original(self, name, valid_seconds)
        if run := active_run():
            run.derived.add(derived)
            run.reach("after", "downstream call", f"key.derive({name!r}), which prepares one")
        return derived

    return derive


def _observing(sock: socket.socket) -> Run | None:
    """Return the run that uses this socket, if the socket leads to a downstream service."""
    return active_run() if sock.family in (socket.AF_INET, socket.AF_INET6) else None


def _check(run: Run, address: Any, permitted: Container[Address]) -> None:
    host, port = address[:2]
    if (host, port) not in permitted:
        run.calls((host, port))
