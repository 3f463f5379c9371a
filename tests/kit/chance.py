"""Chance that can be repeated."""

import os
import random

#: Another one takes other turns: ``TEST_SEED=2 pytest ...``.
SEED = os.environ.get("TEST_SEED", "1")


def chance(of: object = "") -> random.Random:
    """Return chance of the seed, for each ``of`` another; a failing test prints the seed."""
    print(f"To repeat it: TEST_SEED={SEED}")  # noqa: T201
    return random.Random(f"{SEED} {of}")
