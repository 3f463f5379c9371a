"""The completer finishes what clients have left, as the user who sent it, and nothing else."""

from asyncio import CancelledError
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from datetime import timedelta
from functools import partial, wraps
from typing import Any
from uuid import uuid4

import pytest
from django.conf import settings as django_settings
from django.db import OperationalError, connection, connections, transaction
from django.db.backends.signals import connection_created
from django.db.models.functions import Now
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.utils import translation
from psycopg.errors import SerializationFailure
from pytest_django import Settings
from rest_framework.throttling import BaseThrottle
from rest_framework.views import APIView

from idempotency._engine import claims
from idempotency._engine.errors import accepts_writes
from idempotency._http.rebuilt import rebuilt_run_of
from idempotency.completer import CompletePass, complete_key, complete_once
from idempotency.decorators import idempotent
from idempotency.exceptions import OPEN_TO_RETRIES, KeyStuck, StuckCode
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from idempotency.signals import key_conflict, key_replayed, key_stuck
from rides_demo.processes.ports import free_port
from tests.factories import IdempotencyKeyFactory, UserFactory
from tests.kit.ageing import abandon, ago, lock_end
from tests.kit.serving import Sender, problem
from tests.kit.shop import Shop, open_shop
from tests.kit.threads import Gate, all_at_once, background
from tests.kit.views import phased
from tests.kit.waiting import eventually
from tests.models import Entry

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def shop(serve: Any) -> Shop:
    """Return the shop, which answers at /view/."""
    return open_shop(serve)


def test_a_key_whose_client_has_gone_is_finished_as_its_user(
    shop: Shop, sender: Sender, settings: Settings
) -> None:
    settings.ALLOWED_HOSTS = ["rides.example"]
    settings.LANGUAGES = [("en", "English"), ("de", "German")]
    headers = {"Accept-Language": "de", "Host": "rides.example"}
    assert sender.send("/view/?b=2", body={"c": "ü"}, headers=headers).status_code == 500
    abandon()
    shop.broken = False
    assert complete_once() == CompletePass(finished=1)
    by_client, by_completer = shop.seen
    assert by_completer == by_client
    assert by_client["language"] == django_settings.LANGUAGE_CODE, (
        "without a LocaleMiddleware nobody asked the client for its language"
    )
    assert by_completer["user"] == sender.user.pk
    answer = sender.send("/view/?b=2", body={"c": "ü"}, headers=headers)
    assert (answer.status_code, answer["Idempotent-Replayed"]) == (201, "true")
    assert Entry.objects.count() == 1
    assert translation.get_language() == django_settings.LANGUAGE_CODE


@pytest.mark.parametrize("leave", [SystemExit, CancelledError])
def test_a_view_that_would_end_its_process_ends_neither_the_pass_nor_the_loop(
    leave: type[BaseException], serve: Any, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    runs: list[str] = []

    async def view(request: HttpRequest) -> HttpResponse:
        runs.append(request.idempotency_key.idempotency_key)
        if len(runs) <= 2:
            return HttpResponse(status=503)
        raise leave("on purpose")

    serve(view=idempotent(recovery_points=[])(view))
    for key in ("one", "two"):
        sender.send(key=key)
    abandon()
    assert complete_once() == CompletePass(failed=2)
    assert runs == ["one", "two"] * 2
    assert set(IdempotencyKey.objects.values_list("last_error", "locked_until")) == {
        (f"{leave.__name__}: on purpose", None)
    }
    assert (
        len(
            [
                record
                for record in caplog.records
                if record.name == "idempotency" and record.levelname == "ERROR"
            ]
        )
        == 2
    )


@pytest.mark.parametrize(
    "state",
    [
        # Half a minute before the limits of the test.
        {"created_at": Now() - timedelta(seconds=2970)},
        {"last_run_at": Now() - timedelta(seconds=570)},
        {"next_run_at": Now() + timedelta(seconds=30)},
        {
            "locked_until": Now() + timedelta(seconds=30),
            "claim_token": "8e03978e-40d5-43e8-bc93-6894a57f9324",
        },
        {"stuck_at": Now(), "stuck_code": "view_gave_up", "stuck_reason": "in doubt"},
    ],
)
def test_a_key_that_is_young_busy_or_a_persons_is_left_alone(
    shop: Shop, sender: Sender, settings: Settings, state: dict[str, Any]
) -> None:
    limits = {
        "COMPLETER_MIN_AGE_SECONDS": 3000,
        "COMPLETER_IDLE_SECONDS": 600,
        "LOCK_TIMEOUT_SECONDS": 900,
    }
    settings.IDEMPOTENCY = limits
    sender.send()
    abandon(times=10)
    shop.broken = False
    IdempotencyKey.objects.update(**state)
    assert astuple(complete_once()) == astuple(CompletePass()) == (0, 0, 0)
    assert len(shop.seen) == 1


def test_a_finished_key_and_an_empty_table_are_nothing_to_do(shop: Shop) -> None:
    assert complete_once() == CompletePass()
    IdempotencyKeyFactory(finished=True)
    abandon()
    assert complete_once() == CompletePass()


def test_a_view_that_fails_again_leaves_its_key_where_it_was_and_waits_longer_each_time(
    shop: Shop, sender: Sender
) -> None:
    sender.send()
    waits = []
    for _ in range(3):
        abandon()
        assert complete_once() == CompletePass(failed=1)
        key = IdempotencyKey.objects.get()
        waits.append((key.next_run_at - key.last_run_at).total_seconds())
        assert (key.recovery_point, key.locked_until) == ("entry_created", None)
        assert key.last_error == "OSError: Stripe is down"
    assert all(least <= wait < 2 * least for least, wait in zip((60, 120, 240), waits, strict=True))
    assert key.completer_attempts == 3


def test_after_the_last_attempt_a_key_is_stuck(
    shop: Shop, sender: Sender, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    settings.IDEMPOTENCY = {"COMPLETER_MAX_ATTEMPTS": 2}
    told = []
    receiver = lambda key, request, **kwargs: told.append((key.stuck_code, request))  # noqa: E731
    key_stuck.connect(receiver)
    sender.send()
    for expected in (CompletePass(failed=1), CompletePass(stuck=1), CompletePass()):
        abandon()
        assert complete_once() == expected
    key_stuck.disconnect(receiver)
    assert told == [("attempts_exhausted", None)]
    assert caplog.text.count("attempts_exhausted") == 1
    assert sender.send().status_code == 409
    assert len(shop.seen) == 3


def test_a_missing_user_or_view_or_body_makes_the_key_stuck(
    shop: Shop, sender: Sender, serve: Any
) -> None:
    sender.send()
    for code, change in {
        "body_not_kept": {"request_body": None, "begun": True},
        "view_missing": {"request_path": "/elsewhere/"},
        "user_missing": {"user_id": 999_999},
    }.items():
        IdempotencyKey.objects.update(stuck_at=None, stuck_code="", stuck_reason="")
        before = IdempotencyKey.objects.values(*change).get()
        IdempotencyKey.objects.update(**change)
        abandon()
        assert complete_once() == CompletePass(stuck=1)
        key = IdempotencyKey.objects.get()
        assert (key.stuck_code, key.locked_until) == (code, None)
        IdempotencyKey.objects.update(**before)
    assert len(shop.seen) == 1


@pytest.mark.parametrize("code", StuckCode)
def test_a_late_retry_runs_what_only_the_completer_cannot_run(
    code: str, shop: Shop, sender: Sender
) -> None:
    runs = {
        "unknown_recovery_point",
        "refused_when_rebuilt",
        "view_missing",
        "user_missing",
        "body_not_kept",
        "operation_missing",
        "arguments_changed",
    }
    sender.send()
    shop.broken = False
    IdempotencyKey.objects.update(stuck_code=code, stuck_at=Now(), stuck_reason="reason")
    assert sender.send().status_code == (201 if code in runs else 409)
    assert IdempotencyKey.objects.stuck().exists() == (code not in runs)


def test_a_view_that_lost_its_decorator_is_not_run(shop: Shop, sender: Sender, serve: Any) -> None:
    sender.send()
    abandon()
    ran = []
    serve(view=lambda request: ran.append(1) or HttpResponse("ran unprotected"))
    assert complete_once() == CompletePass(stuck=1)
    assert not ran


def refused_outside(view: Any) -> Any:
    """A decorator that has thought better of it since the client was let through."""

    @wraps(view)
    def decorated(request: HttpRequest) -> HttpResponseBase:
        if rebuilt_run_of(request) is not None:
            return HttpResponse("Slow down.", content_type="text/plain", status=429)
        answer: HttpResponseBase = view(request)
        return answer

    return decorated


def tenant_is_gone(request: HttpRequest, key: IdempotencyKey) -> None:
    raise LookupError("the tenant is gone")


def tenant_is_a_persons(request: HttpRequest, key: IdempotencyKey) -> None:
    raise KeyStuck("Whose tenant is it?")


def test_what_ends_before_the_views_decorator_releases_the_key_and_says_so(
    shop: Shop, sender: Sender, serve: Any, settings: Settings
) -> None:
    serve(view=refused_outside(shop.view))
    sender.send()
    abandon()
    assert complete_once() == CompletePass(failed=1)
    key = IdempotencyKey.objects.get()
    assert (key.locked_until, key.recovery_point, key.history[-1]["event"]) == (
        None,
        "entry_created",
        "error",
    )
    assert key.last_error.endswith("responded with status 429: Slow down.")
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": tenant_is_gone}
    abandon()
    assert complete_once() == CompletePass(failed=1)
    key = IdempotencyKey.objects.get()
    assert (key.locked_until, key.last_error) == (None, "LookupError: the tenant is gone")
    assert len(shop.seen) == 1


def test_a_throttle_of_the_framework_releases_the_key_and_says_so(
    sender: Sender, serve: Any
) -> None:
    class Once(BaseThrottle):
        let_through = [True]

        def allow_request(self, request: Any, view: Any) -> bool:
            return bool(self.let_through and self.let_through.pop())

    class View(APIView):
        throttle_classes = [Once]
        authentication_classes = []
        permission_classes = []

        @idempotent(recovery_points=[])
        def post(self, request: Any) -> HttpResponseBase:
            return HttpResponse(status=503)

    serve(view=View.as_view())
    sender.send()
    abandon()
    assert complete_once() == CompletePass(failed=1)
    key = IdempotencyKey.objects.get()
    assert key.locked_until is None
    assert "status 429" in key.last_error


def test_a_reason_to_ask_a_person_that_is_raised_before_the_view_makes_the_key_stuck(
    shop: Shop, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": tenant_is_a_persons}
    sender.send()
    abandon()
    assert complete_once() == CompletePass(stuck=1)
    key = IdempotencyKey.objects.get()
    assert (key.stuck_code, key.stuck_reason, key.locked_until) == (
        "view_gave_up",
        "Whose tenant is it?",
        None,
    )


class CodeOfItsOwn(KeyStuck):
    """A reason with a code that each test chooses, in the way that is forgotten about: without
    ``super().__init__``."""

    def __init__(self, why: str) -> None:
        self.why = why


@pytest.mark.parametrize(
    ("code", "kept"),
    [
        ("x" * 60, "x" * 50),
        ("", "view_gave_up"),
        (None, "view_gave_up"),
        ("a\0b\ud800", "ab"),
        (" ", "view_gave_up"),
        ("amount_differs", "amount_differs"),
        # A retry of the client would run the view again.
        *((code, "view_gave_up") for code in OPEN_TO_RETRIES),
        ("user_missing \n", "view_gave_up"),
    ],
)
@pytest.mark.parametrize("by_completer", [False, True])
def test_whatever_code_a_view_gives_its_key_reaches_a_person(
    by_completer: bool,
    code: str,
    kept: str,
    sender: Sender,
    serve: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CodeOfItsOwn, "code", code)
    errors = [CodeOfItsOwn("5 against 500")] + [OSError("down")] * by_completer

    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponseBase:
        raise errors.pop()

    serve(view=view)
    assert sender.send().status_code == (500 if by_completer else 409)
    if by_completer:
        abandon()
        assert complete_once() == CompletePass(stuck=1)
    key = IdempotencyKey.objects.stuck().get()
    assert (key.stuck_code, key.stuck_reason, key.locked_until) == (kept, "5 against 500", None)
    assert problem(sender.send())["code"] == "key_stuck"


class WithoutReason(KeyStuck):
    """A reason that cannot be made."""

    code = "call_in_doubt"

    @property
    def reason(self) -> str:  # type: ignore[override]
        raise AttributeError("no such user")


class WithoutCode(KeyStuck):
    """A code that cannot be made."""

    @property
    def code(self) -> str:  # type: ignore[override]
        raise AttributeError("no such code")


def test_a_key_becomes_stuck_although_its_code_cannot_be_made(sender: Sender, serve: Any) -> None:
    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponseBase:
        raise WithoutCode("Look.")

    serve(view=view)
    assert problem(sender.send())["code"] == "key_stuck"
    key = IdempotencyKey.objects.get()
    assert (key.stuck_code, key.stuck_reason) == ("view_gave_up", "Look.")


def give_up_without_reason(request: HttpRequest, key: IdempotencyKey) -> None:
    raise WithoutReason("Look.")


@pytest.mark.parametrize("by_completer", [False, True])
def test_a_key_becomes_stuck_although_its_reason_cannot_be_made(
    by_completer: bool, shop: Shop, sender: Sender, serve: Any, settings: Settings
) -> None:
    if by_completer:
        sender.send()
        settings.IDEMPOTENCY = {"PREPARE_REQUEST": give_up_without_reason}
        abandon()
        assert complete_once() == CompletePass(stuck=1)
    else:
        serve(
            view=idempotent(recovery_points=[])(
                lambda request: give_up_without_reason(request, request.idempotency_key)
            )
        )
        assert sender.send().status_code == 409
    key = IdempotencyKey.objects.get()
    assert (key.stuck_code, key.stuck_reason, key.locked_until) == (
        "call_in_doubt",
        "WithoutReason: Look.",
        None,
    )


def test_a_key_whose_last_run_did_not_come_back_is_given_up_without_another(
    sender: Sender, serve: Any, settings: Settings
) -> None:
    """It may have killed its process, and could not mark the key."""
    settings.IDEMPOTENCY = {"COMPLETER_MAX_ATTEMPTS": 2}
    runs: list[HttpRequest] = []

    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponseBase:
        runs.append(request)
        return HttpResponse(status=503)

    serve(view=view)
    assert sender.send().status_code == 503
    abandon()
    IdempotencyKey.objects.update(completer_attempts=2)
    assert complete_once() == CompletePass(stuck=1)
    assert len(runs) == 1


@pytest.mark.postgres
def test_a_database_that_takes_no_writes_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, transactional_db: None
) -> None:
    connection.close()
    monkeypatch.setitem(connection.settings_dict, "HOST", "127.0.0.1")
    monkeypatch.setitem(connection.settings_dict, "PORT", free_port())
    assert not accepts_writes("default")
    monkeypatch.undo()
    assert accepts_writes("default")
    with connection.cursor() as cursor:
        cursor.execute("SET default_transaction_read_only = on")
    assert not accepts_writes("default")
    connection.close()


def test_a_key_that_another_run_has_taken_is_not_given_up(transactional_db: None) -> None:
    """The other run takes it after the batch was read."""
    for scope in ("first", "second"):
        IdempotencyKeyFactory(scope=scope, completer_attempts=99, request_path="/view/")
    abandon()
    asked: list[int] = []

    def take_second() -> bool:
        asked.append(1)
        if len(asked) == 2:
            IdempotencyKey.objects.filter(stuck_at=None).update(
                claim_token=uuid4(), locked_until=lock_end()
            )
        return False

    assert complete_once(stop=take_second) == CompletePass(stuck=1)
    assert IdempotencyKey.objects.stuck().count() == 1
    IdempotencyKey.objects.update(locked_until=None)
    assert complete_once() == CompletePass(stuck=1)


def test_a_key_that_cannot_be_claimed_is_tried_once_in_a_pass(
    shop: Shop, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another claim may have won under a high level of isolation, and its run may be over."""
    claimed: list[int] = []
    sender.send()
    abandon()
    monkeypatch.setattr(claims, "claim_by_id", lambda pk, **options: claimed.append(pk))
    assert complete_once(stop=lambda: len(claimed) > 1) == CompletePass()
    assert len(claimed) == 1


def test_a_key_that_a_person_completes_waits_as_long_as_at_first_when_it_fails(
    shop: Shop, sender: Sender
) -> None:
    sender.send()
    assert complete_key(IdempotencyKey.objects.get().pk) == "failed"
    key = IdempotencyKey.objects.get()
    assert 60 <= (key.next_run_at - key.last_run_at).total_seconds() < 90


@pytest.mark.postgres
def without_autocommit() -> Iterator[None]:
    transaction.set_autocommit(False)
    try:
        yield
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


@pytest.mark.parametrize("block", [transaction.atomic, contextmanager(without_autocommit)])
def test_no_key_is_run_where_its_work_could_not_be_committed(
    shop: Shop, sender: Sender, block: Any
) -> None:
    shop.broken = True
    assert sender.send().status_code == 500
    abandon()
    shop.broken = False
    key = IdempotencyKey.objects.get()
    for run in (complete_once, partial(complete_key, key.pk)):
        with pytest.raises(RuntimeError), block():
            run()
    key.refresh_from_db()
    assert (key.completer_attempts, key.finished_at) == (0, None)


def test_a_key_that_a_second_attempt_of_a_run_made_stuck_is_counted_as_stuck(
    sender: Sender, serve: Any
) -> None:
    """A second attempt reads the key again, into another object."""
    errors = [CodeOfItsOwn("5 against 500"), None, OSError("down")]

    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponseBase:
        error = errors.pop()
        if error is None:
            raise OperationalError from SerializationFailure()
        raise error

    serve(view=view)
    assert sender.send().status_code == 500
    abandon()
    assert complete_once() == CompletePass(stuck=1)
    assert not errors


def test_a_reason_of_a_subclass_is_told_whatever_it_is(sender: Sender, serve: Any) -> None:
    class Differs(KeyStuck):
        def __init__(self, **amounts: int) -> None:
            self.reason = amounts

    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponseBase:
        raise Differs(ours=5, theirs=500)

    serve(view=view)
    assert sender.send().status_code == 409
    assert IdempotencyKey.objects.stuck().get().stuck_reason == "{'ours': 5, 'theirs': 500}"


def test_a_key_that_is_abandoned_during_a_pass_does_not_wait_for_its_end(
    serve: Any, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"COMPLETER_MIN_AGE_SECONDS": 1, "COMPLETER_IDLE_SECONDS": 1}
    scopes: list[str] = []
    values: dict[str, Any] = {
        "request_path": "/view/",
        "user": UserFactory(),
        "created_at": ago(hours=2),
    }

    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for _ in key.phases():
            scopes.append(key.scope)
            if len(scopes) == 1:
                IdempotencyKeyFactory(
                    scope="late", last_run_at=Now() - timedelta(seconds=1), **values
                )
            with atomic_phase(key) as phase:
                phase.set_response(HttpResponse(status=201))
        return key.response()

    serve(view=idempotent(recovery_points=[])(view))
    for _ in range(15):
        IdempotencyKeyFactory(scope="backlog", last_run_at=ago(hours=1), **values)
    assert complete_once(batch_size=10) == CompletePass(finished=16)
    assert scopes.index("late") < 15


def test_a_point_of_another_deploy_is_marked_and_finished_by_code_that_knows_it(
    shop: Shop, sender: Sender
) -> None:
    sender.send()
    IdempotencyKey.objects.update(recovery_point="point_of_next_deploy")
    abandon()
    assert complete_once() == CompletePass(stuck=1)
    assert IdempotencyKey.objects.stuck().get().stuck_code == "unknown_recovery_point"
    IdempotencyKey.objects.update(recovery_point="entry_created")
    abandon()
    shop.broken = False
    assert complete_once() == CompletePass(finished=1)
    assert not IdempotencyKey.objects.stuck().exists()


def test_one_failing_key_does_not_keep_the_others_waiting(
    shop: Shop, sender: Sender, serve: Any
) -> None:
    sender.send(key="bad")
    good = Shop()
    serve(view=shop.view, good=good.view)
    sender.send("/good/", key="good")
    good.broken = False
    abandon()
    assert complete_once(batch_size=1) == CompletePass(finished=1, failed=1)


@pytest.mark.postgres
def test_a_view_whose_other_database_is_down_stops_no_other_key(serve: Any, sender: Sender) -> None:
    from django.db.utils import ConnectionHandler

    down = ConnectionHandler(
        {"default": connection.settings_dict | {"HOST": "127.0.0.1", "PORT": "1", "OPTIONS": {}}}
    )
    broken = [1]

    def asks_elsewhere(request: HttpRequest) -> HttpResponse:
        if broken:
            raise OSError("not yet")
        down["default"].cursor()
        return HttpResponse(status=201)

    def healthy(request: HttpRequest) -> HttpResponse:
        if broken:
            raise OSError("not yet")
        return HttpResponse(status=201)

    serve(view=phased(asks_elsewhere), healthy=phased(healthy))
    for number in range(3):
        sender.send(key=f"bad-{number}")
    sender.send("/healthy/", key="good")
    broken.clear()
    abandon()
    assert complete_once() == CompletePass(finished=1, failed=3)
    assert IdempotencyKey.objects.get(idempotency_key="good").response_code == 201


def test_failing_keys_of_one_scope_do_not_hold_up_another_scope(shop: Shop, sender: Sender) -> None:
    other = Sender()
    for number in range(20):
        sender.send(key=f"key-{number}")
    other.send()
    abandon()
    shop.seen.clear()
    assert complete_once() == CompletePass(failed=21)
    assert other.user.pk in [run["user"] for run in shop.seen[:2]]


def test_a_scope_whose_key_is_due_later_does_not_wait_for_all_keys_of_another(
    shop: Shop, sender: Sender
) -> None:
    other = Sender()
    for number in range(30):
        sender.send(key=f"key-{number}")
    other.send()
    abandon()
    not_yet = IdempotencyKey.objects.filter(scope=f"user:{other.user.pk}")
    not_yet.update(next_run_at=Now() + timedelta(hours=1))
    shop.seen.clear()
    stops = iter(range(100))

    def becomes_due() -> bool:
        if next(stops) == 1:
            not_yet.update(next_run_at=None)
        return False

    assert complete_once(stop=becomes_due) == CompletePass(failed=31)
    assert other.user.pk in [run["user"] for run in shop.seen[:12]]


def test_a_pass_takes_each_key_once_although_it_is_due_again(
    shop: Shop, sender: Sender, settings: Settings
) -> None:
    """Else a pass over keys that fail would not end; nor over those of a deploy, which are not
    claimed."""
    for number in range(4):
        sender.send(key=f"key-{number}")
    of_deploy = IdempotencyKey.objects.filter(idempotency_key="key-0")
    of_deploy.update(
        recovery_point="later",
        stuck_at=Now(),
        stuck_code="unknown_recovery_point",
        stuck_reason="a deploy",
    )
    abandon()
    settings.IDEMPOTENCY = {"COMPLETER_IDLE_SECONDS": 1}
    asked = []

    def let_the_first_be_due_again() -> bool:
        asked.append(True)
        if len(asked) == 3:
            (first,) = IdempotencyKey.objects.filter(completer_attempts=1)
            IdempotencyKey.objects.filter(pk=first.pk).update(next_run_at=None)
            eventually(lambda: IdempotencyKey.objects.abandoned().filter(pk=first.pk).exists())
        return len(asked) > 10

    assert complete_once(batch_size=1, stop=let_the_first_be_due_again) == CompletePass(failed=3)
    assert len(asked) == 5


def test_a_pass_ends_although_keys_become_due_all_the_time(
    shop: Shop, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"COMPLETER_MIN_AGE_SECONDS": 1, "COMPLETER_IDLE_SECONDS": 1}
    values: dict[str, Any] = {
        "request_path": "/nowhere/",
        "user": UserFactory(),
        "created_at": ago(hours=2),
    }
    asked = []

    def abandon_another() -> bool:
        asked.append(True)
        if len(asked) > 1:
            IdempotencyKeyFactory(
                scope=f"late-{len(asked)}", last_run_at=Now() - timedelta(seconds=1), **values
            )
        return len(asked) > 20

    IdempotencyKeyFactory(scope="first", last_run_at=ago(hours=1), **values)
    complete_once(batch_size=1, stop=abandon_another)
    assert len(asked) == 2


def test_a_key_that_failed_waits_its_turn_in_a_pass_over_another_scope(
    serve: Any, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"COMPLETER_MIN_AGE_SECONDS": 1, "COMPLETER_IDLE_SECONDS": 1}
    scopes: list[str] = []
    values: dict[str, Any] = {
        "request_path": "/view/",
        "user": UserFactory(),
        "created_at": ago(hours=2),
    }

    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        scopes.append(key.scope)
        if len(scopes) == 1:
            once_failed.update(next_run_at=Now(), last_run_at=Now() - timedelta(seconds=1))
        raise ConnectionError("the provider is down")

    serve(view=idempotent(recovery_points=[])(view))
    for _ in range(15):
        IdempotencyKeyFactory(scope="backlog", last_run_at=ago(hours=1), **values)
    failed = IdempotencyKeyFactory(
        scope="other", completer_attempts=1, next_run_at=Now() + timedelta(hours=1), **values
    )
    once_failed = IdempotencyKey.objects.filter(pk=failed.pk)
    complete_once(batch_size=2)
    assert scopes.index("other") < 15


def test_a_dry_run_changes_nothing(shop: Shop, sender: Sender) -> None:
    sender.send()
    abandon()
    before = IdempotencyKey.objects.values().get()
    assert complete_once(dry_run=True) == CompletePass(finished=1)
    assert IdempotencyKey.objects.values().get() == before


@pytest.mark.postgres
def test_completers_at_once_run_each_key_once(shop: Shop, sender: Sender) -> None:
    for number in range(10):
        sender.send(key=f"key-{number}")
    abandon()
    shop.broken = False
    shop.seen.clear()
    passes = all_at_once(lambda number: complete_once(), 4)
    assert sum(one.finished for one in passes) == 10
    # A view may run twice for one claim, after a serialization failure.
    assert set(IdempotencyKey.objects.values_list("attempts", flat=True)) == {2}


@pytest.mark.postgres
def test_a_run_that_meets_a_serialization_failure_is_made_again_with_the_whole_request(
    shop: Shop, sender: Sender
) -> None:
    sender.send(body={"a": 1})
    abandon()
    failures = iter(["DO $$ BEGIN RAISE SQLSTATE '40001'; END $$"])

    class Failure(Gate):
        def wait_here(self) -> None:
            for statement in failures:
                with connection.cursor() as cursor:
                    cursor.execute(statement)

    shop.broken, shop.gate = False, Failure()
    assert complete_once() == CompletePass(finished=1)
    assert [run["body"] for run in shop.seen] == [{"a": 1}] * 3


@pytest.mark.postgres
def test_several_keys_run_at_once_and_their_counts_are_summed(shop: Shop, sender: Sender) -> None:
    for number in range(3):
        sender.send(key=f"key-{number}")
    sender.send("/view/?later", key="later")
    abandon()
    shop.broken, shop.gate = False, Gate()
    with background(lambda: complete_once(concurrency=2, batch_size=1)) as run:
        shop.gate.wait_until_reached()
        eventually(lambda: IdempotencyKey.objects.finished().count() == 3)
        assert not run.done(), "the first key holds up its own thread alone"
        shop.gate.open()
    assert run.result() == CompletePass(finished=4)
    assert len(shop.seen) == 8


@pytest.mark.postgres
def test_threads_stop_between_keys_and_leave_no_connection(
    shop: Shop, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", None)
    for number in range(6):
        sender.send(key=f"key-{number}")
    abandon()
    shop.broken = False
    opened: list[Any] = []
    connection_created.connect(note := lambda connection, **kwargs: opened.append(connection))
    try:
        assert complete_once(concurrency=3, stop=lambda: len(shop.seen) > 6).finished <= 4
    finally:
        connection_created.disconnect(note)
    assert opened
    assert not [each for each in opened if each.connection is not None]
    assert IdempotencyKey.objects.unfinished().count() >= 2
    with connection.cursor() as cursor:
        others = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <>"
            " pg_backend_pid()"
        )

        def alone() -> bool:
            cursor.execute(others + " AND backend_type = 'client backend'")
            return cursor.fetchone() == (0,)

        eventually(alone)


@pytest.mark.postgres
def test_a_client_that_comes_back_while_the_completer_is_at_work_is_sent_round(
    shop: Shop, sender: Sender
) -> None:
    sender.send()
    abandon()
    shop.broken, shop.gate = False, Gate()
    with background(complete_once):
        shop.gate.wait_until_reached()
        assert sender.send().status_code == 409
        shop.gate.open()
    assert sender.send().status_code == 201


@pytest.mark.postgres
def test_a_run_of_the_completer_that_lost_its_key_replays_it_to_nobody(
    shop: Shop, sender: Sender
) -> None:
    sender.send()
    abandon()
    heard: list[Any] = []

    def hear(request: HttpRequest | None, **kwargs: Any) -> None:
        heard.append(request)

    shop.broken, shop.gate = False, (gate := Gate())
    with background(complete_once) as completer:
        gate.wait_until_reached()
        IdempotencyKey.objects.update(locked_until=None)
        shop.gate = None
        assert sender.send().status_code == 201
        key_replayed.connect(hear)
        key_conflict.connect(hear)
        gate.open()
    key_replayed.disconnect(hear)
    key_conflict.disconnect(hear)
    assert completer.result() == CompletePass(finished=1)
    assert heard == []


@pytest.mark.postgres
def test_a_run_of_the_completer_that_lost_its_key_counts_it_as_the_other_run_left_it(
    shop: Shop, sender: Sender
) -> None:
    sender.send()
    abandon()
    shop.broken, shop.gate = False, Gate()
    with background(complete_once) as completer:
        shop.gate.wait_until_reached()
        IdempotencyKey.objects.update(
            **{"claim_token": uuid4(), "locked_until": None},
            **{"stuck_at": Now(), "stuck_code": "by_hand", "stuck_reason": "Ask the bank."},
        )
        shop.gate.open()
    assert completer.result() == CompletePass(stuck=1)


def test_an_exception_that_became_a_response_is_described_by_the_response(
    serve: Any, sender: Sender
) -> None:
    statuses = iter([503])

    def view(request: HttpRequest) -> HttpResponse:
        for status in statuses:
            return HttpResponse(status=status)
        raise Http404("There is no such ride.")

    serve(view=idempotent(recovery_points=[])(view))
    sender.send()
    abandon()
    assert complete_once() == CompletePass(failed=1)
    assert IdempotencyKey.objects.get().last_error.startswith("The view responded with status 404")


@pytest.mark.postgres
def test_the_abandoned_are_found_through_the_partial_index(db: None) -> None:
    IdempotencyKeyFactory.create_batch(300, finished=True)
    with connection.cursor() as cursor:
        cursor.execute(f"ANALYZE {IdempotencyKey._meta.db_table}")
    assert "idempotency_key_unfinished" in IdempotencyKey.objects.abandoned().explain()
