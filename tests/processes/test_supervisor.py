"""Rocket Rides as it is served: real processes, which come back when killed and leave nothing
behind."""

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median

import httpx
import psutil
import pytest

from rides_demo.management.commands.demo import within_reach
from rides_demo.processes.ports import free_port
from rides_demo.processes.supervisor import BASE_FOLDER, SHORT_LIMITS
from rides_demo.simulator.crashes import KILL_LOOPS, RESTART_BROKER, VICTIMS, Crashes
from rides_demo.simulator.simulation import FAULTS
from tests.kit.threads import WAIT_SECONDS
from tests.kit.waiting import eventually

pytestmark = pytest.mark.processes
NAMES = {
    "supervisor",
    "postgres",
    "redis",
    "sandbox",
    "web",
    "enqueuer",
    "worker",
    "completer",
    "reaper",
}


class Served:
    """One ``manage.py serve`` on a port and in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}/"
        # Of the environment of the tests nothing that names their own services.
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in ("DATABASE_URL", "REDIS_URL")
        }
        self.environment = kept | {
            "DJANGO_SETTINGS_MODULE": "rides_demo.settings",
            "PORT": str(self.port),
            "RIDES_RUN_FOLDER": str(folder),
            "WEB_WORKERS": "1",
        }
        self.process = self.serve()
        self.printed = ""

    def serve(self) -> subprocess.Popen[bytes]:
        self._unread = b""
        command = [sys.executable, BASE_FOLDER / "manage.py", "serve"]
        return subprocess.Popen(
            command,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            cwd=BASE_FOLDER,
        )

    def read_until(self, text: str) -> str:
        """Return what is printed up to the end of the line with ``text``."""
        printed, more, end = b"", b"\n", time.monotonic() + 3 * WAIT_SECONDS
        while more:
            while b"\n" in self._unread:
                line, _, self._unread = self._unread.partition(b"\n")
                printed += line + b"\n"
                if text.encode() in line:
                    return printed.decode()
            ready = select.select([self.process.stdout], [], [], max(0, end - time.monotonic()))[0]
            more = self.process.stdout.read(65536) if ready else b""
            self._unread += more
        raise AssertionError(f"{text!r} was not printed:\n{printed.decode()}")

    def pids(self) -> dict[str, int]:
        return json.loads((self.folder / "pids.json").read_text())

    def status(self) -> int:
        """What /healthz answers, 0 when nothing does."""
        try:
            with urllib.request.urlopen(f"{self.url}healthz", timeout=60) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            error.close()
            return error.code
        except OSError:
            return 0

    def healthy(self) -> bool:
        return self.status() == 200


def everything(pids: dict[str, int]) -> list[psutil.Process]:
    """Return the processes and their children."""
    found = []
    for pid in filter(None, pids.values()):
        process = psutil.Process(pid)
        found += [process, *process.children(recursive=True)]
    return found


def gone(processes: list[psutil.Process]) -> bool:
    return not any(
        process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes
    )


#: How long the start of a Python with Django takes on a quiet machine, at most.
QUIET_START_SECONDS = 0.3


def usual_seconds(measured: Callable[[], float]) -> float:
    """Return the median of three results, as if the machine had nothing else to do: it is timed
    beside each of them."""

    def of_a_quiet_machine() -> float:
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import django.db"], check=True)
        return measured() / max(1, (time.monotonic() - began) / QUIET_START_SECONDS)

    return median(of_a_quiet_machine() for _ in range(3))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    one = Served(tmp_path_factory.mktemp("served"))
    try:
        one.printed = one.read_until("ready:")
        yield one
    finally:
        one.process.kill()
        one.process.wait()
        one.process.stdout.close()


def test_it_says_when_it_takes_requests(served):
    assert served.printed.endswith(f"ready: {served.url}\n")
    assert f"{served.url}admin/  (admin / admin)" in served.printed
    assert served.healthy()
    assert set(served.pids()) == NAMES
    assert all(served.pids().values())


def test_everything_listens_on_loopback_only(served):
    addresses = set()
    for process in everything(served.pids()):
        with suppress(psutil.NoSuchProcess):  # A worker that is replaced, for instance.
            listening = (
                each
                for each in process.net_connections("inet")
                if each.status == psutil.CONN_LISTEN
            )
            addresses |= {connection.laddr.ip for connection in listening}
    assert addresses == {"127.0.0.1"}


def test_the_button_of_the_page_kills_a_web_worker_which_comes_back(served):
    master = psutil.Process(served.pids()["web"])
    with httpx.Client(
        base_url=served.url, follow_redirects=True, timeout=60, trust_env=False
    ) as browser:
        browser.get("/")
        browser.post(
            "/sign-in",
            data={"token": "demo-jane", "csrfmiddlewaretoken": browser.cookies["csrftoken"]},
        )
        killed = browser.post(
            "/switches/kill", data={"csrfmiddlewaretoken": browser.cookies["csrftoken"]}
        ).json()

    assert not killed["ran_booking"]
    eventually(lambda: [worker.pid for worker in master.children()] not in ([], [killed["pid"]]))
    eventually(served.healthy)
    assert master.is_running()


def test_the_limits_are_short_enough_to_watch_a_lock_expire(served):
    environment = psutil.Process(served.pids()["web"]).environ()
    assert {name: environment[name] for name in SHORT_LIMITS} == SHORT_LIMITS


@pytest.mark.parametrize("name", sorted(NAMES - {"supervisor"}))
def test_what_is_killed_runs_again_within_two_seconds(served, name):
    def kill() -> float:
        before = served.pids()[name]
        children = psutil.Process(before).children()
        began = time.monotonic()
        os.kill(before, signal.SIGKILL)
        eventually(lambda: served.pids()[name] not in (0, before))
        took = time.monotonic() - began
        eventually(served.healthy)
        eventually(lambda: gone(children))
        return took

    assert usual_seconds(kill) < 2


@pytest.mark.parametrize("fault", sorted(VICTIMS.keys() - {KILL_LOOPS, RESTART_BROKER}))
@pytest.mark.sample
def test_each_crash_of_the_simulator_strikes_and_the_service_is_back_afterwards(served, fault):
    def strike() -> float:
        crashes = Crashes(served.folder, random.Random(1))
        assert crashes.inject(fault) == [fault]
        eventually(served.healthy)
        return crashes.slowest_restart_seconds

    assert usual_seconds(strike) < 2


def test_a_victim_that_dies_of_something_else_does_not_count(served):
    crashes = Crashes(served.folder, random.Random(1))
    before = served.pids()["enqueuer"]
    os.kill(before, signal.SIGKILL)

    assert crashes.inject("kill-enqueuer") == ["kill-enqueuer"]

    assert served.pids()["enqueuer"] not in (0, before)


def test_services_that_the_demo_does_not_run_are_not_crashed():
    assert within_reach(NAMES).split(",") == list(FAULTS)
    left_out = set(FAULTS) - set(within_reach(NAMES - {"postgres", "redis", "sandbox"}).split(","))
    without = {"restart-postgres", "restart-redis", "stripe-faults", "stripe-down"}
    assert left_out == {*without, "kill-pay-pilots"}


def test_without_the_database_it_is_not_healthy_and_says_so_in_a_line(served):
    os.kill(served.pids()["supervisor"], signal.SIGSTOP)  # or it would have started it again
    try:
        os.kill(served.pids()["postgres"], signal.SIGQUIT)
        eventually(lambda: served.status() == 503)
        request = urllib.request.Request(
            f"{served.url}rides", b"{}", {"Authorization": "Bearer demo-jane"}, method="POST"
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=60)
        assert (refused.value.code, refused.value.headers["Retry-After"]) == (503, "1")
        refused.value.close()
    finally:
        os.kill(served.pids()["supervisor"], signal.SIGCONT)
    eventually(served.healthy)
    printed = served.read_until("a database error ended the request")
    assert "django.db.utils.OperationalError: connection" in printed.splitlines()[-1]
    assert "Traceback" not in printed


def test_a_second_one_on_the_same_port_names_the_cure(served):
    command = [sys.executable, BASE_FOLDER / "manage.py", "serve"]
    done = subprocess.run(command, env=served.environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "serve: FAILED 1\n")
    assert f"Port {served.port} is taken" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("STRIPE_API_KEY", "sk_live_x", "live key"),
        ("PORT", "eighty", "PORT must be a whole number"),
        ("LOCK_TIMEOUT_SECONDS", "-1", "LOCK_TIMEOUT_SECONDS must be a whole number"),
        ("DATABASE_URL", "nonsense", "DATABASE_URL cannot be read"),
        ("DATABASE_URL", "postgresql://127.0.0.1:1/none", "migrate` failed"),
    ],
)
def test_a_wrong_environment_is_named_without_a_traceback(
    served, tmp_path, variable, value, message
):
    environment = served.environment | {
        "PORT": str(free_port()),
        "RIDES_RUN_FOLDER": str(tmp_path),
        variable: value,
    }
    command = [sys.executable, BASE_FOLDER / "manage.py", "serve"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_killing_the_supervisor_leaves_nothing_behind_and_it_starts_again(served):
    running = everything(served.pids())
    served.process.kill()
    served.process.wait()
    served.process.stdout.close()
    eventually(lambda: gone(running))
    served.process = served.serve()
    served.read_until("ready:")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_everything_in_good_order(served, number):
    if served.process.poll() is not None:
        served.process.stdout.close()
        served.process = served.serve()
        served.read_until("ready:")
    running = everything(served.pids())
    served.process.send_signal(number)
    served.read_until("serve: ok")
    assert served.process.wait(60) == 0
    assert gone(running)
    assert not (served.folder / "pids.json").exists()
