"""Run the tests of ``make test`` against every mutant; end with ``mutants: ok`` or ``mutants:
FAILED n``.

A first run of the unchanged code records which test runs which line. A mutant is then tested with
the tests that run its line: first the test that killed it before, then those that killed another
mutant of its function, then of its module, then the fastest; on PostgreSQL, then on SQLite. It is
killed if a test fails twice, and endless if a test takes too long twice. A mutant that survives is
a failure, unless SURVIVORS.md gives the reason why no test can detect it. TESTED.txt has the
modules of which no mutant survived, KILLERS.txt the tests that killed the mutants of a function.

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
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

from rides_demo.processes.embedded import Postgres
from tests.kit.servers import HastyPostgres
from tests.mutation import killers, tested
from tests.mutation.choice import FIRST_FILE, POSTGRESQL, SAMPLED, SEED, SQLITE, WHOLE
from tests.mutation.mutants import ROOT, SQL_MODULES, Mutant, mutants_of
from tests.mutation.stand import Found, Stand

#: The mutants that no test can detect. Each of them is tested with at most TESTS_OF_EXPLAINED
#: tests.
EXPLAINED = set(
    re.findall(r"^- `(.*)`$", (Path(__file__).parent / "SURVIVORS.md").read_text(), re.M)
)
TESTS_OF_EXPLAINED = 100
#: The outcome of each mutant by the digest of its text, and the table, for ``--resume`` and for a
#: comparison.
RESULTS = ROOT / ".run" / "mutants.json"
#: Which test of a file runs which line; valid until the file or the code changes.
LINES = ROOT / ".run" / "mutants-lines"
DATABASES = ("postgresql", "sqlite")
#: The time limit of a test on the unchanged code, and the number of tests that may fail without a
#: mutant; these are left out.
TEST_SECONDS, FEW = 300, 20
OUTCOMES = ("killed", "endless", "survived", "explained", "unsound", "not tested")


class Tests:
    """The tests of one database, their times, and the choice of tests for a mutant."""

    def __init__(self, run: dict[str, Any]) -> None:
        self.seconds: dict[str, float] = run["seconds"]
        self._lines = {
            (module, int(line)): set(run["lines"][module][line])
            for module in run["lines"]
            for line in run["lines"][module]
        }
        #: The tests that killed a mutant of a function, or of a module.
        self._killers: dict[tuple[str, ...], set[str]] = defaultdict(set)

    def of(self, mutant: Mutant, known: str) -> dict[str, float]:
        """Return the tests for a mutant, in order, with their seconds."""
        first = {known, *self._killers[mutant.module, mutant.function]}
        second = self._killers[mutant.module,]
        if mutant.module in SQL_MODULES:
            # Statements are built once and used by all tests. The tests that use the changed
            # statement come first.
            chosen, first = (
                set(self.seconds),
                first | self._using(mutant.function.rpartition(".")[2]),
            )
        else:
            # No test runs the lines of an import. Use the tests that run any line of the module
            # instead.
            lines = mutant.lines or [
                line for module, line in self._lines if module == mutant.module
            ]
            chosen = self._running(mutant.module, lines)
        in_order = sorted(
            chosen & self.seconds.keys(),
            key=lambda test: (
                test != known,
                test not in first,
                test not in second,
                self.seconds[test],
            ),
        )
        return {
            test: self.seconds[test]
            for test in in_order[: TESTS_OF_EXPLAINED if mutant.name in EXPLAINED else None]
        }

    def note_killer(self, module: str, function: str, test: str) -> None:
        """Record that ``test`` killed a mutant, so that the next mutants of the function and of the
        module are tested with it first."""
        self._killers[module, function].add(test)
        self._killers[module,].add(test)

    def _running(self, module: str, lines: Any) -> set[str]:
        return set().union(*(self._lines.get((module, line), ()) for line in lines))

    def _using(self, statement: str) -> set[str]:
        return set().union(
            *(
                self._running(module, [number])
                for module in {module for module, _ in self._lines}
                for number, line in enumerate((ROOT / module).read_text().splitlines(), 1)
                if re.search(rf"\W{statement}\b(?!\()", line)
            )
        )


class Bench:
    """Two stands, on PostgreSQL and on SQLite, that test one mutant at a time."""

    def __init__(self, number: int, folder: Path, server: Postgres, stack: ExitStack) -> None:
        self.stands = {
            "postgresql": stack.enter_context(Stand(folder / f"p{number}", server, POSTGRESQL)),
            "sqlite": stack.enter_context(Stand(folder / f"s{number}", None, SQLITE)),
        }

    def names(self) -> dict[str, set[str]]:
        """Return the names of the tests of each database."""
        return {database: set(stand.names()) for database, stand in self.stands.items()}

    def meet(self, mutant: Mutant, tests: dict[str, Tests], known: str) -> Found:
        """Run the tests of a mutant; ``known`` killed it in an earlier run. The name of a killer
        includes its database."""
        for database, stand in self.stands.items():
            found = stand.meet(
                mutant, tests[database].of(mutant, known.removeprefix(f"{database} "))
            )
            if found.outcome != "survived":
                tests[database].note_killer(mutant.module, mutant.function, found.killer)
                return Found(found.outcome, f"{database} {found.killer}")
        return Found("survived")


class Results:
    """The outcome of each mutant, in this run and in earlier runs."""

    def __init__(self, resume: bool, names: dict[str, list[str]]) -> None:
        kept = json.loads(RESULTS.read_text())["mutants"] if RESULTS.exists() else {}
        self._kept: dict[str, dict[str, str]] = kept
        self._killers_by_name = {each["name"]: each["killer"] for each in kept.values()}
        self._resume = resume
        self._killers = {
            f"{database} {test}" for database in names for test in [*names[database], "its import"]
        }
        self._tests = hashlib.sha256(json.dumps(names).encode()).hexdigest()
        self._lock = Lock()

    def known(self, mutant: Mutant) -> Found | None:
        """Return the outcome of an earlier run if it is valid: the killer exists, or a survivor's
        tests are the same."""
        if not self._resume or not (kept := self._kept.get(mutant.digest)):
            return None
        holds = (
            kept["tests"] == self._tests
            if kept["outcome"] == "survived"
            else kept["killer"] in self._killers
        )
        return Found(kept["outcome"], kept["killer"]) if holds else None

    def killer(self, mutant: Mutant) -> str:
        """Return the test that killed this mutant in an earlier run, perhaps of an older module, or
        an empty string."""
        return self._killers_by_name.get(mutant.name, "")

    def note(self, mutant: Mutant, found: Found) -> None:
        """Store the outcome of a mutant."""
        with self._lock:
            self._kept[mutant.digest] = {
                **{"module": mutant.module, "name": mutant.name, "function": mutant.function},
                **{"outcome": found.outcome, "killer": found.killer, "tests": self._tests},
            }
            self.write()

    def forget(self, mutant: Mutant) -> None:
        """Remove the outcome, so that the next run tests the mutant again."""
        self._kept.pop(mutant.digest, None)

    def of(self, mutants: list[Mutant]) -> list[dict[str, str]]:
        """Return the stored outcomes of these mutants."""
        return [self._kept[each.digest] for each in mutants if each.digest in self._kept]

    def write(self, **more: Any) -> None:
        """Write all outcomes to the file."""
        RESULTS.parent.mkdir(exist_ok=True)
        draft = RESULTS.with_suffix(".new")
        draft.write_text(json.dumps({**more, "mutants": self._kept}, indent=1))
        draft.rename(RESULTS)


class Run:
    """A run: first all tests without a mutant, then each mutant, then the table."""

    def __init__(
        self, to_do: list[Mutant], benches: list[Bench], *, resume: bool, end: float
    ) -> None:
        self._to_do, self._benches, self._end = to_do, benches, end
        self._free: SimpleQueue[Bench] = SimpleQueue()
        for bench in benches:
            self._free.put(bench)
        with ThreadPoolExecutor(4) as pool:
            # Only tests that all stands have: a name with a random part exists on one stand only.
            lists = list(pool.map(Bench.names, benches))
            names = {
                database: sorted(set.intersection(*(each[database] for each in lists)))
                for database in DATABASES
            }
            runs = {
                database: self._cover(database, names[database], pool) for database in DATABASES
            }
        for database in DATABASES:
            for test in runs[database]["failed"]:
                print(
                    f"left out, since it fails without a mutant on {database}: {test}", flush=True
                )
            if len(runs[database]["failed"]) > FEW:
                raise SystemExit(f"More than {FEW} tests fail without a mutant.\nmutants: FAILED 1")
        self._tests = {database: Tests(run) for database, run in runs.items()}
        self._results = Results(
            resume, {database: sorted(self._tests[database].seconds) for database in DATABASES}
        )

    def outcomes(self) -> dict[str, str]:
        """Return the outcome of each mutant by its name."""
        for (module, function), names in killers.read().items():
            for name in names:
                database, _, test = name.partition(" ")
                self._tests[database].note_killer(module, function, test)
        with ThreadPoolExecutor(len(self._benches)) as pool:
            found = dict(
                zip(
                    [mutant.name for mutant in self._to_do],
                    pool.map(self._one, self._to_do),
                    strict=True,
                )
            )
        # A test that also fails without a mutant proves nothing, so all killers run again without a
        # mutant.
        unsound = self._unsound({result.killer for result in found.values() if result.killer})
        for mutant in self._to_do:
            if found[mutant.name].killer in unsound:
                self._results.forget(mutant)
                found[mutant.name] = Found("unsound")
        return {
            name: (
                "explained"
                if result.outcome == "survived" and name in EXPLAINED
                else result.outcome
            )
            for name, result in found.items()
        }

    def report(self, outcomes: dict[str, str], seconds: float) -> None:
        """Print the table, and write it to the file."""
        table = {
            module: dict(
                Counter(outcomes[mutant.name] for mutant in self._to_do if mutant.module == module)
            )
            for module in dict.fromkeys(mutant.module for mutant in self._to_do)
        }
        survivors = sorted(name for name, outcome in outcomes.items() if outcome == "survived")
        self._results.write(table=table, survivors=survivors, seconds=round(seconds), seed=SEED)
        killers.note(self._results.of(self._to_do))
        print(f"\n{'module':28}{'mutants':>10}" + "".join(f"{outcome:>12}" for outcome in OUTCOMES))
        for module, counts in {**table, "all": Counter(outcomes.values())}.items():
            print(
                f"{module:28}{sum(counts.values()):>10}"
                + "".join(f"{counts.get(outcome, 0):>12}" for outcome in OUTCOMES)
            )
        for survivor in survivors:
            print(f"survived, and nobody has said why: {survivor}")

    def _cover(self, database: str, names: list[str], pool: ThreadPoolExecutor) -> dict[str, Any]:
        """Return which test runs which line; use the files of an earlier run if nothing has
        changed."""
        began, code = time.monotonic(), _digest_of_the_code()
        LINES.mkdir(parents=True, exist_ok=True)
        files: dict[str, list[str]] = defaultdict(list)
        for name in names:
            files[name.partition("::")[0]].append(name)

        def one(file: str) -> dict[str, Any]:
            digest = hashlib.sha256(
                "\n".join([code, database, file, (ROOT / file).read_text()]).encode()
            )
            kept = LINES / f"{digest.hexdigest()}.json"
            if not kept.exists():
                bench = self._free.get()
                try:
                    kept.write_text(
                        json.dumps(bench.stands[database].cover(files[file], TEST_SECONDS))
                    )
                finally:
                    self._free.put(bench)
            part: dict[str, Any] = json.loads(kept.read_text())
            return part

        # The first run on each stand creates its database.
        list(
            pool.map(
                lambda bench: bench.stands[database].cover(files[FIRST_FILE], TEST_SECONDS),
                self._benches,
            )
        )
        run: dict[str, Any] = {
            "lines": defaultdict(lambda: defaultdict(list)),
            "seconds": {},
            "failed": [],
        }
        for part in pool.map(one, sorted(files, key=lambda file: -len(files[file]))):
            run["seconds"] |= part["seconds"]
            run["failed"] += part["failed"]
            for module, lines in part["lines"].items():
                for line, tests in lines.items():
                    run["lines"][module][line] += tests
        print(
            f"{len(names)} tests on {database}, run once in {time.monotonic() - began:.0f} s",
            flush=True,
        )
        return run

    def _one(self, mutant: Mutant) -> Found:
        if known := self._results.known(mutant):
            return known
        bench = self._free.get()
        try:
            began, before = time.monotonic(), self._results.killer(mutant)
            if began > self._end:
                return Found("not tested")
            found = bench.meet(mutant, self._tests, before)
        finally:
            self._free.put(bench)
        self._results.note(mutant, found)
        seconds = time.monotonic() - began
        print(f"{found.outcome:<9} {mutant.name}   [{seconds:.0f} s {found.killer}]", flush=True)
        if before and not found.killer:
            print(f"lost its killer {before}: {mutant.name}", flush=True)
        return found

    def _unsound(self, killers: set[str]) -> set[str]:
        unsound = set()
        for database in DATABASES:
            for test in sorted(
                self._tests[database].seconds.keys() & {name.partition(" ")[2] for name in killers}
            ):
                killer = f"{database} {test}"
                if killer in killers and self._benches[0].stands[database].fails(
                    test, self._tests[database].seconds[test]
                ):
                    print(
                        f"{killer} fails without a mutant too: RESUME=1 tests again what it has"
                        " killed."
                    )
                    unsound.add(killer)
        return unsound


def _digest_of_the_code() -> str:
    """Return a digest of the code that tests run, except the test files themselves."""
    digest = hashlib.sha256()
    for folder in ("idempotency", "rides_demo", "tests"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            no_test = not (folder == "tests" and file.name.startswith("test_"))
            if no_test and ("mutation" not in file.parts or file.name == "choice.py"):
                digest.update(file.read_bytes())
    return digest.hexdigest()


def main() -> int:
    """Return the number of unexplained survivors, of mutants that were not tested in time, of
    unsound results, and of explained mutants that do not exist."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument(
        "--modules", default="", help=f"some of {' '.join([*WHOLE, *SAMPLED])}; all by default"
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument(
        "--only", default="", help="a regular expression; the mutants with such a name"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="believe what earlier runs found, as long as its tests exist, and TESTED.txt",
    )
    options = parser.parse_args()
    began = time.monotonic()
    modules = (
        re.split(r"[\s,]+", options.modules.strip())
        if options.modules.strip()
        else [*WHOLE, *SAMPLED]
    )
    if unknown := [module for module in modules if module not in {*WHOLE, *SAMPLED}]:
        parser.error(f"{', '.join(unknown)}: choose from {' '.join([*WHOLE, *SAMPLED])}")
    to_do = [
        mutant
        for module in modules
        for mutant in mutants_of(module)
        if re.search(options.only, mutant.name)
        and not (options.resume and tested.is_tested(mutant.module))
    ]
    samples = ", ".join(f"{SAMPLED[module]} of {module}" for module in modules if module in SAMPLED)
    print(
        f"{len(to_do)} mutants"
        + (f", of which a sample by seed {SEED}: {samples}" if samples else ""),
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        with (
            HastyPostgres(folder / "postgres", max_connections=200) as server,
            ExitStack() as stack,
        ):
            benches = [Bench(number, folder, server, stack) for number in range(2)]
            run = Run(to_do, benches, resume=options.resume, end=began + options.minutes * 60)
            outcomes = run.outcomes()
            run.report(outcomes, time.monotonic() - began)
    if not options.only:
        tested.note(to_do, outcomes)
    # The name of a mutant contains its line, so a changed line makes the name stale.
    every = {each.name for module in modules for each in mutants_of(module, whole=True)}
    stale = sorted(EXPLAINED - every) if not options.modules.strip() else []
    for name in stale:
        print(f"SURVIVORS.md explains a mutant that no module has: {name}")
    counts = Counter(outcomes.values())
    for gone in sorted(
        name for name in EXPLAINED & outcomes.keys() if outcomes[name] in {"killed", "endless"}
    ):
        print(f"SURVIVORS.md explains what does not survive any more: {gone}")
    return counts["survived"] + counts["not tested"] + counts["unsound"] + len(stale)


if __name__ == "__main__":
    failed = main()
    print(f"mutants: FAILED {failed}" if failed else "mutants: ok")
    sys.exit(1 if failed else 0)
