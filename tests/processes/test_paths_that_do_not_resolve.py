"""A path converter may raise anything. The key of such a path stands in nobody's way."""

from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db import OperationalError, connection
from django.http import Http404, HttpResponse
from django.test import Client
from django.urls import include, path, register_converter
from psycopg.errors import DeadlockDetected
from pytest_django import Settings

from idempotency.completer import complete_once
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from idempotency.reaper import ReapPass, reap_once
from tests.factories import IdempotencyKeyFactory, UserFactory
from tests.kit.ageing import ago, expired_key
from tests.models import Entry

pytestmark = pytest.mark.django_db(transaction=True)

KEYS = "/admin/idempotency/idempotencykey/"


failures: list[OperationalError] = []


class Account:
    """Looks the account of a path up."""

    regex = "[0-9]+"

    def to_python(self, value: str) -> Any:
        if value == "0":
            raise ConnectionError("the directory of accounts is down")
        if failures:
            raise failures.pop() from DeadlockDetected()
        if value == "1":
            with connection.cursor() as cursor:
                cursor.execute("SELECT name FROM a_table_that_a_deploy_has_dropped")
        try:
            return get_user_model()._default_manager.get(pk=value)
        except get_user_model().DoesNotExist:
            raise Http404 from None

    def to_url(self, value: Any) -> str:
        return str(value.pk)


register_converter(Account, "account_of_test")


@idempotent(recovery_points=[])
def pay(request: Any, account: Any = None) -> Any:
    with atomic_phase(request.idempotency_key) as phase:
        Entry.objects.create(name="paid")
        phase.set_response(HttpResponse(status=201))
    return request.idempotency_key.response()


@pytest.fixture(autouse=True)
def shop(settings: Settings) -> None:
    urls = [
        path("pay/", pay),
        path("accounts/<account_of_test:account>/pay/", pay),
        path("", include("rides_demo.urls")),
    ]
    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": urls})


def left_key(request_path: str, **values: Any) -> Any:
    user = UserFactory()
    times = {"created_at": ago(hours=100), "last_run_at": ago(hours=99)} | values
    return IdempotencyKeyFactory(
        request_path=request_path, user=user, scope=f"user:{user.pk}", **times
    )


def test_the_reaper_settles_and_deletes_the_others() -> None:
    left_key("/accounts/4711/pay/")
    left_key("/pay/")
    expired_key()
    assert reap_once() == ReapPass(deleted=1, stuck=2)


@pytest.mark.parametrize("account", ["0", "1"], ids=["in a service", "in the database"])
def test_the_reaper_waits_for_a_converter_that_fails(account: str) -> None:
    """The view may have a function ``on_abandon``, which a key that is stuck never runs."""
    waiting = left_key(f"/accounts/{account}/pay/")
    left_key("/pay/")
    assert reap_once() == ReapPass(stuck=1)
    waiting.refresh_from_db()
    assert waiting.stuck_at is None


@pytest.mark.parametrize("account", ["4711", "0"])
def test_the_completer_gives_the_key_up_and_runs_the_others(account: str) -> None:
    gone, good = (
        left_key(f"/accounts/{account}/pay/", completer_attempts=25, attempts=25),
        left_key("/pay/"),
    )
    complete_once()
    assert IdempotencyKey.objects.stuck().get().pk == gone.pk
    assert IdempotencyKey.objects.finished().get().pk == good.pk


def test_the_admin_shows_it() -> None:
    gone = left_key("/accounts/4711/pay/")
    client = Client()
    client.force_login(UserFactory(is_staff=True, is_superuser=True))
    assert [client.get(page).status_code for page in (KEYS, f"{KEYS}{gone.pk}/change/")] == [
        200,
        200,
    ]


@pytest.mark.parametrize(
    "values",
    [
        {"completer_attempts": 25, "attempts": 25},
        {
            "stuck_at": ago(hours=98),
            "stuck_code": "unknown_recovery_point",
            "stuck_reason": "x",
            "recovery_point": "gone",
        },
    ],
    ids=["after its last attempt", "at an unknown recovery point"],
)
def test_the_completer_runs_the_others_although_the_query_of_a_converter_fails(
    values: dict[str, Any],
) -> None:
    left_key("/accounts/1/pay/", **values)
    left_key("/pay/", created_at=ago(hours=99), last_run_at=ago(hours=98))
    complete_once()
    assert [key.request_path for key in IdempotencyKey.objects.finished()] == ["/pay/"]


def test_a_deadlock_of_a_converter_ends_the_pass_and_does_not_mark_the_key() -> None:
    """The view may have a function ``on_abandon``, which a key that is stuck never runs."""
    waiting = left_key("/accounts/4711/pay/", completer_attempts=25, attempts=25)
    failures.append(OperationalError("deadlock detected"))
    with pytest.raises(OperationalError):
        complete_once()
    waiting.refresh_from_db()
    assert waiting.stuck_at is None
