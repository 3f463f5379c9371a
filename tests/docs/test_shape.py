"""The shape of the code: short modules and functions, parts that do not grow, and an engine that
knows no HTTP."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

APP = Path(__file__).parents[2] / "idempotency"
MODULES = sorted(path for path in APP.rglob("*.py") if "migrations" not in path.parts)

#: The lines of code and the tokens of a part. If a new promise needs more, say which one in the
#: commit that raises a figure; if code goes, lower the figure.
BUDGETS = {
    "engine": (6070, 44480),
    "http": (2473, 19818),
    "operations": (851, 6529),
    "jobs": (903, 6870),
}
#: How much a part may grow beyond its figure before a commit must raise it.
TOLERANCE = 1.02
#: The modules and packages of each part; the engine has all that are in no other part.
PARTS = {
    "http": ("_http", "decorators", "scopes", "http"),
    "operations": ("operations", "_operations"),
    "jobs": ("jobs", "inbox", "backends", "enqueuer", "_hand_over", "_prompt", "_groups"),
    "beside": (
        "admin",
        "contrib",
        "testing",
        "management",
        "client",
        "templatetags",
        "_bulk_work",
        "_bulk_answers",
        "_bulk_records",
    ),
    "checks": ("checks", "monitoring", "policy"),
}
_NO_CODE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
)


def part_of(path: Path) -> str:
    name = path.relative_to(APP).with_suffix("").parts[0]
    return next((part for part, names in PARTS.items() if name in names), "engine")


def code_of(path: Path) -> tuple[int, int]:
    """Return the lines of code of a module, without blank lines, comments and docstrings, and its
    tokens without commas."""
    text = path.read_text()
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in _NO_CODE
    ]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines), sum(token.string != "," for token in tokens)


@pytest.mark.parametrize("part", BUDGETS)
def test_a_part_does_not_grow_beyond_its_budget(part: str) -> None:
    counts = [code_of(path) for path in MODULES if part_of(path) == part]
    lines, tokens = (sum(each) for each in zip(*counts, strict=True))
    most_lines, most_tokens = BUDGETS[part]
    assert lines <= most_lines * TOLERANCE, f"{lines} lines"
    assert tokens <= most_tokens * TOLERANCE, f"{tokens} tokens"


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
