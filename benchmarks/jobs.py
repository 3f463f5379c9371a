"""Measure how fast staged jobs reach their queue, compared with the client library of the queue.

``python -m benchmarks.jobs [--jobs N] [--rounds N] [--queues ...]`` starts a PostgreSQL, a Redis
and the brokers in a temporary folder. For each queue it measures, in interleaved rounds: the client
library, which enqueues jobs from memory (RQ's ``enqueue_many``; Celery with one producer; pika with
a confirmation of each job; a producer of Kafka with confirmations of each batch); one enqueuer; and
two concurrent enqueuers. For Kafka it also measures the client library with a confirmation of each
job, its batches together with the bare statements of an enqueuer, and these statements alone. For
RQ it then measures the time from COMMIT until a job is in the queue, with the hand-over after
COMMIT and with the enqueuer's loop. It prints a table, and exits with 1 if a target is missed.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

from benchmarks.ground import stop_in_order
from benchmarks.targets import JOB_TARGETS
from rides_demo.processes.brokers import BROKERS
from rides_demo.processes.debian import NotToBeHad
from rides_demo.processes.embedded import Postgres, Redis, postgres_url, redis_url
from rides_demo.processes.process import Process

JOBS, ROUNDS = 10_000, 5
QUICK_JOBS, QUICK_ROUNDS = 2_000, 1
BACKENDS = {
    "rq": "idempotency.contrib.rq.RQBackend",
    "celery": "idempotency.contrib.celery.CeleryBackend",
    "rabbitmq": "idempotency.contrib.rabbitmq.RabbitMQBackend",
    "kafka": "idempotency.contrib.kafka.KafkaBackend",
}
#: The queue of RabbitMQ, and the topic of Kafka.
QUEUE = "default"
NAME = "benchmarks.jobs.job"
#: The figures that are ratios of two ways.
RATIOS = {
    "of_direct": ("one", "direct"),
    "two_to_one": ("two", "one"),
    "of_single": ("one", "single"),
    "of_bare": ("one", "bare"),
}
BATCH = 1000
PROMPT_SAMPLES, LOOP_SAMPLES, QUICK_LOOP_SAMPLES = 200, 15, 5


def job(**args: Any) -> None:
    """Do nothing: no worker runs the job."""


def set_up(queue: str, **changes: Any) -> Any:
    """Set up Django and, for Celery, its app in this process; return the app, or None."""
    import django
    from django.conf import settings

    django.setup()
    ours = {"ENQUEUERS": {"*": BACKENDS[queue]}}
    settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, **ours, **changes}
    if queue != "celery":
        return None
    from celery import Celery

    from idempotency.contrib.celery import OnceTask

    app = Celery(
        "bench",
        broker=settings.REDIS_URL.replace("unix://", "redis+socket://"),
        set_as_current=True,
    )
    app.task(job, name=NAME, base=OnceTask)
    return app


def arguments(number: int) -> dict[str, Any]:
    """Return the arguments of a job."""
    return {"ride_id": number, "amount_cents": 2000, "label": "receipt"}


def direct(
    queue: str, count: int, start: Any, times: Any, turn: Any, *, batch: int = BATCH
) -> None:
    """Enqueue ``count`` jobs with the client library: the same jobs as the enqueuer sends, with ids
    and retries."""
    enqueue = CLIENTS[queue](set_up(queue))
    enqueue(range(1))
    start.wait()
    begin = time.monotonic()
    for first in range(0, count, batch):
        enqueue(range(first, min(first + batch, count)))
    times.put((begin, time.monotonic()))


def single(queue: str, count: int, start: Any, times: Any, turn: Any) -> None:
    """Enqueue ``count`` jobs one by one, as a view without this app does."""
    direct(queue, count, start, times, turn, batch=1)


def bare(queue: str, count: int, start: Any, times: Any, turn: Any, *, sends: bool = True) -> None:
    """Send staged jobs as the enqueuer does, but with the client library and plain statements: read
    and lock a batch, send as many jobs, and update the rows."""
    enqueue = CLIENTS[queue](set_up(queue))
    from django.db import connection, transaction

    def send_batch() -> bool:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(_READ, [BATCH])
            rows = cursor.fetchall()
            if sends or not rows:
                enqueue(range(len(rows) or 1))
            cursor.execute(_UPDATE, [[row[0] for row in rows]])
            return bool(rows)

    send_batch()
    start.wait()
    begin = time.monotonic()
    for _ in range(0, count, BATCH):
        send_batch()
    times.put((begin, time.monotonic()))


def statements(queue: str, count: int, start: Any, times: Any, turn: Any) -> None:
    """Run the statements of ``bare`` and send nothing: no script with one session and these
    statements is faster, even if it sends while the database works."""
    bare(queue, count, start, times, turn, sends=False)


def rq_client(app: None) -> Callable[[range], None]:
    """Return a function that enqueues one batch."""
    from django_rq.queues import get_queue
    from rq import Queue

    from idempotency.contrib.rq import RQBackend, run_once

    target = get_queue("default")

    def enqueue(numbers: range) -> None:
        batch = []
        for number in numbers:
            pk = str(uuid4())
            call = [NAME, arguments(number), pk]
            batch.append(
                Queue.prepare_data(
                    run_once, args=call, job_id=pk, description=NAME, retry=RQBackend.retry
                )
            )
        target.enqueue_many(batch)

    return enqueue


def celery_client(app: Any) -> Callable[[range], None]:
    """Return a function that sends one batch, job by job."""
    producer = app.amqp.Producer(app.connection_for_write(), auto_declare=False)

    def enqueue(numbers: range) -> None:
        for number in numbers:
            app.send_task(
                NAME,
                kwargs=arguments(number),
                task_id=str(uuid4()),
                producer=producer,
                ignore_result=True,
            )

    return enqueue


def rabbitmq_client(app: None) -> Callable[[range], None]:
    """Return a function that publishes one batch, and waits for the confirmation of each job."""
    import pika
    from django.conf import settings

    channel = pika.BlockingConnection(pika.URLParameters(settings.RABBITMQ_URL)).channel()
    channel.confirm_delivery()

    def enqueue(numbers: range) -> None:
        for number in numbers:
            pk, body = message(number)
            properties = pika.BasicProperties(
                message_id=pk, content_type="application/json", delivery_mode=2
            )
            channel.basic_publish("", QUEUE, body, properties, mandatory=True)

    return enqueue


def kafka_client(app: None) -> Callable[[range], None]:
    """Return a function that publishes one batch, and waits for its confirmations."""
    from confluent_kafka import Producer
    from django.conf import settings

    producer = Producer({**settings.KAFKA, "enable.idempotence": True, "acks": "all"})

    def enqueue(numbers: range) -> None:
        for number in numbers:
            pk, body = message(number)
            producer.produce(QUEUE, body, pk, headers={"job_id": pk})
        producer.flush(30)

    return enqueue


def message(number: int) -> tuple[str, bytes]:
    """Return an id, and the message that the backends of RabbitMQ and Kafka make of its job."""
    pk = str(uuid4())
    call = {"job_id": pk, "job_name": NAME, "job_args": arguments(number)}
    return pk, json.dumps(call | {"using": "default", "trace": None}).encode()


def declare_queue(url: str) -> None:
    """Declare the queue of RabbitMQ."""
    import pika

    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        quorum = {"x-queue-type": "quorum"}
        connection.channel().queue_declare(QUEUE, durable=True, arguments=quorum)


def make_topic(url: str) -> None:
    """Make the topic of Kafka, with one partition."""
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": url})
    admin.create_topics([NewTopic(QUEUE, 1, 1)])[QUEUE].result()


_READ = (
    "SELECT id, job_name, job_args FROM idempotency_stagedjob WHERE failed_at IS NULL"
    " AND run_at <= statement_timestamp() ORDER BY run_at, id LIMIT %s FOR UPDATE SKIP LOCKED"
)
_UPDATE = (
    "UPDATE idempotency_stagedjob SET hand_overs = hand_overs + 1, refusals = 0, last_error = '',"
    " run_at = statement_timestamp() + interval '30 s' WHERE id = ANY(%s::uuid[])"
)
DECLARE = {"rabbitmq": declare_queue, "kafka": make_topic}
CLIENTS: dict[str, Callable[[Any], Callable[[range], None]]] = {
    "rq": rq_client,
    "celery": celery_client,
    "rabbitmq": rabbitmq_client,
    "kafka": kafka_client,
}


def in_queue(queue: str) -> int:
    """Return the number of jobs in the queue. That of Kafka gets another message."""
    from django.conf import settings

    if queue == "rabbitmq":
        import pika

        with pika.BlockingConnection(pika.URLParameters(settings.RABBITMQ_URL)) as connection:
            declared = connection.channel().queue_declare(QUEUE, passive=True)
            return int(declared.method.message_count)
    if queue == "kafka":
        from confluent_kafka import Producer

        # The end of a topic that Tansu reports is too low. Another message has the right offset.
        offsets: list[int] = []
        producer = Producer(settings.KAFKA)
        producer.produce(QUEUE, on_delivery=lambda error, sent: offsets.append(sent.offset()))
        producer.flush(30)
        return offsets[0]
    import redis

    with redis.Redis.from_url(settings.REDIS_URL) as broker:
        return int(broker.llen("rq:queue:default" if queue == "rq" else "celery"))


def enqueuer(queue: str, count: int, start: Any, times: Any, turn: Any) -> None:
    """Run one pass of the enqueuer; other processes may run a pass at the same time."""
    set_up(queue)
    from idempotency.enqueuer import enqueue_once
    from idempotency.models import StagedJob

    with turn:  # To warm up, each process first sends one job.
        StagedJob.objects.create(job_name=NAME, job_args=arguments(0))
        enqueue_once()
    start.wait()
    begin = time.monotonic()
    enqueue_once(batch_size=BATCH)
    times.put((begin, time.monotonic()))


def rate(work: Any, queue: str, count: int, processes: int) -> float:
    """Return the jobs per second if ``processes`` processes concurrently send ``count`` jobs."""
    import redis
    from django.conf import settings
    from django.db import connection

    from idempotency.models import StagedJob

    spawn = multiprocessing.get_context("spawn")
    start, times, turn = spawn.Barrier(processes + 1), spawn.SimpleQueue(), spawn.Lock()
    with redis.Redis.from_url(settings.REDIS_URL) as broker:
        running = [
            spawn.Process(target=work, args=(queue, count, start, times, turn))
            for _ in range(processes)
        ]
        for process in running:
            process.start()
        while start.n_waiting < processes:
            if any(process.exitcode for process in running):
                raise RuntimeError(f"A process of the benchmark died: {work.__name__} of {queue}.")
            time.sleep(0.01)
        broker.flushdb()
        before = in_queue(queue)
        with connection.cursor() as cursor:
            cursor.execute(f"TRUNCATE {StagedJob._meta.db_table}")
        if work in (enqueuer, bare, statements):
            StagedJob.objects.bulk_create(
                (StagedJob(job_name=NAME, job_args=arguments(number)) for number in range(count)),
                batch_size=2000,
            )
            with connection.cursor() as cursor:
                cursor.execute(f"VACUUM ANALYZE {StagedJob._meta.db_table}")
        start.wait()
        spans = [times.get() for _ in running]
        for process in running:
            process.join()
        moved = in_queue(queue) - before - (queue == "kafka")
        if moved != (0 if work is statements else count):
            raise RuntimeError(f"{moved} of {count} jobs are in the queue of {queue}.")
    return count / (max(end for _, end in spans) - min(begin for begin, _ in spans))


def latency(samples: int) -> list[float]:
    """Stage jobs one by one; return the seconds from each COMMIT until its job is in the queue of
    RQ."""
    import redis
    from django.conf import settings
    from django.db import transaction

    from idempotency.jobs import stage_job

    found = []
    with redis.Redis.from_url(settings.REDIS_URL) as broker:
        broker.flushdb()
        for number in range(samples):
            with transaction.atomic():
                stage_job(NAME, arguments(number))
            committed = time.monotonic()
            if broker.blpop(["rq:queue:default"], timeout=20) is None:
                raise RuntimeError("No job came within 20 s.")
            found.append(time.monotonic() - committed)
            # Vary the pause, so that the samples are not in step with a polling loop.
            time.sleep(0.005 * (number % 7))
    return found


def loop() -> Process:
    """Return the process ``manage.py enqueue_jobs --loop`` with its default options."""
    return Process(
        "enqueue_jobs",
        [sys.executable, "manage.py", "enqueue_jobs", "--loop"],
        output=lambda line: None,
    )


def measure(
    quick: bool = False,
    *,
    jobs: int | None = None,
    rounds: int | None = None,
    queues: Collection[str] = tuple(BACKENDS),
) -> dict[str, Any]:
    """Return the figures: jobs per second of each way and their ratios (medians of the rounds);
    latencies in milliseconds."""
    jobs = jobs or (QUICK_JOBS if quick else JOBS)
    rounds = rounds or (QUICK_ROUNDS if quick else ROUNDS)
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        _services(Path(folder), queues) as missing,
    ):
        set_up("rq", HAND_OVER_AFTER_COMMIT=True)
        from django.conf import settings
        from django.core.management import call_command
        from django.db import connections
        from django.test import override_settings

        call_command("migrate", verbosity=0)
        figures: dict[str, Any] = {"jobs": jobs, "rounds": rounds}
        ways = {"direct": (direct, 1), "one": (enqueuer, 1), "two": (enqueuer, 2)}
        for queue in queues:
            if queue in missing:
                figures[queue] = {"error": missing[queue]}
                continue
            of_queue = ways | (
                {"single": (single, 1), "bare": (bare, 1), "statements": (statements, 1)}
                if queue == "kafka"
                else {}
            )
            rates: dict[str, list[float]] = {way: [] for way in of_queue}
            for _ in range(rounds):
                for way, (work, processes) in of_queue.items():
                    # RabbitMQ writes each message to disk before it confirms it.
                    is_slow = queue == "rabbitmq" or work is single
                    count = jobs // 10 if is_slow else jobs
                    rates[way].append(rate(work, queue, count, processes))
            figures[queue] = {way: round(median(found)) for way, found in rates.items()} | {
                "load": round(os.getloadavg()[0], 1),
                "spread": {
                    way: [round(min(found)), round(max(found))] for way, found in rates.items()
                },
                **{
                    ratio: round(
                        median(a / b for a, b in zip(rates[way], rates[base], strict=True)), 2
                    )
                    for ratio, (way, base) in RATIOS.items()
                    if base in rates
                },
            }
            print(f"jobs: {queue} measured", flush=True)
        figures["latency_ms"] = {"after_commit": _percentiles(latency(PROMPT_SAMPLES))}
        with (
            override_settings(
                IDEMPOTENCY={**settings.IDEMPOTENCY, "HAND_OVER_AFTER_COMMIT": False}
            ),
            loop(),
        ):
            figures["latency_ms"]["loop"] = _percentiles(
                latency(QUICK_LOOP_SAMPLES if quick else LOOP_SAMPLES)[1:]
            )  # The first sample waits for the start of the process.
        connections.close_all()
    return figures


def _percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        name: round(1e3 * ordered[int(share * (len(ordered) - 1))], 1)
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }


@contextmanager
def _services(folder: Path, queues: Collection[str]) -> Iterator[dict[str, str]]:
    """Start the servers; yield the reason for each queue whose broker cannot be had."""
    os.environ |= {
        "DATABASE_URL": postgres_url(folder / "postgres"),
        "REDIS_URL": redis_url(folder / "redis"),
        "DJANGO_SETTINGS_MODULE": "benchmarks.job_settings",
        "RIDES_RUN_FOLDER": str(folder),
    }
    import redis

    missing = {}
    with ExitStack() as stack:
        stack.enter_context(Postgres(folder / "postgres", max_connections=20))
        broker = stack.enter_context(Redis(folder / "redis"))
        for name in BROKERS.keys() & {*queues}:
            try:
                server = stack.enter_context(BROKERS[name](folder / name))
            except NotToBeHad as error:
                missing[name] = str(error)
            else:
                os.environ[f"{name.upper()}_URL"] = server.url
                DECLARE[name](server.url)
        with redis.Redis.from_url(broker.url) as connection:
            # The usual setting. With "always", each LPUSH of Celery waits for the disk, which
            # dominates the figures.
            connection.config_set("appendfsync", "everysec")
        yield missing


def missed(figures: dict[str, Any]) -> list[str]:
    """Return the targets that were missed."""
    return [
        f"{queue} {name}: {found}, target at least {least}"
        for queue, targets in JOB_TARGETS.items()
        for name, least in targets.items()
        if queue in figures and (found := figures[queue].get(name, 0)) < least
    ]


def main() -> None:
    """Measure, print the figures, and exit with 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=JOBS,
        help="Jobs in each run (default: %(default)s); a tenth of them for RabbitMQ.",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=ROUNDS,
        help="Rounds; the medians count (default: %(default)s).",
    )
    parser.add_argument(
        "--queues", nargs="+", choices=BACKENDS, default=[*BACKENDS], help="Some of the queues."
    )
    parser.add_argument("--json", type=Path, help="Where the figures go.")
    options = parser.parse_args()
    stop_in_order()
    figures = measure(jobs=options.jobs, rounds=options.rounds, queues=options.queues)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(
        f"{'jobs a second':14} {'client alone':>14} {'one enqueuer':>14} {'two':>10}"
        f" {'one/client':>11} {'two/one':>8}"
    )
    for queue in options.queues:
        row = figures[queue]
        if "error" in row:
            print(f"{queue:14} {row['error']}")
            continue
        ratios = f"{row['of_direct']:11.2f} {row['two_to_one']:8.2f}"
        print(f"{queue:14} {row['direct']:14,} {row['one']:14,} {row['two']:10,} {ratios}")
    for way, found in figures["latency_ms"].items():
        print(
            f"COMMIT to queue, {way.replace('_', ' ')}: p50 {found['p50']} ms, p99"
            f" {found['p99']} ms"
        )
    failures = missed(figures)
    for failure in failures:
        print(f"missed: {failure}")
    print(f"jobs: FAILED {len(failures)}" if failures else "jobs: ok")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
