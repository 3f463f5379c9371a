"""Numbers 25 to 28: the same key with another request."""

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.http import HttpRequest, HttpResponse
from django.test.client import MULTIPART_CONTENT, encode_multipart
from pytest_django import Settings

from tests.kit.serving import Sender, View, another_client, problem
from tests.kit.threads import WAIT_SECONDS, Gate, in_background
from tests.kit.views import Counted, both_kinds, create, phased, plain

Kind = Callable[..., View]
Serve = Callable[..., None]

ANOTHER_REQUEST = {
    "body": {"body": {"a": 2}},
    "method": {"method": "PATCH"},
    "path": {"url": "/other/"},
    "query": {"url": "/view/?a=1"},
}


@both_kinds
@pytest.mark.parametrize("another", ANOTHER_REQUEST.values(), ids=ANOTHER_REQUEST)
def test_25_mismatch_is_refused_and_the_original_still_replays(
    another: dict[str, Any], kind: Kind, serve: Serve, sender: Sender
) -> None:
    view = kind(work := Counted())
    serve(view=view, other=view)
    first = sender.send()
    refused = sender.send(**another)
    assert (refused.status_code, problem(refused)["code"]) == (422, "key_reused")
    assert problem(refused)["retryable"] is False
    replayed = sender.send()
    assert (replayed.status_code, replayed.content) == (201, first.content)
    assert work.runs == 1


@both_kinds
@pytest.mark.parametrize("status", [400, 409])
def test_25_status_is_a_setting(
    status: int, kind: Kind, serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"MISMATCH_STATUS": status}
    serve(view=kind(Counted()))
    sender.send()
    refused = sender.send(body={"a": 2})
    assert (refused.status_code, problem(refused)["code"], problem(refused)["status"]) == (
        status,
        "key_reused",
        status,
    )


@both_kinds
@pytest.mark.postgres
def test_26_mismatch_on_a_key_in_flight_is_a_mismatch(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    gate = Gate()

    def work(request: HttpRequest) -> HttpResponse:
        gate.wait_here()
        return create(request)

    serve(view=kind(work))
    running = in_background(another_client(sender).send)
    gate.wait_until_reached()
    refused, duplicate = sender.send(body={"a": 2}), sender.send()
    gate.open()
    assert (refused.status_code, problem(refused)["code"]) == (422, "key_reused")
    assert (duplicate.status_code, problem(duplicate)["code"]) == (409, "key_in_use")
    assert running.result().status_code == 201


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("running_kind", "asking_kind"),
    [
        (plain, phased),
        (phased, plain),
    ],
)
def test_26_mismatch_is_seen_across_kinds(
    running_kind: Kind, asking_kind: Kind, serve: Serve, sender: Sender
) -> None:
    gate = Gate()

    def work(request: HttpRequest) -> HttpResponse:
        gate.wait_here()
        return create(request)

    serve(running=running_kind(work), asking=asking_kind(asked := Counted()))
    running = in_background(lambda: another_client(sender).send("/running/"))
    gate.wait_until_reached()
    asking = in_background(lambda: another_client(sender).send("/asking/"))
    try:
        refused = asking.result(WAIT_SECONDS)
    finally:
        gate.open()
    assert (refused.status_code, problem(refused)["code"]) == (422, "key_reused")
    assert running.result().status_code == 201
    assert asked.runs == 0


@both_kinds
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ('{"a": 1, "b": [1, 2]}', '{"b":[1,2],"a":1}'),
        ('{"a": 1.50, "b": 1}', '{"b": 1, "a": 1.50}'),
        ('{"a": {"x": 1, "y": 2}}', '{\n  "a": {"y": 2, "x": 1}\n}'),
        (r'{"a": "\u00e9"}', '{"a": "é"}'),
    ],
)
def test_27_the_same_value_is_the_same_request(
    first: str, second: str, kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=kind(work := Counted()))
    assert sender.send(body=first).content == sender.send(body=second).content
    assert work.runs == 1


@both_kinds
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": null}', "{}"),
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": 1}', '{"a": 1.0}'),
        ('{"a": 1.0}', '{"a": "1.0"}'),
    ],
)
def test_27_another_value_is_another_request(
    first: str, second: str, kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=kind(Counted()))
    sender.send(body=first)
    assert sender.send(body=second).status_code == 422


@both_kinds
def test_27_multipart_with_a_new_boundary_is_the_same_request(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=kind(work := Counted()))
    responses = []
    for boundary in ("first", "second"):
        file = SimpleUploadedFile("ride.txt", b"content", "text/plain")
        body = encode_multipart(boundary, {"a": "1", "file": file})
        content_type = MULTIPART_CONTENT.replace("BoUnDaRyStRiNg", boundary)
        responses.append(sender.send(body=body, content_type=content_type))
    assert [response.status_code for response in responses] == [201, 201]
    assert responses[0].content == responses[1].content
    assert work.runs == 1


@both_kinds
@pytest.mark.parametrize(
    "content_type", ["application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_27_form_with_a_fresh_csrf_token_is_the_same_request(
    content_type: str, kind: Kind, serve: Serve, sender: Sender
) -> None:
    def submit(token: str, amount: int) -> HttpResponse:
        fields = {"csrfmiddlewaretoken": token, "amount": amount}
        multipart = content_type.startswith("multipart")
        body = encode_multipart("x", fields) if multipart else urlencode(fields)
        return sender.send(body=body, content_type=content_type)

    serve(view=kind(work := Counted()))
    first, again = submit("one", 10), submit("two", 10)
    assert (again.content, again["Idempotent-Replayed"]) == (first.content, "true")
    assert submit("one", 11).status_code == 422
    assert work.runs == 1


@both_kinds
@pytest.mark.parametrize("other", [{"HTTP_HOST": "b.example"}, {"SCRIPT_NAME": "/mount"}])
def test_27_retry_by_another_address_is_the_same_request_unless_the_site_says_otherwise(
    other: dict[str, str], kind: Kind, serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.ALLOWED_HOSTS = ["*"]
    serve(view=kind(work := Counted()))
    assert sender.send().content == sender.send(**other).content
    settings.IDEMPOTENCY = {"FINGERPRINT_HOST": True}
    assert [sender.send(key="two").status_code, sender.send(key="two", **other).status_code] == [
        201,
        422,
    ]
    assert work.runs == 2


@both_kinds
def test_27_headers_do_not_count(kind: Kind, serve: Serve, sender: Sender) -> None:
    serve(view=kind(work := Counted()))
    sender.send(headers={"Accept-Language": "de", "X-Anything": "1", "Authorization": "Bearer old"})
    sender.send(headers={"Accept-Language": "en", "X-Anything": "2", "Authorization": "Bearer new"})
    assert work.runs == 1


@both_kinds
def test_28_the_error_shows_no_stored_data_no_difference_and_no_key(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=kind(lambda request: HttpResponse("stored-answer")))
    sender.send(key="secret-key", body={"field-one": "value-one"})
    refused = sender.send(key="secret-key", body={"field-two": "value-two"})
    shown = refused.content.decode() + json.dumps(dict(refused.items()))
    for private in (
        "stored-answer",
        "secret-key",
        "field-one",
        "value-one",
        "field-two",
        "value-two",
    ):
        assert private not in shown
