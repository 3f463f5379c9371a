"""Number 60: no frame of this app shows a secret, a key, a seed, a token, a body or arguments while foreign code runs."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.core.files.uploadedfile import InMemoryUploadedFile, SimpleUploadedFile
from django.core.files.uploadhandler import MemoryFileUploadHandler
from django.http import HttpRequest, HttpResponse
from django.test.client import BOUNDARY, MULTIPART_CONTENT, encode_multipart

from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase, foreign_call
from tests.kit.frames import OutOfLuck, Planted, values_shown
from tests.kit.serving import Sender, View
from tests.kit.views import over_key, phased, plain

Kind = Callable[..., View]
Serve = Callable[..., None]


@pytest.fixture
def ask(planted: Planted, transactional_db: None) -> Callable[[], BaseException]:
    """Return a function that sends a request with the planted secrets, and returns the error that reaches Django."""
    sender = Sender()
    sender.client.raise_request_exception = True

    def send(**sent: Any) -> BaseException:
        headers = {"Accept-Language": planted["header"]}
        with pytest.raises(OutOfLuck) as caught:
            sender.send(**{"key": planted["key"], "body": {"card": planted["body"]}, "headers": headers, **sent})
        return caught.value

    send.client = sender.client
    return send


def fail(*args: Any, **kwargs: Any) -> Any:
    """Fail as foreign code does."""
    raise OutOfLuck


def test_a_secret_in_a_frame_is_found(planted: Planted) -> None:
    source = "def shows(secret):\n    held = {'a': [secret]}\n    fail()\n"
    module: dict[str, Any] = {"__name__": "idempotency.shows", "fail": fail}
    exec(source, module)
    with pytest.raises(OutOfLuck) as caught:
        module["shows"](planted["body"])
    reports = {value.place.partition(":")[0] for value in values_shown(caught.value) if planted["body"] in value.text}
    assert reports == {"repr", "Django", "sentry-sdk"}
    with pytest.raises(AssertionError, match="body in Django"):
        planted.refuse_shown(caught.value)


@pytest.mark.parametrize("options", [{}, {"store_body": False}])
def test_60_error_of_a_plain_view(options: dict[str, Any], serve: Serve, planted: Planted, ask: Any) -> None:
    def view(request: HttpRequest) -> HttpResponse:
        planted.of_key(request.idempotency_key)
        raise OutOfLuck

    serve(view=plain(view, **options))
    planted.refuse_shown(ask(), at_least=10)


def derive(planted: Planted, key: IdempotencyKey) -> None:
    """Plant the key for a downstream service."""
    planted.of_key(key, derived=key.derive("charge"))


def in_a_phase(planted: Planted, key: IdempotencyKey) -> None:
    """Fail in a phase."""
    with atomic_phase(key):
        fail()


def at_the_end_of_a_phase(planted: Planted, key: IdempotencyKey) -> None:
    """Store a response whose template fails."""
    with atomic_phase(key) as phase:
        response = HttpResponse(planted["answer"])
        response.is_rendered, response.render = False, fail
        phase.set_response(response)


def in_a_call(planted: Planted, key: IdempotencyKey) -> None:
    """Fail in a call with a derived key."""
    with key.call("charge"):
        fail()


def in_a_foreign_call(planted: Planted, key: IdempotencyKey) -> None:
    """Fail in a call to a service without keys."""
    with foreign_call(key, "sms"):
        fail()


def between_phases(planted: Planted, key: IdempotencyKey) -> None:
    """Fail outside of any block."""
    fail()


@pytest.mark.parametrize("place", [between_phases, in_a_phase, at_the_end_of_a_phase, in_a_call, in_a_foreign_call])
@pytest.mark.parametrize("options", [{}, {"store_body": False}])
def test_60_error_of_a_phased_view(
    place: Callable[[Planted, IdempotencyKey], None], options: dict[str, Any], serve: Serve, planted: Planted, ask: Any
) -> None:
    def work(key: IdempotencyKey) -> None:
        derive(planted, key)
        place(planted, key)

    serve(view=over_key(work, **options))
    planted.refuse_shown(ask(), at_least=10)


@pytest.mark.parametrize("option", ["applies", "validate", "scope", "key_from", "using"])
@pytest.mark.parametrize("kind", [plain, phased])
def test_60_error_of_a_function_in_an_option(option: str, kind: Kind, serve: Serve, planted: Planted, ask: Any) -> None:
    serve(view=kind(fail, **{option: fail}))
    planted.refuse_shown(ask(), at_least=3)


@pytest.mark.parametrize("setting", ["KEY_VALIDATOR", "ERROR_RENDERER"])
def test_60_error_of_a_function_in_a_setting(setting: str, serve: Serve, planted: Planted, ask: Any, settings: Any) -> None:
    settings.IDEMPOTENCY = {setting: fail, "KEY_MAX_LENGTH": 20 if setting == "ERROR_RENDERER" else 255}
    serve(view=plain(fail))
    planted.refuse_shown(ask(), at_least=3)


class FailingHandler(MemoryFileUploadHandler):
    """An upload handler of a project."""

    def receive_data_chunk(self, raw_data: bytes, start: int) -> bytes | None:
        """Fail when the first byte arrives."""
        raise OutOfLuck


class FailingFile(InMemoryUploadedFile):
    """A file that is not readable."""

    def chunks(self, chunk_size: int | None = None) -> Iterator[bytes]:
        """Fail."""
        raise OutOfLuck


class UnreadableHandler(MemoryFileUploadHandler):
    """An upload handler whose file is not readable."""

    def file_complete(self, file_size: int) -> Any:
        """Return the file."""
        file: Any = super().file_complete(file_size)
        file.__class__ = FailingFile
        return file


def uploaded(planted: Planted) -> dict[str, Any]:
    """Return a request with a field and a file."""
    parts = {"card": planted["body"], "file": SimpleUploadedFile("f.txt", planted["body"].encode())}
    return {"body": encode_multipart(BOUNDARY, parts), "content_type": MULTIPART_CONTENT}


@pytest.mark.parametrize("handler", [FailingHandler, UnreadableHandler])
@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize("kind", [plain, phased])
def test_60_error_of_an_upload(
    handler: type, method: str, kind: Kind, serve: Serve, planted: Planted, ask: Any, settings: Any
) -> None:
    settings.FILE_UPLOAD_HANDLERS = [f"{handler.__module__}.{handler.__qualname__}"]
    serve(view=kind(fail, store_body=False))
    planted.refuse_shown(ask(method=method, **uploaded(planted)), at_least=10)


def test_60_error_of_a_check_of_replays(serve: Serve, planted: Planted, ask: Any) -> None:
    stored = HttpResponse(planted["answer"])
    serve(view=plain(lambda request: stored, replay_check=fail))
    with pytest.raises(pytest.fail.Exception):
        ask()
    planted.of_key(IdempotencyKey.objects.get())
    planted.refuse_shown(ask(), at_least=3)
