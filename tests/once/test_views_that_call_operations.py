"""Views that only call an operation: ``problems`` and ``key_of`` of ``idempotency.http``."""

import asyncio
import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.decorators import login_required
from django.db import connection
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.test import RequestFactory
from django.urls import path
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST
from ninja import NinjaAPI
from pytest_django import Settings
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency.decorators import idempotent
from idempotency.exceptions import (
    InProgress,
    InterventionRequired,
    KeyReused,
    NotReplicated,
    Rejected,
    Unavailable,
    Unfinished,
)
from idempotency.http import key_of, not_stored, problems
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from tests.kit.asgi import ask, hang_up, run
from tests.kit.serving import Sender, problem
from tests.kit.views import create, plain
from tests.models import Account, Entry
from tests.operations import Bank, charge, note, pay

pytestmark = pytest.mark.django_db(transaction=True)
BROWSER = "text/html,application/xhtml+xml,*/*;q=0.8"


@require_POST
@login_required
@problems
def note_view(request: HttpRequest, name: str = "one") -> JsonResponse:
    result = note.by(request.user).once(key_of(request), name=name, **request.GET.dict())
    return JsonResponse(result, status=201)


@problems
async def note_async(request: HttpRequest) -> JsonResponse:
    result = await note.aonce(key_of(request), name="one", **request.GET.dict())
    return JsonResponse(result, status=201)


@problems
def charging(request: HttpRequest) -> JsonResponse:
    return JsonResponse(charge.once(key_of(request), name="one", cents=5), status=201)


class NoteView(View):
    @problems
    def post(self, request: HttpRequest) -> JsonResponse:
        result = note.once(key_of(request), name="one", **request.GET.dict())
        return JsonResponse(result, status=201)


class NoteOfDRF(APIView):
    @problems
    def post(self, request: Any) -> Response:
        result = note.once(key_of(request), name="one", **request.GET.dict())
        return Response(result, status=201)


def ninja_urls() -> Any:
    api = NinjaAPI(urls_namespace="views_that_call_operations")

    @api.post("/")
    @problems
    def of_ninja(request: HttpRequest, fails: str = "") -> Any:
        given = {"fails": fails} if fails else {}
        return note.once(key_of(request), name="one", **given)

    @api.post("/async/")
    @problems
    async def of_ninja_async(request: HttpRequest, fails: str = "") -> Any:
        given = {"fails": fails} if fails else {}
        return await note.aonce(key_of(request), name="one", **given)

    return api


@pytest.fixture(params=["function", "async", "method", "drf", "ninja", "async ninja"])
def url(request: pytest.FixtureRequest, settings: Settings) -> str:
    """Serve a view of each kind that calls the same operation, and return its URL."""
    views: dict[str, Any] = {
        "function": note_view,
        "async": note_async,
        "method": NoteView.as_view(),
        "drf": NoteOfDRF.as_view(),
    }
    if "ninja" in request.param:
        patterns = [path("ninja/", ninja_urls().urls)]
    else:
        patterns = [path("view/", views[request.param])]
    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": patterns})
    return {"ninja": "/ninja/", "async ninja": "/ninja/async/"}.get(request.param, "/view/")


def test_a_repeat_gets_the_result_and_a_refusal_its_code(sender: Sender, url: str) -> None:
    first, again = (sender.send(url) for _ in range(2))
    assert first.status_code == (200 if "ninja" in url else 201)
    assert (again.status_code, again.content) == (first.status_code, first.content)
    assert Entry.objects.count() == 1
    for fails in ("raises", "returns"):
        for _ in range(2):
            refused = sender.send(f"{url}?fails={fails}", fails)
            assert refused.status_code == 422, refused.content
            told = refused.json()
            assert (told["code"], told["detail"]) == ("refused", "It was refused.")
            assert (told["data"], told["retryable"]) == ({"name": "one"}, False)
    assert Entry.objects.count() == 2
    for refused, status, code in (
        (sender.send(f"{url}?fails=returns"), 422, "key_reused"),
        (sender.send(url, None), 400, "key_missing"),
        (sender.send(url, "a,b"), 400, "key_invalid"),
    ):
        assert (refused.status_code, problem(refused)["code"]) == (status, code)


@pytest.mark.parametrize(
    ("error", "status", "code", "seconds"),
    [
        (InProgress(retry_after=7.5), 409, "key_in_use", "7"),
        (KeyReused(), 422, "key_reused", None),
        (InterventionRequired(), 409, "key_stuck", None),
        (Unavailable(), 503, "database_unavailable", "1"),
        (Unavailable(code="conflict"), 409, "conflict", "1"),
        (NotReplicated(), 503, "not_replicated", "2"),
        (Unfinished(), 503, "unfinished", "2"),
        (Rejected("declined"), 422, "declined", None),
    ],
)
def test_each_exception_of_once_has_an_error_response(
    error: Exception, status: int, code: str, seconds: str | None
) -> None:
    @problems
    def view(request: HttpRequest) -> HttpResponseBase:
        raise error

    response: Any = view(RequestFactory().post("/view/"))
    told = problem(response)
    assert (response.status_code, told["status"], told["code"]) == (status, status, code)
    assert response.get("Retry-After") == seconds
    assert told["retryable"] is (seconds is not None)
    assert "data" not in told


def test_other_exceptions_pass() -> None:
    @problems
    def view(request: HttpRequest) -> HttpResponseBase:
        raise ValueError("It is broken.")

    with pytest.raises(ValueError, match="broken"):
        view(RequestFactory().post("/view/"))


def test_a_decorator_without_a_request_is_an_error() -> None:
    @problems
    def view(name: str) -> HttpResponseBase:
        raise InProgress

    with pytest.raises(TypeError, match="no request"):
        view("one")


def test_an_unfinished_operation_is_answered_and_its_error_is_logged(
    serve: Any, sender: Sender, bank: Bank, caplog: pytest.LogCaptureFixture
) -> None:
    def lose() -> None:
        raise OSError("The bank is away.")

    @problems
    def view(request: HttpRequest) -> JsonResponse:
        return JsonResponse(pay.once(key_of(request), name="one", cents=5))

    serve(view=view)
    bank.before = lose
    with caplog.at_level(logging.ERROR, "idempotency"):
        told = problem(sender.send())
    assert (told["status"], told["code"]) == (503, "unfinished")
    assert "The bank is away." in caplog.text
    bank.before = lambda: None
    assert sender.send().json() == {"transfer": 0}
    assert Account.objects.count() == 1


def test_a_browser_gets_a_page_with_the_text_of_the_refusal(sender: Sender, serve: Any) -> None:
    serve(view=note_view)
    refused = sender.send("/view/?fails=raises", headers={"Accept": BROWSER})
    assert (refused.status_code, refused["Content-Type"]) == (422, "text/html; charset=utf-8")
    assert b"Your request was rejected" in refused.content
    assert b"It was refused." in refused.content


def with_data(*, status: int, code: str, data: Any = None, **members: Any) -> JsonResponse:
    return JsonResponse({"mine": code, "data": data}, status=status)


def without_data(
    *,
    request: HttpRequest,
    status: int,
    code: str,
    title: str,
    detail: str,
    retryable: bool,
    headers: dict[str, str],
) -> JsonResponse:
    return JsonResponse({"mine": code}, status=status)


@pytest.mark.parametrize(
    ("render", "content"),
    [
        (with_data, {"mine": "refused", "data": {"name": "one"}}),
        (without_data, {"mine": "refused"}),
        (
            "idempotency.contrib.rest_framework.render_error",
            {"code": "refused", "detail": "It was refused.", "data": {"name": "one"}},
        ),
    ],
)
def test_a_renderer_gets_the_data_of_a_refusal_if_it_takes_them(
    render: Any, content: dict[str, Any], settings: Settings, sender: Sender, serve: Any
) -> None:
    settings.IDEMPOTENCY = {"ERROR_RENDERER": render}
    serve(view=note_view)
    refused = sender.send("/view/?fails=raises")
    assert (refused.status_code, refused.json()) == (422, content)


@pytest.fixture
def atomic_requests(settings: Settings) -> Any:
    connection.settings_dict["ATOMIC_REQUESTS"] = True
    yield
    connection.settings_dict["ATOMIC_REQUESTS"] = False


@pytest.mark.usefixtures("atomic_requests")
def test_atomic_requests_commits_a_refusal_and_rolls_other_errors_back(
    sender: Sender, serve: Any
) -> None:
    @problems
    def view(request: HttpRequest) -> JsonResponse:
        Entry.objects.create(name="of the view")
        result = note.once(key_of(request), name="one", **request.GET.dict())
        return JsonResponse(result, status=201)

    serve(view=view)
    assert sender.send("/view/?fails=raises").status_code == 422
    assert (Entry.objects.count(), IdempotencyKey.objects.count()) == (1, 1)
    assert sender.send().status_code == 422  # other arguments: key_reused
    assert sender.send(key=None).status_code == 400
    assert sender.send(key="key-2").status_code == 201
    assert (Entry.objects.count(), IdempotencyKey.objects.count()) == (3, 2)


def test_a_protected_view_and_its_operation_have_keys_of_their_own(
    sender: Sender, serve: Any
) -> None:
    @idempotent
    @problems
    def view(request: HttpRequest) -> JsonResponse:
        Entry.objects.create(name="of the view")
        result = note.by(request.user).once(key_of(request), name="one", **request.GET.dict())
        return JsonResponse(result, status=201)

    serve(view=view)
    for url, status, entries in (("/view/", 201, 2), ("/view/?fails=returns", 422, 4)):
        for _ in range(2):
            assert sender.send(url, key=url).status_code == status
            assert Entry.objects.count() == entries
    assert IdempotencyKey.objects.count() == 4


def test_a_phased_operation_runs_between_the_phases_of_a_view(
    sender: Sender, serve: Any, bank: Bank
) -> None:
    @idempotent(recovery_points=["paid"])
    def view(request: Any) -> HttpResponseBase:
        key = request.idempotency_key
        for point in key.phases():
            result = pay.by(request.user).once(key_of(request), name="one", cents=5)
            with atomic_phase(key) as phase:
                if point == "started":
                    phase.set_recovery_point("paid")
                else:
                    phase.set_response(JsonResponse(result, status=201))
        response: HttpResponseBase = key.response()
        return response

    serve(view=view)
    assert [sender.send().status_code for _ in range(2)] == [201, 201]
    assert (bank.requests, Account.objects.count(), IdempotencyKey.objects.count()) == (1, 1, 2)


def test_a_protected_view_in_the_transaction_of_an_operation_is_refused(
    sender: Sender, serve: Any, bank: Bank
) -> None:
    serve(view=plain(create))
    sender.client.raise_request_exception = True
    bank.inside = sender.send
    with pytest.raises(Unfinished) as caught:
        charge.once("key", name="one", cents=5)
    assert "was entered inside the transaction of another run" in str(caught.value.__cause__)
    assert not Entry.objects.exists()


@pytest.mark.postgres
def test_an_async_call_of_a_sync_view_goes_on_after_its_client_has_hung_up(
    serve: Any, bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a payment would be in doubt each time a browser tab is closed."""

    async def scenario() -> None:
        reached, hung_up = asyncio.Event(), asyncio.Event()

        async def transfer(key: str, cents: int) -> int:
            bank.requests += 1
            reached.set()
            await hung_up.wait()
            return 7

        monkeypatch.setattr(bank, "transfer", transfer)
        serve(view=csrf_exempt(charging))
        await hang_up("/view/", reached, hung_up)
        status, _, content = await ask("/view/", "key-1")
        assert (status, json.loads(content), bank.requests) == (201, {"transfer": 7}, 1)

    run(scenario)


def info_of(request: Any, *parts: str | int, context: Any = None) -> Any:
    """Return the info of a resolver: its field, its context and the path of the field."""
    found = SimpleNamespace(as_list=lambda: list(parts))
    return SimpleNamespace(field_name="pay", path=found, context=context or request)


def test_a_field_of_graphql_has_the_key_of_the_request_and_its_whole_path() -> None:
    request = RequestFactory().post("/graphql/", headers={"Idempotency-Key": '"key-1"'})
    assert key_of(request) == "key-1"
    assert key_of(info_of(request, "cart", 0, "pay")) == "key-1:cart.0.pay"
    for context in (SimpleNamespace(request=request), {"request": request}):
        assert key_of(info_of(None, "pay", context=context)) == "key-1:pay"
    long = RequestFactory().post("/graphql/", headers={"Idempotency-Key": "k" * 250})
    with pytest.raises(Exception, match="more than 255 characters"):
        key_of(info_of(long, "payment"))


def test_the_key_of_a_form_and_that_of_the_header_must_be_the_same() -> None:
    form = {"idempotency_key": "key-1"}
    of_form = RequestFactory().post("/view/", form)
    assert key_of(of_form, key_from="form:idempotency_key") == "key-1"
    with pytest.raises(Exception, match="Send a unique key"):
        key_of(of_form)
    both = RequestFactory().post("/view/", form, headers={"Idempotency-Key": "key-2"})
    with pytest.raises(Exception, match="two different keys"):
        key_of(both, key_from="form:idempotency_key")


def test_not_stored_is_public_here() -> None:
    assert not_stored(JsonResponse({})).content == b"{}"
