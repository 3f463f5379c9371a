"""Cases that have cost money elsewhere, and here before they were found; a known limit is asserted as it is documented."""

import json
import socket
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from io import BytesIO
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
from django.conf import settings as settings_of_django
from django.core.handlers.wsgi import WSGIRequest
from django.core.wsgi import get_wsgi_application
from django.db import Error, IntegrityError, OperationalError, connection, transaction
from django.db.transaction import TransactionManagementError
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.test import Client
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View as ClassBasedView
from django.views.decorators.csrf import csrf_exempt
from pytest_django import Settings

from idempotency.claims import Outcome
from idempotency.completer import CompletePass, complete_once
from idempotency.contrib import rq as rq_backend
from idempotency.decorators import idempotent
from idempotency.enqueuer import EnqueuePass, enqueue_once
from idempotency.inbox import process_once
from idempotency.models import IdempotencyKey, ProcessedMessage, StagedJob
from idempotency.phases import atomic_phase
from tests.factories import IdempotencyKeyFactory, StagedJobFactory
from tests.kit.ageing import abandon, expire_lock, make_older
from tests.kit.chance import chance
from tests.kit.claims import claim, claim_as_completer, request
from tests.kit.database import default_isolation
from tests.kit.serving import Sender, another_client
from tests.kit.threads import Gate, all_at_once, at_once, elsewhere, in_background
from tests.kit.views import both_kinds, create, phased, plain, two_phases
from tests.models import Account, Entry

pytestmark = pytest.mark.django_db(transaction=True)

Serve = Callable[..., None]
JOB_ID = "00000000-0000-7000-8000-00000000000a"


def conflict() -> None:
    """Let the open transaction fail as a serialization failure does."""
    connection.cursor().execute("DO $$ BEGIN RAISE EXCEPTION 'conflict' USING ERRCODE = '40001'; END $$")


# Jobs and messages that are lost in silence


def job_that_catches_its_error() -> str:
    """Write, then try what may be there already, as jobs do."""
    Entry.objects.create(name="work of the job")
    with suppress(IntegrityError):
        Account.objects.create(name="taken")
    return "done"


def job_that_catches_a_raw_error() -> str:
    """Write, then try a statement that fails."""
    Entry.objects.create(name="work of the job")
    with suppress(Error):
        connection.cursor().execute("SELECT 1 / 0")
    return "done"


def job_that_closes_its_connection() -> str:
    """Write, then leave no connection behind, as long-lived workers are told to."""
    Entry.objects.create(name="work of the job")
    connection.close()
    return "done"


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("job", "error"),
    [
        (job_that_catches_its_error, TransactionManagementError),
        (job_that_catches_a_raw_error, TransactionManagementError),
        (job_that_closes_its_connection, OperationalError),
    ],
)
def test_a_job_that_lost_its_transaction_fails_and_leaves_nothing(job: Callable[[], str], error: type[Exception]) -> None:
    """It returned a value, but RQ must try it again."""
    Account.objects.create(name="taken")
    with pytest.raises(error):
        rq_backend.run_once(f"tests.test_hard_cases.{job.__name__}", {}, JOB_ID)
    assert not Entry.objects.exists()
    assert not ProcessedMessage.objects.exists()


@pytest.mark.postgres
def test_a_message_that_lost_its_transaction_fails_and_the_next_delivery_is_the_first() -> None:
    taken = Account.objects.create(name="taken")

    def deliver() -> bool:
        with process_once("stripe", "evt_1") as first:
            job_that_catches_its_error()
        return first

    with pytest.raises(TransactionManagementError):
        deliver()
    assert not Entry.objects.exists()
    assert not ProcessedMessage.objects.exists()
    taken.delete()
    assert deliver()
    assert Entry.objects.count() == 1


def job_that_asks_to_be_run_again() -> Any:
    """Do what RQ's documentation says: return a Retry when the time has not come."""
    from rq import Retry

    if Entry.objects.exists():
        Account.objects.create(name="done at last")
        return None
    return Retry(max=3)


def test_a_job_that_returns_a_retry_is_run_again() -> None:
    from rq import Retry

    name = "tests.test_hard_cases.job_that_asks_to_be_run_again"
    assert isinstance(rq_backend.run_once(name, {}, JOB_ID), Retry)
    Entry.objects.create(name="the time has come")
    rq_backend.run_once(name, {}, JOB_ID)
    assert Account.objects.filter(name="done at last").exists()


# Money doubled by a retry inside the process


def _pay(account: Account, failures: list[int]) -> HttpResponse:
    account.balance -= 10
    account.save()
    if failures:
        failures.pop()
        conflict()
    return JsonResponse({"balance": account.balance}, status=201)


def _on_the_request(kind: Any, failures: list[int]) -> Any:
    protected = kind(lambda request: _pay(request.account, failures))

    def middleware(request: HttpRequest) -> HttpResponseBase:
        request.account = Account.objects.get(name="purse")
        return protected(request)

    return middleware


def _keyword_argument(kind: Any, failures: list[int]) -> Any:
    @idempotent(isolation="serializable")
    def protected(request: HttpRequest, account: Account) -> HttpResponse:
        return _pay(account, failures)

    return lambda request: protected(request, account=Account.objects.get(name="purse"))


def _on_the_class_based_view(kind: Any, failures: list[int]) -> Any:
    class Pay(ClassBasedView):
        def setup(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
            super().setup(request, *args, **kwargs)
            self.account = Account.objects.get(name="purse")

        @method_decorator(idempotent)
        def post(self, request: HttpRequest) -> HttpResponse:
            return _pay(self.account, failures)

    return Pay.as_view()


@pytest.mark.postgres
@pytest.mark.parametrize("make", [_on_the_request, _keyword_argument, _on_the_class_based_view])
def test_a_retry_inside_the_process_pays_once(make: Any, serve: Serve, sender: Sender) -> None:
    Account.objects.create(name="purse", balance=100)
    serve(view=make(plain, [1]))
    assert sender.send().status_code == 201
    assert Account.objects.get().balance == 90


# A part of a request


@pytest.mark.postgres
def test_a_request_that_was_cut_short_does_not_run(serve: Serve, sender: Sender) -> None:
    """gunicorn and wsgiref hand over what came; Django reads it without a word."""

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
    """A server that keeps its log to itself."""

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


# The fence


@pytest.mark.postgres
def test_reading_the_key_again_does_not_pass_the_fence(serve: Serve, sender: Sender) -> None:
    """A late run that refreshes its key takes the winner's token, and commits beside the winner."""
    gate = Gate()
    runs = []

    @idempotent(recovery_points=["unused"])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for _ in key.phases():
            runs.append(key.pk)
            if len(runs) == 1:
                make_older(91, "locked_at")
                winner.append(in_background(another_client(sender).send))
                gate.wait_until_reached()
                key.refresh_from_db()  # the late one wakes up, and looks how far it is
            else:
                gate.wait_here()
            with atomic_phase(key) as phase:
                Entry.objects.create(name="paid")
                phase.set_response(HttpResponse(status=201))
        return key.response()

    winner: list[Any] = []
    serve(view=view)
    late = sender.send()
    gate.open()
    assert winner[0].result(60).status_code == 201
    assert (late.status_code, late.json()["code"]) == (409, "key_in_use")
    assert Entry.objects.count() == 1


# The stored response


def _broken_hook() -> None:
    raise ConnectionError("the broker is down")


@pytest.mark.postgres
def test_a_hook_that_fails_after_commit_does_not_replace_the_stored_answer(
    serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"STORE_5XX": True}

    def work(request: HttpRequest) -> HttpResponse:
        transaction.on_commit(_broken_hook)
        return create(request)

    serve(view=phased(work))
    assert sender.send().status_code == 500
    assert Entry.objects.count() == 1
    assert IdempotencyKey.objects.get().response_code == 201
    assert sender.send().status_code == 201


@pytest.mark.postgres
def test_a_hook_that_fails_after_the_first_phase_does_not_finish_the_key(
    serve: Serve, sender: Sender, settings: Settings
) -> None:
    """404 instead of 500 here: nothing of this needs STORE_5XX."""

    def lost() -> None:
        raise Http404

    def first(request: HttpRequest) -> None:
        Entry.objects.create(name="charged")
        transaction.on_commit(lost)

    serve(view=two_phases(first, lambda request: HttpResponse(status=201)))
    assert [sender.send().status_code for _ in range(2)] == [500, 201]
    assert Entry.objects.count() == 1


@pytest.mark.postgres
def test_an_error_after_commit_that_the_view_turns_into_an_answer_does_not_replace_the_stored_one(
    serve: Serve, sender: Sender
) -> None:
    """A connection that is cut between COMMIT and its acknowledgement looks the same to the view."""

    @idempotent(recovery_points=["unused"])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for _ in key.phases():
            try:
                with atomic_phase(key) as phase:
                    Entry.objects.create(name="paid")
                    transaction.on_commit(_broken_hook)
                    phase.set_response(HttpResponse(status=201))
            except Exception:
                return JsonResponse({"error": "could not be booked"}, status=422)
        return key.response()

    serve(view=view)
    sender.send()
    assert Entry.objects.count() == 1
    assert sender.send().status_code == 201


def test_an_error_after_the_end_is_not_taken_for_a_takeover(
    serve: Serve, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    @idempotent(recovery_points=["unused"])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for _ in key.phases():
            with atomic_phase(key) as phase:
                phase.set_response(HttpResponse(status=201))
        raise RuntimeError("on purpose")

    serve(view=view)
    with caplog.at_level("INFO", "idempotency"):
        sender.send()
    assert "taken over" not in caplog.text
    assert sender.send().status_code == 201


@pytest.mark.postgres
@pytest.mark.parametrize("fails", [True, False])
def test_a_key_that_the_view_itself_committed_is_not_answered_with_an_empty_success(
    fails: bool, serve: Serve, sender: Sender
) -> None:
    @idempotent
    def view(request: HttpRequest) -> HttpResponseBase:
        with connection.cursor() as cursor:
            cursor.execute("COMMIT")
        if fails:
            raise RuntimeError("on purpose")
        return HttpResponse(status=503)

    serve(view=view)
    assert sender.send().status_code == (500 if fails else 503)
    answer = sender.send()
    assert (answer.status_code, answer.json()["code"]) == (409, "key_stuck")


# The completer


@pytest.mark.postgres
def test_a_deploy_that_takes_long_to_be_mended_leaves_keys_that_the_completer_finishes(serve: Serve, sender: Sender) -> None:
    """25 runs of code that does not know the point take 20 hours; then the mended code comes."""
    broken = [1]

    def call() -> None:
        if broken:
            raise OSError("down")

    good = two_phases(lambda request: None, lambda request: HttpResponse(status=201), call=call)
    serve(view=good)
    assert sender.send().status_code == 500
    serve(view=idempotent(recovery_points=["other"])(lambda request: request.idempotency_key.response()))
    for _ in range(26):
        abandon()
        complete_once()
    key = IdempotencyKey.objects.get()
    assert key.stuck_code == "unknown_recovery_point", (key.stuck_code, key.completer_attempts)
    broken.clear()
    serve(view=good)
    abandon()
    complete_once()
    assert IdempotencyKey.objects.get().response_code == 201


@pytest.mark.postgres
@pytest.mark.parametrize(
    "query",
    [
        "name=é",
        "name=%C3%A9",
    ],
)
def test_the_completer_sees_the_query_that_the_client_sent(query: str, serve: Serve, sender: Sender) -> None:
    seen = []

    def second(request: HttpRequest) -> HttpResponse:
        seen.append(request.GET["name"])
        if len(seen) == 1:
            raise OSError("down")
        return HttpResponse(status=201)

    serve(view=two_phases(lambda request: None, second))
    sender.send(f"/view/?{query}")
    abandon()
    complete_once()
    assert seen == ["é", "é"]


@pytest.mark.postgres
def test_the_completer_runs_the_path_that_the_client_sent(sender: Sender, settings: Settings) -> None:
    seen = []

    def view(request: HttpRequest, rest: str) -> HttpResponseBase:
        key = request.idempotency_key
        for _ in key.phases():
            seen.append(rest)
            if len(seen) == 1:
                raise OSError("down")
            with atomic_phase(key) as phase:
                phase.set_response(HttpResponse(status=201))
        return key.response()

    protected = idempotent(recovery_points=["unused"])(view)
    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": [path("<path:rest>", protected)]})
    sender.send("/x", PATH_INFO="//alice/pay")
    abandon()
    complete_once()
    assert seen == ["/alice/pay"] * 2


@pytest.mark.postgres
def test_the_completer_finishes_what_a_method_of_a_class_has_begun(serve: Serve, sender: Sender) -> None:
    broken = [1]

    class Pay(ClassBasedView):
        @method_decorator(idempotent(recovery_points=["unused"]))
        def post(self, request: HttpRequest) -> HttpResponseBase:
            key = request.idempotency_key
            for _ in key.phases():
                if broken:
                    raise OSError("down")
                with atomic_phase(key) as phase:
                    phase.set_response(HttpResponse(status=201))
            return key.response()

    serve(view=Pay.as_view())
    assert sender.send().status_code == 500
    broken.clear()
    abandon()
    assert complete_once() == CompletePass(finished=1)
    answer = sender.send()
    assert (answer.status_code, answer["Idempotent-Replayed"]) == (201, "true")


@pytest.mark.postgres
def test_a_large_form_is_the_same_for_the_completer(serve: Serve, sender: Sender) -> None:
    broken = [1]

    def first(request: HttpRequest) -> None:
        if broken:
            raise OSError("down")
        assert len(request.POST["text"]) == 1_000_000

    serve(view=two_phases(first, lambda request: HttpResponse(status=201)))
    text = "é" * 1_000_000
    body = f'--x\r\nContent-Disposition: form-data; name="text"\r\n\r\n{text}\r\n--x--\r\n'.encode()
    assert sender.send(body=body, content_type="multipart/form-data; boundary=x").status_code == 500
    broken.clear()
    abandon()
    assert complete_once() == CompletePass(finished=1)
    assert IdempotencyKey.objects.get().response_code == 201


# Requests


def test_a_multipart_body_that_a_middleware_has_read(serve: Serve, sender: Sender) -> None:
    protected = idempotent(create)

    def signed(request: HttpRequest) -> HttpResponseBase:
        assert request.body  # as one does who checks its signature
        return protected(request)

    serve(view=signed)
    body = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--x--\r\n'
    assert sender.send(body=body, content_type="multipart/form-data; boundary=x").status_code == 201


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_two_chunked_multipart_bodies_under_asgi_are_two_requests(method: str, sender: Sender) -> None:
    from django.core.handlers.asgi import ASGIRequest

    seen = []

    @idempotent
    def view(request: HttpRequest) -> HttpResponse:
        seen.append(request.body)
        return HttpResponse(status=201)

    for amount in (b"10", b"1000"):
        body = b'--x\r\nContent-Disposition: form-data; name="amount"\r\n\r\n' + amount + b"\r\n--x--\r\n"
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


# The admin


@pytest.mark.postgres
@pytest.mark.parametrize("body", [b'{"name": "\\ud800"}'])
def test_a_key_of_any_body_can_be_looked_at(body: bytes, admin_client: Client) -> None:
    key = IdempotencyKeyFactory(request_body=body)
    admin_client.raise_request_exception = False
    assert admin_client.get(f"/admin/idempotency/idempotencykey/{key.pk}/change/").status_code == 200


@pytest.mark.postgres
@pytest.mark.full
def test_a_key_of_any_depth_can_be_looked_at(admin_client: Client) -> None:
    admin_client.raise_request_exception = False
    broken = []
    for depth in range(700, 1000, 3):
        key = IdempotencyKeyFactory(request_body=b"[" * depth + b"]" * depth)
        if admin_client.get(f"/admin/idempotency/idempotencykey/{key.pk}/change/").status_code != 200:
            broken.append(depth)
    assert broken == []


# Connections


@pytest.mark.parametrize("kind", [plain, phased])
@pytest.mark.postgres
def test_without_autocommit_nothing_runs(kind: Any, serve: Serve, sender: Sender) -> None:
    """Nothing would commit what is answered."""
    serve(view=kind(create))
    sender.client.session  # noqa: B018
    connection.set_autocommit(False)
    try:
        answer = sender.send()
    finally:
        connection.close()
    assert answer.status_code == 500
    assert not Entry.objects.exists()
    assert not IdempotencyKey.objects.exists()


# Scopes


def test_a_scope_of_ones_own_is_not_the_scope_of_a_user(serve: Serve, sender: Sender) -> None:
    serve(view=idempotent(create), open=idempotent(scope=lambda request: request.headers["X-Account"])(create))
    stranger = Client(raise_request_exception=False)
    headers = {"Idempotency-Key": "key-1", "X-Account": f"user:{sender.user.pk}"}
    assert stranger.post("/open/", b"{}", content_type="application/json", headers=headers).status_code == 201
    assert sender.send().status_code == 201


# Answers


@pytest.mark.parametrize(("kind", "replayed"), [(plain, "7"), (phased, None)])
@pytest.mark.postgres
def test_a_replay_has_the_headers_that_the_response_had_when_it_was_stored(
    kind: Any, replayed: str | None, serve: Serve, sender: Sender
) -> None:
    """A decorator below @idempotent changes the response: of a phased view, after a phase has stored it."""
    inner = kind(create).__wrapped__

    def marked(request: HttpRequest) -> HttpResponseBase:
        response = inner(request)
        response["X-Total"] = "7"
        return response

    serve(view=idempotent(recovery_points=["unused"] if kind is phased else None)(marked))
    assert sender.send()["X-Total"] == "7"
    assert sender.send().get("X-Total") == replayed


@pytest.mark.parametrize("savepoint", [True, False])
@pytest.mark.postgres
def test_a_conflict_that_a_plain_view_answers_itself_is_stored_if_its_transaction_is_whole(
    savepoint: bool, serve: Serve, sender: Sender
) -> None:
    """An error of the database that is caught without a savepoint leaves a broken transaction, which can keep no answer."""
    Account.objects.create(name="taken")

    def view(request: HttpRequest) -> HttpResponse:
        try:
            with transaction.atomic() if savepoint else nullcontext():
                Account.objects.create(name="taken")
        except IntegrityError:
            return HttpResponse(status=409)
        return HttpResponse(status=201)

    serve(view=idempotent(view))
    assert sender.send().status_code == (409 if savepoint else 500)
    assert IdempotencyKey.objects.count() == savepoint


# What held, or only shows a limit


@pytest.mark.postgres
@pytest.mark.processes
def test_a_storm_of_plain_requests_with_rollbacks_and_mismatches(serve: Serve, sender: Sender) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        if request.headers.get("X-Chance") == "fail":
            return HttpResponse(status=503)
        Entry.objects.create(name=request.headers["Idempotency-Key"])
        return HttpResponse(request.body, status=201)

    serve(
        view=idempotent(work),
        strict=idempotent(isolation="serializable")(work),
        again=idempotent(isolation="repeatable read")(work),
    )
    seen: dict[str, set[bytes]] = {}
    urls = {f"key-{number}": ["/view/", "/strict/", "/again/"][number % 3] for number in range(15)}

    def client(number: int) -> list[tuple[str, int]]:
        own, drawn = another_client(sender), chance(number)
        out = []
        for key in [key for key in urls for _ in range(4)]:
            headers = {"X-Chance": "fail" if drawn.random() < 0.4 else "go"}
            answer = own.send(urls[key], key=key, body={"other": True} if number == 7 else {"a": 1}, headers=headers)
            if answer.status_code == 201:
                seen.setdefault(key, set()).add(answer.content)
            out.append((key, answer.status_code))
        return out

    answers = [answer for of_client in all_at_once(client, 8) for answer in of_client]
    assert {status for _, status in answers} <= {201, 409, 422, 503}, {status for _, status in answers}
    for key, url in urls.items():
        last = [sender.send(url, key=key, body=body) for body in ({"a": 1}, {"other": True})]
        assert sorted(answer.status_code for answer in last) == [201, 422]
        stored = {answer.content for answer in last if answer.status_code == 201}
        assert seen.get(key, stored) == stored
    names = [entry.name for entry in Entry.objects.all()]
    assert len(names) == len(set(names))
    assert set(names) == set(urls)


@pytest.mark.postgres
@pytest.mark.processes
def test_a_storm_over_expired_keys_with_reapers(serve: Serve, sender: Sender) -> None:
    from idempotency.reaper import reap_once

    serve(view=idempotent(create), phased=phased(create))
    for number in range(20):
        for url in ("/view/", "/phased/"):
            assert sender.send(url, key=f"{url}{number}").status_code == 201
    make_older(80 * 3600, "created_at", "finished_at")
    before = Entry.objects.count()

    def client(number: int) -> set[int]:
        own = another_client(sender)
        out = set()
        for turn in range(20):
            for url in ("/view/", "/phased/"):
                out.add(own.send(url, key=f"{url}{turn}").status_code)
        return out

    def reaper() -> set[int]:
        for _ in range(10):
            reap_once(batch_size=5)
        return set()

    seen = set().union(*at_once([partial(client, number) for number in range(5)] + [reaper]))
    assert seen <= {201, 409}, seen
    assert Entry.objects.count() == before + 40


@both_kinds
def test_a_session_that_is_a_plain_dict(kind: Any, rf: Any, sender: Sender) -> None:
    request = rf.post("/view/", b"{}", content_type="application/json", headers={"Idempotency-Key": "key-1"})
    request.user, request.session = sender.user, {}
    assert kind(create)(request).status_code == 201


@both_kinds
@pytest.mark.postgres
def test_hooks_of_what_was_rolled_back_do_not_run(kind: Any, serve: Serve, sender: Sender) -> None:
    ran = []

    def work(request: HttpRequest) -> HttpResponse:
        transaction.on_commit(lambda: ran.append(1))
        from idempotency.http import not_stored

        if kind is phased:
            raise OSError
        return not_stored(HttpResponse(status=201))

    serve(view=kind(work))
    assert sender.send().status_code == (500 if kind is phased else 201)
    assert ran == []


@pytest.mark.postgres
def test_on_abandon_of_a_path_with_an_accent(sender: Sender, settings: Settings) -> None:
    from idempotency.reaper import reap_once

    def view(request: HttpRequest) -> HttpResponseBase:
        raise OSError("down")

    protected = idempotent(recovery_points=["unused"], on_abandon=lambda key: HttpResponse(status=410))(view)
    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": [path("café/", protected)]})
    assert sender.send("/café/").status_code == 500
    make_older(80 * 3600, "created_at", "last_run_at")
    reap_once()
    assert IdempotencyKey.objects.get().response_code == 410


@both_kinds
@pytest.mark.postgres
def test_upload_that_the_view_closed(kind: Any, serve: Serve, sender: Sender) -> None:
    runs = []

    def work(request: HttpRequest) -> HttpResponse:
        runs.append(1)
        with request.FILES["f"] as upload:
            upload.read()
        if len(runs) == 1:
            conflict()
        return HttpResponse(status=201)

    serve(view=kind(work))
    body = b'--x\r\nContent-Disposition: form-data; name="f"; filename="a"\r\n\r\n1\r\n--x--\r\n'
    # It cannot be read again inside the process: the client is sent round.
    send = partial(sender.send, body=body, content_type="multipart/form-data; boundary=x")
    assert [send().status_code for _ in range(2)] == [409, 201]


delivered: list[str] = []


def broker_with_a_database(job: Any) -> None:
    """Take a job, as a queue that lives in the same database does."""
    delivered.append(job.job_args["name"])
    if job.job_args["name"] == "poison":
        Account.objects.create(name="taken")


@pytest.mark.postgres
def test_a_refusal_by_the_database_stops_no_other_job(settings: Settings) -> None:
    delivered.clear()
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": "tests.test_hard_cases.broker_with_a_database"}}
    Account.objects.create(name="taken")
    for name in ("good", "poison", "later"):
        StagedJobFactory(job_args={"name": name})
    assert enqueue_once() == EnqueuePass(handed_over=2, refused=1)
    assert delivered == ["good", "poison", "later"]
    assert StagedJob.objects.get().job_args == {"name": "poison"}
    assert enqueue_once() == EnqueuePass()


@pytest.mark.postgres
def test_a_view_whose_other_database_is_down_stops_no_other_key(serve: Serve, sender: Sender) -> None:
    from django.db.utils import ConnectionHandler

    down = ConnectionHandler({"default": connection.settings_dict | {"HOST": "127.0.0.1", "PORT": "1", "OPTIONS": {}}})
    broken = [1]

    def asks_elsewhere(request: HttpRequest) -> HttpResponse:
        if broken:
            raise OSError("not yet")
        down["default"].cursor()
        return HttpResponse(status=201)

    def healthy(request: HttpRequest) -> HttpResponse:
        if broken:
            raise OSError("not yet")
        return HttpResponse(status=201)

    serve(view=phased(asks_elsewhere), healthy=phased(healthy))
    for number in range(3):
        sender.send(key=f"bad-{number}")
    sender.send("/healthy/", key="good")
    broken.clear()
    abandon()
    assert complete_once() == CompletePass(finished=1, failed=3)
    assert IdempotencyKey.objects.get(idempotency_key="good").response_code == 201


@pytest.mark.postgres
def test_takeover_at_once_on_a_database_that_is_repeatable_read_by_default() -> None:
    for turn in range(40):
        claim(request(f"key-{turn}"))
    expire_lock()

    def client(number: int) -> list[Outcome]:
        with default_isolation("repeatable read"):
            return [claim(request(f"key-{turn}")).outcome for turn in range(40)]

    for outcomes in zip(*all_at_once(client, 8), strict=True):
        assert sorted(outcomes, key=str) == [Outcome.CLAIMED] + [Outcome.IN_PROGRESS] * 7
    assert set(IdempotencyKey.objects.values_list("attempts", flat=True)) == {2}


@pytest.mark.postgres
def test_completers_at_one_key_on_a_database_that_is_repeatable_read_by_default() -> None:
    keys = [claim(request(f"key-{turn}")).key for turn in range(40)]
    expire_lock()

    def completer(number: int) -> list[bool]:
        with default_isolation("repeatable read"):
            return [claim_as_completer(key) is not None for key in keys]

    assert [sum(claimed) for claimed in zip(*all_at_once(completer, 8), strict=True)] == [1] * 40


@pytest.mark.postgres
@pytest.mark.processes
def test_storm_of_both_kinds(serve: Serve, sender: Sender, settings: Settings) -> None:
    """A rolling deploy: some processes run the view as a plain one, some as a phased one."""
    releases = {"old": idempotent(create), "new": phased(create)}
    serve(view=lambda request: releases[request.headers["X-Release"]](request))

    def client(number: int) -> set[int]:
        own, drawn = another_client(sender), chance(number)
        sent = [(f"key-{turn // 3}", drawn.choice(list(releases))) for turn in range(60)]
        return {own.send(key=key, headers={"X-Release": release}).status_code for key, release in sent}

    seen = set().union(*all_at_once(client, 8))
    assert seen <= {201, 409, 503}
    assert Entry.objects.count() == IdempotencyKey.objects.finished().count() == 20
    assert IdempotencyKey.objects.stuck().count() == 0, IdempotencyKey.objects.stuck().values("stuck_code").first()


@pytest.mark.postgres
def test_a_multipart_request_that_was_cut_between_its_parts_does_not_run(serve: Serve, sender: Sender) -> None:
    """What the parser has seen is whole, and the rest is missing."""
    part = b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    body = part % (b"to", b"bob") + part % (b"amount", b"1000") + part % (b"currency", b"JPY") + b"--x--\r\n"

    def pay(request: HttpRequest) -> HttpResponse:
        Entry.objects.create(name=f"paid {request.POST['amount']} {request.POST.get('currency', 'USD')}")
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
