"""``CeleryBackend`` and the errors of an AMQP broker: those of the connection concern all jobs,
those of a channel one job."""

import gc
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import amqp
import pytest
from amqp.exceptions import AccessRefused, InternalError, NotAllowed, NotFound
from celery import Celery

from idempotency import _hand_over
from idempotency.backends import BrokerUnavailable
from idempotency.contrib.celery import CeleryBackend, OnceTask
from idempotency.enqueuer import EnqueuePass, enqueue_once
from idempotency.models import StagedJob
from tests.factories import StagedJobFactory

#: The client leaves the socket of a connection that was refused to the garbage collector.
pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

#: Methods of AMQP by their class and number.
START, START_OK, TUNE, OPEN, OPEN_OK, CLOSE = (
    (10, 10),
    (10, 11),
    (10, 30),
    (10, 40),
    (10, 41),
    (10, 50),
)
CLOSE_OK, CHANNEL_OPEN, CHANNEL_OPEN_OK, CHANNEL_CLOSE, CHANNEL_CLOSE_OK = (
    (10, 51),
    (20, 10),
    (20, 11),
    (20, 40),
    (20, 41),
)
CONFIRM, CONFIRM_OK, DECLARE, DECLARE_QUEUE = (85, 10), (85, 11), (40, 10), (50, 10)


def frame(method: tuple[int, int], arguments: bytes) -> bytes:
    channel = 0 if method[0] == 10 else 1
    payload = struct.pack(">HH", *method) + arguments
    return struct.pack(">BHI", 1, channel, len(payload)) + payload + b"\xce"


def closing(method: tuple[int, int], code: int) -> bytes:
    """Return the frame of a broker that closes a channel or the connection with an error."""
    return frame(method, struct.pack(">HB4sHH", code, 4, b"oops", 0, 0))


WELCOME = frame(START, b"\0\x09" + struct.pack(">II5sI5s", 0, 5, b"PLAIN", 5, b"en_US"))
#: The answers of a broker that accepts connections and channels.
ANSWERS = {
    START_OK: frame(TUNE, struct.pack(">HIH", 10, 131072, 0)),
    OPEN: frame(OPEN_OK, b"\0"),
    CHANNEL_OPEN: frame(CHANNEL_OPEN_OK, struct.pack(">I", 0)),
    CONFIRM: frame(CONFIRM_OK, b""),
    CHANNEL_CLOSE: frame(CHANNEL_CLOSE_OK, b""),
    CLOSE: frame(CLOSE_OK, b""),
}


class AmqpServer:
    """A server on a loopback port that answers the methods of AMQP with fixed frames."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.answers, self.connections = dict(ANSWERS), 0
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        with suppress(OSError):  # The test has closed the listener.
            while True:
                connection = self.listener.accept()[0]
                self.connections += 1
                with connection, suppress(OSError, struct.error):
                    self.answer(connection.makefile("rwb"))

    def answer(self, stream: Any) -> None:
        stream.read(8)
        stream.write(WELCOME)
        stream.flush()
        while True:
            kind, _, size = struct.unpack(">BHI", stream.read(7))
            payload = stream.read(size + 1)
            if kind == 1 and (answer := self.answers.get(struct.unpack(">HH", payload[:4]))):
                stream.write(answer)
                stream.flush()


def charge() -> None:
    """Stand for the function of a task, which no worker runs here."""


@pytest.fixture
def server() -> Iterator[AmqpServer]:
    server = AmqpServer()
    with server.listener:
        yield server


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, server: AmqpServer) -> Iterator[CeleryBackend]:
    """Return the backend of the enqueuer, with an app whose broker is ``server``."""
    backend = CeleryBackend()
    address = f"127.0.0.1:{server.listener.getsockname()[1]}"
    backend.app = Celery(broker=f"pyamqp://user:secret@{address}//", set_as_current=False)
    backend.app.task(base=OnceTask, name="tests.charge")(charge)
    backend.app.finalize()
    monkeypatch.setattr(_hand_over, "backend_of", lambda queue, using: backend)
    yield backend
    with suppress(AttributeError, KeyError):
        backend._broker.disconnect()
    backend.app.close()
    gc.collect()


def test_the_app_of_a_subclass_decides_whether_its_jobs_may_be_lost() -> None:
    class OnRabbitMQ(CeleryBackend):
        app = Celery(broker="pyamqp://", set_as_current=False)

    class OnRedis(CeleryBackend):
        app = Celery(broker="redis://", set_as_current=False)

    class Kept(OnRabbitMQ):
        follow_up_seconds = CeleryBackend.follow_up_seconds

    backends = OnRabbitMQ(), OnRedis(), Kept()
    assert [each.follow_up_seconds for each in backends] == [None, 600, 600]


def refusals() -> set[int]:
    return set(StagedJob.objects.values_list("refusals", flat=True))


@pytest.mark.parametrize(
    "error",
    [AccessRefused("login refused"), NotAllowed("no such vhost"), InternalError("out of order")],
)
def test_a_connection_that_is_refused_is_no_refusal_of_the_jobs(backend, monkeypatch, error):
    def connect(self: amqp.Connection, callback: object = None) -> None:
        raise error

    monkeypatch.setattr(amqp.Connection, "connect", connect)
    StagedJobFactory.create_batch(2, job_name="tests.charge", job_args=[])
    with pytest.raises(BrokerUnavailable, match=r"user:[*]+@") as caught:
        enqueue_once()
    assert str(error) in str(caught.value)
    assert "secret" not in str(caught.value)
    assert refusals() == {0}


@pytest.mark.parametrize(("after", "code"), [(START_OK, 403), (OPEN, 530), (OPEN, 541)])
def test_a_broker_that_closes_a_new_connection_burns_nothing(backend, server, after, code):
    server.answers[after] = closing(CLOSE, code)
    StagedJobFactory.create_batch(2, job_name="tests.charge", job_args=[])
    with pytest.raises(BrokerUnavailable, match=rf"[(]{code}[)] oops"):
        enqueue_once()
    assert refusals() == {0}
    assert server.connections == 2, "one for each job, because the first may be the cause"


@pytest.mark.parametrize(
    ("closes", "code", "error"),
    [
        (CHANNEL_CLOSE, 404, NotFound),
        (CHANNEL_CLOSE, 403, AccessRefused),
        (CLOSE, 541, InternalError),
    ],
)
def test_an_error_while_a_job_is_published_refuses_that_job(backend, server, closes, code, error):
    """The next job is offered too."""
    server.answers |= {DECLARE: closing(closes, code), DECLARE_QUEUE: closing(closes, code)}
    StagedJobFactory.create_batch(2, job_name="tests.charge", job_args=[])
    assert enqueue_once() == EnqueuePass(refused=2)
    assert {job.last_error.partition(":")[0] for job in StagedJob.objects.all()} == {error.__name__}
    assert refusals() == {1}


def test_a_broker_that_closes_the_connection_and_refuses_the_next_burns_nothing(backend, server):
    StagedJobFactory(job_name="tests.charge", job_args=[])
    backend._broker.producer(backend.app)
    server.answers |= dict.fromkeys((DECLARE, DECLARE_QUEUE), closing(CLOSE, 530)) | {
        OPEN: closing(CLOSE, 530)
    }
    with pytest.raises(BrokerUnavailable, match=r"[(]530[)] oops"):
        enqueue_once()
    assert refusals() == {0}
