"""Scopes: neither a response nor the existence of a key leaks from one client to another."""

from collections.abc import Callable
from decimal import Decimal
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from uuid import UUID

import pytest
from django.apps import apps
from django.contrib.auth import login, logout
from django.contrib.auth.decorators import login_required, permission_required
from django.contrib.auth.models import Permission
from django.contrib.sessions.models import Session
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template import RequestContext, Template
from django.test import Client
from django.utils.functional import SimpleLazyObject
from pytest_django import Settings

from idempotency import scopes
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from tests.factories import UserFactory
from tests.kit.database import statements
from tests.kit.serving import Sender, View, another_client, problem
from tests.kit.threads import all_at_once
from tests.kit.views import Counted, both_kinds, create, plain, two_phases
from tests.kit.waiting import eventually
from tests.models import Account, Entry

Kind = Callable[..., View]
Serve = Callable[..., None]


@pytest.fixture
def visitor(serve: Serve, transactional_db: None) -> Client:
    """Return a client with a session that is not signed in."""
    serve(visit=_keep_a_session)
    client = Client(raise_request_exception=False)
    client.post("/visit/")
    return client


def scope_by_header(name: str) -> scopes.Scope:
    """Return a scope that reads a header, like one that an API gateway sets."""
    return lambda request: request.headers.get(name, "")


@both_kinds
def test_two_users_with_the_same_key_are_strangers(
    kind: Kind, serve: Serve, sender: Sender, transactional_db: None
) -> None:
    serve(view=kind(work := Counted()))
    other = Sender()
    mine, theirs = sender.send(), other.send(body={"another": "body"})
    assert (mine.status_code, theirs.status_code) == (201, 201)
    assert mine.content != theirs.content
    assert "Idempotent-Replayed" not in theirs
    assert work.runs == 2


@both_kinds
@pytest.mark.postgres
def test_two_users_who_send_the_same_keys_at_once_are_strangers(
    kind: Kind, serve: Serve, sender: Sender, transactional_db: None
) -> None:
    serve(view=kind(create))
    users, keys = (sender, Sender()), [f"key-{number}" for number in range(10)]

    def client(number: int) -> list[bytes]:
        own = another_client(users[number % 2])

        def sent_until_done(key: str) -> bytes:
            return eventually(
                lambda: (answer := own.send(key=key)).status_code == 201 and answer.content
            )

        return [sent_until_done(key) for key in keys]

    answers = all_at_once(client, 4)
    assert answers[:2] == answers[2:], "two clients of one user get the same answers"
    assert len({*answers[0], *answers[1]}) == Entry.objects.count() == 20


@both_kinds
def test_an_anonymous_visitor_does_not_get_the_answer_of_a_user(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=kind(work := Counted()), visit=_keep_a_session)
    sender.send()
    visitor = Sender()
    visitor.client.logout()
    assert problem(visitor.send())["code"] == "scope_missing"
    visitor.client.post("/visit/")
    assert "Idempotent-Replayed" not in visitor.send()
    assert work.runs == 2


def test_a_replay_needs_the_permission_that_the_first_request_had(
    serve: Serve, sender: Sender
) -> None:
    permission = Permission.objects.get(codename="view_entry")
    sender.user.user_permissions.add(permission)
    work = Counted()
    serve(view=permission_required("tests.view_entry", raise_exception=True)(idempotent(work)))
    assert sender.send().status_code == 201
    sender.user.user_permissions.remove(permission)
    assert sender.send().status_code == 403
    sender.user.user_permissions.add(permission)
    assert sender.send()["Idempotent-Replayed"] == "true"
    assert work.runs == 1


def test_a_visitor_who_signs_in_does_not_take_the_answer_along_to_the_user(
    serve: Serve, transactional_db: None
) -> None:
    work = Counted()
    serve(view=idempotent(work), visit=_keep_a_session, sign_in=_sign_in)
    visitor = Sender()
    visitor.client.logout()
    visitor.client.post("/visit/")
    visitor.send()
    visitor.client.post("/sign_in/", {"user": visitor.user.pk})
    assert "Idempotent-Replayed" not in visitor.send()
    assert work.runs == 2


def test_47_login_view_with_a_scope_of_its_own_is_replayed(
    serve: Serve, transactional_db: None
) -> None:
    work = Counted(_sign_in)
    serve(view=idempotent(scope=scope_by_header("X-Device"))(work))
    visitor = Sender()
    visitor.client.logout()
    form = {"body": f"user={visitor.user.pk}", "content_type": "application/x-www-form-urlencoded"}
    first = visitor.send(headers={"X-Device": "phone-1"}, **form)
    again = visitor.send(headers={"X-Device": "phone-1"}, **form)
    assert (first.status_code, again["Idempotent-Replayed"]) == (200, "true")
    assert "sessionid" not in again.cookies, "a stored response signs nobody in"
    assert work.runs == 1


def test_a_login_that_was_answered_into_the_void_has_no_session_to_ask_with(
    serve: Serve, visitor: Client, transactional_db: None
) -> None:
    form = {"user": UserFactory().pk}
    serve(view=idempotent(scope=scopes.session)(work := Counted(_sign_in)))
    before = visitor.cookies["sessionid"].value
    assert visitor.post("/view/", form, headers={"Idempotency-Key": "key-1"}).status_code == 200
    visitor.cookies["sessionid"] = before  # the new cookie was lost with the response
    assert (
        problem(visitor.post("/view/", form, headers={"Idempotency-Key": "key-1"}))["code"]
        == "scope_missing"
    )
    serve(view=idempotent(scope=lambda request: f"sign_up:{request.POST['user']}")(work))
    answers = [
        Client().post("/view/", form, headers={"Idempotency-Key": "key-1"}) for _ in range(2)
    ]
    assert [answer.get("Idempotent-Replayed") for answer in answers] == [None, "true"]
    assert work.runs == 2


def test_47_login_view_without_one_loses_its_retry(serve: Serve, transactional_db: None) -> None:
    serve(view=idempotent(work := Counted(_sign_in)), visit=_keep_a_session)
    visitor = Sender()
    visitor.client.logout()
    visitor.client.post("/visit/")
    form = {"body": f"user={visitor.user.pk}", "content_type": "application/x-www-form-urlencoded"}
    assert [visitor.send(**form).status_code for _ in range(2)] == [200, 200]
    assert work.runs == 2, "the retry asks as somebody else"


@both_kinds
def test_scopes_can_be_made_of_parts(kind: Kind, serve: Serve, sender: Sender) -> None:
    tenant = scope_by_header("X-Tenant")
    serve(view=kind(work := Counted(), scope=scopes.joined(tenant, scopes.user)))
    for name in ("a", "b"):
        assert "Idempotent-Replayed" not in sender.send(headers={"X-Tenant": name})
    assert sender.send(headers={"X-Tenant": "a"})["Idempotent-Replayed"] == "true"
    assert problem(sender.send())["code"] == "scope_missing"
    assert work.runs == 2


def test_an_attribute_of_the_request_is_a_scope(serve: Serve, sender: Sender) -> None:
    serve(view=login_required(idempotent(scope=scopes.attribute("user.username"))(create)))
    assert sender.send().status_code == 201
    assert (
        IdempotencyKey.objects.get().scope
        == f"request.user.username:rides_demo.user:str:{sender.user.username}"
    )
    serve(view=login_required(idempotent(scope=scopes.attribute("tenant.pk"))(create)))
    assert problem(sender.send(key="other"))["code"] == "scope_missing"


def _with(**attributes: Any) -> HttpRequest:
    request = HttpRequest()
    vars(request).update(attributes)
    return request


@pytest.mark.parametrize(
    ("value", "kind"), [("acme", "str"), ("7", "str"), (7, "int"), (UUID(int=7), "uuid")]
)
def test_an_attribute_is_an_identifier(value: Any, kind: str) -> None:
    assert scopes.attribute("auth")(_with(auth=value)) == f"request.auth:{kind}:{value}"


@pytest.mark.parametrize("name", ["user", "session", "expired"])
def test_an_attribute_cannot_take_the_scope_of_a_user_or_session_or_of_a_retired_key(
    name: str,
) -> None:
    found = scopes.scope_of(_with(**{name: "7"}), scopes.attribute(name))
    assert found.startswith("request.")


def test_a_proxy_is_the_account_of_its_model() -> None:
    class Supplier(Account):
        class Meta:
            proxy = True
            app_label = "tests"

    try:
        scope = scopes.attribute("auth.pk")
        assert (
            scope(_with(auth=Supplier(pk=7)))
            == scope(_with(auth=Account(pk=7)))
            == "request.auth.pk:tests.account:int:7"
        )
    finally:
        del apps.all_models["tests"]["supplier"]
        apps.clear_cache()


@pytest.mark.parametrize(
    "value",
    [Account(pk=7), object(), {"sub": 7, "exp": 1}, [7], b"acme", 1.5, True, False, Decimal(7)],
)
def test_an_attribute_that_is_no_identifier_is_a_mistake(value: Any) -> None:
    with pytest.raises(
        TypeError, match=rf"attribute\('auth'\) found a {type(value).__name__}.*'auth\.pk'"
    ):
        scopes.attribute("auth")(_with(auth=value))


@pytest.mark.parametrize("value", [None, "", SimpleNamespace(), SimpleNamespace(pk=None)])
def test_an_attribute_that_is_not_there_is_no_scope(value: Any) -> None:
    assert scopes.attribute("auth.pk")(_with(auth=value)) == ""


def test_two_accounts_of_one_name_are_strangers(
    serve: Serve, client: Client, transactional_db: None
) -> None:
    work = Counted(lambda request: JsonResponse({"balance": request.auth.balance}, status=201))
    accounts = {
        "1": Account(pk=1, name="Acme", balance=1),
        "2": Account(pk=2, name="Acme", balance=2),
    }
    serve(
        view=_authenticated(
            idempotent(scope=scopes.attribute("auth.pk"))(work), "auth", accounts.__getitem__
        )
    )
    answers = [
        client.post("/view/", headers={"Idempotency-Key": "key-1", "Authorization": who})
        for who in "12"
    ]
    assert [answer.json() for answer in answers] == [{"balance": 1}, {"balance": 2}]


def test_accounts_of_two_models_with_one_id_are_strangers(
    serve: Serve, client: Client, transactional_db: None
) -> None:
    work = Counted(lambda request: JsonResponse({"paid_by": str(request.auth)}, status=201))
    accounts = {"user": UserFactory(pk=5, username="jane"), "partner": Account(pk=5, name="Acme")}
    serve(
        view=_authenticated(
            idempotent(scope=scopes.attribute("auth.pk"))(work), "auth", accounts.__getitem__
        )
    )
    answers = [
        client.post("/view/", headers={"Idempotency-Key": "key-1", "Authorization": who})
        for who in accounts
    ]
    assert [answer.json() for answer in answers] == [{"paid_by": "jane"}, {"paid_by": "Acme"}]


def test_a_number_and_its_digits_are_two_accounts(
    serve: Serve, client: Client, transactional_db: None
) -> None:
    accounts: dict[str, Any] = {"number": 7, "digits": "7"}
    serve(
        view=_authenticated(
            idempotent(scope=scopes.attribute("auth.id"))(work := Counted()),
            "auth",
            lambda who: SimpleNamespace(id=accounts[who]),
        )
    )
    for who in accounts:
        assert (
            client.post(
                "/view/", headers={"Idempotency-Key": "key-1", "Authorization": who}
            ).status_code
            == 201
        )
    assert work.runs == 2


class TokenUser:
    """An authenticated account of a token package, which is not a Django user."""

    is_authenticated = True

    def __init__(self, name: str) -> None:
        self.pk = self.name = name


def _authenticated(view: View, attribute: str, who: Callable[[str], Any]) -> View:
    """Return the view behind a simulated token authentication."""

    def authenticated(request: HttpRequest) -> HttpResponse:
        found = who(request.headers["Authorization"])
        setattr(request, attribute, SimpleLazyObject(lambda: found))
        return view(request)

    return authenticated


@both_kinds
def test_who_is_signed_in_without_being_a_user_does_not_get_the_answers_of_the_session(
    kind: Kind, serve: Serve, visitor: Client, caplog: pytest.LogCaptureFixture
) -> None:
    work = Counted(lambda request: JsonResponse({"paid_by": request.user.name}, status=201))
    serve(view=_authenticated(kind(work), "user", TokenUser))
    for who in ("alice", "bob"):
        refused = visitor.post("/view/", headers={"Idempotency-Key": "key-1", "Authorization": who})
        assert (refused.status_code, problem(refused)["code"]) == (400, "scope_missing")
    assert work.runs == 0
    assert "TokenUser" in caplog.text
    serve(view=_authenticated(kind(work, scope=scopes.attribute("user.pk")), "user", TokenUser))
    for who in ("alice", "bob"):
        answer = visitor.post("/view/", headers={"Idempotency-Key": "key-1", "Authorization": who})
        assert answer.json() == {"paid_by": who}


def test_who_is_named_by_request_auth_alone_does_not_get_the_answers_of_the_session(
    serve: Serve, visitor: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Django Ninja sets only ``request.auth`` if an authentication returns no user."""
    serve(view=_authenticated(plain(work := Counted()), "auth", lambda name: {"account": name}))
    refused = visitor.post("/view/", headers={"Idempotency-Key": "key-1", "Authorization": "alice"})
    assert (refused.status_code, problem(refused)["code"], work.runs) == (400, "scope_missing", 0)
    assert "it is a dict" in caplog.text


@pytest.mark.parametrize("who", [SimpleNamespace(name="alice"), "account-1"])
def test_an_account_without_is_authenticated_does_not_get_the_answers_of_the_session(
    who: Any, serve: Serve, visitor: Client
) -> None:
    """An authenticator of Django REST framework may set any object as ``request.user``."""
    serve(view=_authenticated(plain(work := Counted()), "user", lambda name: who))
    refused = visitor.post("/view/", headers={"Idempotency-Key": "key-1", "Authorization": "alice"})
    assert (refused.status_code, problem(refused)["code"], work.runs) == (400, "scope_missing", 0)


def test_field_for_who_is_signed_in_without_being_a_user_leaves_the_session_alone(
    serve: Serve, visitor: Client
) -> None:
    before = visitor.cookies["sessionid"].value
    page = Template("{% load idempotency %}{% idempotency_key %}")
    view = _authenticated(
        lambda request: HttpResponse(page.render(RequestContext(request))), "user", TokenUser
    )
    serve(view=view, content=lambda request: JsonResponse(dict(request.session)))
    assert b"idempotency_key" in visitor.get("/view/", headers={"Authorization": "alice"}).content
    assert visitor.cookies["sessionid"].value == before
    assert visitor.get("/content/").json()["here"] is True


@pytest.mark.parametrize("scope", [None, scopes.session])
def test_two_visitors_with_one_signed_cookie_do_not_share_a_scope(
    scope: scopes.Scope | None,
    serve: Serve,
    sender: Sender,
    settings: Settings,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings.SESSION_ENGINE = "django.contrib.sessions.backends.signed_cookies"
    serve(view=idempotent(scope=scope)(work := Counted()), visit=_keep_a_session)
    visitors = Client(), Client()
    visitors[0].post("/visit/")
    # as if created within the same second
    visitors[1].cookies["sessionid"] = visitors[0].cookies["sessionid"].value
    for visitor in visitors:
        assert (
            problem(visitor.post("/view/", headers={"Idempotency-Key": "key-1"}))["code"]
            == "scope_missing"
        )
    assert work.runs == 0
    assert "signed_cookies" in caplog.text


@pytest.mark.parametrize("engine", ["db", "cache", "cached_db", "file"])
def test_scope_of_a_session_is_the_same_after_a_failure_and_a_login(
    engine: str, serve: Serve, settings: Settings, tmp_path: Path, transactional_db: None
) -> None:
    settings.SESSION_ENGINE = f"django.contrib.sessions.backends.{engine}"
    settings.SESSION_FILE_PATH = str(tmp_path)
    first, second = Counted(lambda request: HttpResponse()), Counted()
    view = two_phases(
        first, second, call=Mock(side_effect=[RuntimeError("down"), None]), scope=scopes.session
    )
    serve(view=view, visit=_keep_a_session, sign_in=_sign_in)
    visitor = Client(raise_request_exception=False)
    visitor.post("/visit/")
    assert visitor.post("/view/", headers={"Idempotency-Key": "key-1"}).status_code == 500
    visitor.post("/sign_in/", {"user": UserFactory().pk})
    assert visitor.post("/view/", headers={"Idempotency-Key": "key-1"}).status_code == 201
    assert (first.runs, second.runs, IdempotencyKey.objects.count()) == (1, 1, 1)


@both_kinds
def test_a_login_in_another_tab_meanwhile_neither_breaks_the_answer_nor_loses_it(
    kind: Kind, serve: Serve, visitor: Client
) -> None:
    other_tab = Client()
    other_tab.cookies["sessionid"] = visitor.cookies["sessionid"].value
    user = UserFactory()

    def work(request: HttpRequest) -> HttpResponse:
        other_tab.post("/sign_in/", {"user": user.pk})
        return create(request)

    serve(view=kind(counted := Counted(work), scope=scopes.session), sign_in=_sign_in)
    first = visitor.post("/view/", headers={"Idempotency-Key": "key-1"})
    assert first.status_code == 201
    again = other_tab.post("/view/", headers={"Idempotency-Key": "key-1"})
    assert (again.content, again["Idempotent-Replayed"]) == (first.content, "true")
    assert counted.runs == 1


def test_what_another_tab_does_to_the_session_meanwhile_is_kept(
    serve: Serve, visitor: Client
) -> None:
    other_tab = Client()
    other_tab.cookies["sessionid"] = visitor.cookies["sessionid"].value

    def work(request: HttpRequest) -> HttpResponse:
        other_tab.post("/add/")
        return create(request)

    def add(request: HttpRequest) -> HttpResponse:
        request.session["cart"] = [1]
        return HttpResponse()

    serve(
        view=idempotent(work), add=add, content=lambda request: JsonResponse(dict(request.session))
    )
    assert visitor.post("/view/", headers={"Idempotency-Key": "key-1"}).status_code == 201
    assert visitor.get("/content/").json()["cart"] == [1]


@both_kinds
def test_a_session_that_is_a_plain_dict(kind: Any, rf: Any, sender: Sender) -> None:
    request = rf.post(
        "/view/", b"{}", content_type="application/json", headers={"Idempotency-Key": "key-1"}
    )
    request.user, request.session = sender.user, {}
    assert kind(create)(request).status_code == 201


def test_a_session_that_the_request_has_created_is_no_scope(
    serve: Serve, transactional_db: None
) -> None:
    """A client that gets no response gets no cookie either, so its retry would create another
    session."""

    def creates_a_session(view: View) -> View:
        def outer(request: HttpRequest) -> HttpResponse:
            if request.session.session_key is None:
                request.session.create()
            request.session["seen"] = True
            return view(request)

        return outer

    serve(view=creates_a_session(plain(Counted())))
    client = Client()
    first = client.post("/view/", {}, headers={"Idempotency-Key": "one"})
    assert (first.status_code, first.json()["code"]) == (400, "scope_missing")
    assert client.post("/view/", {}, headers={"Idempotency-Key": "one"}).status_code == 201


def test_a_session_is_written_for_its_scope_once(serve: Serve, visitor: Client) -> None:
    serve(view=idempotent(create))
    writes = []
    for key in ("key-1", "key-2"):
        with statements() as done:
            assert visitor.post("/view/", headers={"Idempotency-Key": key}).status_code == 201
        # psycopg gives Django no text of prepared statements; Django's own statements are not
        # prepared.
        texts = [query["sql"] or "" for query in done]
        writes.append(
            sum("django_session" in text and not text.startswith("SELECT") for text in texts)
        )
    assert writes == [1, 0]


@pytest.mark.parametrize("meanwhile", ["other request", "sign out"])
def test_what_happened_to_a_session_since_it_was_read_is_seen(
    meanwhile: str, serve: Serve, visitor: Client
) -> None:
    other_tab = Client()
    other_tab.cookies["sessionid"] = visitor.cookies["sessionid"].value
    protected = idempotent(work := Counted())

    def slow(request: HttpRequest) -> HttpResponse:
        assert request.session["here"]
        if meanwhile == "sign out":
            Session.objects.all().delete()
        else:
            other_tab.post("/other/", headers={"Idempotency-Key": "key-1"})
        return protected(request)

    serve(view=slow, other=idempotent(create))
    answer = visitor.post("/view/", headers={"Idempotency-Key": "key-2"})
    if meanwhile == "sign out":
        assert (problem(answer)["code"], work.runs) == ("scope_missing", 0)
        assert not Session.objects.exists()
    else:
        assert (
            answer.status_code,
            len(set(IdempotencyKey.objects.values_list("scope", flat=True))),
        ) == (201, 1)


def test_a_session_that_changes_hands_takes_no_answer_along(serve: Serve, visitor: Client) -> None:
    """A second user signs in with the browser in which the first one is signed in, and then signs
    out."""
    serve(
        view=idempotent(scope=scopes.session)(work := Counted()),
        sign_in=_sign_in,
        sign_out=_sign_out,
    )

    def post(url: str = "/view/", **data: int) -> Any:
        return visitor.post(url, data, headers={"Idempotency-Key": "key-1"})

    users = [UserFactory(), UserFactory()]
    post("/sign_in/", user=users[0].pk)
    assert [post().get("Idempotent-Replayed") for _ in range(2)] == [None, "true"]
    post("/sign_in/", user=users[1].pk)
    assert [post().get("Idempotent-Replayed") for _ in range(2)] == [None, "true"]
    post("/sign_out/")
    assert problem(post())["code"] == "scope_missing"
    assert work.runs == 2


def test_who_planted_a_session_gets_no_answer_of_the_user_who_signed_in_with_it(
    serve: Serve, visitor: Client
) -> None:
    serve(view=idempotent(scope=scopes.session)(work := Counted()), sign_in=_sign_in)
    victim = Client()
    victim.cookies["sessionid"] = visitor.cookies["sessionid"].value
    victim.post("/sign_in/", {"user": UserFactory().pk})
    headers = {"Idempotency-Key": "key-1"}
    assert victim.post("/view/", headers=headers).status_code == 201
    assert problem(visitor.post("/view/", headers=headers))["code"] == "scope_missing"
    assert work.runs == 1


def test_joined_scopes_do_not_run_into_each_other() -> None:
    request = HttpRequest()

    def of(*parts: str) -> str:
        return scopes.joined(*(lambda request, part=part: part for part in parts))(request)

    assert len({of("a", "bc"), of("ab", "c"), of("abc"), of("1:a", "bc")}) == 4


def test_what_finished_requests_of_one_user_left_can_be_erased(
    serve: Serve, sender: Sender, transactional_db: None
) -> None:
    serve(view=idempotent(create))
    other = Sender()
    sender.send(), other.send()
    IdempotencyKey.objects.finished().filter(user=sender.user).delete()
    assert IdempotencyKey.objects.get().user_id == other.user.pk


def _keep_a_session(request: HttpRequest) -> HttpResponse:
    request.session["here"] = True
    return HttpResponse()


def _sign_in(request: HttpRequest) -> JsonResponse:
    user = UserFactory._meta.model.objects.get(pk=request.POST["user"])
    login(request, user, backend="django.contrib.auth.backends.ModelBackend")
    return JsonResponse({"hello": user.pk})


def _sign_out(request: HttpRequest) -> HttpResponse:
    logout(request)
    return HttpResponse()


@both_kinds
def test_what_a_scope_of_ones_own_returns_is_nobody_elses(
    kind: Kind, serve: Serve, visitor: Client
) -> None:
    serve(view=kind(work := Counted()), open=kind(work, scope=scope_by_header("X-Account")))
    headers = {"Idempotency-Key": "key-1"}
    first = visitor.post("/view/", headers=headers)
    taken = IdempotencyKey.objects.get().scope
    assert taken.startswith("session:")
    stranger = Client().post("/open/", headers=headers | {"X-Account": taken})
    assert stranger.content != first.content
    assert sorted(IdempotencyKey.objects.values_list("scope", flat=True)) == sorted(
        [taken, f"scope={taken}"]
    )


def test_scope_of_ones_own_in_joined_scopes_is_nobody_elses() -> None:
    request = _with(user=UserFactory.build(pk=7), headers={"X-Account": "user:7"})
    own, ours = scopes.joined(scope_by_header("X-Account")), scopes.joined(scopes.user)
    assert (own(request), ours(request)) == ("12:scope=user:7", "6:user:7")


def test_scope_that_copies_the_name_of_one_of_the_apps_is_still_ones_own() -> None:
    mine = wraps(scopes.user)(scope_by_header("X-Account"))
    assert scopes.scope_of(_with(headers={"X-Account": "user:7"}), mine) == "scope=user:7"
