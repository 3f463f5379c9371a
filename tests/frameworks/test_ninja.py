"""What is particular to Django Ninja."""

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import wraps
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.checks import run_checks
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db.models import F
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.test.client import BOUNDARY, MULTIPART_CONTENT, encode_multipart
from django.urls import path
from ninja import File, Form, NinjaAPI, Router, Schema, Status
from ninja.decorators import decorate_view
from ninja.errors import HttpError
from ninja.files import UploadedFile
from ninja.security import (
    APIKeyHeader,
    HttpBearer,
    SessionAuth,
    django_auth,
    django_auth_is_staff,
    django_auth_superuser,
)
from ninja.streaming import JSONL
from ninja.throttling import AnonRateThrottle
from pytest_django import Settings

from idempotency import decorators, scopes
from idempotency.completer import CompletePass, complete_once
from idempotency.contrib.ninja import idempotent
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from tests.factories import UserFactory
from tests.kit.ageing import abandon
from tests.kit.threads import elsewhere
from tests.models import Account, Entry

pytestmark = pytest.mark.django_db(transaction=True)

Serve = Callable[[NinjaAPI], None]


class EntryIn(Schema):
    """What clients send."""

    name: str
    tags: list[str] = []


class EntryOut(Schema):
    """What they get."""

    id: int
    name: str


class Key(APIKeyHeader):
    """A key that stands for an account, not for a user."""

    param_name = "X-Api-Key"

    def authenticate(self, request: HttpRequest, key: str | None) -> str | None:
        """Return the account of the key."""
        return {"secret-1": "account-1", "secret-2": "account-2"}.get(key or "")


@pytest.fixture
def serve(settings: Settings) -> Serve:
    """Return a function that puts an API under /api/."""

    def put(*apis: NinjaAPI) -> None:
        patterns = [path(f"api{number or ''}/", api.urls) for number, api in enumerate(apis)]
        settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": patterns})

    return put


@pytest.fixture
def client() -> Client:
    """Return a client that is signed in."""
    client = Client(raise_request_exception=False)
    client.force_login(UserFactory())
    return client


def new_api(**options: Any) -> NinjaAPI:
    """Return an API for who is signed in."""
    return NinjaAPI(**{"auth": django_auth, "docs_url": None, "openapi_url": None} | options)


def post(client: Client, data: Any, url: str = "/api/entries", **headers: str) -> Any:
    """Send JSON under the one key of these tests."""
    return client.post(
        url,
        json.dumps(data),
        content_type="application/json",
        headers={"Idempotency-Key": "key-1"} | headers,
    )


def add_entries(api: NinjaAPI, *decorators: Any) -> None:
    """Give the API an operation that writes an entry, protected, as users of Ninja write it."""

    @api.post("/entries", response={201: EntryOut})
    @decorate_view(*decorators or [idempotent])
    def create(request: HttpRequest, data: EntryIn) -> Any:
        return Status(201, Entry.objects.create(name=data.name))


def test_permission_outside_the_decorator_is_asked_before_a_replay(
    serve: Serve, client: Client
) -> None:
    def of_open_account(operation: Any) -> Any:
        @wraps(operation)
        def checked(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            if not Account.objects.filter(balance__gt=0).exists():
                return api.create_response(request, {"detail": "closed"}, status=403)
            return operation(request, *args, **kwargs)

        return checked

    add_entries(api := new_api(urls_namespace="permission"), idempotent, of_open_account)
    serve(api)
    Account.objects.create(name="purse", balance=1)
    assert [post(client, {"name": "one"}).status_code for _ in range(2)] == [201, 201]
    Account.objects.update(balance=0)
    refused = post(client, {"name": "one"})
    assert (refused.status_code, refused.json()) == (403, {"detail": "closed"})
    assert Entry.objects.count() == 1


def test_operation_with_schemas_runs_once(serve: Serve, client: Client) -> None:
    api = new_api()
    add_entries(api)
    serve(api)
    first, second = (post(client, {"name": "one"}) for _ in range(2))
    assert (first.status_code, first.json()) == (201, {"id": Entry.objects.get().pk, "name": "one"})
    assert (second.content, second["Idempotent-Replayed"]) == (first.content, "true")


def test_a_file_that_the_middleware_of_ninja_has_parsed_is_compared(
    serve: Serve, client: Client, settings: Settings
) -> None:
    settings.MIDDLEWARE = [
        *settings.MIDDLEWARE,
        "ninja.compatibility.files.fix_request_files_middleware",
    ]
    api = new_api()

    @api.put("/photos")
    @decorate_view(idempotent)
    def put(request: HttpRequest, title: Form[str], photo: File[UploadedFile]) -> Any:
        return {"photo": Entry.objects.create(name=f"{title} {photo.read().decode()}").name}

    serve(api)

    def send(content: bytes) -> Any:
        body = encode_multipart(
            BOUNDARY, {"title": "me", "photo": SimpleUploadedFile("me.png", content)}
        )
        return client.generic(
            "PUT", "/api/photos", body, MULTIPART_CONTENT, headers={"Idempotency-Key": "key-1"}
        )

    assert [send(b"one").json() for _ in range(2)] == [{"photo": "me one"}] * 2
    assert send(b"two").status_code == 422
    assert Entry.objects.count() == 1


def test_router_may_serve_two_apis(serve: Serve, client: Client) -> None:
    router, apis = Router(), [new_api(urls_namespace=name) for name in ("one", "two")]

    @router.post("/{number}", response={201: EntryOut})
    @decorate_view(idempotent())
    def create(request: HttpRequest, number: int) -> Any:
        return Status(201, Entry.objects.create(name=str(number)))

    for api in apis:
        api.add_router("/entries", router)
    serve(*apis)
    answers = [
        post(client, {}, url, **{"Idempotency-Key": url})
        for url in ("/api/entries/1", "/api1/entries/2") * 2
    ]
    assert [answer.json()["name"] for answer in answers] == ["1", "2", "1", "2"]
    assert ["Idempotent-Replayed" in answer for answer in answers] == [False, False, True, True]
    assert Entry.objects.count() == 2


def test_whole_router_may_be_protected(serve: Serve, client: Client) -> None:
    router, api = Router(), new_api()
    router.add_decorator(idempotent, mode="view")

    @router.post("/entries", response={201: EntryOut})
    def create(request: HttpRequest, data: EntryIn) -> Any:
        return Status(201, Entry.objects.create(name=data.name))

    @router.get("/entries")
    def count(request: HttpRequest) -> Any:
        return {"count": Entry.objects.count()}

    api.add_router("", router)
    serve(api)
    first, second = (post(client, {"name": "one"}) for _ in range(2))
    assert (first.status_code, second.content, second["Idempotent-Replayed"]) == (
        201,
        first.content,
        "true",
    )
    assert client.get("/api/entries").json() == {"count": 1}


def test_wrong_parameters_spend_no_key(serve: Serve, client: Client) -> None:
    api = new_api()
    add_entries(api)
    serve(api)
    assert post(client, {"title": "one"}).status_code == 422
    assert not IdempotencyKey.objects.exists()
    assert post(client, {"name": "one"}).status_code == 201


def test_throttled_request_leaves_no_record(serve: Serve, client: Client) -> None:
    api = new_api(auth=None, throttle=AnonRateThrottle("1/d"))
    add_entries(api, idempotent(scope=lambda request: "all"))
    serve(api)
    stranger = Client()
    assert [post(stranger, {"name": "one"}).status_code for _ in range(2)] == [201, 429]
    assert IdempotencyKey.objects.count() == 1


def test_headers_and_cookies_of_the_response_parameter_are_sent(
    serve: Serve, client: Client
) -> None:
    api = new_api()

    @api.post("/entries", response=EntryOut)
    @decorate_view(idempotent)
    def view(request: HttpRequest, data: EntryIn, response: HttpResponse) -> Any:
        response["X-Custom"] = "kept"
        response.set_cookie("private", "secret")
        return Entry.objects.create(name=data.name)

    serve(api)
    first, second = (post(client, {"name": "one"}) for _ in range(2))
    assert (first["X-Custom"], second["X-Custom"], second.content) == (
        "kept",
        "kept",
        first.content,
    )
    assert ("private" in first.cookies, "private" in second.cookies) == (True, False)


def test_scope_may_be_what_the_authentication_returns(serve: Serve) -> None:
    api = new_api(auth=Key())
    add_entries(api, idempotent(scope=scopes.attribute("auth")))
    serve(api)
    client = Client()
    mine, again = (post(client, {"name": "one"}, **{"X-Api-Key": "secret-1"}) for _ in range(2))
    theirs = post(client, {"name": "one"}, **{"X-Api-Key": "secret-2"})
    assert (again.content, "Idempotent-Replayed" in theirs) == (mine.content, False)
    assert set(IdempotencyKey.objects.values_list("scope", flat=True)) == {
        "request.auth:str:account-1",
        "request.auth:str:account-2",
    }


@pytest.mark.parametrize("is_async", [False, True])
def test_a_session_cookie_beside_an_api_key_is_not_the_sender(
    serve: Serve, client: Client, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    api = new_api()
    payments(api, Key(), moved=False, is_async=is_async)
    serve(api)
    for secret in ("secret-1", "secret-2"):
        refused = post(client, {}, **{"X-Api-Key": secret})
        assert (refused.status_code, refused.json()["code"]) == (400, "scope_missing")
    assert "it is a str" in caplog.text
    assert not IdempotencyKey.objects.exists()


@pytest.mark.parametrize("prepared", [True, False])
def test_completer_does_not_run_the_request_of_an_api_key_as_the_user_of_the_cookie(
    serve: Serve, client: Client, settings: Settings, prepared: bool
) -> None:
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": account_of} if prepared else {}
    api = new_api()
    charged = payments(api, Key(), moved=True, scope=scopes.attribute("auth"))
    serve(api)
    assert post(client, {}, **{"X-Api-Key": "secret-1"}).status_code == 503
    key = completed()
    assert (key.user_id, key.stuck_code, charged) == (
        None,
        *(("", ["account-1"]) if prepared else ("user_missing", [])),
    )


class ProfileOfUser(SessionAuth):
    """An authenticator that reads the user of the session, and returns a part of it."""

    def authenticate(self, request: HttpRequest, key: str | None) -> Any:
        """Return the name of the user."""
        return request.user.get_username() if request.user.is_authenticated else None


@pytest.mark.parametrize("auth", [django_auth, ProfileOfUser(), [Key(), django_auth]])
def test_an_authenticator_of_the_session_names_its_user(
    serve: Serve, client: Client, auth: Any
) -> None:
    api = new_api(auth=auth)
    add_entries(api)
    serve(api)
    first, second = (post(client, {"name": "one"}) for _ in range(2))
    assert (first.status_code, second["Idempotent-Replayed"]) == (201, "true")
    assert IdempotencyKey.objects.get().scope == f"user:{UserFactory._meta.model.objects.get().pk}"


@pytest.mark.parametrize("debug", [True, False])
@pytest.mark.parametrize(
    "error", [HttpError(404, "none"), RuntimeError("bug")], ids=["answer", "bug"]
)
def test_what_an_operation_raises_rolls_back_what_it_wrote(
    serve: Serve, client: Client, settings: Settings, debug: bool, error: Exception
) -> None:
    settings.DEBUG = debug
    api = new_api()

    @api.post("/entries")
    @decorate_view(idempotent)
    def view(request: HttpRequest) -> Any:
        Entry.objects.create(name="made")
        raise error

    serve(api)
    statuses = {post(client, {}).status_code for _ in range(2)}
    assert statuses == {404 if isinstance(error, HttpError) else 500}
    assert not Entry.objects.exists()
    assert IdempotencyKey.objects.finished().exists() == isinstance(error, HttpError)


def test_answer_that_does_not_fit_its_schema_leaves_nothing(serve: Serve, client: Client) -> None:
    api = new_api()

    @api.post("/entries", response=EntryOut)
    @decorate_view(idempotent)
    def view(request: HttpRequest) -> Any:
        Entry.objects.create(name="made")
        return {"name": "no id"}

    serve(api)
    assert post(client, {}).status_code == 500
    assert not Entry.objects.exists()
    assert not IdempotencyKey.objects.exists()


def test_exception_handler_of_the_api_makes_the_answer(serve: Serve, client: Client) -> None:
    class OutOfStock(Exception):
        pass

    api, runs = new_api(), []

    @api.exception_handler(OutOfStock)
    def sold(request: HttpRequest, error: Exception) -> HttpResponse:
        return api.create_response(request, {"error": "sold"}, status=409)

    @api.post("/entries")
    @decorate_view(idempotent)
    def view(request: HttpRequest) -> Any:
        runs.append(Entry.objects.create(name="made"))
        raise OutOfStock

    serve(api)
    first, second = (post(client, {}) for _ in range(2))
    assert (first.status_code, first.json(), second.content) == (
        409,
        {"error": "sold"},
        first.content,
    )
    assert (len(runs), Entry.objects.exists()) == (1, False)


@pytest.mark.postgres
@pytest.mark.parametrize("debug", [True, False])
def test_serialization_failure_is_retried_with_the_parameters_as_they_came(
    serve: Serve, client: Client, settings: Settings, debug: bool
) -> None:
    settings.DEBUG = debug
    account, api, runs = Account.objects.create(name="one"), new_api(), []

    @api.post("/entries")
    @decorate_view(idempotent(isolation="serializable"))
    def view(request: HttpRequest, data: EntryIn) -> Any:
        runs.append(data)
        data.tags.append("x")
        balance = Account.objects.get().balance
        if len(runs) == 1:
            elsewhere(lambda: Account.objects.update(balance=100))
        Account.objects.filter(pk=account.pk).update(balance=balance + 1)
        return {"tags": data.tags, "balance": balance + 1}

    serve(api)
    assert post(client, {"name": "one"}).json() == {"tags": ["x"], "balance": 101}
    assert len(runs) == 2


class Owner(HttpBearer):
    """A token that returns something of its own."""

    def authenticate(self, request: HttpRequest, token: str) -> dict[str, str] | None:
        """Return what the token says."""
        request.user = UserFactory._meta.model.objects.get()
        return {"plan": "gold"} if token == "secret" else None


def prepare(request: HttpRequest, key: IdempotencyKey) -> None:
    """Give the completer's request what the authentication would have."""
    request.auth = {"plan": "silver"}


@pytest.mark.parametrize(
    ("settled", "plan"),
    [({}, "user"), ({"PREPARE_REQUEST": prepare}, "silver")],
    ids=["user", "own"],
)
def test_completer_passes_the_authentication(
    serve: Serve, client: Client, settings: Settings, settled: dict[str, Any], plan: str
) -> None:
    settings.IDEMPOTENCY = settled
    api = new_api(auth=Owner())
    auths: list[Any] = []

    @api.post("/entries")
    @decorate_view(idempotent(recovery_points=["made"]))
    def view(request: HttpRequest) -> Any:
        key = request.idempotency_key
        for recovery_point in key.phases():
            with atomic_phase(key) as phase:
                if recovery_point == "started":
                    phase.set_recovery_point("made")
                else:
                    auths.append(request.auth)
                    assert len(auths) > 1, "out of luck"
                    phase.set_response(api.create_response(request, {"done": True}, status=201))
        return key.response()

    serve(api)
    assert post(client, {}, Authorization="Bearer secret").status_code == 500
    abandon()
    assert complete_once() == CompletePass(finished=1)
    assert auths == [
        {"plan": "gold"},
        {"plan": "silver"} if settled else UserFactory._meta.model.objects.get(),
    ]


class StaffOfShop(SessionAuth):
    """An authenticator of a project that asks the user alone, in an async function."""

    async def authenticate(self, request: HttpRequest, key: str | None) -> Any:
        """Return the user if that is one of the staff."""
        user = await request.auser()
        return user if user.is_staff else None


def payments(
    api: NinjaAPI, auth: Any, *, moved: bool, is_async: bool = False, **options: Any
) -> list[Any]:
    """Give the API an operation that charges who asks at its second run; return whom it has
    charged."""
    runs: list[Any] = []
    charged: list[Any] = []

    def pay(request: HttpRequest) -> Any:
        key = request.idempotency_key
        for recovery_point in key.phases():
            if moved and recovery_point == "started":
                with atomic_phase(key) as phase:
                    phase.set_recovery_point("noted")
                continue
            runs.append(1)
            if len(runs) == 1:
                return api.create_response(request, {}, status=503)
            charged.append(request.auth)
            with atomic_phase(key) as phase:
                phase.set_response(api.create_response(request, {}, status=201))
        return key.response()

    async def pay_async(request: HttpRequest) -> Any:
        return await sync_to_async(pay)(request)

    protect = decorate_view(idempotent(recovery_points=["noted"], **options))
    api.post("/entries", auth=auth)(protect(pay_async if is_async else pay))
    return charged


def completed() -> IdempotencyKey:
    """Return the only key after the completer took it, an hour later."""
    old = timedelta(hours=1)
    IdempotencyKey.objects.update(
        created_at=F("created_at") - old, last_run_at=F("last_run_at") - old
    )
    complete_once()
    return IdempotencyKey.objects.get()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("auth", [django_auth_is_staff, django_auth_superuser, StaffOfShop()])
@pytest.mark.parametrize("revoked", [True, False])
@pytest.mark.parametrize("moved", [True, False])
def test_completer_asks_an_authenticator_of_users_again(
    serve: Serve, client: Client, auth: Any, moved: bool, revoked: bool, is_async: bool
) -> None:
    users, rights = UserFactory._meta.model.objects, {"is_staff": True, "is_superuser": True}
    users.update(**rights)
    api = new_api()
    charged = payments(api, auth, moved=moved, is_async=is_async)
    serve(api)
    assert post(client, {}).status_code == 503
    if revoked:
        users.update(**dict.fromkeys(rights, False))
    key = completed()
    assert (charged, key.response_code) == (([], None) if revoked else ([users.get()], 201))
    assert key.stuck_code == ("user_missing" if revoked and moved else "")


@pytest.mark.parametrize("scope", [scopes.attribute("auth"), lambda request: "all"])
def test_completer_does_not_pass_an_api_key_as_an_anonymous_user(serve: Serve, scope: Any) -> None:
    api = new_api()
    charged = payments(api, Key(), moved=True, scope=scope)
    serve(api)
    assert post(Client(), {}, **{"X-Api-Key": "secret-1"}).status_code == 503
    assert (completed().stuck_code, charged) == ("user_missing", [])


def account_of(request: HttpRequest, key: IdempotencyKey) -> None:
    """Say who sent the request, from its scope."""
    request.auth = key.scope.removeprefix("request.auth:str:")


def test_prepare_request_says_which_api_key_it_was(serve: Serve, settings: Settings) -> None:
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": account_of}
    api = new_api()
    charged = payments(api, Key(), moved=True, scope=scopes.attribute("auth"))
    serve(api)
    assert post(Client(), {}, **{"X-Api-Key": "secret-1"}).status_code == 503
    assert (completed().response_code, charged) == (201, ["account-1"])


@pytest.mark.parametrize(
    ("auth", "names"),
    [
        (django_auth, ""),
        ([django_auth_is_staff, StaffOfShop()], ""),
        ([django_auth, Owner()], "Owner"),
        (Key(), "Key"),
    ],
)
def test_check_names_authenticators_that_the_completer_cannot_ask(
    serve: Serve, settings: Settings, auth: Any, names: str
) -> None:
    api = new_api()
    payments(api, auth, moved=True)
    serve(api)
    settings.IDEMPOTENCY = {}
    found = [
        message.msg for message in run_checks(databases=[]) if message.id == "idempotency.I002"
    ]
    assert [f"({names})" in message for message in found] == ([True] if names else [])
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": account_of}
    assert "idempotency.I002" not in [message.id for message in run_checks(databases=[])]


def test_nothing_from_the_network_signs_in(serve: Serve) -> None:
    api = new_api(auth=Owner())
    add_entries(api)
    serve(api)
    user = UserFactory()
    names = ["idempotency_completion", "Idempotency-Completion", "auth", "user"]
    data = {"name": "one"} | dict.fromkeys(names, user.pk)
    url = f"/api/entries?{'&'.join(f'{name}={user.pk}' for name in names)}"
    assert post(Client(), data, url, **dict.fromkeys(names, str(user.pk))).status_code == 401
    assert not IdempotencyKey.objects.exists()


def test_other_decorators_of_an_operation_stay(serve: Serve, client: Client) -> None:
    def marked(name: str) -> Any:
        def decorate(run: Any) -> Any:
            @wraps(run)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                response = run(*args, **kwargs)
                response[f"X-{name}"] = "seen"
                return response

            return wrapper

        return decorate

    api = new_api()
    add_entries(api, marked("Below"), idempotent, marked("Above"))
    serve(api)
    answers = [post(client, {"name": "one"}) for _ in range(2)]
    assert [(answer["X-Below"], answer["X-Above"]) for answer in answers] == [("seen", "seen")] * 2
    assert Entry.objects.count() == 1


def test_what_is_no_operation_is_refused() -> None:
    with pytest.raises(TypeError, match="decorate_view"):
        idempotent(lambda request: None)


def test_decorator_of_other_views_is_refused() -> None:
    with pytest.raises(TypeError, match=r"idempotency\.contrib\.ninja"):
        add_entries(new_api(), decorators.idempotent)


def test_stream_is_refused() -> None:
    def stream(request: HttpRequest) -> Iterator[EntryOut]:
        yield EntryOut(id=1, name="one")

    with pytest.raises(TypeError, match="streams"):
        new_api().post("/entries", response=JSONL[EntryOut])(decorate_view(idempotent)(stream))
