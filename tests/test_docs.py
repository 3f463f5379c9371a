"""What the docs say is what the code does."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from idempotency import problems
from idempotency.conf import Settings

ROOT = Path(__file__).parent.parent
REFERENCE = (ROOT / "docs" / "reference.md").read_text()


def test_the_table_of_settings_is_the_one_of_the_code() -> None:
    documented = re.findall(r"^\| `([A-Z0-9_]+)` \| `(.*)` \|$", REFERENCE, re.M)
    assert documented == [(field.name, _written(getattr(Settings(), field.name))) for field in fields(Settings)]


def test_every_error_code_is_documented() -> None:
    assert set(re.findall(r"^\| \d+ \| `(\w+)` \|", REFERENCE, re.M)) == set(problems._TITLES)


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))], ids=lambda path: path.name)
def test_the_python_examples_are_python(path: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S):
        ast.parse(block.replace("[..., ", "["))


def test_every_page_is_in_the_table_of_contents() -> None:
    entries = re.findall(r"^([\w-]+(?:/[\w*-]+)?)$", (ROOT / "docs" / "index.md").read_text(), re.M)
    listed = {page for entry in entries for page in (ROOT / "docs").glob(f"{entry}.md")}
    assert listed | {ROOT / "docs" / "index.md"} == set((ROOT / "docs").glob("**/*.md"))


def test_every_file_that_the_readme_names_exists() -> None:
    named = re.findall(r"`(docs/[^`]*|[A-Z]+(?:\.md)?)`", (ROOT / "README.md").read_text())
    named = [name for name in named if "/" in name or name in ("CHANGELOG.md", "LICENSE")]
    assert len(named) > 4
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_make_target_of_the_readme_exists() -> None:
    targets = set(re.findall(r"\bmake (\w+)$", (ROOT / "README.md").read_text(), re.M))
    assert targets == {"demo", "serve", "test", "lint"}
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)


def _written(value: object) -> str:
    return repr(sorted(value)) if isinstance(value, frozenset) else repr(value)
