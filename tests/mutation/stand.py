"""A copy of the project with its databases and warm processes, in which one mutant after the other is tested."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from rides_demo.services import Postgres, postgres_url
from tests.mutation.mutants import Mutant
from tests.mutation.warm import changed_function, keep_database

ROOT = Path(__file__).resolve().parents[2]
#: Whether an update stays on its page is PostgreSQL's decision, which other sessions have a part in.
LEFT_OUT = ("--deselect", "tests/test_keys.py::test_every_update_of_a_phased_key_but_the_last_stays_hot")
#: So many tests may fail by themselves, as those do on a busy machine that look at times: they are left out.
FEW = 3
COPIED = ("idempotency", "rides_demo", "tests", "manage.py", "setup.cfg", "pyproject.toml")


@dataclass(frozen=True, slots=True)
class Found:
    """What a run of tests found: "survived", "killed" or "endless", and by which test."""

    outcome: str
    killer: str = ""


class Stand:
    """Tests on one database, in a folder of its own; a context manager. ``server`` None is SQLite."""

    def __init__(self, folder: Path, server: Postgres | None, tests: list[str]) -> None:
        self._folder, self._server, self._tests = folder, server, tests
        self._copy, self._run_folder = folder / "copy", folder / "run"
        self._name = f"mutants_{folder.name}"

    def __enter__(self) -> "Stand":
        self._folder.mkdir()
        for name in COPIED:
            source, target = ROOT / name, self._copy / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
        url = postgres_url(self._server.data, self._name) if self._server else f"sqlite:///{self._folder}/rides.sqlite3"
        self._environment = os.environ | {"DATABASE_URL": url, "RIDES_TEST_FOLDER": str(self._run_folder)}
        self._said = (self._folder / "said").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutation.warm", *LEFT_OUT, *self._tests],
            cwd=self._copy,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def cover(self, files: list[str]) -> dict[str, Any]:
        """Run these files on the unchanged code, and return which test runs which line; the test database is kept, empty."""
        covering = self._folder / "covering.json"
        trouble = self._ask({"covering": str(covering), "tests": files, "seconds": 1500})
        found: dict[str, Any] = json.loads(covering.read_text()) if trouble == "" else {"failed": [trouble]}
        if trouble != "" or len(found["failed"]) > FEW:
            failed = "\n".join(map(str, found["failed"]))
            raise SystemExit(f"These fail without a mutant:\n{failed}\n{self._said_last()}\nmutants: FAILED 1")
        for test in found["failed"]:
            print(f"left out, since it fails without a mutant: {test}", flush=True)  # noqa: T201 - part of the report
        self._keep_database()
        return found

    def test(self, mutant: Mutant | None, tests: list[str], seconds: float) -> Found:
        """Run tests of a mutant, None for the unchanged code, until one fails."""
        function = changed_function((self._copy / mutant.module).read_text(), mutant.text) if mutant else ""
        if mutant and function is None:
            return self._test_alone(mutant, tests, seconds)
        given = {"module": mutant.module, "text": mutant.text} if mutant else {}
        failed = self._ask({"covering": "", "function": function, "tests": tests, "seconds": int(seconds), **given})
        if failed is None:
            self._restore_database()
            return Found("endless")
        return Found("killed" if failed else "survived", failed)

    def _ask(self, job: dict[str, Any]) -> str | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"result": str(self._folder / "result"), **job}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"The process of the tests has ended:\n{self._said_last()}\nmutants: FAILED 1")
        failed: str | None = json.loads(line)
        return failed

    def _said_last(self) -> str:
        return (self._folder / "said").read_text()[-4000:]

    def _test_alone(self, mutant: Mutant, tests: list[str], seconds: float) -> Found:
        """Run the tests in a process that reads the mutant."""
        changed = self._copy / mutant.module
        original = changed.read_text()
        changed.write_text(mutant.text)
        quiet = ("-x", "-q", "--reuse-db", "--no-header", "--tb=line", "-p", "no:cacheprovider", *LEFT_OUT)
        # With a folder of its own, which pytest removes at its end.
        environment = self._environment | {"PYTHONDONTWRITEBYTECODE": "1", "RIDES_TEST_FOLDER": str(self._folder / "alone")}
        with subprocess.Popen(
            [sys.executable, "-m", "pytest", *quiet, *tests],
            cwd=self._copy,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                self._restore_database()
                return Found("endless")
            finally:
                changed.write_text(original)
        if process.returncode not in (0, 1):
            self._restore_database()
        killer = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.M)
        return Found("killed", killer[1] if killer else "its import") if process.returncode else Found("survived")

    def _keep_database(self) -> None:
        if self._server:
            self._administer(f"CREATE DATABASE kept_{self._name} TEMPLATE test_{self._name}")
        else:
            keep_database(str(self._run_folder / "test.sqlite3"))

    def _restore_database(self) -> None:
        """Nobody has emptied it."""
        if self._server:
            self._administer(f"DROP DATABASE test_{self._name} WITH (FORCE)")
            self._administer(f"CREATE DATABASE test_{self._name} TEMPLATE kept_{self._name}")
        else:
            keep_database(str(self._run_folder / "test.sqlite3"))

    def _administer(self, statement: str) -> None:
        assert self._server is not None
        with psycopg.connect(postgres_url(self._server.data, "postgres"), autocommit=True) as connection:
            connection.execute(statement)
