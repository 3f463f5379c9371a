"""Parsing of requests and storing of responses, beyond the cases of the contract in
``tests/conformance``."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
from django.conf import settings as settings_of_django
from django.contrib.auth import login
from django.contrib.sessions.backends.db import SessionStore
from django.core.handlers.wsgi import WSGIRequest
from django.core.wsgi import get_wsgi_application
from django.db import transaction
from django.http import (
    FileResponse,
    Http404,
    HttpRequest,
    HttpResponse,
    HttpResponseBase,
    HttpResponseRedirect,
    StreamingHttpResponse,
)
from django.template import engines
from django.template.response import TemplateResponse
from django.test import Client, RequestFactory
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from pytest_django import Settings

from idempotency import scopes
from idempotency._http.key_header import key_of as key_carried_by
from idempotency._http.problems import Problem
from idempotency._http.work import _warn_of_stream
from idempotency.completer import complete_key
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from tests.factories import UserFactory
from tests.kit.database import default_isolation, no_migration, waits_for_a_lock
from tests.kit.serving import Sender, View, another_client, problem
from tests.kit.threads import at_once, background, elsewhere
from tests.kit.views import Counted, both_kinds, create, phased, phased_outside, plain
from tests.kit.waiting import eventually
from tests.models import Entry

Kind = Callable[..., View]
Serve = Callable[..., None]

VALID = {
    "abc": "abc",
    '"abc"': "abc",
    "8e03978e-40d5-43e8-bc93-6894a57f9324": "8e03978e-40d5-43e8-bc93-6894a57f9324",
    "a;b=c": "a;b=c",
    "a'b": "a'b",
    r"a\b": r"a\b",
    "!#$%&()*+-./:<=>?@[]^_`{|}~": "!#$%&()*+-./:<=>?@[]^_`{|}~",
    " abc\t": "abc",
    '"a,b"': "a,b",
    '" "': " ",
    r'"\""': '"',
    r'"\\"': "\\",
    '"abc";a': "abc",
    '"abc" ; a=1;b="x\\"y";*c=:aGk=:': "abc",
    "x" * 255: "x" * 255,
}
INVALID = [
    *(
        "",
        " ",
        '""',
        '"',
        '"a',
        'a"',
        '"a""b"',
        '"a" b',
        '"a"b',
        '"a";',
        '"a"; =1',
        '"a";A=1',
        'a"b',
    ),
    *(
        r'"\a"',
        '"a\\',
        r'"\u0041"',
        '"a\x00"',
        "\x00",
        "a\x00",
        '"a\x1f"',
        '"a\x7f"',
        "a\x7f",
        "a b",
        "a\nb",
        "a\rb",
    ),
    *(
        "a,b",
        "a, b",
        '"a","b"',
        '"a", "b"',
        "ä",
        '"ä"',
        "\ud800",
        "ключ",
        '"😀"',
        "x" * 256,
        '"' + "x" * 256 + '"',
    ),
    "\\" * 5000 + '"',
    '"' + ";a" * 5000,
    '"a"' + ";a=1" * 5000 + ";",
]


def key_of(request: HttpRequest) -> str | None:
    key = key_carried_by(request, request, None)
    return None if key is None else key.value


def _request(key: str) -> HttpRequest:
    request = RequestFactory().post("/")
    request.META["HTTP_IDEMPOTENCY_KEY"] = key
    return request


@pytest.mark.parametrize(("header", "key"), VALID.items())
def test_key_is_read(header: str, key: str) -> None:
    assert key_of(_request(header)) == key


@pytest.mark.parametrize("header", INVALID)
def test_key_is_refused(header: str) -> None:
    with pytest.raises(Problem) as refused:
        key_of(_request(header))
    assert (refused.value.status, refused.value.code) == (400, "key_invalid")


@pytest.mark.parametrize(
    "header", [header for header in INVALID if header.strip('" ') and len(header) >= 4]
)
def test_refusal_does_not_repeat_the_key(header: str) -> None:
    with pytest.raises(Problem) as refused:
        key_of(_request(header))
    assert header not in refused.value.detail


def test_no_header_is_no_key() -> None:
    assert key_of(RequestFactory().post("/")) is None


BAD_INPUT = {
    "NUL in the path": {"url": "/any/a%00b/"},
    "invalid UTF-8 in the path": {"url": "/any/%ff%fe/"},
    "NUL in the query": {"QUERY_STRING": "a=\x00"},
    "invalid UTF-8 in the query": {"QUERY_STRING": "a=%ff"},
    "raw bytes in the query": {"QUERY_STRING": "a=\xff\xfe"},
    "NUL in the body": {"body": b"\x00"},
    "invalid UTF-8 in the body": {"body": b"\xff\xfe\xfa"},
    "brackets": {"body": b"[" * 10_000},
    "large body": {"body": b"x" * 3_000_000},
    "large number": {"body": b"9" * 100_000},
    "exponent": {"body": b"1e999999999"},
    "negative exponent": {"body": b"1e-999999999"},
    "lone surrogate": {"body": rb'{"\ud800": "\udfff"}'},
    "no boundary": {"body": b"abc", "content_type": "multipart/form-data"},
    "broken multipart": {"body": b"--x\r\nabc", "content_type": "multipart/form-data; boundary=x"},
    "endless boundary": {
        "body": b"abc",
        "content_type": f"multipart/form-data; boundary={'a' * 300}",
    },
    "odd content type": {"content_type": "application/json; x=\xff\x00"},
    "unknown charset": {"content_type": "application/json; charset=klingon"},
    "charset that decodes nothing": {"content_type": "application/json; charset=undefined"},
    "form in no charset of text": {
        "body": b"a=1",
        "content_type": "application/x-www-form-urlencoded; charset=idna",
    },
    "boundary that is not ASCII": {
        "body": b"abc",
        "content_type": "multipart/form-data; boundary=\xe9",
    },
    "NUL in kept headers": {"headers": {"Accept": "a\x00b", "Accept-Language": "\xff"}},
    "odd method": {"method": "BREW-COFFEE-AND-THEN-SOME-MORE"},
}


@both_kinds
@pytest.mark.parametrize("bad", BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_gives_no_500_and_no_stuck_key(
    bad: dict[str, Any], kind: Kind, serve: Serve, sender: Sender, settings: Settings
) -> None:
    view = kind(lambda request, **kwargs: HttpResponse("fine"))
    serve(view=view)
    settings.ROOT_URLCONF.urlpatterns.append(
        path("any/<path:rest>", lambda request, rest: view(request))
    )
    answers = [sender.send(**bad) for _ in range(2)]
    assert all(answer.status_code < 500 for answer in answers), answers
    assert answers[0].content == answers[1].content
    keys = list(IdempotencyKey.objects.all())
    assert all(key.finished_at and not key.stuck_at for key in keys)
    assert len(keys) == (answers[0].status_code == 200)


@both_kinds
def test_validate_refuses_before_a_key_is_spent(kind: Kind, serve: Serve, sender: Sender) -> None:
    def validate(request: HttpRequest) -> HttpResponse | None:
        return None if b"good" in request.body else HttpResponse("bad", status=422)

    serve(view=kind(work := Counted(), validate=validate))
    assert sender.send(body='"bad"').status_code == 422
    assert not IdempotencyKey.objects.exists()
    assert sender.send(body='"good"').status_code == 201
    assert work.runs == 1


def test_validate_refuses_retries_and_replays_but_not_the_completer(
    serve: Serve, sender: Sender
) -> None:
    """The switch of ``docs/incidents.md``."""
    switched_off = False
    work = Counted(lambda request: create(request) if work.runs > 1 else 1 / 0)
    serve(view=phased(work, validate=lambda _: HttpResponse(status=503) if switched_off else None))
    assert sender.send().status_code == 500
    switched_off = True
    assert sender.send().status_code == 503
    assert complete_key(IdempotencyKey.objects.get().pk) == "finished"
    assert sender.send().status_code == 503
    switched_off = False
    assert sender.send().headers["Idempotent-Replayed"] == "true"
    assert work.runs == 2


@pytest.mark.parametrize("missing", [None, ""])
@both_kinds
def test_key_is_asked_for_before_validate(
    missing: str | None, kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=kind(create, validate=lambda request: HttpResponse("bad", status=422)))
    assert sender.send(key=missing).status_code == 400


@pytest.mark.postgres
def test_a_request_that_was_cut_short_does_not_run(serve: Serve, sender: Sender) -> None:
    """gunicorn and wsgiref pass a truncated body on, and Django reads it without an error."""

    def pay(request: HttpRequest) -> HttpResponse:
        Entry.objects.create(name=f"paid {request.POST['amount']}")
        return HttpResponse(status=201)

    serve(view=idempotent(csrf_exempt(pay)))
    body, name = b"to=bob&amount=1000", settings_of_django.SESSION_COOKIE_NAME
    head = (
        "POST /view/ HTTP/1.0\r\nHost: localhost\r\nIdempotency-Key: key-1\r\n"
        f"Cookie: {name}={sender.client.cookies[name].value}\r\n"
        f"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    with make_server("127.0.0.1", 0, get_wsgi_application(), handler_class=QuietHandler) as server:

        def arrive(part: bytes) -> bytes:
            with socket.create_connection(server.server_address) as line:
                line.sendall(head + part)
                line.shutdown(socket.SHUT_WR)
                elsewhere(server.handle_request)
                return b"".join(iter(partial(line.recv, 65536), b"")).partition(b"\r\n")[0]

        assert b" 400 " in arrive(body[:-2])
        assert [entry.name for entry in Entry.objects.all()] == []
        assert b" 201 " in arrive(body)
    assert [entry.name for entry in Entry.objects.all()] == ["paid 1000"]


class QuietHandler(WSGIRequestHandler):
    """A request handler without a log."""

    def log_message(self, *arguments: Any) -> None:
        """Log nothing."""


@pytest.mark.postgres
def test_a_multipart_request_that_was_cut_between_its_parts_does_not_run(
    serve: Serve, sender: Sender
) -> None:
    """The parts that the parser reads are complete, but the remaining parts are missing."""
    part = b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    body = (
        part % (b"to", b"bob")
        + part % (b"amount", b"1000")
        + part % (b"currency", b"JPY")
        + b"--x--\r\n"
    )

    def pay(request: HttpRequest) -> HttpResponse:
        Entry.objects.create(
            name=f"paid {request.POST['amount']} {request.POST.get('currency', 'USD')}"
        )
        return HttpResponse(status=201)

    protected = idempotent(pay)

    def arrive(part: bytes) -> HttpResponseBase:
        request = WSGIRequest(
            {
                "REQUEST_METHOD": "POST",
                "PATH_INFO": "/view/",
                "CONTENT_TYPE": "multipart/form-data; boundary=x",
                "CONTENT_LENGTH": str(len(body)),
                "HTTP_IDEMPOTENCY_KEY": "key-1",
                "SERVER_NAME": "localhost",
                "SERVER_PORT": "80",
                "wsgi.input": BytesIO(part),
            }
        )
        request.user = sender.user
        return protected(request)

    cut = arrive(body[: body.index(b'--x\r\nContent-Disposition: form-data; name="currency"')])
    assert (cut.status_code, json.loads(cut.content)["code"]) == (400, "body_incomplete")
    assert [entry.name for entry in Entry.objects.all()] == []
    assert arrive(body).status_code == 201


def test_a_multipart_body_that_a_middleware_has_read(serve: Serve, sender: Sender) -> None:
    protected = idempotent(create)

    def signed(request: HttpRequest) -> HttpResponseBase:
        assert request.body  # like a view that verifies a signature
        return protected(request)

    serve(view=signed)
    body = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--x--\r\n'
    assert sender.send(body=body, content_type="multipart/form-data; boundary=x").status_code == 201


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_two_chunked_multipart_bodies_under_asgi_are_two_requests(
    method: str, sender: Sender
) -> None:
    from django.core.handlers.asgi import ASGIRequest

    seen = []

    @idempotent
    def view(request: HttpRequest) -> HttpResponse:
        seen.append(request.body)
        return HttpResponse(status=201)

    for amount in (b"10", b"1000"):
        body = (
            b'--x\r\nContent-Disposition: form-data; name="amount"\r\n\r\n'
            + amount
            + b"\r\n--x--\r\n"
        )
        scope = {
            "type": "http",
            "method": method,
            "path": "/view/",
            "query_string": b"",
            "headers": [
                (b"content-type", b"multipart/form-data; boundary=x"),
                (b"transfer-encoding", b"chunked"),
                (b"idempotency-key", b"key-1"),
            ],
        }
        request = ASGIRequest(scope, BytesIO(body))
        request.user = sender.user
        answer = view(request)
    assert answer.status_code == 422, (answer.status_code, dict(answer.items()), len(seen))


@pytest.mark.postgres
def test_two_queries_are_two_requests(serve: Serve, sender: Sender) -> None:
    serve(view=idempotent(create))
    assert sender.send("/view/", QUERY_STRING="name=\xe9").status_code == 201
    assert sender.send("/view/", QUERY_STRING="name=%C3%A9").status_code == 422


# Scopes


@pytest.fixture
def visitor(transactional_db: None) -> Client:
    """Return a client with a session and without a user."""
    client = Client(raise_request_exception=False)
    session = SessionStore()
    session["visited"] = True
    session.save()
    client.cookies["sessionid"] = session.session_key
    return client


def post(client: Client, key: str = "key-1") -> HttpResponse:
    """Send one request."""
    return client.post(
        "/view/", {"a": 1}, content_type="application/json", headers={"Idempotency-Key": key}
    )


@both_kinds
def test_visitor_has_the_scope_of_the_session(kind: Kind, serve: Serve, visitor: Client) -> None:
    serve(view=kind(work := Counted()))
    session_key = visitor.cookies["sessionid"].value
    assert post(visitor).content == post(visitor).content
    assert work.runs == 1
    scope = IdempotencyKey.objects.get().scope
    assert scope.startswith("session:")
    assert session_key not in scope


@pytest.mark.postgres
def test_a_first_request_that_a_twin_outran_takes_its_scope(
    rf: RequestFactory, visitor: Client
) -> None:
    """At REPEATABLE READ the second UPDATE of the session fails instead of waiting for the
    first."""
    requests: list[Any] = [rf.post("/"), rf.post("/")]
    for request in requests:
        request.session = SessionStore(visitor.cookies["sessionid"].value)
    saved = threading.Event()

    def twin() -> None:
        with transaction.atomic():
            scopes.session(requests[1])
            saved.set()
            eventually(lambda: elsewhere(waits_for_a_lock))

    with background(twin):
        assert saved.wait(60)
        with default_isolation("repeatable read"):
            scope = scopes.session(requests[0])
    assert scope == scopes.session(requests[1])


@both_kinds
def test_first_two_requests_of_a_session_agree_on_the_scope(
    kind: Kind, serve: Serve, visitor: Client
) -> None:
    serve(view=kind(work := Counted()))

    def twin() -> HttpResponse:
        client = Client(raise_request_exception=False)
        client.cookies["sessionid"] = visitor.cookies["sessionid"].value
        return post(client)

    answers = at_once([twin, twin])
    assert {answer.status_code for answer in answers} <= {201, 409, 503}
    assert work.runs == 1
    assert IdempotencyKey.objects.count() == 1


def test_answer_that_is_not_saved_in_the_session_does_not_change_its_scope(
    serve: Serve, visitor: Client
) -> None:
    serve(
        view=plain(
            work := Counted(
                lambda request: HttpResponse(status=500) if work.runs == 1 else create(request)
            )
        )
    )
    assert [post(visitor).status_code for _ in range(3)] == [500, 201, 201]
    assert IdempotencyKey.objects.count() == 1


def test_session_that_is_rotated_keeps_its_scope(serve: Serve, visitor: Client) -> None:
    def rotate(request: HttpRequest) -> HttpResponse:
        request.session.cycle_key()
        return HttpResponse()

    serve(view=plain(work := Counted()), rotate=rotate)
    first = post(visitor)
    before = visitor.cookies["sessionid"].value
    visitor.post("/rotate/")
    assert visitor.cookies["sessionid"].value != before
    assert post(visitor).content == first.content
    assert work.runs == 1


def test_session_that_is_rotated_at_login_keeps_its_scope(serve: Serve, visitor: Client) -> None:
    user = UserFactory()

    def sign_in(request: HttpRequest) -> HttpResponse:
        login(request, user, backend="django.contrib.auth.backends.ModelBackend")
        return HttpResponse()

    serve(
        view=plain(Counted(), scope=lambda request: scopes.scope_of(_without_user(request), None)),
        sign_in=sign_in,
    )
    first = post(visitor)
    before = visitor.cookies["sessionid"].value
    visitor.post("/sign_in/")
    assert visitor.cookies["sessionid"].value != before
    assert post(visitor).content == first.content


def _without_user(request: HttpRequest) -> HttpRequest:
    only_session = HttpRequest()
    only_session.session = request.session
    return only_session


def test_two_sessions_share_no_scope(serve: Serve, visitor: Client) -> None:
    serve(view=plain(work := Counted()))
    other = Client()
    session = SessionStore()
    session.save()
    other.cookies["sessionid"] = session.session_key
    assert post(visitor).content != post(other).content
    assert work.runs == 2


def test_scope_of_a_user_outlives_the_session(serve: Serve, sender: Sender) -> None:
    serve(view=plain(work := Counted()))
    first = sender.send()
    sender.client.logout()
    sender.client.force_login(sender.user)
    assert sender.send().content == first.content
    assert work.runs == 1
    assert IdempotencyKey.objects.get().user_id == sender.user.pk


def test_scope_callable_without_an_answer_is_refused(serve: Serve, sender: Sender) -> None:
    serve(view=plain(create, scope=lambda request: ""))
    assert problem(sender.send())["code"] == "scope_missing"


@pytest.mark.parametrize("scope", ["x" * 195, "a\x00b", None, 7])
def test_scope_callable_with_a_bad_answer_is_a_mistake(
    scope: Any, serve: Serve, sender: Sender
) -> None:
    serve(view=plain(work := Counted(), scope=lambda request: scope))
    assert sender.send().status_code == 500
    assert work.runs == 0


# Stored responses


def test_request_is_kept_for_the_completer(serve: Serve, sender: Sender) -> None:
    serve(view=phased(create))
    headers = {
        "Accept-Language": "de",
        "Authorization": "Bearer secret",
        "X-Api-Version": "2",
        "Cookie2": "secret",
    }
    sender.send("/view/?a=%20b", body='{"c": 1}', headers=headers, HTTP_HOST="localhost")
    key = IdempotencyKey.objects.get()
    assert (key.request_method, key.request_path, bytes(key.request_body)) == (
        "POST",
        "/view/?a=%20b",
        b'{"c": 1}',
    )
    assert key.request_params == {"c": 1}
    assert key.request_content_type == "application/json"
    assert key.request_headers == {
        "Host": "localhost",
        "scheme": "http",
        "Accept-Language": "de",
        "X-Api-Version": "2",
    }
    assert "secret" not in str(IdempotencyKey.objects.values().get())


def test_of_a_request_to_a_plain_view_neither_headers_nor_body_are_stored(
    serve: Serve, sender: Sender
) -> None:
    serve(view=plain(create))
    sender.send("/view/?a=%20b", body='{"c": 1}', headers={"Accept-Language": "de"})
    key = IdempotencyKey.objects.get()
    assert (key.request_method, key.request_path, key.user_id) == (
        "POST",
        "/view/?a=%20b",
        sender.user.pk,
    )
    assert (key.remote_addr, key.request_fingerprint[:3]) == ("127.0.0.1", "v1k")
    assert (key.request_body, key.request_content_type, key.request_headers) == (None, "", {})


@pytest.mark.parametrize(
    ("content_type", "body", "read"),
    [
        ("application/json", b'{"a": 1}', {"a": 1}),
        ("application/json", b'{"a": ', '{"a": '),
        ("application/json", b"\xff", "\ufffd"),
        ("application/x-www-form-urlencoded", b"a=1&a=2&b=", {"a": ["1", "2"], "b": [""]}),
        ("text/plain", "é".encode(), "é"),
        ("application/json", None, None),
    ],
)
def test_a_stored_request_is_read_by_its_content_type(
    content_type: str, body: bytes | None, read: Any
) -> None:
    assert (
        IdempotencyKey(request_content_type=content_type, request_body=body).request_params == read
    )


@pytest.fixture
def template(settings: Settings) -> Iterator[Callable[[str], Any]]:
    """Return a function that creates a template from a text."""
    return lambda text: engines["django"].from_string(text)


@both_kinds
def test_template_response_is_rendered_before_it_is_stored(
    kind: Kind, serve: Serve, sender: Sender, template: Callable[[str], Any]
) -> None:
    def work(request: HttpRequest) -> TemplateResponse:
        return TemplateResponse(
            request, template("made {{ n }}"), {"n": Entry.objects.count()}, status=201
        )

    serve(view=kind(work))
    first = sender.send()
    Entry.objects.create(name="later")
    assert first.content == b"made 0"
    assert sender.send().content == b"made 0"


@both_kinds
def test_what_a_callback_makes_of_a_rendered_response_is_stored(
    kind: Kind, serve: Serve, sender: Sender, template: Callable[[str], Any]
) -> None:
    def work(request: HttpRequest) -> TemplateResponse:
        response = TemplateResponse(request, template("draft"), status=201)
        response.add_post_render_callback(
            lambda rendered: HttpResponse(rendered.content.upper(), status=201)
        )
        return response

    serve(view=kind(work))
    assert [sender.send().content for _ in range(2)] == [b"DRAFT", b"DRAFT"]


def test_what_is_no_response_is_named(
    serve: Serve, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    serve(view=plain(lambda request: "made"))
    assert sender.send().status_code == 500
    assert "returned str, not a response." in caplog.text


@both_kinds
def test_a_missing_migration_is_named_with_its_cure(
    kind: Kind, serve: Serve, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    serve(view=kind(create))
    with no_migration():
        assert sender.send().status_code == 500
    assert "run manage.py migrate --database default" in caplog.text


@pytest.mark.parametrize("value", [None, {"id": 1}])
def test_a_phase_that_stores_no_response_is_named(
    value: Any, serve: Serve, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    serve(view=phased(lambda request: value))
    assert sender.send().status_code == 500
    assert f"set_response() got {type(value).__name__}, not a response." in caplog.text


def test_a_forgotten_return_is_named_with_the_line_that_is_missing(
    serve: Serve, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> None:
        key = request.idempotency_key
        for _ in key.phases():
            with atomic_phase(key) as phase:
                phase.set_response(HttpResponse("made"))

    serve(view=view)
    assert sender.send().status_code == 500
    assert "view returned NoneType, not a response." in caplog.text
    assert "return key.response()" in caplog.text
    assert sender.send().content == b"made"


def test_an_error_that_the_handler_of_a_framework_fails_at_is_left_to_django(
    serve: Serve, sender: Sender
) -> None:
    def missing(request: HttpRequest) -> HttpResponse:
        raise Http404

    def broken(request: HttpRequest, error: Exception) -> HttpResponse:
        raise RuntimeError("no handler")

    missing.response_to = broken  # type: ignore[attr-defined]
    serve(view=plain(missing))
    assert [sender.send().status_code for _ in range(2)] == [404, 404]
    assert sender.send()["Idempotent-Replayed"] == "true"


@pytest.mark.parametrize("kind", [plain, phased_outside])
def test_error_in_rendering_comes_before_commit(
    kind: Kind, serve: Serve, sender: Sender, template: Callable[[str], Any]
) -> None:
    def broken() -> str:
        Entry.objects.create(name="by the template")
        raise RuntimeError("no template")

    def work(request: HttpRequest) -> HttpResponse:
        if counted.runs == 1:
            return TemplateResponse(
                request, template("{{ broken }}"), {"broken": broken}, status=404
            )
        return HttpResponse("fine", status=404)

    serve(view=kind(counted := Counted(work)))
    assert sender.send().status_code == 500
    assert not IdempotencyKey.objects.finished().exists()
    assert [sender.send().content for _ in range(2)] == [b"fine", b"fine"]
    assert Entry.objects.exists() is (kind is phased_outside)


@both_kinds
def test_streamed_body_that_breaks_off_leaves_the_work_and_no_half_body(
    kind: Kind, serve: Serve, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    """Its generator runs after COMMIT, which the log says once."""
    _warn_of_stream.cache_clear()

    def broken() -> Iterator[bytes]:
        yield b"half"
        raise RuntimeError("no more")

    def work(request: HttpRequest) -> StreamingHttpResponse:
        create(request)
        return StreamingHttpResponse(broken(), status=201)

    serve(view=kind(counted := Counted(work)))
    with pytest.raises(RuntimeError, match="no more"):
        b"".join(sender.send().streaming_content)
    replayed = sender.send()
    assert (replayed.status_code, replayed.content) == (201, b"")
    assert replayed["Idempotent-Body-Omitted"] == "true"
    assert (counted.runs, Entry.objects.count()) == (1, 1)
    with pytest.raises(RuntimeError, match="no more"):
        b"".join(sender.send(key="another").streaming_content)
    assert caplog.text.count("streams its response") == 1


def test_file_response_is_delivered_and_not_kept(
    serve: Serve, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    def file(request: HttpRequest) -> FileResponse:
        return FileResponse(BytesIO(b"pdf"), filename="ride.pdf")

    serve(view=plain(file))
    first, replayed = sender.send(), sender.send()
    assert "streams its response" not in caplog.text
    assert first.getvalue() == b"pdf"
    assert replayed["Content-Disposition"] == first["Content-Disposition"]
    assert replayed["Content-Length"] == "0"


@pytest.mark.parametrize("content", [b"", b"\x00\xff", "é".encode("latin-1"), "日本".encode()])
@both_kinds
def test_body_is_replayed_byte_by_byte(
    content: bytes, kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(
        view=kind(lambda request: HttpResponse(content, content_type="text/plain; charset=latin-1"))
    )
    first, replayed = sender.send(), sender.send()
    assert (replayed.content, replayed["Content-Type"]) == (content, "text/plain; charset=latin-1")
    assert first.content == content
    assert "Idempotent-Body-Omitted" not in replayed


def test_cookies_set_by_hand_as_a_header_are_not_kept(serve: Serve, sender: Sender) -> None:
    serve(view=plain(lambda request: HttpResponse(headers={"Set-Cookie": "private=secret"})))
    sender.send()
    assert "Set-Cookie" not in sender.send()
    assert "secret" not in str(IdempotencyKey.objects.values().get())


@pytest.mark.parametrize(("kind", "replayed"), [(plain, "7"), (phased, None)])
@pytest.mark.postgres
def test_a_replay_has_the_headers_that_the_response_had_when_it_was_stored(
    kind: Any, replayed: str | None, serve: Serve, sender: Sender
) -> None:
    """A decorator inside @idempotent changes the response; in a phased view, this is after a phase
    has stored it."""
    inner = kind(create).__wrapped__

    def marked(request: HttpRequest) -> HttpResponseBase:
        response = inner(request)
        response["X-Total"] = "7"
        return response

    serve(view=idempotent(recovery_points=["unused"] if kind is phased else None)(marked))
    assert sender.send()["X-Total"] == "7"
    assert sender.send().get("X-Total") == replayed


def test_replayed_redirect_can_be_followed_in_tests(serve: Serve, sender: Sender) -> None:
    serve(
        view=plain(lambda request: HttpResponseRedirect("/done/")),
        done=lambda request: HttpResponse("done"),
    )
    for _ in range(2):
        response = sender.client.post(
            "/view/", {"a": 1}, headers={"Idempotency-Key": "key-1"}, follow=True
        )
        assert response.content == b"done"


def test_two_clients_of_a_user_share_keys(serve: Serve, sender: Sender) -> None:
    serve(view=plain(work := Counted()))
    assert sender.send().content == another_client(sender).send().content
    assert work.runs == 1
