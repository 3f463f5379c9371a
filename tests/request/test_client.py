"""The client sends one key and the same bytes in all attempts, to a real server that simulates
failures of the network."""

import asyncio
import gzip
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO, StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import httpx
import pytest
import requests

import idempotency.client
from idempotency.client import (
    AsyncIdempotentTransport,
    IdempotentTransport,
    Retries,
    make_async_client,
    make_client,
    make_session,
)
from tests.kit.faulty_service import (
    CUT_AFTER,
    CUT_BEFORE,
    CUT_IN_BODY,
    PROBLEM,
    SILENCE,
    FaultyService,
    Step,
    problem,
    serving,
)

FAST = Retries(deadline_seconds=60, first_pause_seconds=0.001, longest_pause_seconds=0.002)


@pytest.fixture
def service() -> Iterator[FaultyService]:
    with serving() as server:
        yield server


Response = httpx.Response | requests.Response
Send = Callable[..., Response]


# Without ``verify``: the service does not use TLS, and loading the certificates takes 30 ms.
def send_sync(method: str, url: str, retries: Retries = FAST, **options: Any) -> httpx.Response:
    with make_client(retries, trust_env=False, verify=False) as client:
        return client.request(method, url, **options)


def send_async(method: str, url: str, retries: Retries = FAST, **options: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        async with make_async_client(retries, trust_env=False, verify=False) as client:
            return await client.request(method, url, **options)

    return asyncio.run(send())


def send_by_requests(
    method: str, url: str, retries: Retries = FAST, content: Any = None, **options: Any
) -> requests.Response:
    with make_session(retries) as session:
        session.trust_env = False
        return session.request(method, url, data=content, **options)


@pytest.fixture(params=[send_sync, send_async, send_by_requests], ids=["sync", "async", "requests"])
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
        (423, {"Retry-After": "0"}, b""),
        problem(409, True),
        problem(400, True),
        (
            409,
            PROBLEM | {"Content-Encoding": "gzip"},
            gzip.compress(b'{"retryable": true}', mtime=0),
        ),
    ],
    ids=str,
)
def test_what_may_succeed_is_sent_again_with_its_key(
    service: FaultyService, send: Send, step: Step
) -> None:
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
        (423, {}, b""),
        (409, PROBLEM, b"not JSON"),
        (409, PROBLEM, b'["retryable"]'),
        (409, {"Content-Type": "application/json"}, b'{"retryable": true}'),
        *((status, {}, b"") for status in (400, 401, 402, 403, 404, 412, 422)),
    ],
    ids=str,
)
def test_what_would_fail_again_stands(service: FaultyService, send: Send, step: Step) -> None:
    service.script = [step]

    assert send("POST", service.url).status_code == step[0]
    assert len(service.heard) == 1


def test_over_many_faults_the_work_is_done_once(service: FaultyService, send: Send) -> None:
    service.script = [
        CUT_BEFORE,
        problem(503, True),
        CUT_AFTER,
        problem(409, True),
        CUT_IN_BODY,
        (500, {}, b""),
    ]

    assert send("POST", service.url, json={"a": 1}).content.replace(b" ", b"") == b'done0:{"a":1}'
    assert len(service.done) == 1
    assert len(set(service.keys())) == 1
    assert len(service.heard) == 7


class Noticing(httpx.HTTPTransport):
    """A transport that sets ``refused`` when a connection is refused."""

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
    service, transport = FaultyService(), Noticing()
    with make_client(FAST, transport=transport) as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, service.url)
        assert transport.refused.wait(60)
        with serving(service):
            assert answer.result(60).status_code == 201


def test_retry_after_is_waited_for_in_seconds(service: FaultyService, send: Send) -> None:
    service.script = [(503, {"Retry-After": "0.3"}, b"")]
    began = time.monotonic()

    assert send("POST", service.url).status_code == 201
    assert time.monotonic() - began >= 0.3


def test_retry_after_is_a_date_on_the_clock_of_the_server(service: FaultyService) -> None:
    dates = {
        "Date": "Wed, 21 Oct 2015 07:28:00 GMT",
        "Retry-After": "Wed, 21 Oct 2015 07:28:01 GMT",
    }
    service.script = [(503, dates, b"")]
    began = time.monotonic()

    assert send_sync("POST", service.url).status_code == 201
    assert 1 <= time.monotonic() - began < 10


@pytest.mark.parametrize(
    "value",
    ["", "soon", "-5", "nan", "Wed, 99 Oct 2015 07:28:00 GMT", "Wed, 21 Oct 2015 07:28:00 GMT"],
)
def test_a_retry_after_that_says_nothing_holds_nobody_up(
    service: FaultyService, value: str
) -> None:
    service.script = [(503, {"Retry-After": value}, b"")]

    assert send_sync("POST", service.url).status_code == 201


@pytest.mark.parametrize("value", ["3600", "inf", "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_whoever_is_told_to_come_back_after_the_deadline_gives_up_at_once(
    service: FaultyService, send: Send, value: str
) -> None:
    service.script = [(503, {"Retry-After": value}, b"later")]

    answer = send("POST", service.url)

    assert (answer.status_code, answer.content) == (503, b"later")
    assert len(service.heard) == 1


@pytest.fixture
def only_pauses_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advance the clock of the client only in its pauses, which have their maximum length and
    return immediately."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    async def sleep_async(seconds: float) -> None:
        sleep(seconds)

    rules = "idempotency.client._rules"
    monkeypatch.setattr(
        f"{rules}.time", SimpleNamespace(monotonic=lambda: now, time_ns=time.time_ns)
    )
    monkeypatch.setattr(f"{rules}.random", SimpleNamespace(uniform=lambda least, most: most))
    for module in ("_httpx", "_requests"):
        monkeypatch.setattr(f"idempotency.client.{module}.time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr("idempotency.client._httpx.anyio", SimpleNamespace(sleep=sleep_async))


@pytest.mark.usefixtures("only_pauses_take_time")
def test_after_the_deadline_the_last_error_is_raised_with_the_key_to_ask_with_later(
    service: FaultyService, send: Send
) -> None:
    service.script = [CUT_AFTER] * 10_000

    with pytest.raises((httpx.RemoteProtocolError, requests.ConnectionError)) as caught:
        send(
            "POST",
            service.url,
            Retries(deadline_seconds=100, first_pause_seconds=20, longest_pause_seconds=40),
        )

    service.script = []
    assert len(service.heard) == 3, "at 0, 20 and 60 seconds; the next would come at 100"
    key = caught.value.request.headers["Idempotency-Key"]
    assert send("POST", service.url, headers={"Idempotency-Key": key}).content == b"done 0: "


@pytest.mark.usefixtures("only_pauses_take_time")
def test_after_the_last_attempt_the_last_answer_is_returned(
    service: FaultyService, send: Send
) -> None:
    service.script = [(503, {}, b"busy")] * 10_000

    answer = send("POST", service.url, Retries(deadline_seconds=3600, max_attempts=4))

    assert (answer.status_code, answer.content, len(service.heard)) == (503, b"busy", 4)


def test_a_server_that_says_nothing_is_not_waited_for_beyond_the_deadline(
    service: FaultyService, send: Send
) -> None:
    service.script = [SILENCE]
    began = time.monotonic()

    with pytest.raises((httpx.ReadTimeout, requests.ReadTimeout)):
        send("POST", service.url, Retries(deadline_seconds=0.3), timeout=None)

    assert time.monotonic() - began < 10


def test_each_call_has_a_key_of_its_own_and_the_later_key_is_greater(
    service: FaultyService, send: Send
) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        send(method, service.url)

    keys = service.keys()
    assert len(set(keys)) == 4
    assert {UUID(key.strip('"')).version for key in keys} == {7}
    times = [key[:14] for key in keys]
    assert times == sorted(times)


def test_a_key_of_the_caller_is_kept(service: FaultyService, send: Send) -> None:
    service.script = [CUT_AFTER]

    send("POST", service.url, headers={"idempotency-key": "order-17"})

    assert service.keys() == ["order-17", "order-17"]


def test_the_header_may_have_another_name(service: FaultyService) -> None:
    retries = Retries(key_header="PayPal-Request-Id")

    request = send_sync("POST", service.url, retries).request

    assert "PayPal-Request-Id" in request.headers
    assert "Idempotency-Key" not in request.headers


def test_an_attempt_that_times_out_is_retried(service: FaultyService, send: Send) -> None:
    service.script = [SILENCE]

    assert send("POST", service.url, timeout=0.1).content == b"done 0: "
    assert len(set(service.keys())) == 1


def test_safe_methods_are_handed_through(service: FaultyService, send: Send) -> None:
    service.script = [(503, {}, b"")]

    assert send("GET", service.url).status_code == 503
    assert service.keys() == [None]


class Pipe(BytesIO):
    """A file that cannot be read twice."""

    def seekable(self) -> bool:
        return False

    def seek(self, *args: Any) -> int:
        raise OSError("a pipe")

    tell = seek


def parts() -> Iterator[bytes]:
    yield b"one, "
    yield b"two"


async def async_parts() -> AsyncIterator[bytes]:
    for part in parts():
        yield part


@pytest.mark.parametrize(
    ("send", "content"),
    [
        (send_sync, parts),
        (send_async, async_parts),
        (send_sync, lambda: Pipe(b"one, two")),
        (send_by_requests, parts),
        (send_by_requests, lambda: Pipe(b"one, two")),
        (send_by_requests, lambda: BytesIO(b"one, two")),
        (send_by_requests, lambda: StringIO("one, two")),
        (send_by_requests, lambda: bytearray(b"one, two")),
        (send_by_requests, lambda: iter(["one, ", "two"])),
    ],
    ids=lambda value: value.__name__,
)
def test_a_body_that_can_be_read_once_is_sent_whole_each_time(
    service: FaultyService, send: Send, content: Any
) -> None:
    service.script = [CUT_BEFORE, (503, {}, b"")]

    send("POST", service.url, content=content())

    assert service.bodies() == [b"one, two"] * 3


def test_a_body_that_was_consumed_is_refused_and_not_sent(service: FaultyService) -> None:
    with make_client(FAST, trust_env=False) as client:
        request = client.build_request("POST", service.url, content=parts())
        b"".join(request.stream)  # type: ignore[arg-type]
        with pytest.raises(httpx.StreamConsumed):
            client.send(request)

    assert service.heard == []


def test_the_answer_may_be_compressed_and_streamed(service: FaultyService) -> None:
    service.script = [(200, {"Content-Encoding": "gzip"}, gzip.compress(b"much"))]

    with make_client(FAST, trust_env=False) as client, client.stream("POST", service.url) as answer:
        assert b"".join(answer.iter_bytes()) == b"much"


def test_the_transports_stand_in_any_client_of_httpx(service: FaultyService) -> None:
    service.script = [(503, {}, b"")]
    with httpx.Client(transport=IdempotentTransport(retries=FAST)) as client:
        assert client.post(service.url).status_code == 201

    async def send() -> int:
        async with httpx.AsyncClient(transport=AsyncIdempotentTransport(retries=FAST)) as client:
            return (await client.post(service.url)).status_code

    service.script = [(503, {}, b"")]
    assert asyncio.run(send()) == 201


def test_a_proxy_does_not_lead_around_the_retries(service: FaultyService) -> None:
    service.script = [(503, {}, b"")]

    with make_client(FAST, proxy=service.url) as client:
        assert client.post("http://example.invalid/").status_code == 201


def test_a_mount_does_not_lead_around_the_retries(service: FaultyService) -> None:
    service.script = [(503, {}, b"")]
    with make_client(FAST, mounts={"http://": httpx.HTTPTransport(), "https://": None}) as client:
        assert client.post(service.url).status_code == 201

    async def send() -> int:
        async with make_async_client(
            FAST, mounts={"http://": httpx.AsyncHTTPTransport(), "https://": None}
        ) as client:
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
    """A transport that reads each response before it returns it."""

    def __init__(self) -> None:
        super().__init__(trust_env=False)
        self.log: list[bytes] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        self.log.append(response.read())
        return response


def test_a_transport_may_read_the_answer_itself(service: FaultyService) -> None:
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

    with pytest.raises(
        (
            httpx.UnsupportedProtocol,
            requests.exceptions.InvalidSchema,
            requests.exceptions.MissingSchema,
        )
    ):
        send("POST", url)

    assert time.monotonic() - began < 10


@pytest.mark.parametrize("used", ["make_client", "make_session"])
def test_it_imports_the_library_that_is_used_and_nothing_of_django(used: str) -> None:
    code = f"""
import sys, idempotency.client
assert not {{"httpx", "requests", "django"}} & sys.modules.keys()
idempotency.client.{used}()
print(*sorted({{"httpx", "requests", "django"}} & sys.modules.keys()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True
    )
    assert done.stdout.split() == [{"make_client": "httpx", "make_session": "requests"}[used]]


@pytest.mark.parametrize(
    ("name", "library", "extra"),
    [("make_client", "httpx", "client"), ("make_session", "requests", "requests")],
)
def test_the_error_of_a_missing_library_names_its_extra(
    name: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"idempotency.client._{library}")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=rf"django-idempotency\[{extra}\]") as caught:
        getattr(idempotency.client, name)
    assert caught.value.name == library
    assert not hasattr(idempotency.client, "no_such_name")


def test_the_deadline_of_the_docs_is_the_one_of_the_code() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "call-from-a-client.md"

    assert f"`deadline_seconds` ({Retries().deadline_seconds})" in page.read_text()
