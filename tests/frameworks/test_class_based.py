"""What is particular to class-based views."""

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.decorators import login_required, permission_required
from django.contrib.auth.mixins import LoginRequiredMixin, PermissionRequiredMixin
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.generic import CreateView
from pytest_django import Settings

from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from tests.kit.serving import Sender
from tests.kit.threads import elsewhere
from tests.models import Account, Entry

Serve = Callable[[Any], None]


@pytest.fixture
def serve(settings: Settings) -> Serve:
    """Return a function that puts a view under /view/."""

    def put(view: Any) -> None:
        settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": [path("view/", view)]})

    return put


@pytest.mark.postgres
@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "on the method"])
def test_view_is_as_it_was_when_a_serialization_failure_makes_it_run_again(
    serve: Serve, sender: Sender, by_name: bool
) -> None:
    protect = idempotent(isolation="serializable")
    Account.objects.create(name="one")

    class Steps(View):
        runs = 0

        def setup(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
            super().setup(request, *args, **kwargs)
            self.step = 0

        def post(self, request: HttpRequest) -> HttpResponseBase:
            Steps.runs += 1
            self.step += 1
            balance = Account.objects.get().balance
            if Steps.runs == 1:
                elsewhere(lambda: Account.objects.update(balance=100))
            Account.objects.update(balance=balance + 1)
            return JsonResponse({"step": self.step, "balance": balance + 1})

    if by_name:
        method_decorator(protect, name="post")(Steps)
    else:
        Steps.post = protect(Steps.post)
    serve(Steps.as_view())
    assert sender.send().json() == {"step": 1, "balance": 101}
    assert Steps.runs == 2


def test_inherited_handler_of_a_generic_view_is_protected_by_name(
    serve: Serve, sender: Sender
) -> None:
    @method_decorator(idempotent, name="post")
    class CreateEntry(LoginRequiredMixin, CreateView):
        model, fields, success_url = Entry, ["name"], "/thanks/"

    serve(CreateEntry.as_view())
    answers = [
        sender.send(body="name=one", content_type="application/x-www-form-urlencoded")
        for _ in range(2)
    ]
    assert [(answer.status_code, answer["Location"]) for answer in answers] == [
        (302, "/thanks/")
    ] * 2
    assert Entry.objects.get().name == "one"


def test_permission_of_a_mixin_is_asked_before_a_replay(serve: Serve, sender: Sender) -> None:
    granted = [True, False]

    class Guarded(PermissionRequiredMixin, View):
        raise_exception = True

        def has_permission(self) -> bool:
            return granted.pop(0)

        @idempotent
        def post(self, request: HttpRequest) -> HttpResponseBase:
            return JsonResponse({}, status=201)

    serve(Guarded.as_view())
    assert [sender.send().status_code for _ in range(2)] == [201, 403]


def test_decorator_outside_of_a_mixin_s_check_is_refused(serve: Serve, sender: Sender) -> None:
    @method_decorator(idempotent, name="dispatch")
    class Guarded(LoginRequiredMixin, View):
        def post(self, request: HttpRequest) -> HttpResponseBase:
            return JsonResponse({}, status=201)

    serve(Guarded.as_view())
    assert sender.send().status_code == 500
    assert not IdempotencyKey.objects.exists()


@pytest.mark.parametrize(
    "check", [login_required, permission_required("tests.add_entry")], ids=["login", "permission"]
)
def test_decorator_outside_of_a_check_is_refused(check: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="@idempotent outside"):
        idempotent(check(lambda request: JsonResponse({})))


def test_view_may_keep_the_request_under_any_name(serve: Serve, sender: Sender) -> None:
    class Keeping(View):
        def setup(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
            super().setup(request, *args, **kwargs)
            self._request = request

        @idempotent
        def post(self, request: HttpRequest) -> HttpResponseBase:
            return JsonResponse({}, status=201)

    serve(Keeping.as_view())
    assert [sender.send().status_code for _ in range(2)] == [201, 201]
