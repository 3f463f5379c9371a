"""Credentials in the query and in the headers of a response: they are not in the table, and the
completer does not run without them."""

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

import pytest
from django.core.checks import run_checks
from django.db import connection
from django.http import HttpRequest, HttpResponse, JsonResponse
from pytest_django import Settings

from idempotency.completer import CompletePass, complete_once
from idempotency.models import IdempotencyKey
from idempotency.reaper import reap_once
from tests.kit.admin import KEYS, person
from tests.kit.ageing import abandon, past_the_retention
from tests.kit.serving import Sender, View, problem
from tests.kit.views import Counted, both_kinds, phased, plain

Kind = Callable[..., View]
Serve = Callable[..., None]

SECRET = "hunter2"


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
@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "apikey",
        "api-key",
        "apiKey",
        "X-Api-Key",
        "access_token",
        "token",
        "api%5Fkey",
        "a[api_key]",
        "api_key[]",
    ],
)
def test_a_credential_in_the_query_is_nowhere_in_the_table(
    kind: Kind, name: str, serve: Serve, sender: Sender
) -> None:
    serve(view=kind(work := Counted()))
    url = f"/view/?page=%41+b&{name}={SECRET}&key=1&flag"
    assert sender.send(url).status_code == 201
    assert SECRET not in everything_stored()
    assert (
        IdempotencyKey.objects.get().request_path
        == f"/view/?page=%41+b&{name}=not-stored&key=1&flag"
    )
    assert sender.send(url)["Idempotent-Replayed"] == "true"
    assert problem(sender.send(url.replace(SECRET, "hunter3")))["code"] == "key_reused"
    assert work.runs == 1


@pytest.mark.parametrize(
    "query", ["page=2&page_token=a", "token", "api_key=", "%&&=&[]=1", "key=1;api_key=1"]
)
def test_another_query_is_stored_as_it_came(query: str, serve: Serve, sender: Sender) -> None:
    serve(view=plain(Counted()))
    assert sender.send(f"/view/?{query}").status_code == 201
    assert IdempotencyKey.objects.get().request_path == f"/view/?{query}"


def test_a_credential_cannot_be_guessed_from_the_fingerprint(
    serve: Serve, sender: Sender, settings: Settings
) -> None:
    serve(view=plain(Counted()))
    prints = []
    for settings.SECRET_KEY in ("one secret", "another secret"):
        sender = Sender()
        sender.send(f"/view/?token={SECRET}")
        prints.append(IdempotencyKey.objects.latest("pk").request_fingerprint.partition(":")[2])
    assert prints[0] != prints[1]


@both_kinds
def test_a_credential_in_a_header_of_the_response_is_sent_and_not_stored(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        headers = {
            "X-Auth-Token": SECRET,
            "Access-Token": SECRET,
            "Authorization": SECRET,
            "X-Page-Token": "kept",
        }
        return HttpResponse(status=201, headers=headers)

    serve(view=kind(work))
    first, again = (sender.send() for _ in range(2))
    assert [first[name] for name in ("X-Auth-Token", "Access-Token", "Authorization")] == [
        SECRET
    ] * 3
    assert SECRET not in everything_stored()
    assert (again["Idempotent-Replayed"], again["X-Page-Token"]) == ("true", "kept")
    assert {"X-Auth-Token", "Access-Token", "Authorization"}.isdisjoint(again.headers)


def test_the_setting_adds_names(serve: Serve, sender: Sender, settings: Settings) -> None:
    settings.IDEMPOTENCY = {"CREDENTIAL_NAMES": ["X-Shop-Pass"]}
    serve(view=plain(lambda request: HttpResponse(headers={"x-shop-pass": SECRET})))
    sender.send(f"/view/?shop_pass={SECRET}&api_key={SECRET}")
    assert SECRET not in everything_stored()


@pytest.mark.parametrize("names", ["api_key", [7], [""]])
def test_the_setting_is_a_collection_of_names(names: Any, settings: Settings) -> None:
    settings.IDEMPOTENCY = {"CREDENTIAL_NAMES": names}
    assert "idempotency.E001" in [message.id for message in run_checks(databases=[])]


def failing_once(**options: Any) -> Any:
    """Return a phased view that fails in its first run, and else answers with its parsed query."""

    def work(request: HttpRequest) -> HttpResponse:
        runs.append(1)
        if len(runs) == 1:
            raise RuntimeError("out of luck")
        return JsonResponse(parse_qs(request.META["QUERY_STRING"]))

    runs: list[int] = []
    return phased(work, **options)


def test_the_completer_does_not_run_a_request_without_its_credential(
    serve: Serve, sender: Sender
) -> None:
    serve(view=failing_once())
    url = f"/view/?api_key={SECRET}&page=1"
    assert sender.send(url).status_code == 500
    abandon()
    assert complete_once() == CompletePass(failed=1)
    assert IdempotencyKey.objects.refused().exists()
    assert SECRET not in everything_stored()
    assert json.loads(sender.send(url).content) == {"api_key": [SECRET], "page": ["1"]}
    assert IdempotencyKey.objects.finished().count() == 1


def test_a_request_without_its_credential_is_left_to_on_abandon(
    serve: Serve, sender: Sender
) -> None:
    serve(view=failing_once(on_abandon=lambda key: HttpResponse(status=410)))
    url = f"/view/?api_key={SECRET}"
    assert sender.send(url).status_code == 500
    abandon()
    assert complete_once() == CompletePass(failed=1)
    past_the_retention()
    assert reap_once().settled == 1
    assert sender.send(url).status_code == 410


def test_no_page_shows_the_credential_and_curl_says_what_is_missing(
    serve: Serve, sender: Sender, settings: Settings
) -> None:
    urls = settings.ROOT_URLCONF
    serve(view=phased(Counted()))
    assert sender.send(f"/view/?api_key={SECRET}").status_code == 201
    settings.ROOT_URLCONF = urls
    key = IdempotencyKey.objects.get()
    client = person()
    for page in ("", f"{key.pk}/change/", f"{key.pk}/json/", "csv/", "dashboard/"):
        shown = client.get(f"{KEYS}{page}")
        assert (shown.status_code, SECRET in shown.text) == (200, False)
    notes = [
        line
        for line in client.get(f"{KEYS}{key.pk}/change/").context["curl"].splitlines()
        if line.startswith("#")
    ]
    assert any("not-stored" in note for note in notes)
