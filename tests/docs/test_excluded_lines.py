"""What coverage does not count is listed with its reason."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LISTED = (ROOT / "docs" / "contributing" / "coverage.md").read_text()


def test_each_line_that_coverage_leaves_out_is_listed_with_a_reason() -> None:
    found = {
        (str(path.relative_to(ROOT)), line.partition("# pragma: no")[0].strip())
        for path in (ROOT / "idempotency").rglob("*.py")
        for line in path.read_text().splitlines()
        if "# pragma: no" in line
    }
    rows = re.findall(r"^\| `(.*)` \| `(.*)` \| (\S.*) \|$", LISTED, re.M)
    assert {(file, line) for file, line, _ in rows} == found
