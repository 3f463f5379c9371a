"""The adapter for requests, beyond the rules that ``test_client.py`` tests for each library."""

import pickle
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import pytest
import requests
from requests.auth import HTTPDigestAuth
from requests.exceptions import ChunkedEncodingError, ContentDecodingError, UnrewindableBodyError
from urllib3.util import Timeout

from idempotency.client import Retries, make_session
from tests.kit.faulty_service import CUT_BEFORE, CUT_IN_BODY, SILENCE, FaultyService, serving

FAST = Retries(
    deadline_seconds=60, max_attempts=4, first_pause_seconds=0.001, longest_pause_seconds=0.002
)


@pytest.fixture
def service() -> Iterator[FaultyService]:
    with serving() as server:
        yield server


@pytest.fixture
def session() -> Iterator[requests.Session]:
    with make_session(FAST) as session:
        session.trust_env = False
        yield session


def parts() -> Iterator[bytes]:
    yield b"one, "
    yield b"two"


def test_a_generator_that_was_begun_is_refused_and_not_sent(
    service: FaultyService, session: requests.Session
) -> None:
    body = parts()
    next(body)

    with pytest.raises(UnrewindableBodyError, match="read before"):
        session.post(service.url, data=body)

    assert service.heard == []


def test_a_file_that_was_read_after_the_request_was_made_is_rewound(
    service: FaultyService, session: requests.Session
) -> None:
    body = BytesIO(b"read before, one, two")
    body.seek(len(b"read before, "))
    request = session.prepare_request(requests.Request("POST", service.url, data=body))
    body.read()
    service.script = [CUT_BEFORE]

    session.send(request)

    assert service.bodies() == [b"one, two"] * 2


def test_a_closed_file_is_refused_and_not_sent(
    service: FaultyService, session: requests.Session
) -> None:
    body = BytesIO(b"one, two")
    request = session.prepare_request(requests.Request("POST", service.url, data=body))
    body.close()

    with pytest.raises(ValueError, match="closed"):
        session.send(request)

    assert service.heard == []


def test_a_request_that_is_sent_again_has_the_same_key_and_body(
    service: FaultyService, session: requests.Session
) -> None:
    request = session.prepare_request(requests.Request("POST", service.url, data=parts()))

    answers = [session.send(request).content for _ in range(2)]

    assert answers == [b"done 0: one, two"] * 2
    assert [
        (headers["Content-Length"], headers["Transfer-Encoding"]) for _, headers, _ in service.heard
    ] == [("8", None)] * 2


def test_a_redirect_keeps_the_key_and_the_body(
    service: FaultyService, session: requests.Session
) -> None:
    service.script = [(307, {"Location": "/moved"}, b""), (503, {}, b"")]

    assert session.post(service.url, data=parts()).status_code == 201

    assert len(set(service.keys())) == 1
    assert service.bodies() == [b"one, two"] * 3


def test_digest_authentication_sends_a_file_again(
    service: FaultyService, session: requests.Session
) -> None:
    service.script = [(401, {"WWW-Authenticate": 'Digest realm="a", nonce="b"'}, b""), CUT_BEFORE]

    assert (
        session.post(
            service.url, data=BytesIO(b"one, two"), auth=HTTPDigestAuth("user", "word")
        ).status_code
        == 201
    )

    assert service.bodies() == [b"one, two"] * 3


def test_the_error_of_a_truncated_body_has_the_key(
    service: FaultyService, session: requests.Session
) -> None:
    service.script = [CUT_IN_BODY] * 4

    with pytest.raises(ChunkedEncodingError) as caught:
        session.post(service.url)

    assert caught.value.request
    assert service.keys() == [caught.value.request.headers["Idempotency-Key"]] * 4


def test_an_answer_that_cannot_be_decoded_is_retried(
    service: FaultyService, session: requests.Session
) -> None:
    not_gzip = (502, {"Content-Encoding": "gzip"}, b"Bad Gateway")
    service.script = [not_gzip]
    assert session.post(service.url).status_code == 201

    service.script = [not_gzip] * 4
    with pytest.raises(ContentDecodingError) as caught:
        session.post(service.url)
    assert caught.value.request
    assert service.keys()[2:] == [caught.value.request.headers["Idempotency-Key"]] * 4


def test_the_answer_may_be_read_in_parts(service: FaultyService, session: requests.Session) -> None:
    service.script = [(503, {}, b"")]

    with session.post(service.url, data=b"much", stream=True) as answer:
        assert b"".join(answer.iter_content(3)) == b"done 0: much"


@pytest.mark.parametrize("timeout", [0.1, (5, 0.1), Timeout(read=0.1), Timeout(total=0.1)], ids=str)
def test_each_form_of_timeout_applies_to_an_attempt(
    service: FaultyService, session: requests.Session, timeout: Any
) -> None:
    service.script = [SILENCE]

    assert session.post(service.url, timeout=timeout).status_code == 201


def test_a_proxy_does_not_lead_around_the_retries(
    service: FaultyService, session: requests.Session
) -> None:
    service.script = [(503, {}, b"")]

    assert session.post("http://example.invalid/", proxies={"http": service.url}).status_code == 201


def test_a_session_that_was_pickled_still_retries(
    service: FaultyService, session: requests.Session
) -> None:
    service.script = [(503, {}, b"")]

    assert pickle.loads(pickle.dumps(session)).post(service.url).status_code == 201
