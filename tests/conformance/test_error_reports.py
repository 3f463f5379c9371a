"""Number 60: no frame of this app shows a secret, a key, a seed, a token, a body or arguments while
foreign code runs."""

import logging
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import httpx
import pytest
import requests
from asgiref.sync import async_to_sync
from django.contrib.auth import get_user_model
from django.core.files.uploadedfile import InMemoryUploadedFile, SimpleUploadedFile
from django.core.files.uploadhandler import MemoryFileUploadHandler
from django.db import DatabaseError, connection, transaction
from django.db.models.signals import post_init
from django.http import HttpRequest, HttpResponse
from django.test.client import BOUNDARY, MULTIPART_CONTENT, encode_multipart

from idempotency.client import Retries, make_async_client, make_client, make_session
from idempotency.decorators import idempotent
from idempotency.exceptions import KeyStuck
from idempotency.models import DownstreamCall, IdempotencyKey
from idempotency.phases import atomic_phase
from tests.factories import IdempotencyKeyFactory, StagedJobFactory
from tests.kit.frames import OutOfLuck, Planted, values_shown
from tests.kit.serving import Sender, View
from tests.kit.views import over_key, phased, phased_outside, plain, storing_no_body

Kind = Callable[..., View]
Serve = Callable[..., None]


@pytest.fixture
def ask(planted: Planted, transactional_db: None) -> Callable[[], BaseException]:
    """Return a function that sends a request with the planted secrets, and returns the error that
    reaches Django."""
    sender = Sender()
    sender.client.raise_request_exception = True

    def send(error: type[Exception] = OutOfLuck, **sent: Any) -> BaseException:
        headers = {"Accept-Language": planted["header"]}
        with pytest.raises(error) as caught:
            sender.send(
                **{
                    "key": planted["key"],
                    "body": {"card": planted["body"]},
                    "headers": headers,
                    **sent,
                }
            )
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
    reports = {
        value.place.partition(":")[0]
        for value in values_shown(caught.value)
        if planted["body"] in value.text
    }
    assert reports == {"repr", "Django", "sentry-sdk"}
    with pytest.raises(AssertionError, match="body in Django"):
        planted.refuse_shown(caught.value)


def test_60_error_of_a_plain_view(serve: Serve, planted: Planted, ask: Any) -> None:
    def view(request: HttpRequest) -> HttpResponse:
        planted.of_key(request.idempotency_key)
        raise OutOfLuck

    serve(view=plain(view))
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


def in_an_at_most_once_call(planted: Planted, key: IdempotencyKey) -> None:
    """Fail in a call to a service without keys."""
    with key.call("sms", at_most_once=True):
        fail()


def between_phases(planted: Planted, key: IdempotencyKey) -> None:
    """Fail outside of any block."""
    fail()


@pytest.mark.parametrize(
    "place", [between_phases, in_a_phase, at_the_end_of_a_phase, in_a_call, in_an_at_most_once_call]
)
@pytest.mark.parametrize("options", [{}, {"store_body": False}])
def test_60_error_of_a_phased_view(
    place: Callable[[Planted, IdempotencyKey], None],
    options: dict[str, Any],
    serve: Serve,
    planted: Planted,
    ask: Any,
) -> None:
    def work(key: IdempotencyKey) -> None:
        derive(planted, key)
        place(planted, key)

    serve(view=over_key(work, **options))
    planted.refuse_shown(ask(), at_least=10)


@pytest.mark.parametrize("option", ["applies", "validate", "scope", "key_from", "using"])
@pytest.mark.parametrize("kind", [plain, phased])
def test_60_error_of_a_function_in_an_option(
    option: str, kind: Kind, serve: Serve, planted: Planted, ask: Any
) -> None:
    serve(view=kind(fail, **{option: fail}))
    planted.refuse_shown(ask(), at_least=3)


@pytest.mark.parametrize("setting", ["KEY_VALIDATOR", "ERROR_RENDERER"])
def test_60_error_of_a_function_in_a_setting(
    setting: str, serve: Serve, planted: Planted, ask: Any, settings: Any
) -> None:
    settings.IDEMPOTENCY = {
        setting: fail,
        "KEY_MAX_LENGTH": 20 if setting == "ERROR_RENDERER" else 255,
    }
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
    serve(view=storing_no_body(kind)(fail))
    planted.refuse_shown(ask(method=method, **uploaded(planted)), at_least=10)


def test_60_error_of_a_value_that_keep_names(
    serve: Serve, planted: Planted, ask: Any, settings: Any
) -> None:
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.with_basket"]
    serve(view=phased(fail, keep=["session.card", "basket.pk"]))
    session = ask.client.session
    session["card"] = planted["session"]
    session.save()
    planted.refuse_shown(ask(), at_least=10)


class Basket:
    """An object of a middleware."""

    @property
    def pk(self) -> int:
        """Fail, as a row that was deleted."""
        raise OutOfLuck


def with_basket(get_response: Any) -> Any:
    """Set the basket of the request, as a middleware does."""

    def middleware(request: HttpRequest) -> HttpResponse:
        request.basket = Basket()
        response: HttpResponse = get_response(request)
        return response

    return middleware


@pytest.fixture
def failing_table(transactional_db: None) -> Iterator[Callable[[str], None]]:
    """Return a function that lets each INSERT or UPDATE of keys fail in the database."""
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION fail_here() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'out of"
            " luck'; END $$"
        )

    def fail_at(operation: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                f"CREATE TRIGGER fail_here BEFORE {operation} ON idempotency_idempotencykey "
                "FOR EACH ROW EXECUTE FUNCTION fail_here()"
            )

    yield fail_at
    with connection.cursor() as cursor:
        cursor.execute("DROP FUNCTION fail_here CASCADE")


@pytest.mark.postgres
@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("kind", [plain, phased])
@pytest.mark.parametrize("operation", ["INSERT", "UPDATE"])
def test_60_error_of_a_statement_on_keys(
    operation: str,
    kind: Kind,
    merged: bool,
    serve: Serve,
    planted: Planted,
    ask: Any,
    failing_table: Any,
    settings: Any,
) -> None:
    settings.IDEMPOTENCY = {"MERGE_ROUND_TRIPS": merged}

    def work(request: HttpRequest) -> HttpResponse:
        planted.of_key(request.idempotency_key)
        return HttpResponse(planted["answer"])

    failing_table(operation)
    serve(view=kind(work))
    planted.refuse_shown(ask(error=DatabaseError), at_least=10)


@pytest.mark.parametrize("kind", [plain, phased])
@pytest.mark.parametrize("beginning", ["INSERT", "UPDATE"])
def test_60_error_of_a_wrapper_of_statements(
    beginning: str, kind: Kind, serve: Serve, planted: Planted, ask: Any
) -> None:
    def wrapper(execute: Any, sql: Any, *more: Any) -> Any:
        if "idempotency_idempotencykey" in str(sql) and beginning in str(sql):
            raise OutOfLuck
        return execute(sql, *more)

    def work(request: HttpRequest) -> HttpResponse:
        planted.of_key(request.idempotency_key)
        return HttpResponse(planted["answer"])

    serve(view=kind(work))
    with connection.execute_wrapper(wrapper):
        planted.refuse_shown(ask(), at_least=10)


@pytest.mark.postgres
@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("kind", [plain, phased])
def test_60_error_of_the_database_that_quotes_the_row(
    kind: Kind, merged: bool, serve: Serve, planted: Planted, ask: Any, settings: Any
) -> None:
    settings.IDEMPOTENCY = {"MERGE_ROUND_TRIPS": merged}
    serve(view=kind(fail))
    with connection.cursor() as cursor:  # As by the migration of a later version.
        cursor.execute("ALTER TABLE idempotency_idempotencykey ADD COLUMN added text NOT NULL")
    try:
        error = ask(error=DatabaseError)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE idempotency_idempotencykey DROP COLUMN added")
    assert "added" in str(error)
    planted.refuse_shown(error, at_least=10)


def test_60_repr_of_a_row(db: None, planted: Planted) -> None:
    key = IdempotencyKeyFactory(
        idempotency_key=planted["key"],
        request_path=f"/view/?token={planted['session']}",
        request_headers={"Accept": planted["header"]},
        request_body=planted["body"].encode(),
        response_body=planted["answer"].encode(),
        finished=True,
    )
    job = StagedJobFactory(job_args={"card": planted["argument"]}, idempotency_key=key)
    call = DownstreamCall.objects.create(
        key=key, name="sms", token=uuid4(), result=planted["answer"]
    )
    shown = [text for row in (key, job, call) for text in (str(row), repr(row))]
    assert not [text for text in shown for secret in planted.secrets.values() if secret in text]


def test_60_error_of_a_client(planted: Planted) -> None:
    sent = {"headers": {"Idempotency-Key": planted["key"]}, "json": {"card": planted["body"]}}
    address, once = "http://127.0.0.1:1/", Retries(max_attempts=1)

    async def send_async() -> None:
        async with make_async_client(once) as client:
            await client.post(address, **sent)

    sends: list[Callable[[], object]] = [
        lambda: make_client(once).post(address, **sent),
        async_to_sync(send_async),
        lambda: make_session(once).post(address, **sent),
    ]
    for send in sends:
        with pytest.raises((httpx.ConnectError, requests.ConnectionError)) as caught:
            send()
        planted.refuse_shown(caught.value)


def give_up(request: HttpRequest) -> HttpResponse:
    """Give up the key."""
    raise KeyStuck("The bank does not answer.")


@pytest.mark.parametrize("kind", [plain, phased])
def test_60_log_lines(
    kind: Kind, serve: Serve, planted: Planted, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        planted.of_key(request.idempotency_key)
        return HttpResponse(planted["answer"])

    caplog.set_level(logging.DEBUG, "idempotency")
    serve(view=kind(work), failing=kind(fail), stuck=phased_outside(give_up))
    sent = {"body": {"card": planted["body"]}, "headers": {"Accept-Language": planted["header"]}}
    key = planted["key"]
    statuses = [
        sender.send(f"/{view}/", f"{key}-{view}", **sent).status_code
        for view in ("view", "failing", "stuck") * 2
    ]
    statuses += [
        sender.send(key=f"{key}-view", body={}).status_code,
        sender.send(key=key * 9).status_code,
    ]
    assert statuses == [200, 500, 409, 200, 500, 409, 422, 400]
    planted.refuse_logged([record for record in caplog.records if record.name == "idempotency"])


@pytest.mark.postgres
@pytest.mark.parametrize("kind", [plain, phased])
def test_60_error_while_a_request_is_restored(
    kind: Kind, serve: Serve, planted: Planted, ask: Any
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        planted.of_key(request.idempotency_key)
        assert request.user.pk
        post_init.connect(fail, sender=get_user_model())
        with connection.cursor() as cursor:
            cursor.execute("DO $$ BEGIN RAISE 'out of luck' USING ERRCODE = '40001'; END $$")
        return HttpResponse()

    serve(view=kind(work))
    try:
        planted.refuse_shown(ask(), at_least=10)
    finally:
        post_init.disconnect(fail, sender=get_user_model())


def test_60_error_of_a_function_that_returns_a_part_of_the_body(
    serve: Serve, planted: Planted, ask: Any
) -> None:
    serve(view=plain(lambda request: HttpResponse(), applies=lambda request: planted["body"]))
    told = "".join(traceback.format_exception(ask(error=TypeError)))
    assert planted["body"] not in told


def test_60_error_of_the_result_of_a_call(serve: Serve, planted: Planted, ask: Any) -> None:
    def work(key: IdempotencyKey) -> None:
        derive(planted, key)
        with key.call("sms", at_most_once=True) as call:
            call.record({"bad": "\0", "good": planted["answer"]})

    serve(view=over_key(work))
    planted.refuse_shown(ask(error=TypeError), at_least=10)


def test_60_error_of_a_part_of_a_run(serve: Serve, planted: Planted, ask: Any) -> None:
    inner = plain(fail)

    def outer(request: HttpRequest) -> HttpResponse:
        planted.of_key(request.idempotency_key)
        return inner(request)

    serve(view=plain(outer))
    planted.refuse_shown(ask(), at_least=10)


def test_60_error_in_an_outer_transaction(serve: Serve, planted: Planted, ask: Any) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        planted.of_key(request.idempotency_key)
        raise OutOfLuck

    serve(view=transaction.atomic(plain(work)))
    planted.refuse_shown(ask(), at_least=10)


@pytest.mark.parametrize(
    "open_block",
    [lambda key: key.call("charge"), lambda key: key.call("sms", at_most_once=True), atomic_phase],
)
def test_60_error_in_a_block_of_an_async_view(
    open_block: Callable[[IdempotencyKey], Any], serve: Serve, planted: Planted, ask: Any
) -> None:
    @idempotent(recovery_points=[], store_body=False)
    async def view(request: HttpRequest) -> HttpResponse:
        key = request.idempotency_key
        derive(planted, key)
        async for _ in key.aphases():
            async with open_block(key):
                raise OutOfLuck
        raise AssertionError

    serve(view=view)
    planted.refuse_shown(ask(), at_least=10)
