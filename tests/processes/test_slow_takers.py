"""A slow HTTP service as the backend of a queue: processes that are killed or stopped during its
hand-overs, and limits of time that a held transaction would exceed."""

import os
import re
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.request import Request, urlopen

import pytest
from django.db import connection
from django.utils import timezone

from idempotency.models import StagedJob
from tests.factories import StagedJobFactory
from tests.kit.commands import start
from tests.kit.database import database_setting
from tests.kit.examples import file_of
from tests.kit.threads import WAIT_SECONDS, background
from tests.kit.waiting import eventually

pytestmark = [
    pytest.mark.processes,
    pytest.mark.postgres,
    pytest.mark.django_db(transaction=True),
]


_guide: dict[str, Any] = {}
exec(file_of("choose-a-queue.md", "shop/partner.py"), _guide)
#: The function of the guide, with the lease of the test.
send_slowly = _guide["send"]
send_slowly.lease_seconds = float(os.environ.get("LEASE", send_slowly.lease_seconds))


def send_fast(job: StagedJob) -> None:
    """Send a job of a fast queue, in the transaction of the enqueuer."""
    address = os.environ["PARTNER_URL"].replace("slow", "fast")
    with urlopen(Request(address, b"", {"Idempotency-Key": str(job.pk)}), timeout=30):
        pass


class _Handler(BaseHTTPRequestHandler):
    server: "Service"

    def do_POST(self) -> None:
        """Count the job, and answer as late as the test wants."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path[1:], self.headers["Idempotency-Key"]))
        self.server.wait(len(self.server.got))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Log nothing."""


class Service(ThreadingHTTPServer):
    """The service: the queues and ids of the jobs that it got, in order, and its waits."""

    daemon_threads = True
    got: list[tuple[str, str]]
    wait: Callable[[int], object]

    def enqueuer(
        self, *, lease: float, loop: bool = True
    ) -> AbstractContextManager["subprocess.Popen[str]"]:
        """Start an enqueuer whose backends send to the service."""
        backends = {"*": f"{__name__}.send_slowly", "fast": f"{__name__}.send_fast"}
        code = (
            "import django; django.setup()\n"
            "from django.core.management import call_command\n"
            "from django.test.utils import override_settings\n"
            f"with override_settings(IDEMPOTENCY={{'ENQUEUERS': {backends!r}}}):\n"
            f"    call_command('enqueue_jobs', loop={loop}, interval=0.1)\n"
        )
        address = f"http://127.0.0.1:{self.server_port}/slow"
        return start(python=code, PARTNER_URL=address, LEASE=str(lease))


@pytest.fixture
def service() -> Iterator[Service]:
    """Yield a running service, which answers at once."""
    with Service(("127.0.0.1", 0), _Handler) as server, background(server.serve_forever):
        server.got, server.wait = [], lambda number: None
        yield server
        server.shutdown()


def handed_over(process: "subprocess.Popen[str]") -> int:
    """End an enqueuer, and return the number of jobs that it counted."""
    if process.poll() is None:
        process.terminate()
    output, _ = process.communicate(timeout=WAIT_SECONDS)
    return sum(map(int, re.findall(r"(\d+) handed over", output)))


def test_a_job_whose_enqueuer_is_killed_is_offered_again_after_the_lease(service: Service) -> None:
    answer, times = threading.Event(), []

    def wait(number: int) -> None:
        times.append(timezone.now())
        if number == 1:
            answer.wait(WAIT_SECONDS)

    service.wait = wait
    job = StagedJobFactory(queue="slow")
    with service.enqueuer(lease=3) as first:
        eventually(lambda: service.got)
        lease_end = StagedJob.objects.get().run_at
        first.kill()
        first.wait(WAIT_SECONDS)
    with service.enqueuer(lease=60) as second:
        eventually(lambda: not StagedJob.objects.exists(), WAIT_SECONDS)
        assert handed_over(second) == 1
    answer.set()
    assert service.got == [("slow", str(job.pk))] * 2
    assert times[0] < lease_end <= times[1]


def test_an_enqueuer_that_is_stopped_past_its_lease_neither_deletes_nor_counts(
    service: Service,
) -> None:
    answers = {number: threading.Event() for number in (1, 2)}
    service.wait = lambda number: answers[min(number, 2)].wait(2 * WAIT_SECONDS)
    StagedJobFactory(queue="slow")
    with service.enqueuer(lease=3, loop=False) as late:
        eventually(lambda: service.got, WAIT_SECONDS)
        late.send_signal(signal.SIGSTOP)
        with service.enqueuer(lease=600) as other:
            eventually(lambda: len(service.got) == 2, WAIT_SECONDS)
            answers[1].set()
            late.send_signal(signal.SIGCONT)
            late.wait(WAIT_SECONDS)
            assert handed_over(late) == 0
            assert StagedJob.objects.count() == 1, "the other one holds it"
            answers[2].set()
            eventually(lambda: not StagedJob.objects.exists(), WAIT_SECONDS)
            assert handed_over(other) == 1


def test_two_enqueuers_never_send_one_job(service: Service) -> None:
    service.wait = lambda number: threading.Event().wait(0.02)
    jobs = [str(job.pk) for job in StagedJobFactory.create_batch(80, queue="slow")]
    with service.enqueuer(lease=600) as one, service.enqueuer(lease=600) as other:
        eventually(lambda: not StagedJob.objects.exists(), 2 * WAIT_SECONDS)
        assert handed_over(one) + handed_over(other) == 80
    assert Counter(job for _, job in service.got) == dict.fromkeys(jobs, 1)


def test_a_slow_service_exceeds_no_limit_of_transactions_and_does_not_stop_other_queues(
    service: Service,
) -> None:
    sessions: list[int] = []

    def wait(number: int) -> None:
        if service.got[number - 1][0] == "slow":
            threading.Event().wait(3)
            sessions.append(open_transactions())

    service.wait = wait
    StagedJobFactory.create_batch(6, queue="slow")
    with (
        database_setting("idle_in_transaction_session_timeout", "1s"),
        service.enqueuer(lease=60) as process,
    ):
        eventually(lambda: service.got, WAIT_SECONDS)
        StagedJobFactory.create_batch(20, queue="fast")
        eventually(lambda: not StagedJob.objects.exists(), 2 * WAIT_SECONDS)
        assert handed_over(process) == 26
    queues = [queue for queue, _ in service.got]
    assert Counter(queues) == {"slow": 6, "fast": 20}
    assert len(set(service.got)) == 26, "each job once"
    assert queues[-1] == "slow", "the fast jobs were not held up until the end"
    assert sessions == [0] * 6


def open_transactions() -> int:
    """Return the number of transactions that other sessions have had open for two seconds."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND"
            " backend_type = 'client backend' AND pid <> pg_backend_pid() AND xact_start <"
            " now() - interval '2 seconds'"
        )
        (count,) = cursor.fetchone()
    connection.close()  # of this thread
    return int(count)
