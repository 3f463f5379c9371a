"""Run the quick tests of keys and phases against every mutant; end with ``mutants: ok`` or ``mutants: FAILED n``.

A first run of the unchanged code notes which test runs which line. A mutant then meets the tests that run its line: the quick
ones on PostgreSQL, the same on SQLite, then the slow ones. It is killed when one fails, or takes too long. Those that survive
are in SURVIVORS.md with the reason why nobody can see them, or they are failures.

Source: R. A. DeMillo and others, "Hints on Test Data Selection" (1978).
"""
# ruff: noqa: T201 - it prints its report

import argparse
import hashlib
import json
import re
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rides_demo.services import Postgres
from tests.kit.servers import HastyPostgres
from tests.mutation.mutants import MODULES, SQL_MODULE, Mutant, mutants
from tests.mutation.stand import ROOT, Found, Stand

#: The mutants that nobody can see; they meet the quick tests alone.
EXPLAINED = set(re.findall(r"^- `(.*)`$", (Path(__file__).parent / "SURVIVORS.md").read_text(), re.M))
#: Where the killed are written down, for ``--resume``.
PROGRESS = ROOT / ".run" / "mutants.json"
QUICK = [
    "tests/test_keys.py",
    "tests/test_claims_and_phases.py",
    "tests/test_phases.py",
    "tests/test_foreign_calls.py",
    "tests/test_edges_of_claims_and_phases.py",
]
#: What survives the quick ones meets these.
SLOW = [
    "tests/test_calls_in_doubt.py",
    "tests/test_decorators.py",
    "tests/test_completer.py",
    "tests/test_abandonment.py",
    "tests/test_hard_cases.py",
]
#: A run is stopped when it takes so many times as long as its tests did before, and so many seconds.
PATIENCE, GRACE_SECONDS = 5, 20


class Tests:
    """The tests of one database, how long they take, and which of them a mutant meets."""

    def __init__(self, run: dict[str, Any]) -> None:
        self.seconds: dict[str, float] = run["seconds"]
        self._lines = {
            (module, int(line)): set(run["lines"][module][line]) for module in run["lines"] for line in run["lines"][module]
        }

    def of(self, mutant: Mutant) -> list[str]:
        """Return the tests that run the mutant's lines, the shortest first; all of them for what runs at import."""
        chosen = self._running(mutant.module, mutant.lines)
        users: set[str] = set()
        if mutant.module == SQL_MODULE:
            # A text is put together once, and used by all: those come first that use it.
            chosen, users = set(self.seconds), self._using(mutant.function.rpartition(".")[2])
        elif not mutant.lines:
            chosen = set(self.seconds)
        return sorted(chosen, key=lambda test: (test not in users, self.seconds[test]))

    def _running(self, module: str, lines: range) -> set[str]:
        return set().union(*(self._lines.get((module, line), ()) for line in lines))

    def _using(self, statement: str) -> set[str]:
        return set().union(
            *(
                self._running(module, range(number, number + 1))
                for module in MODULES
                for number, line in enumerate((ROOT / module).read_text().splitlines(), 1)
                if re.search(rf"\W{statement}\b(?!\()", line)
            )
        )


class Stages:
    """Which tests a mutant meets, and in which order."""

    def __init__(self, quick: dict[str, Any], slow: dict[str, Any]) -> None:
        self.quick, self.slow, self.on_sqlite = Tests(quick["postgresql"]), Tests(slow["postgresql"]), Tests(quick["sqlite"])
        self.count = len(self.quick.seconds) + len(self.slow.seconds) + len(self.on_sqlite.seconds)


class Bench:
    """What tests one mutant at a time: a stand on PostgreSQL, and one on SQLite."""

    def __init__(self, number: int, folder: Path, server: Postgres, stack: ExitStack) -> None:
        self._first = number == 0
        self._postgresql = stack.enter_context(Stand(folder / f"p{number}", server, [*QUICK, *SLOW]))
        self._sqlite = stack.enter_context(Stand(folder / f"s{number}", None, QUICK))

    def cover(self) -> dict[str, Any]:
        """Run the quick tests on both databases, or the slow ones, without a mutant."""
        return {
            "postgresql": self._postgresql.cover(QUICK if self._first else SLOW),
            "sqlite": self._sqlite.cover(QUICK if self._first else QUICK[:1]),
        }

    def meet(self, mutant: Mutant, stages: Stages) -> Found:
        """Let a mutant meet its tests."""
        found = Found("survived")
        for tests, stand in self._stages(stages)[: 1 if mutant.name in EXPLAINED else None]:
            chosen = tests.of(mutant)
            if chosen and found.outcome == "survived":
                found = stand.test(mutant, chosen, GRACE_SECONDS + PATIENCE * sum(tests.seconds[test] for test in chosen))
        return found

    def fail_without_mutant(self, killers: set[str], stages: Stages) -> list[str]:
        """Run tests that have killed on the unchanged code, and return those that fail."""
        failed = []
        for tests, stand in self._stages(stages):
            if (again := sorted(killers & tests.seconds.keys())) and (
                found := stand.test(None, again, 600)
            ).outcome != "survived":
                failed.append(found.killer or "a test that takes too long")
        return failed

    def _stages(self, stages: Stages) -> list[tuple[Tests, Stand]]:
        return [(stages.quick, self._postgresql), (stages.on_sqlite, self._sqlite), (stages.slow, self._postgresql)]


class Progress:
    """The mutants that were killed, by the text of their module."""

    def __init__(self, resume: bool) -> None:
        self._killed: dict[str, str] = json.loads(PROGRESS.read_text()) if resume and PROGRESS.exists() else {}

    def killer(self, mutant: Mutant) -> str | None:
        """Return by what this very mutant was killed in an earlier run, None if it was not."""
        return self._killed.get(self._digest(mutant))

    def note(self, mutant: Mutant, found: Found) -> None:
        """Write down what was found."""
        if found.outcome == "killed":
            self._killed[self._digest(mutant)] = found.killer
            PROGRESS.parent.mkdir(exist_ok=True)
            PROGRESS.write_text(json.dumps(self._killed))

    def _digest(self, mutant: Mutant) -> str:
        return hashlib.sha256(f"{mutant.module}\n{mutant.text}".encode()).hexdigest()


def main() -> int:
    """Return the number of survivors that nobody has explained, and of mutants for which the time was too short."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--only", default="", help="a regular expression; the mutants with such a name")
    parser.add_argument("--resume", action="store_true", help="leave out those that an earlier run killed")
    options = parser.parse_args()
    end = time.monotonic() + options.minutes * 60
    to_do = [
        mutant
        for module in (*MODULES, SQL_MODULE)
        for mutant in mutants(module, (ROOT / module).read_text())
        if re.search(options.only, mutant.name)
    ]
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        with HastyPostgres(folder / "postgres") as server, ExitStack() as stack:
            benches = [Bench(number, folder, server, stack) for number in range(2)]
            outcomes = _test(to_do, benches, Progress(options.resume), end)
    counts = Counter(outcomes.values())
    print(f"{len(to_do)} mutants: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    survivors = {name for name, outcome in outcomes.items() if outcome == "survived"}
    for survivor in sorted(survivors - EXPLAINED):
        print(f"survived, and nobody has said why: {survivor}")
    for gone in sorted(EXPLAINED - survivors) if not options.only and not counts["not tested"] else []:
        print(f"SURVIVORS.md explains what does not survive any more: {gone}")
    return len(survivors - EXPLAINED) + counts["not tested"] + counts["unsound"]


def _test(to_do: list[Mutant], benches: list[Bench], progress: Progress, end: float) -> dict[str, str]:
    """Return the outcome of each mutant."""
    began = time.monotonic()
    with ThreadPoolExecutor(len(benches)) as pool:
        stages = Stages(*pool.map(lambda bench: bench.cover(), benches))
        print(f"{len(to_do)} mutants, {stages.count} tests, run once in {time.monotonic() - began:.0f} s", flush=True)
        free: SimpleQueue[Bench] = SimpleQueue()
        for bench in benches:
            free.put(bench)
        killers: set[str] = set()

        def one(mutant: Mutant) -> str:
            killer = progress.killer(mutant)
            if killer is not None:
                return "killed"
            if time.monotonic() > end:
                return "not tested"
            bench, began = free.get(), time.monotonic()
            try:
                found = bench.meet(mutant, stages)
            finally:
                free.put(bench)
            progress.note(mutant, found)
            killers.add(found.killer)
            seconds = time.monotonic() - began
            print(f"{found.outcome:<9} {mutant.name}   [{seconds:.0f} s {found.killer}]", flush=True)
            return found.outcome

        outcomes = dict(zip([mutant.name for mutant in to_do], pool.map(one, to_do), strict=True))
    # A test that fails by itself kills nothing: all that did are run again without a mutant.
    for name in benches[0].fail_without_mutant(killers, stages):
        print(f"{name} fails without a mutant too, so who else was killed by it?")
        outcomes[name] = "unsound"
    return outcomes


if __name__ == "__main__":
    failed = main()
    print(f"mutants: FAILED {failed}" if failed else "mutants: ok")
    sys.exit(1 if failed else 0)
