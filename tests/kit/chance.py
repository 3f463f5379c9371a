"""Repeatable random choices."""

import os
import random

#: Another seed makes other choices: ``TEST_SEED=2 pytest ...``.
SEED = os.environ.get("TEST_SEED", "1")


def chance(of: object = "") -> random.Random:
    """Return a random generator that depends on the seed and on ``of``; the output of a failing
    test has the seed."""
    print(f"To repeat it: TEST_SEED={SEED}")  # noqa: T201
    return random.Random(f"{SEED} {of}")
