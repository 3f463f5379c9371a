"""A retry inside the process gets the original request: its sender and its contents."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth import get_user_model
from django.contrib.auth.models import AnonymousUser
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connection, models
from django.db.models import F
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.test.utils import isolate_apps
from django.utils.decorators import method_decorator
from django.utils.functional import SimpleLazyObject, cached_property
from django.views import View as ClassBasedView
from rest_framework.authentication import BaseAuthentication
from rest_framework.decorators import api_view, authentication_classes, parser_classes
from rest_framework.parsers import MultiPartParser
from rest_framework.request import Request
from rest_framework.response import Response

from idempotency._engine.errors import exceeded_time_limit
from idempotency.decorators import idempotent
from tests.kit.serving import Sender, View
from tests.kit.threads import elsewhere
from tests.kit.views import both_kinds, phased, plain
from tests.models import Account

pytestmark = pytest.mark.postgres

Kind = Callable[..., View]
Serve = Callable[..., None]
Outer = Callable[[HttpRequest], None]


def conflict() -> None:
    """Raise a serialization failure of PostgreSQL."""
    connection.cursor().execute(
        "DO $$ BEGIN RAISE EXCEPTION 'conflict' USING ERRCODE = '40001'; END $$"
    )


class Twice:
    """Work that records the values that each run finds; the first run gets a serialization
    failure."""

    def __init__(self, find: Callable[..., Any]) -> None:
        self.find, self.found = find, list[Any]()

    def __call__(self, request: Any, *args: Any, **kwargs: Any) -> HttpResponse:
        self.found.append(self.find(request, *args, **kwargs))
        if len(self.found) == 1:
            conflict()
        return HttpResponse(status=201)


def under(middleware: Outer, view: View) -> View:
    """Return the view inside a wrapper that changes its request, like a middleware."""

    def outer(request: HttpRequest) -> HttpResponseBase:
        middleware(request)
        return view(request)

    return outer


# Sender


class TokenUser:
    """The sender that a token names. Its id may be the id of another user here."""

    is_authenticated = True

    def __init__(self, pk: int) -> None:
        self.pk = pk
        self.spent = 0

    def spend(self) -> tuple[type, int]:
        self.spent += 10
        return type(self), self.spent


def users_with(name: str, function: Callable[[Any], str]) -> Any:
    """Return a user class with a cached property, like one of a project."""
    meta = type("Meta", (), {"proxy": True, "app_label": "tests"})
    with isolate_apps("tests"):
        return type(
            "Rider",
            (get_user_model(),),
            {"__module__": __name__, "Meta": meta, name: cached_property(function)},
        )


def everybody(request: HttpRequest) -> str:
    return "everybody"


@both_kinds
def test_user_of_another_model_stays_who_he_is(kind: Kind, serve: Serve, sender: Sender) -> None:
    def authenticate(request: HttpRequest) -> None:
        request.user = Account(pk=sender.user.pk, name="customer")

    work = Twice(lambda request: request.user.name)
    serve(view=under(authenticate, kind(work, scope=everybody)))
    assert sender.send().status_code == 201
    assert work.found == ["customer"] * 2


@pytest.mark.parametrize("lazy", [False, True])
def test_user_of_no_model_stays_who_he_is(lazy: bool, serve: Serve, sender: Sender) -> None:
    def authenticate(request: HttpRequest) -> None:
        made = TokenUser(sender.user.pk)
        request.user = SimpleLazyObject(lambda: made) if lazy else made

    work = Twice(lambda request: request.user.spend())
    serve(view=under(authenticate, idempotent(work, scope=everybody)))
    assert sender.send().status_code == 201
    assert work.found == [(TokenUser, 10)] * 2


def test_unsaved_user_of_the_project_is_what_his_claims_say(serve: Serve, sender: Sender) -> None:
    def authenticate(request: HttpRequest) -> None:
        request.user = get_user_model()(pk=sender.user.pk, username="of the token")

    work = Twice(lambda request: request.user.username)
    serve(view=under(authenticate, idempotent(work)))
    assert sender.send().status_code == 201
    assert work.found == ["of the token"] * 2


def test_anonymous_user_stays_anonymous(serve: Serve, sender: Sender) -> None:
    sender.client.logout()
    work = Twice(lambda request: type(request.user._wrapped))
    serve(view=idempotent(work, scope=everybody))
    assert sender.send().status_code == 201
    assert work.found == [AnonymousUser] * 2


def test_user_of_rest_framework_stays_who_he_is(serve: Serve, sender: Sender) -> None:
    class Authentication(BaseAuthentication):
        def authenticate(self, request: Request) -> tuple[Any, Any]:
            return TokenUser(sender.user.pk), None

    work = Twice(lambda request: (request.user.spend(), request._request.user is request.user))

    @api_view(["POST"])
    @authentication_classes([Authentication])
    @idempotent(scope=everybody)
    def view(request: Request) -> Response:
        work(request)
        return Response(status=201)

    serve(view=view)
    assert sender.send().status_code == 201
    assert work.found == [((TokenUser, 10), True)] * 2


class Tier(models.TextChoices):
    """A value whose class has a metaclass, like a row."""

    GOLD = "gold"


def test_user_keeps_his_class_and_what_a_middleware_gave_him(serve: Serve, sender: Sender) -> None:
    Rider = users_with("greeting", lambda user: f"Hello {user.first_name}")

    def authenticate(request: HttpRequest) -> None:
        request.user = Rider.objects.get(pk=request.user.pk)
        request.user.is_hijacked = True
        request.user.tier = Tier.GOLD
        request.user.purse = Account.objects.get()

    def spend(request: Any) -> Any:
        request.user.purse.balance -= 10
        found = (
            type(request.user),
            request.user.is_hijacked,
            request.user.purse.balance,
            request.user.greeting,
        )
        request.user.first_name = request.user.is_hijacked = "changed"
        elsewhere(lambda: Rider.objects.update(first_name="Jane"))
        return found

    Account.objects.create(name="purse", balance=100)
    work = Twice(spend)
    protected = idempotent(work)
    serve(view=under(authenticate, under(lambda request: request.user.greeting, protected)))
    assert sender.send().status_code == 201
    assert work.found == [(Rider, True, 90, "Hello "), (Rider, True, 90, "Hello Jane")]


def test_user_who_is_gone_is_what_he_was(serve: Serve, sender: Sender) -> None:
    Rider = users_with("groups_of_the_token", lambda user: "read without the token")

    def authenticate(request: HttpRequest) -> None:
        request.user = Rider.objects.get(pk=request.user.pk)
        request.user.groups_of_the_token = "drivers"

    def delete_elsewhere(request: Any) -> tuple[str, str]:
        elsewhere(get_user_model().objects.all().delete)
        return request.user.username, request.user.groups_of_the_token

    work = Twice(delete_elsewhere)
    serve(view=under(authenticate, idempotent(work)))
    assert sender.send().status_code == 201
    assert work.found == [(sender.user.username, "drivers")] * 2


def test_user_of_an_async_view_is_fetched_anew(serve: Serve, sender: Sender) -> None:
    """Both ``auser()`` and ``request.user`` return the new user; an async view cannot load
    ``request.user`` lazily."""
    found = []

    def rename() -> None:
        elsewhere(lambda: get_user_model().objects.update(first_name="Jane"))
        conflict()

    @idempotent
    async def view(request: HttpRequest) -> HttpResponse:
        found.append([request.user.first_name, (await request.auser()).first_name])
        if len(found) == 1:
            await sync_to_async(rename)()
        return HttpResponse(status=201)

    async def outer(request: HttpRequest) -> HttpResponseBase:
        await request.auser()
        return await view(request)  # type: ignore[no-any-return]

    serve(view=outer)
    assert sender.send().status_code == 201
    assert found == [["", ""], ["Jane", "Jane"]]


# Rows


@pytest.mark.parametrize("loaded", [False, True])
def test_row_behind_something_lazy_pays_once(loaded: bool, serve: Serve, sender: Sender) -> None:
    def load(request: HttpRequest) -> None:
        request.account = SimpleLazyObject(Account.objects.get)
        assert not loaded or request.account.balance == 100

    def pay(request: Any) -> int:
        request.account.balance -= 10
        request.account.save()
        return request.account.balance  # type: ignore[no-any-return]

    Account.objects.create(name="purse", balance=100)
    work = Twice(pay)
    serve(view=under(load, idempotent(work)))
    assert sender.send().status_code == 201
    assert (work.found, Account.objects.get().balance) == ([90, 90], 90)


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


@pytest.mark.parametrize("make", [_on_the_request, _keyword_argument, _on_the_class_based_view])
def test_a_retry_inside_the_process_pays_once(make: Any, serve: Serve, sender: Sender) -> None:
    Account.objects.create(name="purse", balance=100)
    serve(view=make(plain, [1]))
    assert sender.send().status_code == 201
    assert Account.objects.get().balance == 90


@pytest.mark.parametrize("kind", [plain, phased])
@pytest.mark.parametrize("through", ["request", "another row"])
@pytest.mark.django_db(transaction=True)
def test_row_that_somebody_has_changed_since_is_read_by_its_middleware_again(
    through: str, kind: Kind, serve: Serve, sender: Sender
) -> None:
    """Otherwise the second run would use the old balance, and overwrite the other payment."""

    def load(request: HttpRequest) -> None:
        account = Account.objects.get()
        if through == "request":
            request.account = account
        else:
            request.tenant = Account(name="tenant")
            request.tenant._state.fields_cache["account"] = account

    def pay(request: Any) -> HttpResponse:
        account = (
            request.account
            if through == "request"
            else request.tenant._state.fields_cache["account"]
        )
        found.append(account.balance)
        assert Account.objects.count() == 1  # This query takes the snapshot.
        if len(found) == 1:
            elsewhere(lambda: Account.objects.update(balance=F("balance") - 30))
        account.balance -= 10
        account.save()
        return HttpResponse(status=201)

    found: list[int] = []
    Account.objects.create(name="purse", balance=100)
    view = kind(pay, isolation="serializable", scope=everybody)
    serve(view=under(load, view))
    refused = sender.send()
    assert (refused.status_code, refused.json()["code"]) == (409, "conflict")
    assert "nothing was done" not in refused.text, (
        "a phase may have committed, and a call may have been made"
    )
    assert (sender.send().status_code, found, Account.objects.get().balance) == (201, [100, 70], 60)


def test_a_row_that_is_held_twice_stays_one_object(serve: Serve, sender: Sender) -> None:
    def load(request: HttpRequest) -> None:
        request.account = Account.objects.get()  # type: ignore[attr-defined]
        request.tenant = Account(name="tenant")  # type: ignore[attr-defined]
        request.tenant._state.fields_cache["account"] = request.account  # type: ignore[attr-defined]

    Account.objects.create(name="purse", balance=100)
    work = Twice(lambda request: request.tenant._state.fields_cache["account"] is request.account)
    serve(view=under(load, idempotent(work)))
    assert sender.send().status_code == 201
    assert work.found == [True, True]


# Contents

FORM = "application/x-www-form-urlencoded"


def mutable_copy(request: HttpRequest) -> None:
    request.POST = request.POST.copy()


def parse(request: HttpRequest) -> None:
    assert request.POST


def take(request: Any) -> list[str]:
    return request.POST.pop("amount")  # type: ignore[no-any-return]


def unlock(request: Any) -> tuple[bool, list[str]]:
    found = request.POST._mutable, request.POST.getlist("amount")
    request.POST._mutable = True
    request.POST["amount"] = "1"
    return found


def append(request: Any) -> list[str]:
    request.POST.appendlist("amount", "6")
    return list(request.POST.getlist("amount"))


def reorder(request: Any) -> list[str]:
    found = list(request.POST)
    request.POST["amount"] = request.POST.pop("amount")
    return found


@pytest.mark.parametrize(
    ("middleware", "find", "first"),
    [
        (mutable_copy, take, ["5"]),
        (mutable_copy, append, ["5", "6"]),
        (mutable_copy, reorder, ["amount", "to"]),
        (parse, unlock, (False, ["5"])),
    ],
)
@both_kinds
def test_form_is_as_it_came(
    kind: Kind, middleware: Outer, find: Any, first: Any, serve: Serve, sender: Sender
) -> None:
    work = Twice(find)
    serve(view=under(middleware, kind(work)))
    assert sender.send(body="amount=5&to=bob", content_type=FORM).status_code == 201
    assert work.found == [first] * 2


def test_headers_are_as_they_came(serve: Serve, sender: Sender) -> None:
    def change(request: HttpRequest) -> tuple[Any, ...]:
        found = (
            request.META.get("tenant"),
            request.META["CONTENT_TYPE"],
            request.META is request.environ,
        )
        request.META |= {"tenant": "other", "CONTENT_TYPE": "text/plain"}
        return found

    work = Twice(change)
    serve(view=idempotent(work))
    assert sender.send().status_code == 201
    assert work.found == [(None, "application/json", True)] * 2


@pytest.mark.parametrize("made", [list, dict, set])
def test_what_a_middleware_collects_in_is_as_it_came_and_still_its_own(
    made: Any, serve: Serve, sender: Sender
) -> None:
    collected = {list: [1], dict: {1: 1}, set: {1}}[made]

    def collect(request: HttpRequest) -> None:
        request.collected = collected

    def put(request: Any) -> Any:
        found = made(request.collected)
        number = len(work.found) + 2
        if made is set:
            collected.symmetric_difference_update({1, number})
        else:
            collected.append(number) if made is list else collected.update({number: number})
        return found

    work = Twice(put)
    serve(view=under(collect, idempotent(work)))
    assert sender.send().status_code == 201
    assert [list(found) for found in work.found] == [[1], [1]]
    assert list(collected) == ([3] if made is set else [1, 3])


def test_arguments_are_as_they_came(serve: Serve, sender: Sender) -> None:
    work = Twice(lambda request, first, second: (first.pop(), second.popitem()))
    protected = idempotent(work)
    serve(view=lambda request: protected(request, [1], second={"a": 1}))
    assert sender.send().status_code == 201
    assert work.found == [(1, ("a", 1))] * 2


def test_attributes_of_a_class_based_view_are_as_they_came(serve: Serve, sender: Sender) -> None:
    work = Twice(lambda view: (view.kwargs.pop("a", None), view.steps.append(1), len(view.steps)))

    class Pay(ClassBasedView):
        def setup(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
            super().setup(request, *args, **kwargs)
            self.steps = list[int]()

        @idempotent
        def post(self, request: HttpRequest, a: int) -> HttpResponse:
            return work(self)

    view = Pay.as_view()
    serve(view=lambda request: view(request, a=1))
    assert sender.send().status_code == 201
    assert work.found == [(1, None, 1)] * 2


def test_data_of_rest_framework_with_files_is_as_it_came(serve: Serve, sender: Sender) -> None:
    work = Twice(
        lambda request: (
            request.data.pop("amount"),
            request.data["file"].read(),
            request.FILES.pop("file") and None,
        )
    )

    @api_view(["POST"])
    @parser_classes([MultiPartParser])
    @idempotent(validate=lambda request: request.data and None)
    def view(request: Request) -> Response:
        work(request)
        return Response(status=201)

    serve(view=view)
    form = {"amount": "5", "file": SimpleUploadedFile("a.txt", b"content")}
    assert (
        sender.client.post("/view/", form, headers={"Idempotency-Key": "key-1"}).status_code == 201
    )
    assert work.found == [(["5"], b"content", None)] * 2


@both_kinds
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
    # The body cannot be read again inside the process, so the client must retry.
    send = partial(sender.send, body=body, content_type="multipart/form-data; boundary=x")
    assert [send().status_code for _ in range(2)] == [409, 201]


@both_kinds
def test_lists_in_the_session_are_as_they_came(kind: Kind, serve: Serve, sender: Sender) -> None:
    """The second run does not fill the cart again."""
    sender.client.force_login(sender.user)
    session = sender.client.session
    session["cart"] = ["chair"]
    session.save()

    def fill(request: HttpRequest) -> list[str]:
        request.session["cart"].append("table")
        request.session.modified = True
        return list(request.session["cart"])

    serve(view=kind(work := Twice(fill)))
    assert sender.send().status_code == 201
    assert work.found == [["chair", "table"]] * 2
    assert sender.client.session["cart"] == ["chair", "table"]


@both_kinds
def test_a_row_that_is_not_stored_is_no_conflict(kind: Kind, serve: Serve, sender: Sender) -> None:
    def draft(request: HttpRequest) -> None:
        request.draft = Account(name="draft")  # type: ignore[attr-defined]

    serve(view=under(draft, kind(work := Twice(lambda request: request.draft.name))))
    assert sender.send().status_code == 201
    assert work.found == ["draft"] * 2


@both_kinds
def test_an_error_that_is_its_own_cause_ends_the_request(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    def book(request: HttpRequest) -> HttpResponse:
        try:
            raise LookupError
        except LookupError as error:
            raise error from error  # Python accepts this slip.

    serve(view=kind(book))
    assert sender.send().status_code == 500


def test_a_time_limit_is_looked_for_once_in_a_cycle_of_errors() -> None:
    first, second = OSError(), OSError()
    first.__cause__, second.__context__ = second, first
    assert exceeded_time_limit(first) is None
