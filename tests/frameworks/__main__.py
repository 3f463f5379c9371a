"""``python -m tests.frameworks`` runs the cases over all kinds of view and prints the table; 0 when
all of them pass."""

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.exit(
        pytest.main(["-q", "--no-header", "--tb=short", str(Path(__file__).parent), *sys.argv[1:]])
    )
