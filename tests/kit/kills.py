"""Kills of an enqueuer, a consumer and a broker at random times, and a count of the effects."""

import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from django.conf import settings

from idempotency.models import StagedJob
from rides_demo.processes.process import Process
from tests.factories import StagedJobFactory
from tests.kit.chance import chance
from tests.kit.commands import environment
from tests.kit.waiting import eventually
from tests.models import Entry
from tests.processes.service import JOB

JOBS, KILLS = 300, 12
_ENQUEUER = "enqueue_jobs --loop --interval 0.1 --batch-size 25"
_CONSUMER = (
    "import django; django.setup()\nimport runpy; runpy.run_module({!r}, run_name='__main__')"
)


def assert_kills_lose_nothing_and_repeat_nothing(
    folder: Path,
    module: str,
    variables: Mapping[str, str],
    *,
    queue: str = "killed",
    backend: str = "Backend",
    arguments: Sequence[str] = (),
    broker: Process | None = None,
) -> None:
    """Stage jobs while the processes are killed and start again. ``module`` has the backend, and is
    the consumer if it is run with ``arguments``."""
    given = environment(
        DJANGO_SETTINGS_MODULE="tests.processes.settings",
        TEST_BACKEND=f"{module}.{backend}",
        **variables,
    )
    commands = {
        "enqueuer": [sys.executable, "-m", "django", *_ENQUEUER.split()],
        "consumer": [sys.executable, "-c", _CONSUMER.format(module), *arguments],
    }
    names, drawn = [f"job {number}" for number in range(JOBS)], chance()
    with ExitStack() as stack:
        processes = [] if broker is None else [broker]
        for name, command in commands.items():
            log = folder / f"{name}.log"
            process = Process(
                name, command, environment=given, folder=settings.BASE_DIR, output=log
            )
            # A broker is slow to start: it is killed half as often.
            processes += [stack.enter_context(process)] * 2

        def revive() -> None:
            for process in processes:
                process.launch()

        for kill in range(KILLS):
            StagedJob.objects.bulk_create(
                StagedJobFactory.build(job_name=JOB, queue=queue, job_args={"name": name})
                for name in names[kill::KILLS]
            )
            threading.Event().wait(drawn.uniform(0.5, 4))
            drawn.choice(processes).kill()
            revive()

        def done() -> bool:
            revive()
            return not StagedJob.objects.exists() and Entry.objects.count() >= JOBS

        eventually(done, 600)
    assert Counter(Entry.objects.values_list("name", flat=True)) == dict.fromkeys(names, 1)
