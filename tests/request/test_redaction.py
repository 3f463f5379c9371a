"""Redacted values: they are not in the table, cannot be guessed from it, and the completer does not run without them."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.http import HttpRequest, HttpResponse
from pytest_django import Settings
from rest_framework.parsers import FormParser, JSONParser
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency._request.fingerprint import fingerprint
from idempotency._request.redaction import redacted_body
from idempotency.completer import CompletePass, complete_once
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from idempotency.reaper import reap_once
from tests.kit.ageing import abandon, make_older, past_the_retention
from tests.kit.serving import Sender, View, problem
from tests.kit.views import Counted, both_kinds, phased, plain

Kind = Callable[..., View]
Serve = Callable[..., None]

NUMBER = "4242424242424242"
FORM = "application/x-www-form-urlencoded"
JSON = "application/json"


def everything_stored() -> str:
    """Return the whole content of the table of keys, as text."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT * FROM idempotency_idempotencykey")
        return repr([[bytes(value) if isinstance(value, memoryview) else value for value in row] for row in cursor.fetchall()])


@both_kinds
@pytest.mark.parametrize(
    "sent",
    [
        {"body": {"card": {"number": NUMBER}, "a": 1}},
        {"body": {"card": [{"number": NUMBER}, {"number": NUMBER}]}},
        {"body": {"card": NUMBER}},
        {"body": {"card": [NUMBER, [int(NUMBER)]]}},
        {"body": {"card.number": NUMBER}},
        {"body": f'"{NUMBER}"'},
        {"body": f'{{"card": {{"number": "{NUMBER}"}}, "card": {{}}}}'},
        {"body": f'{{"card": {{"number": "{NUMBER}"}}'},
        {"body": f"card.number={NUMBER}&a=%C3%A4", "content_type": FORM},
        {"body": NUMBER, "content_type": "text/plain"},
        {"url": f"/view/?card.number={NUMBER}"},
    ],
)
def test_a_redacted_parameter_is_nowhere_in_the_table(sent: dict[str, Any], kind: Kind, serve: Serve, sender: Sender) -> None:
    serve(view=kind(work := Counted(), redact=["card.number"]))
    assert sender.send(**sent).status_code == 201
    assert NUMBER not in everything_stored()
    assert sender.send(**sent)["Idempotent-Replayed"] == "true"
    assert work.runs == 1


@pytest.mark.parametrize(
    "sent",
    [
        {"data": {"prüfziffer": NUMBER}},
        {"data": f"prüfziffer={NUMBER}&a=\udcff".encode("utf-8", "surrogateescape"), "content_type": FORM},
        {"data": f"pr%C3%BCfziffer={NUMBER}", "content_type": FORM},
        {"data": f"pr%FCfziffer={NUMBER}", "content_type": f"{FORM}; charset=latin-1"},
        {"data": {"prüfziffer": NUMBER}, "content_type": JSON},
        {"path": f"/view/?pr%C3%BCfziffer={NUMBER}"},
        {"path": f"/view/?pr%FCfziffer={NUMBER}"},
        {"path": "/view/", "QUERY_STRING": f"prüfziffer={NUMBER}"},
    ],
)
def test_a_parameter_whose_name_is_not_ascii_is_redacted_too(sent: dict[str, Any], serve: Serve, sender: Sender) -> None:
    serve(view=idempotent(redact=["prüfziffer"])(lambda request: HttpResponse(status=201)))
    assert sender.client.post(**{"path": "/view/", **sent}, headers={"Idempotency-Key": "key"}).status_code == 201
    assert NUMBER not in everything_stored()
    assert IdempotencyKey.objects.get().request_headers["redacted"] == "true"


@both_kinds
def test_the_fingerprint_covers_what_is_redacted(kind: Kind, serve: Serve, sender: Sender) -> None:
    serve(view=kind(Counted(), redact=["pin"]))
    sender.send(body={"pin": "1234"})
    assert problem(sender.send(body={"pin": "1235"}))["code"] == "key_reused"


@pytest.mark.parametrize("options", [{"redact": ["pin"]}, {"store_body": False}])
def test_the_fingerprint_of_what_is_not_kept_needs_the_secret(
    options: dict[str, Any], serve: Serve, sender: Sender, settings: Settings
) -> None:
    requests: list[HttpRequest] = []

    def work(request: HttpRequest) -> HttpResponse:
        requests.append(request)
        return HttpResponse()

    serve(view=plain(work, **options))
    sender.send(body={"pin": "1234"})
    stored = IdempotencyKey.objects.get().request_fingerprint
    assert stored != fingerprint(requests[0], requests[0].body)
    assert stored != fingerprint(requests[0], requests[0].body, "another secret")


@both_kinds
def test_a_new_secret_does_not_make_another_request_of_a_retry(
    kind: Kind, serve: Serve, sender: Sender, settings: Settings
) -> None:
    serve(view=kind(work := Counted(), redact=["pin"], scope=lambda request: "one"))
    first = sender.send(body={"pin": "1234"})
    settings.SECRET_KEY_FALLBACKS = [settings.SECRET_KEY]
    settings.SECRET_KEY = "a new secret, which signs from now on"
    again = sender.send(body={"pin": "1234"})
    assert (again.content, again["Idempotent-Replayed"]) == (first.content, "true")
    assert problem(sender.send(body={"pin": "1235"}))["code"] == "key_reused"
    assert work.runs == 1


def test_a_body_that_is_not_stored_is_compared_all_the_same(serve: Serve, sender: Sender) -> None:
    serve(view=plain(Counted(), store_body=False))
    sender.send(body={"pin": "1234"})
    assert IdempotencyKey.objects.get().request_body is None
    assert sender.send(body={"pin": "1234"})["Idempotent-Replayed"] == "true"
    assert problem(sender.send(body={"pin": "1235"}))["code"] == "key_reused"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"redact": ["pin"]}, "body_redacted"),
        ({"store_body": False}, "body_not_kept"),
        ({"store_body": False, "redact": ["pin"]}, "body_not_kept"),
    ],
)
def test_the_completer_hands_over_what_it_cannot_run_as_it_was(
    options: dict[str, Any], code: str, serve: Serve, sender: Sender
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        if not runs:
            runs.append(1)
            raise RuntimeError("out of luck")
        return HttpResponse(json.loads(request.body)["pin"])

    runs: list[int] = []
    serve(view=phased(work, **options))
    assert sender.send(body={"pin": "1234"}).status_code == 500
    make_older(400, "created_at", "last_run_at")
    assert complete_once().stuck == 1
    key = IdempotencyKey.objects.get()
    assert (key.stuck_code, key.stuck_reason.endswith("only its client can send it again.")) == (code, True)
    assert problem(sender.send(body={"pin": "1235"}))["code"] == "key_reused"
    assert sender.send(body={"pin": "1234"}).content == b"1234", "a late retry brings what was missing"
    assert not IdempotencyKey.objects.stuck().exists()


def test_what_the_completer_cannot_run_is_left_to_on_abandon(
    serve: Serve, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(request: HttpRequest) -> HttpResponse:
        raise RuntimeError("out of luck")

    serve(view=phased(fail, redact=["pin"], on_abandon=lambda key: HttpResponse(status=410)))
    assert sender.send(body={"pin": "1234"}).status_code == 500
    for _ in range(2):
        abandon()
        assert complete_once() == CompletePass(failed=1)
    key = IdempotencyKey.objects.get()
    assert "only its client can send it again" in key.last_error
    assert caplog.text.count(f"the completer cannot run key {key.key_hash} (body_redacted): Parts of the request") == 2
    past_the_retention()
    assert reap_once().settled == 1
    assert sender.send(body={"pin": "1234"}).status_code == 410


def test_an_empty_body_is_kept_in_any_case_and_run_by_the_completer(serve: Serve, sender: Sender) -> None:
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


def test_what_has_nothing_to_redact_is_kept_as_it_came_and_run_by_the_completer(serve: Serve, sender: Sender) -> None:
    runs: list[int] = []

    def work(request: HttpRequest) -> HttpResponse:
        runs.append(1)
        if len(runs) == 1:
            raise RuntimeError("out of luck")
        return HttpResponse(request.body)

    serve(view=phased(work, redact=["pin"]))
    body = '{"amount": 1.10,  "a": "ä"}'
    assert sender.send(body=body).status_code == 500
    make_older(400, "created_at", "last_run_at")
    assert complete_once().finished == 1
    assert sender.send(body=body).content == body.encode()


@pytest.mark.parametrize(
    ("body", "content_type", "kept"),
    [
        (b'{"a": {"b": 1}}', JSON, b'{"a": {"b": "[redacted]"}}'),
        (b'{"a": [{"b": 1}, 2, {"b": null}]}', JSON, b'{"a": [{"b": "[redacted]"}, "[redacted]", {"b": "[redacted]"}]}'),
        (b'[{"c": {"d": 1}}]', "application/vnd.shop+json", b'[{"c": "[redacted]"}]'),
        (b'{"a": 1}', JSON, b'{"a": "[redacted]"}'),
        (b'{"a": null}', JSON, b'{"a": null}'),
        (b'{"a": {"x": 1}}', JSON, b'{"a": {"x": 1}}'),
        (b'{"a.b": 1, "x": 2}', JSON, b'{"a.b": "[redacted]", "x": 2}'),
        (b'"a"', JSON, b'"[redacted]"'),
        (b'["a", null]', JSON, b'["[redacted]", null]'),
        (b"c=1&a=%E4&c=2", f"{FORM}; charset=latin-1", b"c=%5Bredacted%5D&a=%E4&c=%5Bredacted%5D"),
        (b"c=1&%FC=\xff+%C3%A4", FORM, b"c=%5Bredacted%5D&%FC=%FF+%C3%A4"),
        (b'{"c": "x=1"}', FORM, None),
        (b"<c>1</c>", FORM, None),
        (b"c: 1\nd: 2", FORM, None),
        (b"", "text/plain", b""),
        (b"anything", "text/plain", None),
        (b"{", JSON, None),
        (b'{"c": 1, "c": 2}', JSON, None),
    ],
)
def test_what_is_kept_of_a_body(body: bytes, content_type: str, kept: bytes | None) -> None:
    assert redacted_body(body, content_type, ("a.b", "c"))[0] == kept


def test_a_single_path_is_refused_at_decoration() -> None:
    with pytest.raises(ValueError, match="list of dotted paths"):
        idempotent(redact="card.number")(lambda request: HttpResponse())


@pytest.mark.parametrize(
    ("content_type", "body", "read"),
    [
        (FORM, NUMBER.encode(), None),
        (FORM, f"[{NUMBER}]".encode(), None),
        (FORM, f"card: {NUMBER}".encode(), None),
        (FORM, f"%7B%22card%22%3A%22{NUMBER}%22%7D".encode(), None),
        (f"{FORM}; charset=utf-7", f"c+AGE-rd={NUMBER}".encode(), NUMBER),
        (f"{FORM}; charset=utf-16-le", f"card={NUMBER}".encode("utf-16-le"), NUMBER),
        (f"{JSON}; charset=utf-7", f'{{"c+AGE-rd": "{NUMBER}"}}'.encode(), NUMBER),
        (f"{FORM}; charset=unknown", f"card={NUMBER}".encode(), NUMBER),
        (f"{FORM}; charset=latin-1", f"card={NUMBER}".encode(), NUMBER),
    ],
)
def test_a_body_that_is_no_form_or_in_another_charset_is_not_stored(
    content_type: str, body: bytes, read: str | None, serve: Serve, sender: Sender
) -> None:
    seen: list[Any] = []

    class Pay(APIView):
        parser_classes = [FormParser, JSONParser]

        @idempotent(redact=["card"])
        def post(self, request: Any) -> Response:
            seen.append(request.data.get("card"))
            return Response({})

    serve(view=Pay.as_view())
    assert sender.send(body=body, content_type=content_type).status_code == 200
    assert seen == [read]
    assert NUMBER not in everything_stored()
