"""What ``CONTRIBUTING.md`` says is there: targets, tests, modules, cells."""

import re
from configparser import ConfigParser
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
SETUP = ConfigParser()
SETUP.read(ROOT / "setup.cfg")


def test_each_target_that_it_names_exists_and_the_other_way_round() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.M)
    assert phony
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", TEXT, re.M))
    of_users = {"demo", "serve", "clean"}
    assert named == {target for target in phony[1].split() if target not in of_users}


def test_ci_runs_the_targets_that_it_says() -> None:
    table = re.findall(r"^\| `make ([a-z-]+)`", TEXT, re.M)
    script = (ROOT / ".ci" / "run").read_text()
    assert re.findall(r"^make ([a-z-]+)", script, re.M) == table[:9]


def test_each_test_that_it_names_exists() -> None:
    path, name = re.search(r"(tests/[\w/]+\.py)::(\w+)", TEXT).groups()  # type: ignore[union-attr]
    assert f"def {name}(" in (ROOT / path).read_text()
    ((path, part),) = re.findall(r"pytest (\S+) -k (\w+)$", TEXT, re.M)
    assert re.search(rf"^def test_\w*{part}", (ROOT / path).read_text(), re.M)
    assert all(
        (ROOT / path).exists()
        for path in re.findall(r"\b(?:tests|requirements|idempotency)/[\w./]+\w", TEXT)
    )


def test_its_map_shows_each_package_of_the_app() -> None:
    folder = ROOT / "idempotency"
    rooms = [
        f"{path.parent.name}/"
        for path in folder.glob("*/__init__.py")
        if path.parent.name not in ("migrations", "templatetags")
    ]
    the_map = TEXT[TEXT.index("## The map of the app") : TEXT.index("## Rules")]
    assert not [name for name in rooms if name not in the_map]
    assert len(re.findall(r"^\|", the_map, re.M)) <= 16


def test_no_test_file_imports_from_another() -> None:
    """What tests share stands in tests/kit."""
    imports = r"^ *(?:from tests\.(?:\w+\.)?test_\w+|from tests(?:\.\w+)? import test_)"
    assert not [
        path.name
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(imports, path.read_text(), re.M)
    ]


def test_the_layers_of_the_imports_are_few_and_name_each_module() -> None:
    for name, most in (("layers", 8), ("engine", 8), ("http", 8)):
        contract = SETUP[f"importlinter:contract:{name}"]
        assert contract["exhaustive"] == "true"
        assert len(contract["layers"].strip().splitlines()) <= most


def test_no_example_of_the_docs_imports_a_private_module() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert not [
        page.name
        for page in pages
        if re.search(r"(?:from|import) idempotency(?:\.\w+)*\._|import _", page.read_text())
    ]


def test_the_cells_of_the_matrix_are_the_environments_of_tox() -> None:
    cells = re.search(r"^CELLS := (.*)$", MAKEFILE, re.M)
    assert cells
    environments = set()
    for pattern in re.split(r",\s*(?![^{]*})", SETUP["tox:tox"]["env_list"]):
        parts = [part.strip("{}").split(",") for part in re.split(r"({[^}]*})", pattern.strip())]
        environments |= {"".join(chosen) for chosen in product(*parts)}
    assert set(cells[1].split()) - {"postgres15"} == environments


def test_the_lowest_cell_has_the_lowest_versions_that_the_package_permits() -> None:
    pins = dict(
        re.findall(
            r"^([\w-]+)(?:\[\w+\])?==([\d.]+)$",
            (ROOT / "requirements" / "lowest.txt").read_text(),
            re.M,
        )
    )
    needed = "".join(
        [SETUP["options"]["install_requires"], *SETUP["options.extras_require"].values()]
    )
    bounds = dict(re.findall(r"^([\w-]+)>=([\d.]+)$", needed, re.M))
    assert pins.keys() == bounds.keys()
    # The first releases of some versions are withdrawn.
    assert {name: version[: len(bounds[name])] for name, version in pins.items()} == bounds


def test_the_cell_that_it_names_is_one_and_the_main_cell_is_the_pinned_one() -> None:
    (named,) = re.findall(r"make matrix CELLS=([\w-]+)", TEXT)
    cells = re.search(r"^CELLS := (.*)$", MAKEFILE, re.M)
    assert cells
    assert named in cells[1].split()
    ((python, django),) = re.findall(r"Python ([\d.]+) with Django (\d+\.\d+)", TEXT)
    assert f"py{python.replace('.', '')}-django{django.replace('.', '')}" == cells[1].split()[0]
    assert re.search(
        rf"^django=={django}\.", (ROOT / "requirements" / "test.txt").read_text(), re.M
    )


def test_each_package_and_each_action_is_pinned_by_hash() -> None:
    for path in {*(ROOT / "requirements").glob("*.txt")} - {ROOT / "requirements" / "lowest.txt"}:
        lines = path.read_text().replace("\\\n", " ").splitlines()
        pins = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
        assert pins
        assert not [
            pin
            for pin in pins
            if not re.match(r"[\w.\[\]-]+==\S+ .*--hash=sha256:[0-9a-f]{64}\b", pin)
        ]
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        actions = re.findall(r"uses: (.*)", path.read_text())
        assert actions
        assert all(
            re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v[\d.]+", action) for action in actions
        )


def test_coverage_and_mutants_run_as_their_page_says() -> None:
    page = " ".join((ROOT / "docs" / "contributing" / "coverage.md").read_text().split())
    assert re.findall(r"`MINUTES` \((\d+)\)", page) == re.findall(
        r"--minutes \$\(or \$\(MINUTES\),(\d+)\)", MAKEFILE
    )


def test_the_workflows_run_the_targets_and_the_cells() -> None:
    workflows = ROOT / ".github" / "workflows"
    script = (ROOT / ".ci" / "run").read_text()
    assert "bash .ci/run" in (workflows / "ci.yml").read_text()
    nightly = (workflows / "nightly.yml").read_text()
    cells = re.search(r"^CELLS := (.*)$", MAKEFILE, re.M)
    assert cells
    assert re.findall(r"^          - (py\S+|postgres\S+)$", nightly, re.M) == cells[1].split()
    assert set(re.findall(r'CELLS="(.*)"', script)[0].split()) <= set(cells[1].split())
    left_out = set(re.findall(r"make ([a-z-]+)", script[script.index("left to the night") :]))
    assert left_out <= set(re.findall(r"make ([a-z-]+)", nightly))
