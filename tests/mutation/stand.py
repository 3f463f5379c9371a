"""A copy of the project with its databases and a warm process, which tests one mutant after
another."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

import psycopg
from psycopg.sql import SQL, Identifier

from rides_demo.processes.embedded import Postgres, postgres_url
from tests.kit.tables import WRITTEN_ONCE
from tests.mutation.mutants import ROOT, Mutant
from tests.mutation.warm import changed_function

#: PostgreSQL decides whether an update stays on its page (HOT), and other sessions affect this
#: decision.
LEFT_OUT = (
    "--deselect",
    "tests/request/test_counts.py::test_every_update_of_a_phased_key_but_the_finish_is_hot",
)
NOT_COPIED = (".git", ".venv*", ".run", ".tox", ".*_cache", ".hypothesis", "__pycache__")
#: A test is endless if it takes PATIENCE times its former time plus GRACE_SECONDS, because the
#: machine has other load.
PATIENCE, GRACE_SECONDS = 20, 20
#: The number of tests in a first pytest for a mutant that needs a new process; it collects only the
#: files of these tests.
FIRST = 30
#: The time limit for the collection of all tests.
COLLECTING_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Found:
    """An outcome: "survived", or "killed" or "endless" with the test that found it."""

    outcome: str
    killer: str = ""


class Ended(Exception):
    """The process of the tests has ended."""


class Warm:
    """A pytest that has collected tests, and runs some of them for each job; a context manager."""

    def __init__(self, folder: Path, environment: dict[str, str], arguments: Iterable[str]) -> None:
        self._result, self._said = folder / "result", folder / "said"
        with self._said.open("a") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.mutation.warm", *LEFT_OUT, *arguments],
                cwd=folder / "copy",
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                start_new_session=True,
            )

    def __enter__(self) -> "Warm":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def ask(self, **job: Any) -> Any:
        """Return the answer to a job."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"result": str(self._result), **job}) + "\n")
            self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise Ended(f"The process of the tests has ended:\n{self._said.read_text()[-4000:]}")
        return json.loads(line)


class Stand:
    """The tests on one database, in a separate folder; a context manager. If ``server`` is None,
    the database is SQLite."""

    def __init__(self, folder: Path, server: Postgres | None, arguments: tuple[str, ...]) -> None:
        self._folder, self._server, self._arguments = folder, server, arguments
        self._copy, self._run_folder = folder / "copy", folder / "run"
        self._name = f"mutants_{folder.name}"
        self._covered = False

    def __enter__(self) -> "Stand":
        shutil.copytree(ROOT, self._copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
        url = (
            postgres_url(self._server.data, self._name)
            if self._server
            else f"sqlite:///{self._folder}/rides.sqlite3"
        )
        self._environment = os.environ | {
            "DATABASE_URL": url,
            "RIDES_TEST_FOLDER": str(self._run_folder),
        }
        self._warm = Warm(self._folder, self._environment, self._arguments)
        return self

    def __exit__(self, *exception: object) -> None:
        self._warm.__exit__(*exception)

    def names(self) -> list[str]:
        """Return the names of all tests."""
        names: list[str] = self._warm.ask(do="list")
        return names

    def cover(self, tests: list[str], seconds: int) -> dict[str, Any]:
        """Run tests on the unchanged code; return which test runs which line, the seconds of each,
        and the failed tests."""
        ended: list[str] = []
        while len(ended) < len(tests):
            limits = {test: seconds for test in tests if test not in ended}
            found: dict[str, Any] = self._warm.ask(do="cover", tests=limits, adopt=self._covered)
            if found["outcome"] == "covered":
                if not self._covered:
                    self._keep()
                self._covered = True
                return found | {"failed": [*found["failed"], *ended]}
            if not found["killer"]:
                raise RuntimeError(
                    f"The tests could not be run:\n{(self._folder / 'said').read_text()[-4000:]}"
                )
            # Leave out the test that ended the process, or took too long.
            ended.append(found["killer"])
            if self._covered:
                self._restore()
        return {"lines": {}, "seconds": {}, "failed": ended}

    def meet(self, mutant: Mutant, tests: dict[str, float]) -> Found:
        """Run tests of a mutant until one fails."""
        found = Found("not swapped")
        if function := changed_function((self._copy / mutant.module).read_text(), mutant.text):
            found = self._fail_twice(
                self._warm, tests, function=function, module=mutant.module, text=mutant.text
            )
        if found.outcome == "not swapped":
            names = list(tests)
            found = self._meet_anew(mutant, {name: tests[name] for name in names[:FIRST]})
            if found.outcome == "survived" and names[FIRST:]:
                found = self._meet_anew(mutant, {name: tests[name] for name in names[FIRST:]})
        return found

    def fails(self, test: str, seconds: float) -> bool:
        """Return whether a test fails on the unchanged code."""
        return self._ask(self._warm, {test: seconds}, function="").outcome != "survived"

    def _fail_twice(self, warm: Warm, tests: dict[str, float], **job: str) -> Found:
        """Run tests until one fails twice; if the second, separate run passes, continue with the
        next tests."""
        names = list(tests)
        while names:
            found = self._ask(warm, {name: tests[name] for name in names}, **job)
            if found.killer in tests:
                again = self._ask(warm, {found.killer: tests[found.killer]}, **job)
                if again.outcome != "survived":
                    return again
                names = names[names.index(found.killer) + 1 :]
            else:
                return found
        return Found("survived")

    def _meet_anew(self, mutant: Mutant, tests: dict[str, float]) -> Found:
        """Run the tests in a new process that imports the mutant."""
        changed = self._copy / mutant.module
        original = changed.read_text()
        # A separate folder, because pytest removes it at its end.
        alone = self._folder / "alone"
        environment = self._environment | {
            "PYTHONDONTWRITEBYTECODE": "1",
            "RIDES_TEST_FOLDER": str(alone),
        }
        if not self._server:
            alone.mkdir(exist_ok=True)
            shutil.copy(self._folder / "kept.sqlite3", alone / "test.sqlite3")
        files = sorted({name.partition("::")[0] for name in tests}) if len(tests) <= FIRST else ()
        arguments = [*self._arguments, *files] if self._server else self._arguments
        try:
            changed.write_text(mutant.text)
            with Warm(self._folder, environment, arguments) as warm:
                hanging = Timer(COLLECTING_SECONDS, warm.__exit__)
                hanging.start()
                try:
                    collected = set(warm.ask(do="list"))
                finally:
                    hanging.cancel()
                if gone := [name for name in tests if name not in collected]:
                    # The mutant changed the name of a test parameter.
                    return Found("killed", gone[0])
                return self._fail_twice(warm, tests, function="")
        except Ended:
            return Found("killed", "its import")
        finally:
            changed.write_text(original)

    def _ask(self, warm: Warm, tests: dict[str, float], **job: str) -> Found:
        """Run tests until one fails; after a failure, restore the database."""
        allowed = {name: int(GRACE_SECONDS + PATIENCE * seconds) for name, seconds in tests.items()}
        answer = warm.ask(do="test", tests=allowed, **job)
        if answer["outcome"] == "ended" and not answer["killer"]:
            raise RuntimeError(f"{self._folder}/said says why a mutant could not be tested.")
        if answer["outcome"] not in {"survived", "not swapped"}:
            self._restore(dropped=answer["outcome"] != "killed")
        return Found(
            answer["outcome"] if answer["outcome"] != "ended" else "killed", answer["killer"]
        )

    def _keep(self) -> None:
        """Copy the empty test databases."""
        if not self._server:
            source, kept = (
                sqlite3.connect(folder)
                for folder in (self._run_folder / "test.sqlite3", self._folder / "kept.sqlite3")
            )
            source.backup(kept)
            source.close(), kept.close()
        for name in self._names():
            self._administer(
                SQL("CREATE DATABASE {} TEMPLATE {}").format(
                    Identifier(f"kept_{name}"), Identifier(name)
                )
            )

    def _restore(self, *, dropped: bool = True) -> None:
        """Empty the test databases, which late threads may have filled; if ``dropped``, create them
        again from the copies."""
        if not self._server:
            for file in self._run_folder.glob("test.sqlite3*"):
                file.unlink()
            shutil.copy(self._folder / "kept.sqlite3", self._run_folder / "test.sqlite3")
        for name in self._names():
            if dropped:
                self._administer(SQL("DROP DATABASE {} WITH (FORCE)").format(Identifier(name)))
                self._administer(
                    SQL("CREATE DATABASE {} TEMPLATE {}").format(
                        Identifier(name), Identifier(f"kept_{name}")
                    )
                )
            else:
                self._administer(
                    SQL(
                        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname"
                        " = {}"
                    ).format(name)
                )
                self._administer(SQL(EMPTY).format(SQL(", ").join(WRITTEN_ONCE)), name)

    def _names(self) -> list[str]:
        """Return the names of the two test databases of PostgreSQL; the result is empty on
        SQLite."""
        return [f"test_{self._name}", f"test_{self._name}_b"] if self._server else []

    def _administer(self, statement: Any, database: str = "postgres") -> None:
        assert self._server is not None
        with psycopg.connect(
            postgres_url(self._server.data, database), autocommit=True
        ) as connection:
            connection.execute(statement)


EMPTY = """
    DO $$ DECLARE name text; BEGIN
        SET LOCAL session_replication_role = replica;
        FOR name IN
            SELECT format('%I', tablename) FROM pg_tables
            WHERE schemaname = 'public' AND tablename NOT IN ({})
        LOOP
            EXECUTE 'DELETE FROM ' || name;
        END LOOP;
    END $$
"""
