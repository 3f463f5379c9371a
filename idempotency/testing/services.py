"""The addresses that a request may call inside a transaction: databases, caches and brokers."""

import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings

#: A host name or an IP address, and a port.
Address = tuple[str, int]
_PORTS = {"redis": 6379, "rediss": 6379, "amqp": 5672, "amqps": 5671, "mysql": 3306, "oracle": 1521}
_BROKERS = ("CELERY_BROKER_URL", "CELERY_RESULT_BACKEND", "BROKER_URL")


def permitted_addresses(ignored: Iterable[str]) -> set[Address]:
    """Return the addresses of the services in the settings, and of each "host:port" in ``ignored``.

    The addresses contain the host names and the IP addresses of these hosts.
    """
    named = {
        *_of_settings(),
        *(address for text in ignored if ":" in text for address in _of_url(text)),
    }
    return named | {address for host, port in named for address in _resolved(host, port)}


def _of_settings() -> Iterator[Address]:
    for database in settings.DATABASES.values():
        default = _PORTS.get(database["ENGINE"].rpartition(".")[2], 5432)
        yield database.get("HOST") or "localhost", int(database.get("PORT") or default)
    for queue in getattr(settings, "RQ_QUEUES", {}).values():
        if "HOST" in queue:
            yield queue["HOST"], int(queue.get("PORT") or _PORTS["redis"])
        yield from _of_url(queue.get("URL") or "")
    for cache in settings.CACHES.values():
        locations = cache.get("LOCATION") or ()
        for location in [locations] if isinstance(locations, str) else locations:
            yield from _of_url(location)
    for name in _BROKERS:
        yield from _of_url(getattr(settings, name, None) or "")


def _of_url(text: Any) -> Iterator[Address]:
    """Yield the address of each URL or "host:port"; commas or semicolons separate them."""
    for one in str(text).replace(",", ";").split(";"):
        with suppress(ValueError):  # The text is something else, such as the folder of a cache.
            url = urlsplit(one if "//" in one else f"//{one}")
            if url.hostname and (port := url.port or _PORTS.get(url.scheme)):
                yield url.hostname, port


def _resolved(host: str, port: int) -> set[Address]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # The host is unknown, or it is the folder of a unix socket.
        return set()
    return {address[:2] for *_, address in found}  # type: ignore[misc]
