"""Run the quick tests of keys and phases against every mutant; end with ``mutants: ok`` or ``mutants: FAILED n``.

Each mutant lives in a copy of the project, with a database of its own on one PostgreSQL. It is killed when a test fails or a
run takes too long. Those that survive are in SURVIVORS.md with the reason why nobody can see them, or they are failures.

Source: R. A. DeMillo and others, "Hints on Test Data Selection" (1978).
"""
# ruff: noqa: T201 - it prints its report

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from rides_demo.services import Postgres, postgres_url
from tests.mutation.mutants import MODULES, SQL_MODULE, Mutant, mutants

ROOT = Path(__file__).resolve().parents[2]
EXPLAINED = Path(__file__).parent / "SURVIVORS.md"
COPIED = ("idempotency", "rides_demo", "tests", "manage.py", "setup.cfg", "pyproject.toml")
#: Every mutant meets these.
QUICK = ("tests/test_keys.py", "tests/test_claims_and_phases.py", "tests/test_phases.py", "tests/test_foreign_calls.py")
#: Whatever survives them, and is explained nowhere, meets these.
SLOW = (
    *("tests/test_decorators.py", "tests/test_hard_cases.py", "tests/test_completer.py", "tests/test_abandonment.py"),
    "tests/conformance",
)
#: They start processes, or look at log lines of all kinds: slow, and about other things.
LEFT_OUT = ("tests/conformance/test_processes.py", "tests/conformance/test_kill.py", "tests/conformance/test_renderers.py")
WORKERS = 2
#: A run is stopped when it takes so many times as long as the tests of the unchanged code, and a test after so many seconds.
PATIENCE, TEST_SECONDS = 3, 60


class Stand:
    """A copy of the project with a database, in which one mutant after the other is tested."""

    def __init__(self, number: int, folder: Path, server: Postgres) -> None:
        self.copy = folder / f"copy{number}"
        self._number, self._databases, self._server = number, 0, server
        for name in COPIED:
            source, target = ROOT / name, self.copy / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)

    def outcome(self, mutant: Mutant | None, tests: tuple[str, ...], seconds: float) -> tuple[str, str]:
        """Return "survived", "killed" or "endless" of a mutant, None for the unchanged code, and what pytest said."""
        changed = self.copy / mutant.module if mutant else None
        original = changed.read_text() if changed else ""
        if changed and mutant:
            changed.write_text(mutant.text)
        try:
            return self._run(tests, seconds)
        finally:
            if changed:
                changed.write_text(original)

    def _run(self, tests: tuple[str, ...], seconds: float) -> tuple[str, str]:
        command = [
            *(sys.executable, "-m", "pytest", "-x", "-q", "--reuse-db", "--no-header", "--tb=line", "-p", "no:cacheprovider"),
            *("-o", f"faulthandler_timeout={TEST_SECONDS}", "-o", "faulthandler_exit_on_timeout=true"),
            *tests,
            *(f"--ignore={name}" for name in LEFT_OUT),
        ]
        environment = os.environ | {
            "DATABASE_URL": postgres_url(self._server.data, f"m{self._number}_{self._databases}"),
            "RIDES_TEST_FOLDER": str(self.copy / "run"),
            # What a crash of the server would lose does not matter here.
            "PGOPTIONS": "-c synchronous_commit=off",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        with subprocess.Popen(
            command,
            cwd=self.copy,
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
                said, _ = process.communicate()
                self._databases += 1  # Nobody has emptied the old one.
                return "endless", said
        if process.returncode not in (0, 1):
            self._databases += 1
        return ("survived" if process.returncode == 0 else "killed"), said


def main() -> int:
    """Return the number of survivors that nobody has explained, and of mutants for which the time was too short."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--only", default="", help="a regular expression; the mutants with such a name")
    options = parser.parse_args()
    end = time.monotonic() + options.minutes * 60
    to_do = [
        mutant
        for module in (SQL_MODULE, *MODULES)
        for mutant in mutants(module, (ROOT / module).read_text())
        if re.search(options.only, mutant.name)
    ]
    explained = set(re.findall(r"^- `(.*)`$", EXPLAINED.read_text(), re.M))
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        server = Postgres(folder / "postgres")
        server.start()
        try:
            survivors, counts = _test(to_do, [Stand(number, folder, server) for number in range(WORKERS)], explained, end)
        finally:
            server.stop()
    print(f"{len(to_do)} mutants: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    new = sorted(set(survivors) - explained)
    for survivor in new:
        print(f"survived, and nobody has said why: {survivor}")
    for gone in sorted(explained - set(survivors)) if not options.only and not counts["not tested"] else []:
        print(f"SURVIVORS.md explains what does not survive any more: {gone}")
    return len(new) + counts["not tested"]


def _test(to_do: list[Mutant], stands: list[Stand], explained: set[str], end: float) -> tuple[list[str], Counter[str]]:
    began = time.monotonic()
    with ThreadPoolExecutor(len(stands)) as pool:
        for outcome, said in pool.map(lambda stand: stand.outcome(None, QUICK, 600), stands):
            if outcome != "survived":
                raise SystemExit(f"The tests fail without a mutant:\n{said}\nmutants: FAILED 1")
        seconds = (time.monotonic() - began) * PATIENCE
        print(f"{len(to_do)} mutants; the tests take {seconds / PATIENCE:.0f} s", flush=True)
        free: SimpleQueue[Stand] = SimpleQueue()
        for stand in stands:
            free.put(stand)

        def one(mutant: Mutant) -> str:
            if time.monotonic() > end:
                return "not tested"
            stand = free.get()
            try:
                outcome, said = stand.outcome(mutant, QUICK, seconds)
                if outcome == "survived" and mutant.name not in explained:
                    outcome, said = stand.outcome(mutant, SLOW, 600)
            finally:
                free.put(stand)
            killer = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.M)
            print(f"{outcome:<9} {mutant.name}" + (f"   [{killer[1]}]" if killer else ""), flush=True)
            return outcome

        outcomes = list(pool.map(one, to_do))
    survivors = [mutant.name for mutant, outcome in zip(to_do, outcomes, strict=True) if outcome == "survived"]
    return survivors, Counter(outcomes)


if __name__ == "__main__":
    failed = main()
    print(f"mutants: FAILED {failed}" if failed else "mutants: ok")
    sys.exit(1 if failed else 0)
