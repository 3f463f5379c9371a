"""Run the three shops (unprotected, plain, phased) as processes on a real PostgreSQL, each with its
own database."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import psycopg
import pytest
from bank import Bank
from running_shop import RunningShop

from rides_demo.processes.embedded import Postgres, postgres_url

EXAMPLE = Path(__file__).parents[1]
ROOT = EXAMPLE.parents[1]


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of the three shops: copies of ``shop``, two of them with their patch."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("unprotected", "plain", "phased")}
    for name, folder in folders.items():
        shutil.copy(EXAMPLE / "manage.py", folder)
        shutil.copytree(
            EXAMPLE / "shop", folder / "shop", ignore=shutil.ignore_patterns("__pycache__")
        )
        if name != "unprotected":
            subprocess.run(
                ["git", "apply", EXAMPLE / f"{name}.patch"],
                cwd=folder,
                env=os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)},
                check=True,
            )
    return folders


@pytest.fixture(scope="session")
def manage(sources: dict[str, Path]) -> Callable[..., str]:
    """Return a function that runs ``manage.py`` of a shop on a database, and returns its output."""

    def run(shop: str, url: str, *arguments: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "manage.py", *arguments],
            cwd=sources[shop],
            env=os.environ | {"DATABASE_URL": url, "PYTHONPATH": str(ROOT)} | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def postgres(
    tmp_path_factory: pytest.TempPathFactory, manage: Callable[..., str]
) -> Iterator[Postgres]:
    """Run a PostgreSQL whose database ``rides`` is a migrated shop with one product."""
    with Postgres(tmp_path_factory.mktemp("postgres") / "data") as server:
        manage("plain", server.url, "migrate", "--verbosity", "0")
        manage("plain", server.url, "loaddata", str(EXAMPLE / "catalogue.json"))
        yield server


@pytest.fixture
def bank() -> Iterator[Bank]:
    """Run the bank in the process of the tests, so that a kill of the shop does not end it."""
    with Bank() as bank:
        yield bank


@pytest.fixture
def open_shop(
    postgres: Postgres,
    sources: dict[str, Path],
    manage: Callable[..., str],
    tmp_path: Path,
    bank: Bank,
) -> Iterator[Callable[..., RunningShop]]:
    """Return a function that starts a shop on a new database, with payment by card (``by_card``) or
    by invoice."""
    opened: list[RunningShop] = []

    def open_(name: str, *, by_card: bool = False) -> RunningShop:
        database = f"shop_{next(NUMBERS)}"
        with psycopg.connect(
            postgres_url(postgres.data, "postgres"), autocommit=True
        ) as connection:
            connection.execute(f"CREATE DATABASE {database} TEMPLATE rides")
        url = postgres_url(postgres.data, database)
        environment = {"DATABASE_URL": url, "PYTHONPATH": str(ROOT)} | (
            {"BANK_URL": bank.url} if by_card else {}
        )

        def run(*arguments: str) -> str:
            return manage(name, url, *arguments, **environment)

        shop = RunningShop(name, sources[name], environment, tmp_path / f"{name}.log", run)
        opened.append(shop)
        shop.start()
        return shop

    yield open_
    for shop in opened:
        shop.close()


NUMBERS = count()
