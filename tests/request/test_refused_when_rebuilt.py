"""A refusal of only the completer's rebuilt request is not a response for the client."""

import re
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import pytest
from django.conf import settings as settings_of_django
from django.contrib.auth.decorators import login_required, permission_required, user_passes_test
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import PermissionDenied
from django.db.utils import OperationalError
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.shortcuts import redirect
from psycopg.errors import SerializationFailure
from pytest_django import Settings

from idempotency import _key_completion
from idempotency.completer import CompletePass, complete_once
from idempotency.decorators import idempotent
from idempotency.exceptions import StuckCode
from idempotency.http import not_stored
from idempotency.models import IdempotencyKey
from idempotency.monitoring.doctor import diagnose
from idempotency.phases import atomic_phase
from idempotency.signals import key_stuck
from tests.kit.ageing import abandon
from tests.kit.serving import Sender
from tests.models import Entry

pytestmark = pytest.mark.django_db(transaction=True)

Refusal = Callable[[], HttpResponseBase]
#: The middleware sets this for the client's request, but not for the rebuilt request.
tenant: ContextVar[str] = ContextVar("tenant", default="")


class Shop:
    """A phased view whose bank is down at first, and that refuses requests without a tenant."""

    def __init__(self, refusal: Refusal, *, begun: bool = False, **options: Any) -> None:
        self.refusal, self.begun = refusal, begun
        self.bank_is_down = True
        self.view = idempotent(recovery_points=["ordered"], **options)(self._view)

    def _view(self, request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        if not tenant.get():
            return self.refusal()
        for _ in key.phases():
            if self.begun:
                with key.call("charge"):
                    pass
            if self.bank_is_down:
                return HttpResponse(status=503)
            with atomic_phase(key) as phase:
                Entry.objects.create(name="paid")
                phase.set_response(JsonResponse({"paid": True}, status=201))
        return key.response()


def missing() -> HttpResponseBase:
    raise Http404


def forbidden() -> HttpResponseBase:
    raise PermissionDenied


REFUSALS = [
    *(partial(HttpResponse, status=status) for status in (400, 403, 404)),
    missing,
    forbidden,
]


def left_by_its_client(shop: Shop, serve: Any, sender: Sender) -> None:
    """Send the client's request with its tenant, without a retry; then make the bank available."""
    serve(view=shop.view)
    send(sender, 503)
    shop.bank_is_down = False
    abandon()


def send(sender: Sender, status: int) -> None:
    """Send the client's request; the response must have ``status``."""
    token = tenant.set("one")
    try:
        assert sender.send().status_code == status
    finally:
        tenant.reset(token)


def run_until_stuck(runs: int) -> None:
    """Let the completer run the key ``runs`` times; the last run makes the key stuck."""
    for _ in range(runs - 1):
        abandon()
        assert complete_once() == CompletePass(failed=1)
    abandon()
    assert complete_once() == CompletePass(stuck=1)


@pytest.mark.parametrize("refusal", REFUSALS)
def test_it_is_not_stored_and_the_retry_of_the_client_runs(
    refusal: Refusal, serve: Any, sender: Sender
) -> None:
    left_by_its_client(Shop(refusal), serve, sender)
    assert complete_once() == CompletePass(failed=1)
    key = IdempotencyKey.objects.get()
    assert (key.finished_at, key.stuck_at, key.locked_until, key.refused_at) == (
        None,
        None,
        None,
        None,
    )
    assert re.search("40[034]|^PermissionDenied", key.last_error)
    send(sender, 201)
    assert Entry.objects.count() == 1


@pytest.mark.parametrize("refusal", REFUSALS)
def test_after_a_few_runs_it_is_left_to_the_client_whose_retry_still_runs(
    refusal: Refusal, serve: Any, sender: Sender
) -> None:
    told: list[str] = []

    def listen(key: IdempotencyKey, **kwargs: Any) -> None:
        told.append(key.stuck_code)

    key_stuck.connect(listen)
    left_by_its_client(Shop(refusal), serve, sender)
    run_until_stuck(_key_completion._RUNS_BEFORE_REFUSED)
    abandon()
    assert complete_once() == CompletePass()
    assert IdempotencyKey.objects.stuck().get().stuck_code == StuckCode.REFUSED_WHEN_REBUILT
    assert told == [StuckCode.REFUSED_WHEN_REBUILT]
    assert "stuck_keys" not in {finding.code for finding in diagnose().findings}
    send(sender, 201)
    assert not IdempotencyKey.objects.stuck().exists()


@pytest.mark.parametrize("status", [400, 401])
def test_a_refusal_before_the_decorator_counts_the_same(
    status: int, serve: Any, sender: Sender
) -> None:
    shop = Shop(lambda: HttpResponse(status=404))
    left_by_its_client(shop, serve, sender)

    @wraps(shop.view)
    def signed_in(request: HttpRequest) -> HttpResponseBase:
        answer: HttpResponseBase = (
            shop.view(request) if tenant.get() else HttpResponse(status=status)
        )
        return answer

    serve(view=signed_in)
    run_until_stuck(_key_completion._RUNS_BEFORE_REFUSED)
    key = IdempotencyKey.objects.get()
    assert key.stuck_code == StuckCode.REFUSED_WHEN_REBUILT
    assert key.stuck_reason.endswith(key.last_error)
    assert str(status) in key.last_error
    send(sender, 201)


def test_an_error_before_the_decorator_is_no_refusal(serve: Any, sender: Sender) -> None:
    shop = Shop(lambda: HttpResponse(status=404))
    left_by_its_client(shop, serve, sender)
    serve(view=wraps(shop.view)(lambda request: HttpResponse(status=500)))
    for _ in range(_key_completion._RUNS_BEFORE_REFUSED):
        abandon()
        assert complete_once() == CompletePass(failed=1)


def test_a_request_that_has_begun_something_has_all_its_attempts(
    serve: Any, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"COMPLETER_MAX_ATTEMPTS": 7}
    left_by_its_client(Shop(lambda: HttpResponse(status=404), begun=True), serve, sender)
    run_until_stuck(7)
    key = IdempotencyKey.objects.get()
    assert (key.stuck_code, key.stuck_reason.endswith(key.last_error)) == (
        "attempts_exhausted",
        True,
    )


@pytest.mark.parametrize(
    "answer", [lambda: not_stored(HttpResponse(status=409)), lambda: HttpResponse(status=503)]
)
def test_an_answer_that_asks_to_come_back_is_no_refusal(
    answer: Refusal, serve: Any, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"COMPLETER_MAX_ATTEMPTS": 7}
    left_by_its_client(Shop(answer), serve, sender)
    run_until_stuck(7)
    assert IdempotencyKey.objects.get().stuck_code == "attempts_exhausted"


def test_a_refusal_after_part_of_the_work_is_the_last_error(serve: Any, sender: Sender) -> None:
    left_by_its_client(Shop(lambda: HttpResponse("who?", status=401), begun=True), serve, sender)
    assert complete_once() == CompletePass(failed=1)
    assert "status 401" in IdempotencyKey.objects.get().last_error


def test_a_5xx_of_the_rebuilt_request_is_not_stored_either(
    serve: Any, sender: Sender, settings: Settings
) -> None:
    shop = Shop(lambda: HttpResponse(status=500))
    left_by_its_client(shop, serve, sender)
    settings.IDEMPOTENCY = {"STORE_5XX": True}
    assert complete_once() == CompletePass(failed=1)
    send(sender, 201)


def test_what_a_phase_stores_in_the_rebuilt_request_is_the_answer(
    serve: Any, sender: Sender
) -> None:
    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        if key.attempts == 1:
            return HttpResponse(status=503)
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse("no", status=403))
        return key.response()

    serve(view=view)
    sender.send()
    abandon()
    assert complete_once() == CompletePass(finished=1)
    assert (sender.send().status_code, sender.send().content) == (403, b"no")


def test_a_view_with_on_abandon_is_run_until_that_settles_it(serve: Any, sender: Sender) -> None:
    shop = Shop(lambda: HttpResponse(status=404), on_abandon=lambda key: HttpResponse(status=410))
    left_by_its_client(shop, serve, sender)
    for _ in range(_key_completion._RUNS_BEFORE_REFUSED + 1):
        abandon()
        assert complete_once() == CompletePass(failed=1)


def test_a_client_that_came_back_meanwhile_keeps_its_key(serve: Any, sender: Sender) -> None:
    """The retry charged and got a 503 before the run of the completer ended."""
    shop = Shop(lambda: HttpResponse(status=404), begun=True)
    left_by_its_client(shop, serve, sender)
    IdempotencyKey.objects.update(
        begun=False, completer_attempts=_key_completion._RUNS_BEFORE_REFUSED - 1
    )
    shop.bank_is_down = True

    @wraps(shop.view)
    def refused_while_the_client_retries(request: HttpRequest) -> HttpResponseBase:
        if tenant.get():
            answer: HttpResponseBase = shop.view(request)
            return answer
        IdempotencyKey.objects.update(locked_until=None)
        send(sender, 503)
        return HttpResponse(status=404)

    serve(view=refused_while_the_client_retries)
    assert complete_once() == CompletePass(failed=1)
    assert not IdempotencyKey.objects.stuck().exists()


@pytest.mark.postgres
def test_it_is_not_left_to_the_client_after_a_second_attempt_of_the_same_run_has_begun_it(
    serve: Any, sender: Sender
) -> None:
    failures: list[bool] = []

    @idempotent(recovery_points=["ordered"])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        if not failures:
            return HttpResponse(status=503)
        if failures.pop():
            raise OperationalError from SerializationFailure()
        with atomic_phase(key) as phase:
            phase.set_recovery_point("ordered")
        raise Http404

    serve(view=view)
    assert sender.send().status_code == 503
    IdempotencyKey.objects.update(completer_attempts=_key_completion._RUNS_BEFORE_REFUSED)
    abandon()
    failures += [False, True]
    assert complete_once() == CompletePass(failed=1)
    assert not IdempotencyKey.objects.stuck().exists()


LOGIN_CHECKS = {
    "permission": permission_required("tests.add_entry"),
    "login": login_required,
    "login page of its own": user_passes_test(
        lambda user: user.is_superuser, login_url="/staff/sign-in/"
    ),
    "parameter of its own": permission_required(
        "tests.add_entry", login_url="https://id.example/?from=shop"
    ),
}


def expect_refused() -> None:
    """Let the completer run the key until it is left to its client."""
    run_until_stuck(_key_completion._RUNS_BEFORE_REFUSED)
    key = IdempotencyKey.objects.get()
    assert (key.stuck_code, key.response_code) == (StuckCode.REFUSED_WHEN_REBUILT, None)
    assert "status 302" in key.stuck_reason


@pytest.mark.parametrize("check", LOGIN_CHECKS.values(), ids=LOGIN_CHECKS)
def test_a_redirect_to_the_login_page_is_a_refusal(check: Any, serve: Any, sender: Sender) -> None:
    """The user lost the permission after the request was sent."""
    shop = Shop(lambda: HttpResponse(status=404))
    left_by_its_client(shop, serve, sender)
    serve(view=check(shop.view))
    if check is login_required:
        IdempotencyKey.objects.update(user=None, scope="session:1")
    expect_refused()


@pytest.mark.parametrize("login_url", [None, "/staff/sign-in/"])
def test_a_redirect_to_the_login_page_by_the_view_is_a_refusal(
    login_url: str | None, serve: Any, sender: Sender
) -> None:
    left_by_its_client(Shop(lambda: redirect_to_login("/view/", login_url)), serve, sender)
    expect_refused()


def test_a_redirect_to_the_login_page_after_part_of_the_work_needs_a_person(
    serve: Any, sender: Sender
) -> None:
    shop = Shop(lambda: HttpResponse(status=404), begun=True)
    left_by_its_client(shop, serve, sender)
    serve(view=permission_required("tests.add_entry")(shop.view))
    assert complete_once() == CompletePass(stuck=1)
    key = IdempotencyKey.objects.get()
    assert key.stuck_code == StuckCode.USER_MISSING
    assert settings_of_django.LOGIN_URL in key.stuck_reason


def test_a_redirect_that_a_phase_stores_is_the_answer(serve: Any, sender: Sender) -> None:
    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        if key.attempts == 1:
            return HttpResponse(status=503)
        with atomic_phase(key) as phase:
            phase.set_response(redirect(f"/accounts/login/?next={request.path}"))
        return key.response()

    serve(view=view)
    sender.send()
    abandon()
    assert complete_once() == CompletePass(finished=1)


def test_another_redirect_is_no_refusal(serve: Any, sender: Sender, settings: Settings) -> None:
    settings.IDEMPOTENCY = {"COMPLETER_MAX_ATTEMPTS": 7}
    settings.LOGIN_URL = "a_name_without_a_url"
    shop = Shop(lambda: HttpResponse(status=404))
    left_by_its_client(shop, serve, sender)
    serve(view=wraps(shop.view)(lambda request: redirect("/welcome/?next=/elsewhere/")))
    run_until_stuck(7)
    assert IdempotencyKey.objects.get().stuck_code == "attempts_exhausted"
