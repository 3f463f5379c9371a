"""The client: one key and the same bytes over all tries, against a real server that fails in every way a network can."""

import asyncio
import gzip
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import httpx
import pytest

from idempotency.client import AsyncIdempotentTransport, IdempotentTransport, Retries, make_async_client, make_client

FAST = Retries(deadline_seconds=60, first_pause_seconds=0.001, longest_pause_seconds=0.002)
PROBLEM = {"Content-Type": "application/problem+json"}

#: What the connection does instead of carrying an answer.
CUT_BEFORE, CUT_AFTER, CUT_IN_BODY, SILENCE = "cut before", "cut after", "cut in the body", "silence"

Step = str | tuple[int, dict[str, str], bytes]


def problem(status: int, retryable: bool, **headers: str) -> Step:
    """Return an answer of this library's kind."""
    return status, PROBLEM | headers, json.dumps({"code": "a_code", "retryable": retryable}).encode()


class Service(ThreadingHTTPServer):
    """Plays its script, a step for each request, then does the work: once per key, with the same answer to each retry."""

    daemon_threads = True

    def __init__(self) -> None:
        # Its port is its own from now on; it is a server from ``server_activate`` on.
        super().__init__(("127.0.0.1", 0), Handler, bind_and_activate=False)
        self.server_bind()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"
        self.script: list[Step] = []
        #: Method, headers and body of what came.
        self.heard: list[tuple[str, Any, bytes]] = []
        self.done: dict[str, bytes] = {}
        self.over = threading.Event()

    def work(self, key: str, body: bytes) -> bytes:
        return self.done.setdefault(key, b"done %d: " % len(self.done) + body)

    def keys(self) -> list[str]:
        return [headers["Idempotency-Key"] for _, headers, _ in self.heard]

    def bodies(self) -> list[bytes]:
        return [body for _, _, body in self.heard]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Service

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        service = self.server
        service.heard.append((self.command, self.headers, body))
        step = service.script.pop(0) if service.script else "work"
        if isinstance(step, tuple):
            return self.answer(*step)
        if step == SILENCE:
            service.over.wait(60)
        if step in (CUT_BEFORE, SILENCE):
            self.close_connection = True
            return None
        done = service.work(self.headers["Idempotency-Key"], body)
        if step == CUT_AFTER:
            self.close_connection = True
            return None
        return self.answer(201, {}, done, cut=step == CUT_IN_BODY)

    do_GET = do_PUT = do_PATCH = do_DELETE = do_POST

    def answer(self, status: int, headers: dict[str, str], body: bytes, *, cut: bool = False) -> None:
        self.send_response_only(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = cut

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def serving(service: Service | None = None) -> Iterator[Service]:
    """Serve while the block runs."""
    with service or Service() as server:
        server.server_activate()
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.over.set()
        server.shutdown()


@pytest.fixture
def service() -> Iterator[Service]:
    with serving() as server:
        yield server


Send = Callable[..., httpx.Response]


def send_sync(method: str, url: str, retries: Retries = FAST, **options: Any) -> httpx.Response:
    with make_client(retries, trust_env=False) as client:
        return client.request(method, url, **options)


def send_async(method: str, url: str, retries: Retries = FAST, **options: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        async with make_async_client(retries, trust_env=False) as client:
            return await client.request(method, url, **options)

    return asyncio.run(send())


@pytest.fixture(params=[send_sync, send_async], ids=["sync", "async"])
def send(request: pytest.FixtureRequest) -> Send:
    function: Send = request.param
    return function


@pytest.mark.parametrize(
    "step",
    [
        CUT_BEFORE,
        CUT_AFTER,
        CUT_IN_BODY,
        *((status, {}, b"") for status in (408, 425, 429, 500, 502, 503, 504)),
        (409, {"Retry-After": "0"}, b""),
        problem(409, True),
        problem(400, True),
        (409, PROBLEM | {"Content-Encoding": "gzip"}, gzip.compress(b'{"retryable": true}', mtime=0)),
    ],
    ids=str,
)
def test_what_may_succeed_is_sent_again_with_its_key(service: Service, send: Send, step: Step) -> None:
    service.script = [step]

    answer = send("POST", service.url, content=b"book")

    assert (answer.status_code, answer.content) == (201, b"done 0: book")
    first, second = service.keys()
    assert first == second
    assert service.bodies() == [b"book", b"book"]
    assert answer.request.headers["Idempotency-Key"] == first


@pytest.mark.parametrize(
    "step",
    [
        problem(409, False),
        problem(409, False, **{"Retry-After": "0"}),
        problem(503, False),
        (409, {}, b""),
        (409, PROBLEM, b"not JSON"),
        (409, PROBLEM, b'["retryable"]'),
        (409, {"Content-Type": "application/json"}, b'{"retryable": true}'),
        *((status, {}, b"") for status in (400, 401, 402, 403, 404, 412, 422)),
    ],
    ids=str,
)
def test_what_would_fail_again_stands(service: Service, send: Send, step: Step) -> None:
    service.script = [step]

    assert send("POST", service.url).status_code == step[0]
    assert len(service.heard) == 1


def test_over_many_faults_the_work_is_done_once(service: Service, send: Send) -> None:
    service.script = [CUT_BEFORE, problem(503, True), CUT_AFTER, problem(409, True), CUT_IN_BODY, (500, {}, b"")]

    assert send("POST", service.url, json={"a": 1}).content == b'done 0: {"a":1}'
    assert len(service.done) == 1
    assert len(set(service.keys())) == 1
    assert len(service.heard) == 7


class Noticing(httpx.HTTPTransport):
    """Tells when nobody listened."""

    def __init__(self) -> None:
        super().__init__(trust_env=False)
        self.refused = threading.Event()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return super().handle_request(request)
        except httpx.ConnectError:
            self.refused.set()
            raise


def test_a_server_that_is_not_there_yet_is_waited_for() -> None:
    service, transport = Service(), Noticing()
    with make_client(FAST, transport=transport) as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, service.url)
        assert transport.refused.wait(60)
        with serving(service):
            assert answer.result(60).status_code == 201


def test_retry_after_is_waited_for_in_seconds(service: Service, send: Send) -> None:
    service.script = [(503, {"Retry-After": "0.3"}, b"")]
    began = time.monotonic()

    assert send("POST", service.url).status_code == 201
    assert time.monotonic() - began >= 0.3


def test_retry_after_is_a_date_on_the_clock_of_the_server(service: Service) -> None:
    dates = {"Date": "Wed, 21 Oct 2015 07:28:00 GMT", "Retry-After": "Wed, 21 Oct 2015 07:28:01 GMT"}
    service.script = [(503, dates, b"")]
    began = time.monotonic()

    assert send_sync("POST", service.url).status_code == 201
    assert 1 <= time.monotonic() - began < 10


@pytest.mark.parametrize("value", ["", "soon", "-5", "nan", "Wed, 99 Oct 2015 07:28:00 GMT", "Wed, 21 Oct 2015 07:28:00 GMT"])
def test_a_retry_after_that_says_nothing_holds_nobody_up(service: Service, value: str) -> None:
    service.script = [(503, {"Retry-After": value}, b"")]

    assert send_sync("POST", service.url).status_code == 201


@pytest.mark.parametrize("value", ["3600", "inf", "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_whoever_is_told_to_come_back_after_the_deadline_gives_up_at_once(service: Service, send: Send, value: str) -> None:
    service.script = [(503, {"Retry-After": value}, b"later")]

    answer = send("POST", service.url)

    assert (answer.status_code, answer.content) == (503, b"later")
    assert len(service.heard) == 1


@pytest.fixture
def only_pauses_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock of the client stand still but in its pauses, each of which is as long as it may be, and over at once."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    async def sleep_async(seconds: float) -> None:
        sleep(seconds)

    clock = {"monotonic": lambda: now, "sleep": sleep, "time_ns": time.time_ns}
    monkeypatch.setattr("idempotency.client.time", SimpleNamespace(**clock))
    monkeypatch.setattr("idempotency.client.anyio", SimpleNamespace(sleep=sleep_async))
    monkeypatch.setattr("idempotency.client.random", SimpleNamespace(uniform=lambda least, most: most))


@pytest.mark.usefixtures("only_pauses_take_time")
def test_after_the_deadline_the_last_error_is_raised_with_the_key_to_ask_with_later(service: Service, send: Send) -> None:
    service.script = [CUT_AFTER] * 10_000

    with pytest.raises(httpx.RemoteProtocolError) as caught:
        send("POST", service.url, Retries(deadline_seconds=100, first_pause_seconds=20, longest_pause_seconds=40))

    service.script = []
    assert len(service.heard) == 3, "at 0, 20 and 60 seconds; the next would come at 100"
    key = caught.value.request.headers["Idempotency-Key"]
    assert send("POST", service.url, headers={"Idempotency-Key": key}).content == b"done 0: "


def test_a_server_that_says_nothing_is_not_waited_for_beyond_the_deadline(service: Service, send: Send) -> None:
    service.script = [SILENCE]
    began = time.monotonic()

    with pytest.raises(httpx.ReadTimeout):
        send("POST", service.url, Retries(deadline_seconds=0.3), timeout=None)

    assert time.monotonic() - began < 10


def test_each_call_has_a_key_of_its_own_and_the_later_key_is_greater(service: Service, send: Send) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        send(method, service.url)

    keys = service.keys()
    assert len(set(keys)) == 4
    assert {UUID(key.strip('"')).version for key in keys} == {7}
    times = [key[:14] for key in keys]
    assert times == sorted(times)


def test_a_key_of_the_caller_is_kept(service: Service, send: Send) -> None:
    service.script = [CUT_AFTER]

    send("POST", service.url, headers={"idempotency-key": "order-17"})

    assert service.keys() == ["order-17", "order-17"]


def test_the_header_may_have_another_name(service: Service) -> None:
    retries = Retries(key_header="PayPal-Request-Id")

    request = send_sync("POST", service.url, retries).request

    assert "PayPal-Request-Id" in request.headers
    assert "Idempotency-Key" not in request.headers


def test_safe_methods_are_handed_through(service: Service, send: Send) -> None:
    service.script = [(503, {}, b"")]

    assert send("GET", service.url).status_code == 503
    assert service.keys() == [None]


class Pipe(BytesIO):
    """A file that cannot be read twice."""

    def seekable(self) -> bool:
        return False

    def seek(self, *args: Any) -> int:
        raise OSError("a pipe")


def parts() -> Iterator[bytes]:
    yield b"one, "
    yield b"two"


async def async_parts() -> AsyncIterator[bytes]:
    for part in parts():
        yield part


@pytest.mark.parametrize(
    ("send", "content"),
    [(send_sync, parts), (send_async, async_parts), (send_sync, lambda: Pipe(b"one, two"))],
    ids=["generator", "async generator", "pipe"],
)
def test_a_body_that_can_be_read_once_is_sent_whole_each_time(service: Service, send: Send, content: Any) -> None:
    service.script = [CUT_BEFORE, (503, {}, b"")]

    send("POST", service.url, content=content())

    assert service.bodies() == [b"one, two"] * 3


def test_a_body_that_was_consumed_is_refused_and_not_sent(service: Service) -> None:
    with make_client(FAST, trust_env=False) as client:
        request = client.build_request("POST", service.url, content=parts())
        b"".join(request.stream)  # type: ignore[arg-type]
        with pytest.raises(httpx.StreamConsumed):
            client.send(request)

    assert service.heard == []


def test_the_answer_may_be_compressed_and_streamed(service: Service) -> None:
    service.script = [(200, {"Content-Encoding": "gzip"}, gzip.compress(b"much"))]

    with make_client(FAST, trust_env=False) as client, client.stream("POST", service.url) as answer:
        assert b"".join(answer.iter_bytes()) == b"much"


def test_the_transports_stand_in_any_client_of_httpx(service: Service) -> None:
    service.script = [(503, {}, b"")]
    with httpx.Client(transport=IdempotentTransport(retries=FAST)) as client:
        assert client.post(service.url).status_code == 201

    async def send() -> int:
        async with httpx.AsyncClient(transport=AsyncIdempotentTransport(retries=FAST)) as client:
            return (await client.post(service.url)).status_code

    service.script = [(503, {}, b"")]
    assert asyncio.run(send()) == 201


def test_a_proxy_does_not_lead_around_the_retries(service: Service) -> None:
    service.script = [(503, {}, b"")]

    with make_client(FAST, proxy=service.url) as client:
        assert client.post("http://example.invalid/").status_code == 201


def test_a_mount_does_not_lead_around_the_retries(service: Service) -> None:
    service.script = [(503, {}, b"")]
    with make_client(FAST, mounts={"http://": httpx.HTTPTransport(), "https://": None}) as client:
        assert client.post(service.url).status_code == 201

    async def send() -> int:
        async with make_async_client(FAST, mounts={"http://": httpx.AsyncHTTPTransport(), "https://": None}) as client:
            return (await client.post(service.url)).status_code

    service.script = [(503, {}, b"")]
    assert asyncio.run(send()) == 201
    first, again, other, other_again = service.keys()
    assert (first, other) == (again, other_again)
    assert first != other


def test_an_imitation_of_httpx_answers_as_a_server_does() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["Idempotency-Key"])
        if len(keys) % 2:
            return httpx.Response(409, headers=PROBLEM, json={"retryable": True})
        return httpx.Response(201, content=request.content)

    async def send() -> bytes:
        async with make_async_client(FAST, transport=httpx.MockTransport(answer)) as client:
            return (await client.post("http://example.invalid/", content=b"book")).content

    keys: list[str] = []
    with make_client(FAST, transport=httpx.MockTransport(answer)) as client:
        assert client.post("http://example.invalid/", content=b"book").content == b"book"
    assert asyncio.run(send()) == b"book"
    assert (len(keys), len(set(keys))) == (4, 2)


class Logging(httpx.HTTPTransport):
    """Reads each answer before it hands it on."""

    def __init__(self) -> None:
        super().__init__(trust_env=False)
        self.log: list[bytes] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        self.log.append(response.read())
        return response


def test_a_transport_may_read_the_answer_itself(service: Service) -> None:
    headers = {"Content-Encoding": "gzip"}
    service.script = [
        (409, PROBLEM | headers, gzip.compress(b'{"retryable": true}', mtime=0)),
        (201, headers, gzip.compress(b"much", mtime=0)),
    ]

    with make_client(FAST, transport=(transport := Logging())) as client:
        assert client.post(service.url).content == b"much"
    assert transport.log == [b'{"retryable": true}', b"much"]


@pytest.mark.parametrize("url", ["ftp://example.invalid/", "/no-host"])
def test_a_request_that_cannot_be_sent_is_not_tried_for_long(send: Send, url: str) -> None:
    began = time.monotonic()

    with pytest.raises(httpx.UnsupportedProtocol):
        send("POST", url)

    assert time.monotonic() - began < 10


def test_it_needs_nothing_of_django() -> None:
    code = "import sys, idempotency.client; sys.exit('django' in sys.modules)"

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_deadline_of_the_docs_is_the_one_of_the_code() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "call-from-a-client.md"

    assert f"`deadline_seconds` ({Retries().deadline_seconds})" in page.read_text()
