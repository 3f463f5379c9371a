"""The ground that all are measured on: a PostgreSQL and a Redis of its own, in a temporary folder, stopped at the end."""

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from redis import Redis as Client

from rides_demo.processes.embedded import Postgres, Redis, postgres_url, redis_url


@dataclass(frozen=True)
class Ground:
    """The two servers; the environment names them to this process and to those that it starts."""

    folder: Path
    postgres: Postgres
    redis: Redis


@contextmanager
def ground() -> Iterator[Ground]:
    """Start both, tell the environment, and stop them in the end."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        os.environ |= {
            "DATABASE_URL": postgres_url(folder / "postgres"),
            "REDIS_URL": redis_url(folder / "redis"),
            "DJANGO_SETTINGS_MODULE": "benchmarks.settings",
            "RIDES_RUN_FOLDER": name,
        }
        with Postgres(folder / "postgres", max_connections=120) as postgres, Redis(folder / "redis") as redis:
            with Client.from_url(redis.url) as connection:
                # As most run it; with "always" each response that a peer keeps in Redis would wait for the disk.
                connection.config_set("appendfsync", "everysec")
            yield Ground(folder, postgres, redis)


def stop_in_order() -> None:
    """Let SIGTERM end this process as Ctrl-C does: servers are stopped, folders removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def migrate() -> None:
    """Make Django ready in this process, and the tables of all."""
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
