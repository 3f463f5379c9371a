"""The button that kills a web worker: whom it kills, and where it is not."""

# ruff: noqa: F811 (fixtures are imported, and named by the tests that use them)

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from django.test import Client

from rides_demo import switches
from rides_demo.processes import web_workers
from tests.kit.rides import Phone, jane, sandbox  # noqa: F401

pytestmark = pytest.mark.django_db


@pytest.fixture
def window(jane: Phone) -> Client:
    """Return a browser in which Jane is signed in, and whose CSRF tokens are checked."""
    client = Client(enforce_csrf_checks=True)
    session = client.session
    session["rides_token"] = "demo-jane"
    session.save()
    return client


def posted(window: Client) -> dict[str, str]:
    """Return what the button posts."""
    window.get("/")
    return {"key": "k", "csrfmiddlewaretoken": window.cookies["csrftoken"].value}


@pytest.fixture
def victim(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Return a process that is a worker of the same web server as this one."""
    monkeypatch.setattr(switches, "running", web_workers.RunningRequests(tmp_path))
    with subprocess.Popen(["sleep", "600"]) as sibling:
        workers = {os.getpid(): psutil.Process(), sibling.pid: psutil.Process(sibling.pid)}
        monkeypatch.setattr(web_workers, "siblings", lambda: workers)
        yield sibling
        sibling.kill()


def hand_over(pid: int) -> None:
    """Let another process run what this one runs."""
    (entry,) = switches.running.folder.iterdir()
    entry.rename(entry.with_name(entry.name.replace(f".{os.getpid()}.", f".{pid}.")))


@pytest.mark.parametrize("supervisor", [None, "", "-1", "this process"])
def test_a_service_that_no_supervisor_started_has_no_button(
    window: Client, monkeypatch: pytest.MonkeyPatch, supervisor: str | None
) -> None:
    if supervisor is not None:
        monkeypatch.setenv(
            web_workers.SUPERVISOR, str(os.getpid()) if supervisor == "this process" else supervisor
        )

    assert b"/switches/kill" not in window.get("/").content
    assert window.post("/switches/kill", posted(window)).status_code == 404


def test_the_worker_that_runs_the_booking_is_killed(
    window: Client, victim: subprocess.Popen[bytes]
) -> None:
    with switches.running.entered("Bearer demo-jane", "k"):
        hand_over(victim.pid)
        answer = window.post("/switches/kill", posted(window))

    assert answer.json() == {"pid": victim.pid, "ran_booking": True}
    assert victim.wait(60) == -signal.SIGKILL


def test_no_other_site_no_stranger_and_no_other_machine_kills(
    window: Client, victim: subprocess.Popen[bytes]
) -> None:
    form = posted(window)
    with switches.running.entered("Bearer demo-jane", "k"):
        hand_over(victim.pid)

        assert window.get("/switches/kill").status_code == 405
        assert window.post("/switches/kill", {"key": "k"}).status_code == 403
        assert window.post("/switches/kill", form, REMOTE_ADDR="192.0.2.1").status_code == 404
        assert Client().post("/switches/kill", {"key": "k"}).status_code == 403

    assert victim.poll() is None


def test_a_request_is_known_while_it_runs(victim: subprocess.Popen[bytes]) -> None:
    running = switches.running
    assert running.worker_of("a", "b") is None
    with running.entered("a", "b"):
        found = running.worker_of("a", "b")
        assert found is not None
        assert found.pid == os.getpid()
        assert running.worker_of("ab", "") is None
    assert running.worker_of("a", "b") is None


def test_a_file_of_a_dead_worker_names_nobody(victim: subprocess.Popen[bytes]) -> None:
    running = switches.running
    running.folder.mkdir(exist_ok=True)
    with running.entered("a", "b"):
        (entry,) = running.folder.iterdir()
        entry.with_name(entry.name.replace(f".{os.getpid()}.", ".1.")).touch()

    assert len(list(running.folder.iterdir())) == 1
    assert running.worker_of("a", "b") is None
