"""The how-to guides that a newcomer needs first, followed as they are printed, from an empty folder.

What their examples promise is tested in ``tests/docs/test_howtos.py``, ``tests/frameworks`` and ``tests/crash``.
"""

from pathlib import Path

import pytest

from tests.kit.examples import GUIDES
from tests.kit.printed import Project

pytestmark = pytest.mark.processes

AS_PRINTED = [
    "checkout-in-the-session.md",
]


@pytest.mark.parametrize("guide", AS_PRINTED)
def test_a_guide_can_be_followed_from_an_empty_folder(guide: str, tmp_path: Path) -> None:
    Project(tmp_path).follow((GUIDES / guide).read_text())
