"""Loopback ports: free ones, and the port of the Stripe sandbox."""

import socket
from contextlib import suppress


def sandbox_port(port: int) -> int:
    """Return the default port of the Stripe sandbox for a demo on ``port``."""
    return port + 10_000 if port < 50_000 else port - 10_000


def port_is_free(port: int) -> bool:
    """Return whether the loopback port is free."""
    with suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


def free_port() -> int:
    """Return a free loopback port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
