"""The servers of the measurements: a PostgreSQL and a Redis in a temporary folder, stopped at the
end."""

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from redis import Redis as Client

from benchmarks.proxy import REDIS, proxy
from rides_demo.processes.embedded import Postgres, Redis, postgres_url, redis_url

#: The variable with the process id of PostgreSQL.
POSTMASTER = "BENCH_POSTMASTER"


@dataclass(frozen=True)
class Ground:
    """The two servers. Their URLs are in the environment of this process and of its child
    processes."""

    folder: Path
    postgres: Postgres
    redis: Redis


@contextmanager
def ground() -> Iterator[Ground]:
    """Start both servers, set their URLs in the environment, and stop the servers at the end."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        os.environ |= {
            **_urls(folder / "postgres", folder / "redis"),
            "DJANGO_SETTINGS_MODULE": "benchmarks.settings",
            "RIDES_RUN_FOLDER": name,
        }
        with (
            Postgres(folder / "postgres", max_connections=120) as postgres,
            Redis(folder / "redis") as redis,
        ):
            with Client.from_url(redis.url) as connection:
                # The usual setting. With "always", each response that a peer stores in Redis would
                # wait for the disk.
                connection.config_set("appendfsync", "everysec")
            os.environ[POSTMASTER] = str(postgres.pid)
            yield Ground(folder, postgres, redis)


@contextmanager
def far_away(servers: Ground) -> Iterator[None]:
    """Set the URLs in the environment to proxies of both servers, which delay each round trip;
    restore them at the end."""
    near = {name: os.environ[name] for name in _urls(servers.folder, servers.folder)}
    with (
        proxy(servers.folder, servers.postgres.sockets) as far,
        proxy(servers.folder, servers.redis.sockets, REDIS),
    ):
        os.environ |= _urls(far, far)
        try:
            yield
        finally:
            os.environ |= near


def server_nanoseconds() -> dict[int, int]:
    """Return the processor time of each PostgreSQL process by process id. The result is empty if
    the system is not Linux."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if parent == os.environ[POSTMASTER]:
                found[int(folder.name)] = int((folder / "schedstat").read_text().split()[0])
    return found


def _urls(postgres: Path, redis: Path) -> dict[str, str]:
    return {"DATABASE_URL": postgres_url(postgres), "REDIS_URL": redis_url(redis)}


def stop_in_order() -> None:
    """Let SIGTERM raise SystemExit, so that servers are stopped and folders removed, as after
    Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def migrate() -> None:
    """Set up Django in this process, and create the tables of the apps and of the work."""
    import logging

    import django

    django.setup()
    logging.disable(logging.CRITICAL)
    from django.core.management import call_command
    from django.db import connection

    from benchmarks.counts import create_table

    call_command("migrate", verbosity=0)
    create_table()
    connection.close()
