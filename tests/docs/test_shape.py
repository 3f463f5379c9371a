"""The shape of the code: short modules and functions, and an engine that knows no HTTP."""

import ast
from pathlib import Path

import pytest

APP = Path(__file__).parents[2] / "idempotency"
MODULES = sorted(path for path in APP.rglob("*.py") if "migrations" not in path.parts)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(APP)))
def test_a_module_has_300_lines_at_most_and_the_body_of_a_function_40(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 300
    long = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if body and (body[-1].end_lineno or 0) - body[0].lineno >= 40:
                long.append(node.name)
    assert not long


@pytest.mark.parametrize("path", sorted((APP / "_engine").glob("*.py")), ids=lambda path: path.name)
def test_the_engine_imports_nothing_of_http(path: Path) -> None:
    imported = set()
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if not isinstance(node, ast.If)]  # if TYPE_CHECKING
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            imported |= {
                node.module or "",
                *(f"{node.module}.{alias.name}" for alias in node.names),
            }
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
    assert not [name for name in imported if name.startswith(("django.http", "django.urls"))]
