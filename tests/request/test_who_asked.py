"""The completer runs a request as its sender, not as somebody else, and only while the sender may
make it."""

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.decorators import permission_required
from django.contrib.auth.models import AnonymousUser
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from pytest_django import Settings
from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.permissions import IsAdminUser
from rest_framework.views import APIView

from idempotency import scopes
from idempotency._http.rebuilt import rebuilt_run_of
from idempotency.completer import CompletePass, complete_once
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from tests.kit.serving import Sender

pytestmark = pytest.mark.django_db(transaction=True)


class Bank:
    """A phased view that charges the sender, and returns 503 while ``down``. ``moved`` adds a
    committed phase before."""

    def __init__(self, who: Callable[[Any], Any], *, moved: bool = False) -> None:
        self.who, self.moved, self.down = who, moved, True
        self.charged: list[Any] = []

    def pay(self, request: Any, *args: Any) -> HttpResponseBase:
        key = request.idempotency_key
        for recovery_point in key.phases():
            if self.moved and recovery_point == "started":
                with atomic_phase(key) as phase:
                    phase.set_recovery_point("noted")
                continue
            if self.down:
                return HttpResponse(status=503)
            self.charged.append(self.who(request))
            with atomic_phase(key) as phase:
                phase.set_response(JsonResponse({}, status=201))
        answer: HttpResponseBase = key.response()
        return answer

    def protected(self, **options: Any) -> Any:
        return idempotent(recovery_points=["noted"], **options)(self.pay)


class TokenAccount:
    """An account of an API, which is not a Django user."""

    is_authenticated = True

    def __init__(self, pk: int) -> None:
        self.pk = pk


class TokenAuthentication(BaseAuthentication):
    """Authentication by token in Django REST framework."""

    def authenticate(self, request: Any) -> tuple[TokenAccount, str] | None:
        """Return the account of a token."""
        token = request.headers.get("X-Token")
        return (TokenAccount(int(token)), token) if token else None


def behind_token(view: Any) -> Any:
    """Set ``request.account`` before the view, like a middleware."""

    def authenticated(request: HttpRequest) -> HttpResponseBase:
        if token := request.headers.get("X-Token"):
            request.account = TokenAccount(int(token))
        answer: HttpResponseBase = view(request)
        return answer

    authenticated.idempotency = view.idempotency
    return authenticated


def api_view_of(
    bank: Bank,
    authentication: type[BaseAuthentication],
    permissions: tuple[Any, ...] = (),
    **options: Any,
) -> Any:
    class Pay(APIView):
        authentication_classes = [authentication]
        permission_classes = list(permissions)

        @idempotent(recovery_points=["noted"], **options)
        def post(self, request: Any) -> HttpResponseBase:
            return bank.pay(request)

    return Pay.as_view()


def abandon() -> None:
    old = Now() - timedelta(hours=1)
    IdempotencyKey.objects.update(created_at=old, last_run_at=old, next_run_at=None)


def completed(bank: Bank) -> IdempotencyKey:
    """Make the bank available, run the completer, and return the only key."""
    bank.down = False
    abandon()
    complete_once()
    return IdempotencyKey.objects.get()


def account_of_key(request: HttpRequest, key: IdempotencyKey) -> None:
    request.user = TokenAccount(int(key.scope.rpartition(":")[2]))


def account_on_request(request: HttpRequest, key: IdempotencyKey) -> None:
    request.account = TokenAccount(int(key.scope.rpartition(":")[2]))


def nobody_in_particular(request: HttpRequest, key: IdempotencyKey) -> None:
    request.user = AnonymousUser()


def another_matter(request: HttpRequest, key: IdempotencyKey) -> None:
    request.site = SimpleNamespace(name="shop")


@pytest.mark.parametrize("prepare", [None, another_matter], ids=["nothing", "another matter"])
@pytest.mark.parametrize(
    "scope",
    [scopes.attribute("user.pk"), lambda request: "everybody"],
    ids=["of the account", "one"],
)
def test_an_account_of_a_framework_is_not_replaced_by_an_anonymous_user(
    prepare: Any, scope: Any, serve: Any, sender: Sender, settings: Settings
) -> None:
    bank = Bank(lambda request: request.user.pk)
    serve(view=api_view_of(bank, TokenAuthentication, scope=scope))
    assert sender.send(headers={"X-Token": "7"}).status_code == 503
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": prepare}
    key = completed(bank)
    assert (bank.charged, key.stuck_code, key.locked_until) == ([], "user_missing", None)


def test_an_account_that_a_middleware_names_is_not_left_out(serve: Any, sender: Sender) -> None:
    bank = Bank(lambda request: getattr(request, "account", None))
    serve(view=behind_token(bank.protected(scope=scopes.attribute("account.pk"))))
    sender.client.logout()
    assert sender.send(headers={"X-Token": "7"}).status_code == 503
    key = completed(bank)
    assert (bank.charged, key.stuck_code) == ([], "user_missing")


@pytest.mark.parametrize("settled", [account_of_key, account_on_request])
def test_prepare_request_says_who_asked(
    settled: Any, serve: Any, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": settled}
    if settled is account_of_key:  # The framework uses the user of the request.
        bank = Bank(lambda request: request.user.pk)
        serve(view=api_view_of(bank, TokenAuthentication, scope=scopes.attribute("user.pk")))
    else:
        bank = Bank(lambda request: request.account.pk)
        serve(view=behind_token(bank.protected(scope=scopes.attribute("account.pk"))))
    sender.client.logout()
    assert sender.send(headers={"X-Token": "7"}).status_code == 503
    key = completed(bank)
    assert (bank.charged, key.response_code, key.stuck_code) == ([7], 201, "")


@pytest.mark.parametrize(
    ("scope", "prepare"),
    [
        (None, None),
        (scopes.session, None),
        (lambda request: "all", None),
        (lambda request: request.META["REMOTE_ADDR"], None),
        (scopes.joined(lambda request: "shop", scopes.user_or_session), nobody_in_particular),
    ],
    ids=["default", "session", "one for all", "of what is kept", "said to be nobody"],
)
def test_an_anonymous_visitor_is_completed(
    scope: Any, prepare: Any, serve: Any, sender: Sender, settings: Settings
) -> None:
    bank = Bank(lambda request: request.user.is_authenticated)
    serve(view=bank.protected(scope=scope))
    sender.client.logout()
    session = sender.client.session
    session["cart"] = 1
    session.save()
    assert sender.send().status_code == 503
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": prepare}
    key = completed(bank)
    assert (bank.charged, key.response_code, key.stuck_code) == ([False], 201, "")


def test_a_scope_that_reads_what_is_not_kept_names_nobody(serve: Any, sender: Sender) -> None:
    bank = Bank(lambda request: None)
    serve(view=bank.protected(scope=lambda request: request.headers["X-Account"]))
    sender.client.logout()
    assert sender.send(headers={"X-Account": "7"}).status_code == 503
    key = completed(bank)
    assert (bank.charged, key.stuck_code) == ([], "user_missing")


def by_permission_class(bank: Bank) -> Any:
    return api_view_of(bank, SessionAuthentication, (IsAdminUser,))


def by_decorator(bank: Bank) -> Any:
    return permission_required("idempotency.view_idempotencykey", raise_exception=True)(
        bank.protected()
    )


@pytest.mark.parametrize("checked", [by_permission_class, by_decorator])
@pytest.mark.parametrize("moved", [False, True])
def test_whose_rights_were_revoked_is_not_charged(
    checked: Any, moved: bool, serve: Any, sender: Sender
) -> None:
    rights = {"is_staff": True, "is_superuser": True}
    type(sender.user).objects.filter(pk=sender.user.pk).update(**rights)
    bank = Bank(lambda request: request.user.pk, moved=moved)
    serve(view=checked(bank))
    assert sender.send().status_code == 503
    type(sender.user).objects.filter(pk=sender.user.pk).update(**dict.fromkeys(rights, False))
    key = completed(bank)
    assert (bank.charged, key.finished_at, key.locked_until) == ([], None, None)
    assert key.stuck_code == ("user_missing" if moved else "")


@pytest.mark.parametrize("moved", [False, True])
def test_a_sender_who_was_deactivated_is_not_charged(
    moved: bool, serve: Any, sender: Sender
) -> None:
    """The view itself would not refuse the request: it accepts every signed-in user."""
    bank = Bank(lambda request: request.user.pk, moved=moved)
    serve(view=bank.protected())
    assert sender.send().status_code == 503
    type(sender.user).objects.filter(pk=sender.user.pk).update(is_active=False)
    key = completed(bank)
    assert (bank.charged, key.stuck_code, key.locked_until) == ([], "user_missing", None)


def test_a_refusal_of_the_view_itself_is_not_one_of_its_sender(serve: Any, sender: Sender) -> None:
    bank = Bank(lambda request: None, moved=True)
    bank.pay = refusing(bank.pay)
    serve(view=bank.protected())
    assert sender.send().status_code == 503
    bank.moved = False
    abandon()
    assert complete_once() == CompletePass(failed=1)
    assert IdempotencyKey.objects.get().stuck_code == ""


def refusing(pay: Any) -> Any:
    """Return a view that returns 403 in the completer, after all checks before the view have
    passed."""

    def view(request: Any) -> HttpResponseBase:
        return HttpResponse(status=403) if rebuilt_run_of(request) is not None else pay(request)

    return view
