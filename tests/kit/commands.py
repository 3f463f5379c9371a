"""Run ``manage.py`` commands in separate processes, on the database and the Redis of the test."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any
from urllib.parse import quote

from django.conf import settings
from django.core.management import execute_from_command_line
from django.db import connection

#: The log texts of a loop for a failed pass, and for the first success after it.
FAILING, RECOVERED = "pass failed", "recovered"


def database_url() -> str:
    """Return the URL of the test database, whose name differs from the name in the settings."""
    parts = connection.settings_dict
    if connection.vendor == "sqlite":
        return f"sqlite:///{parts['NAME']}"
    host = parts["HOST"] or parts["OPTIONS"].get("host", "")
    login = quote(parts["USER"]) + (
        f":{quote(parts['PASSWORD'], safe='')}" if parts["PASSWORD"] else ""
    )
    if host.startswith("/"):
        return f"postgresql://{login}@/{parts['NAME']}?host={quote(host)}"
    return f"postgresql://{login}@{host}:{parts['PORT'] or 5432}/{parts['NAME']}"


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a child process that uses the test's database and Redis."""
    own = {
        "DATABASE_URL": database_url(),
        "REDIS_URL": settings.REDIS_URL,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
    }
    return {**os.environ, **own, "PYTHONUNBUFFERED": "1", **changes}


@contextmanager
def start(
    *arguments: str, python: str | None = None, stdout: int = subprocess.PIPE, **changes: str
) -> Iterator["subprocess.Popen[str]"]:
    """Start a management command, or the code ``python``; ``communicate()`` returns its output. The
    block's end kills it."""
    command = (
        [sys.executable, "-c", python] if python else [sys.executable, "-m", "django", *arguments]
    )
    options: dict[str, Any] = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        command, env=environment(**changes), cwd=settings.BASE_DIR, **options
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def run(*arguments: str, **changes: str) -> "subprocess.CompletedProcess[str]":
    """Run a management command to its end, at most two minutes."""
    with start(*arguments, **changes) as process:
        output, errors = process.communicate(timeout=120)
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


def run_here(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a management command in this process; return its exit status, output and errors, as from
    a child process."""
    output, errors, status = io.StringIO(), io.StringIO(), 0
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    }
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            execute_from_command_line(["manage.py", *arguments])
        except SystemExit as end:
            status = int(end.code or 0)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return subprocess.CompletedProcess(arguments, status, output.getvalue(), errors.getvalue())
