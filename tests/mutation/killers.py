"""The tests that killed the mutants of a function, in KILLERS.txt. A run tries them first.

The file is part of the repository: without it, the first run on a machine takes hours. Each line
with a function is followed by its tests, each with its database.
"""

from collections.abc import Iterable
from pathlib import Path

FILE = Path(__file__).parent / "KILLERS.txt"


def read() -> dict[tuple[str, str], list[str]]:
    """Return the tests by module and function."""
    found: dict[tuple[str, str], list[str]] = {}
    tests: list[str] = []
    for line in FILE.read_text().splitlines():
        if line.startswith("  "):
            tests.append(line.strip())
        else:
            module, _, name = line.partition(": ")
            found[module, name] = tests = []
    return found


def note(results: Iterable[dict[str, str]]) -> None:
    """Replace the tests of those functions that these results have."""
    new: dict[tuple[str, str], set[str]] = {}
    for result in results:
        if result["killer"] and not result["killer"].endswith(" its import"):
            function = result["module"], result["function"]
            new.setdefault(function, set()).add(result["killer"])
    every = {**read(), **new}
    FILE.write_text(
        "".join(
            f"{module}: {name}\n" + "".join(f"  {test}\n" for test in sorted(every[module, name]))
            for module, name in sorted(every)
        )
    )
