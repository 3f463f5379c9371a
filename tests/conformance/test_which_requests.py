"""Numbers 8 to 11: which requests are protected, and whose they are."""

from collections.abc import Callable

import pytest
from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.views.decorators.csrf import csrf_protect

from idempotency.models import IdempotencyKey
from tests.factories import UserFactory
from tests.kit.serving import Sender, View, problem
from tests.kit.views import Counted, both_kinds, plain
from tests.models import Entry

Kind = Callable[..., View]
Serve = Callable[..., None]


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_08_safe_methods_run_each_time_and_store_nothing(
    method: str, serve: Serve, sender: Sender
) -> None:
    bound = []

    def look(request: HttpRequest) -> HttpResponse:
        bound.append(request.idempotency_key)
        return HttpResponse("seen")

    serve(view=plain(look))
    responses = [sender.send(method=method), sender.send(method=method)]
    assert [response.status_code for response in responses] == [200, 200]
    assert not any("Idempotent-Replayed" in response for response in responses)
    assert bound == [None, None]
    assert not IdempotencyKey.objects.exists()


@both_kinds
@pytest.mark.parametrize("method", ["POST", "PATCH", "PUT", "DELETE"])
def test_08_unsafe_methods_are_protected(
    method: str, kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=kind(work := Counted()))
    assert sender.send(method=method).status_code == 201
    assert sender.send(method=method)["Idempotent-Replayed"] == "true"
    assert work.runs == 1


@both_kinds
def test_09_missing_required_key_is_refused_and_the_view_does_not_run(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=kind(work := Counted()))
    response = sender.send(key=None)
    assert (response.status_code, problem(response)["code"]) == (400, "key_missing")
    assert problem(response)["retryable"] is False
    assert work.runs == 0
    assert not IdempotencyKey.objects.exists()


def test_09_not_required_runs_unprotected_and_stores_nothing(serve: Serve, sender: Sender) -> None:
    serve(view=plain(work := Counted(), required=False))
    assert [sender.send(key=None).status_code for _ in range(2)] == [201, 201]
    assert work.runs == 2
    assert Entry.objects.filter(idempotency_key=None).count() == 2
    assert not IdempotencyKey.objects.exists()


def test_09_not_required_is_protected_when_a_key_comes(serve: Serve, sender: Sender) -> None:
    serve(view=plain(work := Counted(), required=False))
    assert sender.send().content == sender.send().content
    assert work.runs == 1


@both_kinds
def test_10_failures_before_the_view_create_no_record(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    def forbid(request: HttpRequest) -> HttpResponse:
        raise PermissionDenied

    view = kind(work := Counted())

    def forbidden(request: HttpRequest) -> HttpResponse:
        return forbid(request) or view(request)

    serve(anonymous=login_required(view), forbidden=forbidden, forged=csrf_protect(view))
    headers = {"Idempotency-Key": "key-1"}
    assert Client().post("/anonymous/", headers=headers).status_code == 302
    assert sender.send("/forbidden/").status_code == 403
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(sender.user)
    assert strict.post("/forged/", headers=headers).status_code == 403
    assert work.runs == 0
    assert not IdempotencyKey.objects.exists()


@both_kinds
def test_10_a_stored_response_is_replayed_only_to_who_passes(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    view = kind(Counted(), scope=lambda request: "one for all")

    def guarded(request: HttpRequest) -> HttpResponse:
        if request.headers.get("X-Pass") != "yes":
            raise PermissionDenied
        return view(request)

    serve(view=guarded)
    assert sender.send(headers={"X-Pass": "yes"}).status_code == 201
    refused = sender.send(headers={"X-Pass": "no"})
    assert refused.status_code == 403
    assert "Idempotent-Replayed" not in refused
    assert sender.send(headers={"X-Pass": "yes"})["Idempotent-Replayed"] == "true"


@both_kinds
def test_11_neither_user_nor_session_nor_scope_is_refused(
    kind: Kind, serve: Serve, transactional_db: None
) -> None:
    serve(view=kind(work := Counted()))
    response = Client().post("/view/", headers={"Idempotency-Key": "key-1"})
    assert (response.status_code, problem(response)["code"]) == (400, "scope_missing")
    assert work.runs == 0
    assert not IdempotencyKey.objects.exists()


@both_kinds
def test_11_an_invented_session_cookie_is_no_session(
    kind: Kind, serve: Serve, transactional_db: None
) -> None:
    serve(view=kind(work := Counted()))
    client = Client()
    client.cookies["sessionid"] = "a" * 32
    assert (
        problem(client.post("/view/", headers={"Idempotency-Key": "key-1"}))["code"]
        == "scope_missing"
    )
    assert work.runs == 0


@both_kinds
def test_11_strangers_share_no_scope(kind: Kind, serve: Serve, sender: Sender) -> None:
    serve(view=kind(work := Counted()))
    other = Client()
    other.force_login(UserFactory())
    first = sender.send()
    second = other.post(
        "/view/", {"a": 1}, content_type="application/json", headers={"Idempotency-Key": "key-1"}
    )
    assert (first.status_code, second.status_code) == (201, 201)
    assert "Idempotent-Replayed" not in second
    assert work.runs == 2
