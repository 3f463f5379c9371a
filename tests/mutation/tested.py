"""The modules of which no mutant survived, in TESTED.txt, each with a digest of its code.

All mutants take hours, so the file is part of the repository: ``--resume`` tests only the modules
that have changed since. A change of the tests is not noticed; a run without ``--resume`` is.
"""

import hashlib
from collections import Counter
from pathlib import Path

from tests.mutation.mutants import ROOT, Mutant

FILE = Path(__file__).parent / "TESTED.txt"
#: A module with such an outcome is not noted.
_OPEN = {"survived", "not tested", "unsound"}


def is_tested(module: str) -> bool:
    """Return whether the module has been tested as it is now."""
    return _digest(module) in _noted().get(module, "").split()


def note(mutants: list[Mutant], outcomes: dict[str, str]) -> None:
    """Add the modules of a run to the file, and remove those that have changed."""
    lines = {module: line for module, line in _noted().items() if is_tested(module)}
    for module in dict.fromkeys(mutant.module for mutant in mutants):
        counts = Counter(outcomes[mutant.name] for mutant in mutants if mutant.module == module)
        lines.pop(module, None)
        if not counts.keys() & _OPEN:
            figures = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
            lines[module] = f"{module} {_digest(module)} {figures}"
    FILE.write_text("".join(f"{lines[module]}\n" for module in sorted(lines)))


def _noted() -> dict[str, str]:
    return {line.split()[0]: line for line in FILE.read_text().splitlines()}


def _digest(module: str) -> str:
    path = ROOT / module
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.exists() else "gone"
