"""The services of a test run: one PostgreSQL for all of it, a Redis for each process that asks for one."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis
from django.conf import settings

from rides_demo.processes import ProcessError
from rides_demo.services import Postgres, Redis, free_port
from tests.serving import sender, serve  # noqa: F401 - fixtures

POSTGRES = pytest.StashKey[Postgres]()


def pytest_configure(config: pytest.Config) -> None:
    """Start PostgreSQL where the settings say it is; the workers of pytest-xdist find it running."""
    if hasattr(config, "workerinput") or "RIDES_TEST_POSTGRES" not in os.environ or config.option.collectonly:
        return
    _remove_what_killed_runs_left()
    server = config.stash[POSTGRES] = Postgres(settings.TEST_FOLDER / "postgres", max_connections=200)
    try:
        server.start()
    except ProcessError as error:
        raise pytest.UsageError(str(error)) from None


def _remove_what_killed_runs_left() -> None:
    for folder in settings.TEST_FOLDER.parent.glob("rides-tests-*"):
        pid = folder.name.rpartition("-")[2]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop PostgreSQL and remove what the run left."""
    if POSTGRES in config.stash:
        config.stash[POSTGRES].stop()
    if not hasattr(config, "workerinput") and "TEST_FOLDER" in dir(settings):
        shutil.rmtree(settings.TEST_FOLDER, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs PostgreSQL when the run is on another database."""
    if "postgresql" in settings.DATABASES["default"]["ENGINE"]:
        return
    for item in items:
        if item.get_closest_marker("postgres") or item.get_closest_marker("murphy"):
            item.add_marker(pytest.mark.skip(reason="needs PostgreSQL"))


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Redis | None]:
    """Run the Redis that ``RQ_QUEUES`` of the settings name; None when ``REDIS_URL`` names another one, which must be empty."""
    if os.environ.get("REDIS_URL"):
        with redis.Redis.from_url(settings.REDIS_URL) as connection:
            if connection.dbsize():
                pytest.exit("The tests empty the Redis of REDIS_URL, and it holds something. Name an empty database of it.", 4)
        yield None
        return
    with Redis(settings.RUN_FOLDER / "redis") as server:
        yield server


@pytest.fixture
def broker(redis_server: Redis | None) -> Iterator["redis.Redis"]:
    """Return a connection to the Redis of ``RQ_QUEUES``, emptied before the test."""
    with redis.Redis.from_url(settings.REDIS_URL) as connection:
        connection.flushdb()
        yield connection


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Return an empty folder with a path short enough for unix sockets."""
    folder = Path(settings.TEST_FOLDER) / f"t{free_port()}"
    folder.mkdir(parents=True)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
