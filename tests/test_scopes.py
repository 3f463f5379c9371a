"""Whose key it is: no response and no existence leaks from one client to another."""

from collections.abc import Callable

from django.contrib.auth import login
from django.contrib.auth.decorators import login_required, permission_required
from django.contrib.auth.models import Permission
from django.http import HttpRequest, HttpResponse, JsonResponse

from idempotency import scopes
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from tests.conformance.views import Counted, both_kinds, create
from tests.factories import UserFactory
from tests.serving import Sender, View, problem

Kind = Callable[..., View]
Serve = Callable[..., None]


def scope_by_header(name: str) -> scopes.Scope:
    """Return a scope that reads a header, as an API gateway sets one."""
    return lambda request: request.headers.get(name, "")


@both_kinds
def test_two_users_with_the_same_key_are_strangers(kind: Kind, serve: Serve, sender: Sender, transactional_db: None) -> None:
    serve(view=kind(work := Counted()))
    other = Sender()
    mine, theirs = sender.send(), other.send(body={"another": "body"})
    assert (mine.status_code, theirs.status_code) == (201, 201)
    assert mine.content != theirs.content
    assert "Idempotent-Replayed" not in theirs
    assert work.runs == 2


@both_kinds
def test_an_anonymous_visitor_does_not_get_the_answer_of_a_user(kind: Kind, serve: Serve, sender: Sender) -> None:
    serve(view=kind(work := Counted()), visit=_keep_a_session)
    sender.send()
    visitor = Sender()
    visitor.client.logout()
    assert problem(visitor.send())["code"] == "scope_missing"
    visitor.client.post("/visit/")
    assert "Idempotent-Replayed" not in visitor.send()
    assert work.runs == 2


def test_a_replay_needs_the_permission_that_the_first_request_had(serve: Serve, sender: Sender) -> None:
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


def test_a_visitor_who_signs_in_does_not_take_the_answer_along_to_the_user(serve: Serve, transactional_db: None) -> None:
    work = Counted()
    serve(view=idempotent(work), visit=_keep_a_session, sign_in=_sign_in)
    visitor = Sender()
    visitor.client.logout()
    visitor.client.post("/visit/")
    visitor.send()
    visitor.client.post("/sign_in/", {"user": visitor.user.pk})
    assert "Idempotent-Replayed" not in visitor.send()
    assert work.runs == 2


def test_47_login_view_with_a_scope_of_its_own_is_replayed(serve: Serve, transactional_db: None) -> None:
    work = Counted(_sign_in)
    serve(view=idempotent(scope=scope_by_header("X-Device"), store_body=False)(work))
    visitor = Sender()
    visitor.client.logout()
    form = {"body": f"user={visitor.user.pk}", "content_type": "application/x-www-form-urlencoded"}
    first = visitor.send(headers={"X-Device": "phone-1"}, **form)
    again = visitor.send(headers={"X-Device": "phone-1"}, **form)
    assert (first.status_code, again["Idempotent-Replayed"]) == (200, "true")
    assert "sessionid" not in again.cookies, "a stored response signs nobody in"
    assert work.runs == 1


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
    assert IdempotencyKey.objects.get().scope == f"user.username:{sender.user.username}"
    serve(view=login_required(idempotent(scope=scopes.attribute("tenant.pk"))(create)))
    assert problem(sender.send(key="other"))["code"] == "scope_missing"


def test_joined_scopes_do_not_run_into_each_other() -> None:
    request = HttpRequest()

    def of(*parts: str) -> str:
        return scopes.joined(*(lambda request, part=part: part for part in parts))(request)

    assert len({of("a", "bc"), of("ab", "c"), of("abc"), of("1:a", "bc")}) == 4


def test_what_finished_requests_of_one_user_left_can_be_erased(serve: Serve, sender: Sender, transactional_db: None) -> None:
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
