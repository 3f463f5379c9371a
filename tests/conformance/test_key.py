"""Numbers 1 to 5: the key."""

import http.client
import json
from collections.abc import Callable
from contextlib import closing

import pytest
from django.views.decorators.csrf import csrf_exempt
from pytest_django import Settings
from pytest_django.live_server_helper import LiveServer

from idempotency.models import IdempotencyKey
from tests.kit.serving import Sender, View, problem
from tests.kit.views import Counted, both_kinds, plain

Kind = Callable[..., View]
Serve = Callable[..., None]


@both_kinds
@pytest.mark.parametrize("name", ["Idempotency-Key", "idempotency-key", "IDEMPOTENCY-KEY"])
def test_01_header_is_found_in_any_case(
    kind: Kind, name: str, serve: Serve, sender: Sender
) -> None:
    serve(view=kind(Counted()))
    assert sender.send(key=None, headers={name: "abc"}).status_code == 201
    assert IdempotencyKey.objects.get().idempotency_key == "abc"


@both_kinds
def test_01_several_header_names_carry_the_same_key(
    kind: Kind, serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"HEADER_NAMES": ["Idempotency-Key", "PayPal-Request-Id"]}
    serve(view=kind(work := Counted()))
    first = sender.send(key="abc")
    assert sender.send(key=None, headers={"PayPal-Request-Id": "abc"}).content == first.content
    assert sender.send(key="abc", headers={"PayPal-Request-Id": "abc"}).content == first.content
    assert work.runs == 1
    assert (
        problem(sender.send(key="abc", headers={"PayPal-Request-Id": "other"}))["code"]
        == "key_invalid"
    )


@both_kinds
def test_01_another_header_name_replaces_the_default(
    kind: Kind, serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"HEADER_NAMES": ["X-Once"]}
    serve(view=kind(Counted()))
    refused = problem(sender.send(key="abc"))
    assert refused["code"] == "key_missing"
    assert "X-Once" in refused["detail"]
    assert sender.send(key=None, headers={"X-Once": "abc"}).status_code == 201


@both_kinds
def test_02_quoted_and_unquoted_are_the_same_key(kind: Kind, serve: Serve, sender: Sender) -> None:
    serve(view=kind(work := Counted()))
    first = sender.send(key='"abc"')
    second = sender.send(key="abc")
    assert (first.status_code, second.status_code) == (201, 201)
    assert second.content == first.content
    assert work.runs == 1
    assert IdempotencyKey.objects.get().idempotency_key == "abc"


@both_kinds
def test_02_strict_syntax_refuses_the_unquoted_form(
    kind: Kind, serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"STRICT_KEY_SYNTAX": True}
    serve(view=kind(work := Counted()))
    refused = sender.send(key="abc")
    assert (refused.status_code, problem(refused)["code"]) == (400, "key_invalid")
    assert work.runs == 0
    assert sender.send(key='"abc"').status_code == 201


@pytest.mark.parametrize(
    ("header", "key"),
    [
        (r'"a\"b"', 'a"b'),
        (r'"a\\b"', r"a\b"),
        (r'"a\\\"b"', r"a\"b"),
        ('"abc";version=2', "abc"),
        ('"abc"; a; b=?1;c="x;y"', "abc"),
        ('  "abc"  ', "abc"),
        ('"a b"', "a b"),
    ],
)
def test_03_escapes_are_undone_and_parameters_ignored(
    header: str, key: str, serve: Serve, sender: Sender
) -> None:
    serve(view=plain(Counted()))
    assert sender.send(key=header).status_code == 201
    assert IdempotencyKey.objects.get().idempotency_key == key


@both_kinds
@pytest.mark.parametrize(
    "header",
    [
        r'"a\nb"',
        r'"a\"',
        '"abc',
        'abc"',
        '"a"b"',
        '"abc" tail',
        "a\x00b",
        "a\tb",
        '"a\tb"',
        "a\x7fb",
        "ä",
        '"ä"',
        "",
        " ",
        '""',
        "abc,def",
        '"abc", "def"',
    ],
)
def test_03_malformed_key_is_refused_and_the_view_does_not_run(
    header: str, kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=kind(work := Counted()))
    response = sender.send(key=header)
    assert (response.status_code, problem(response)["code"]) == (400, "key_invalid")
    assert work.runs == 0
    assert not IdempotencyKey.objects.exists()


@pytest.mark.parametrize("keys", [("abc", "def"), ("abc", "abc"), ('"abc"', '"def"')])
def test_03_two_header_lines_are_refused(
    keys: tuple[str, str], serve: Serve, live_server: LiveServer, transactional_db: None
) -> None:
    serve(view=csrf_exempt(plain(work := Counted(), scope=lambda request: "everybody")))
    with closing(
        http.client.HTTPConnection(live_server.thread.host, live_server.thread.port, timeout=60)
    ) as connection:
        connection.putrequest("POST", "/view/")
        for key in keys:
            connection.putheader("Idempotency-Key", key)
        connection.putheader("Content-Length", "0")
        connection.putheader("Connection", "close")
        connection.endheaders()
        with connection.getresponse() as response:
            assert (response.status, json.loads(response.read())["code"]) == (400, "key_invalid")
    assert work.runs == 0


@both_kinds
def test_04_255_characters_pass_and_256_are_refused(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=kind(work := Counted()))
    assert sender.send(key="k" * 255).status_code == 201
    refused = sender.send(key="k" * 256)
    assert (refused.status_code, problem(refused)["code"]) == (400, "key_invalid")
    assert work.runs == 1


@both_kinds
def test_04_limits_are_settings(
    kind: Kind, serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"KEY_MIN_LENGTH": 3, "KEY_MAX_LENGTH": 5}
    serve(view=kind(Counted()))
    assert [sender.send(key="k" * length).status_code for length in (2, 3, 5, 6)] == [
        400,
        201,
        201,
        400,
    ]


def test_04_quotes_and_escapes_do_not_count(serve: Serve, sender: Sender) -> None:
    serve(view=plain(Counted()))
    assert sender.send(key='"' + r"\"" * 255 + '"').status_code == 201


@both_kinds
def test_05_keys_are_case_sensitive(kind: Kind, serve: Serve, sender: Sender) -> None:
    serve(view=kind(work := Counted()))
    assert sender.send(key="abc").content != sender.send(key="ABC").content
    assert work.runs == 2
