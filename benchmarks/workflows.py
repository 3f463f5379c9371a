"""Operations beside a bare function with the same INSERT, and beside a workflow of DBOS with one
step."""

from typing import Any

from benchmarks import in_process
from benchmarks.ground import ground, migrate

#: The systems of this part; ``contestant.load`` knows their modules.
NAMES = ("operations", "dbos_step")


def measure(quick: bool) -> dict[str, Any]:
    """Return for each system its version and the figures of its kinds of call, or its error."""
    with ground():
        migrate()
        rounds = in_process.QUICK_ROUNDS if quick else in_process.ROUNDS
        return in_process.compete(NAMES, rounds)
