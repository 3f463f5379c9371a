"""Plain views, and phased views with ``store_body=False``: the body is not in the table and cannot
be guessed from it. The completer does not run a request without it."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.http import HttpRequest, HttpResponse
from pytest_django import Settings
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency._hidden import Hidden
from idempotency._http.fingerprint import fingerprint
from idempotency.completer import CompletePass, complete_once
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from idempotency.reaper import reap_once
from tests.kit.ageing import abandon, make_older, past_the_retention
from tests.kit.serving import Sender, View, problem
from tests.kit.views import Counted, both_kinds, create, phased, plain, storing_no_body, two_phases

Kind = Callable[..., View]
Serve = Callable[..., None]

NUMBER = "4242424242424242"
FORM = "application/x-www-form-urlencoded"
bodies = pytest.mark.parametrize(
    "sent",
    [
        {"body": {"card": {"number": NUMBER}, "a": 1}},
        {"body": f'{{"card": {{"number": "{NUMBER}"}}'},
        {"body": f"card.number={NUMBER}&a=%C3%A4", "content_type": FORM},
        {"body": f"c+AGE-rd={NUMBER}".encode(), "content_type": f"{FORM}; charset=utf-7"},
        {"body": NUMBER, "content_type": "text/plain"},
        {
            "body": (
                f'--b\r\nContent-Disposition: form-data; name="card"\r\n\r\n{NUMBER}\r\n--b--\r\n'
            ),
            "content_type": "multipart/form-data; boundary=b",
        },
    ],
)


def everything_stored() -> str:
    """Return the whole content of the table of keys, as text."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT * FROM idempotency_idempotencykey")
        return repr(
            [
                [bytes(value) if isinstance(value, memoryview) else value for value in row]
                for row in cursor.fetchall()
            ]
        )


@both_kinds
@bodies
def test_a_body_that_is_not_stored_is_nowhere_in_the_table(
    sent: dict[str, Any], kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=storing_no_body(kind)(work := Counted()))
    assert sender.send(**sent).status_code == 201
    assert NUMBER not in everything_stored()
    assert sender.send(**sent)["Idempotent-Replayed"] == "true"
    assert work.runs == 1


@bodies
def test_a_body_that_rest_framework_parses_is_nowhere_in_the_table(
    sent: dict[str, Any], serve: Serve, sender: Sender
) -> None:
    class Pay(APIView):
        @idempotent
        def post(self, request: Any) -> Response:
            return Response({})

    serve(view=Pay.as_view())
    assert sender.send(**sent).status_code == 200
    assert NUMBER not in everything_stored()


@both_kinds
def test_a_body_that_is_not_stored_is_compared_all_the_same(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=storing_no_body(kind)(Counted()))
    sender.send(body={"pin": "1234"})
    assert IdempotencyKey.objects.get().request_body is None
    assert sender.send(body={"pin": "1234"})["Idempotent-Replayed"] == "true"
    assert problem(sender.send(body={"pin": "1235"}))["code"] == "key_reused"


def test_the_fingerprint_of_a_body_that_is_not_stored_needs_the_secret(
    serve: Serve, sender: Sender, settings: Settings
) -> None:
    requests: list[HttpRequest] = []

    def work(request: HttpRequest) -> HttpResponse:
        requests.append(request)
        return HttpResponse()

    serve(view=plain(work))
    sender.send(body={"pin": "1234"})
    stored = IdempotencyKey.objects.get().request_fingerprint
    body = Hidden(requests[0].body)
    assert stored == fingerprint(requests[0], body, keyed=True)
    settings.SECRET_KEY = "another secret"
    assert stored not in (
        fingerprint(requests[0], body),
        fingerprint(requests[0], body, keyed=True),
    )


@both_kinds
def test_a_new_secret_does_not_make_another_request_of_a_retry(
    kind: Kind, serve: Serve, sender: Sender, settings: Settings
) -> None:
    serve(view=storing_no_body(kind)(work := Counted(), scope=lambda request: "one"))
    first = sender.send(body={"pin": "1234"})
    settings.SECRET_KEY_FALLBACKS = [settings.SECRET_KEY]
    settings.SECRET_KEY = "a new secret, which signs from now on"
    again = sender.send(body={"pin": "1234"})
    assert (again.content, again["Idempotent-Replayed"]) == (first.content, "true")
    assert problem(sender.send(body={"pin": "1235"}))["code"] == "key_reused"
    assert work.runs == 1


def test_the_completer_hands_over_what_it_cannot_run_as_it_was(
    serve: Serve, sender: Sender
) -> None:
    def call() -> None:
        if not calls:
            calls.append(1)
            raise RuntimeError("out of luck")

    calls: list[int] = []
    serve(
        view=two_phases(
            create,
            lambda request: HttpResponse(json.loads(request.body)["pin"]),
            call=call,
            store_body=False,
        )
    )
    assert sender.send(body={"pin": "1234"}).status_code == 500
    make_older(400, "created_at", "last_run_at")
    assert complete_once().stuck == 1
    key = IdempotencyKey.objects.get()
    assert (key.stuck_code, key.stuck_reason.endswith("only its client can send it again.")) == (
        "body_not_kept",
        True,
    )
    assert problem(sender.send(body={"pin": "1235"}))["code"] == "key_reused"
    assert sender.send(body={"pin": "1234"}).content == b"1234", (
        "a late retry brings what was missing"
    )
    assert not IdempotencyKey.objects.stuck().exists()


def test_what_the_completer_cannot_run_is_left_to_on_abandon(
    serve: Serve, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(request: HttpRequest) -> HttpResponse:
        raise RuntimeError("out of luck")

    serve(view=phased(fail, store_body=False, on_abandon=lambda key: HttpResponse(status=410)))
    assert sender.send(body={"pin": "1234"}).status_code == 500
    for _ in range(2):
        abandon()
        assert complete_once() == CompletePass(failed=1)
    key = IdempotencyKey.objects.get()
    assert "only its client can send it again" in key.last_error
    assert (
        caplog.text.count(
            f"the completer cannot run key {key.key_hash} (body_not_kept): The body of the request"
        )
        == 2
    )
    past_the_retention()
    assert reap_once().settled == 1
    assert sender.send(body={"pin": "1234"}).status_code == 410


def test_an_empty_body_is_kept_in_any_case_and_run_by_the_completer(
    serve: Serve, sender: Sender
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        if not runs:
            runs.append(1)
            raise RuntimeError("out of luck")
        return HttpResponse(request.body)

    runs: list[int] = []
    serve(view=phased(work, store_body=False))
    assert sender.send(method="DELETE", body=b"", content_type="").status_code == 500
    make_older(400, "created_at", "last_run_at")
    assert complete_once().finished == 1
    assert sender.send(method="DELETE", body=b"", content_type="")["Idempotent-Replayed"] == "true"
