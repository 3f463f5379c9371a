"""What is published is the app, all of it, and nothing else; in an empty project it works. ``make
package`` sets this up."""

import re
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path, PurePosixPath

import pytest

from tests.kit.packages import ROOT, TOOLS, one, run

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.full,  # make package runs them
    pytest.mark.skipif(not TOOLS.exists(), reason="make package installs the tools"),
]

VIEWS = """
from django.http import JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from idempotency.decorators import idempotent

runs = []

@csrf_exempt
@idempotent(scope=lambda request: "everybody")
def pay(request):
    runs.append(request)
    return JsonResponse({"run": len(runs)}, status=201)

urlpatterns = [path("pay", pay)]
"""

PAYS_TWICE = """
from django.test import Client
headers = {"Idempotency-Key": "one-payment"}
first, second = (Client().post("/pay", headers=headers) for _ in range(2))
assert (first.status_code, first.content) == (201, b'{"run": 1}'), first.content
assert (second.status_code, second.content) == (201, b'{"run": 1}'), second.content
assert second.headers["Idempotent-Replayed"] == "true", second.headers
"""

#: The module that an extra is for, and the apps that it wants installed.
EXTRAS = {
    "celery": ("idempotency.contrib.celery", []),
    "client": ("idempotency.client._httpx", []),
    "drf": ("idempotency.contrib.rest_framework", ["rest_framework"]),
    "kafka": ("idempotency.contrib.kafka", []),
    "ninja": ("idempotency.contrib.ninja", []),
    "opentelemetry": ("idempotency.contrib.opentelemetry._wrappers", []),
    "prometheus": ("idempotency.contrib.prometheus", []),
    "rabbitmq": ("idempotency.contrib.rabbitmq", []),
    "requests": ("idempotency.client._requests", []),
    "rq": ("idempotency.contrib.rq", ["django_rq"]),
    "spectacular": ("idempotency.contrib.spectacular", ["drf_spectacular"]),
    "sqs": ("idempotency.contrib.sqs", []),
    "tasks": ("idempotency.contrib.tasks", ["django_tasks_db"]),
}
IMPORTS = """
import importlib, sys
import django
from django.conf import settings
settings.configure(
    SECRET_KEY="packaging", USE_TZ=True,
    INSTALLED_APPS=[
        "django.contrib.contenttypes", "django.contrib.auth", "idempotency", *sys.argv[2:]
    ],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    RQ_QUEUES={"default": {"HOST": "localhost"}},
)
django.setup()
importlib.import_module(sys.argv[1])
"""


def test_the_wheel_holds_each_file_of_the_app_and_nothing_else(built: Path) -> None:
    names = {PurePosixPath(name) for name in zipfile.ZipFile(one(built, "*.whl")).namelist()}
    assert {
        name for name in names if not name.parts[0].endswith(".dist-info")
    } == files_of_the_app()


def test_the_sdist_holds_the_app_and_neither_demo_nor_tests(built: Path) -> None:
    with tarfile.open(one(built, "*.tar.gz")) as archive:
        names = {
            PurePosixPath(*Path(member.name).parts[1:]) for member in archive if member.isfile()
        }
    tops = {name.parts[0] for name in names if not name.parts[0].endswith(".egg-info")}
    assert {name for name in names if name.parts[0] == "idempotency"} == files_of_the_app()
    assert tops == {
        "idempotency", "CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md",
        "pyproject.toml", "setup.cfg",
    }  # fmt: skip


def test_the_index_would_take_both(built: Path) -> None:
    run(
        TOOLS,
        "-m",
        "twine",
        "check",
        "--strict",
        one(built, "*.whl"),
        one(built, "*.tar.gz"),
        cwd=built,
    )


def test_the_wheel_says_which_versions_the_matrix_proves_and_which_extras_there_are(
    built: Path,
) -> None:
    with zipfile.ZipFile(one(built, "*.whl")) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        said = Parser().parsestr(archive.read(name).decode())
    cells = re.search(r"^CELLS := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert cells
    proved = set()
    for python, django, release in re.findall(r"\bpy3(\d+)-django(\d)(\d)\b", cells[1]):
        proved |= {
            f"Programming Language :: Python :: 3.{python}",
            f"Framework :: Django :: {django}.{release}",
        }
    classifiers = said.get_all("Classifier")
    assert {
        line for line in classifiers if re.search(r":: (Python|Django) :: \d+\.", line)
    } == proved
    assert set(said.get_all("Provides-Extra")) == set(EXTRAS)


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_brings_all_that_its_module_imports(
    built: Path, tmp_path: Path, extra: str
) -> None:
    site, (module, apps) = tmp_path / "site", EXTRAS[extra]
    wheel = f"django-idempotency[{extra}] @ {one(built, '*.whl').as_uri()}"
    run(
        TOOLS,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--target",
        site,
        wheel,
        "psycopg[binary]",
        "Django~=5.2.0",
        cwd=tmp_path,
    )
    # Without the packages of the environment that the tests run in.
    run(
        TOOLS, "-S", "-W", "error", "-c", IMPORTS, module, *apps, cwd=tmp_path, PYTHONPATH=str(site)
    )


def test_a_new_project_answers_the_retry_of_a_payment_with_the_first_answer(
    built: Path, tmp_path: Path
) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    run(
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        one(built, "*.whl"),
        "psycopg[binary]",
        cwd=tmp_path,
    )
    run(python, "-m", "django", "startproject", "shop", tmp_path, cwd=tmp_path)
    settings = tmp_path / "shop" / "settings.py"
    settings.write_text(
        settings.read_text()
        + "\nINSTALLED_APPS += ['idempotency']\nALLOWED_HOSTS = ['testserver']\nROOT_URLCONF ="
        " 'pay'\n"
    )
    (tmp_path / "pay.py").write_text(VIEWS)

    def manage(*arguments: str) -> str:
        return run(python, "-W", "error", "manage.py", *arguments, cwd=tmp_path)

    manage("check")
    manage("migrate")
    manage("makemigrations", "--check", "--dry-run")
    manage("shell", "--verbosity", "0", "--command", PAYS_TWICE)
    manage("reap_keys")


def files_of_the_app() -> set[PurePosixPath]:
    files = (
        path
        for path in (ROOT / "idempotency").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )
    return {PurePosixPath(path.relative_to(ROOT)) for path in files}
