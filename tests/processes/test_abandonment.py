"""What nobody could finish is settled once by the view's ``on_abandon``, or handed to a person."""

from asyncio import CancelledError
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
from django.conf.urls.i18n import i18n_patterns
from django.db import OperationalError, connection, connections, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.urls import path
from django.utils import translation
from pytest_django import Settings

from idempotency import interventions
from idempotency._abandonment import settle
from idempotency._engine import claims
from idempotency.completer import complete_once
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from idempotency.reaper import reap_once
from tests.kit.ageing import make_older, past_the_retention
from tests.kit.outages import cut_this_connection
from tests.kit.serving import Sender
from tests.kit.threads import all_at_once
from tests.kit.views import over_key
from tests.models import Entry

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def abandoned(serve: Any, sender: Sender) -> Callable[..., IdempotencyKey]:
    """Return a function that leaves a key unfinished for 73 hours behind a view with this
    ``on_abandon``."""

    def leave(on_abandon: Any = None) -> IdempotencyKey:
        @idempotent(recovery_points=["charged"], on_abandon=on_abandon)
        def view(request: HttpRequest) -> HttpResponseBase:
            return HttpResponse(status=503)

        serve(view=view)
        sender.send()
        past_the_retention()
        return IdempotencyKey.objects.get()

    return leave


def test_its_response_finishes_the_key(
    abandoned: Any, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    refunds: list[str] = []

    def refund(key: IdempotencyKey) -> HttpResponseBase:
        assert not connection.in_atomic_block
        refunds.append(key.derive("refund"))
        return JsonResponse({"refunded": key.recovery_point}, status=410)

    key = abandoned(refund)
    assert settle(key.pk, using="default") is True
    assert settle(key.pk, using="default") is None
    assert "is stuck" not in caplog.text, "nobody is called to what was settled"
    answer = sender.send()
    assert (answer.status_code, answer.json()) == (410, {"refunded": "started"})
    assert len(refunds) == 1
    key.refresh_from_db()
    assert (key.stuck_at, key.locked_until) == (None, None)
    claimed = [event["detail"] for event in key.history if event["event"] == "claimed"]
    assert claimed[-1] == "reaper", "who reads it at night knows which process ran it"


@pytest.mark.postgres
def test_its_response_is_stored_on_a_new_connection_if_a_long_call_has_lost_its_own(
    abandoned: Any, sender: Sender
) -> None:
    def refund(key: IdempotencyKey) -> HttpResponseBase:
        # As with CONN_MAX_AGE=None, without CONN_HEALTH_CHECKS.
        connection.close_at, connection.health_check_enabled = None, False
        with key.call("refund"):
            cut_this_connection()
        return HttpResponse(status=410)

    assert settle(abandoned(refund).pk, using="default") is True
    assert sender.send().status_code == 410


@pytest.mark.postgres
@pytest.mark.parametrize("at_most_once", [True, False])
def test_its_next_call_opens_a_new_connection_after_a_loss(
    at_most_once: bool, abandoned: Any, sender: Sender
) -> None:
    """It would not run again."""

    def refund(key: IdempotencyKey) -> HttpResponseBase:
        with key.call("refund"):
            cut_this_connection()
        with key.call("message", at_most_once=at_most_once) as call:
            if at_most_once:
                cut_this_connection()
                call.record("sent")
        with key.call("another message"):
            pass
        return HttpResponse(status=410)

    assert settle(abandoned(refund).pk, using="default") is True
    assert sender.send().status_code == 410


@pytest.mark.parametrize("settles", [True, False])
def test_a_key_that_a_run_has_taken_meanwhile_is_left_alone(abandoned: Any, settles: bool) -> None:
    key = abandoned((lambda key: HttpResponse(status=410)) if settles else None)
    assert claims.claim_by_id(key.pk, delay_seconds=0, using="default")
    assert settle(key.pk, using="default") is None
    key.refresh_from_db()
    assert (key.stuck_at, key.finished_at) == (None, None)


def test_it_may_be_a_coroutine_function(abandoned: Any, sender: Sender) -> None:
    async def refund(key: IdempotencyKey) -> HttpResponseBase:
        return JsonResponse({"refunded": key.recovery_point}, status=410)

    assert settle(abandoned(refund).pk, using="default") is True
    assert sender.send().json() == {"refunded": "started"}


def test_it_is_found_below_i18n_patterns(sender: Sender, settings: Settings) -> None:
    @idempotent(recovery_points=[], on_abandon=lambda key: HttpResponse(status=410))
    def view(request: HttpRequest) -> HttpResponseBase:
        return HttpResponse(status=503)

    settings.LANGUAGES = [("en", "English"), ("de", "German")]
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.middleware.locale.LocaleMiddleware"]
    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": i18n_patterns(path("view/", view))})
    sender.send("/de/view/")
    translation.activate("en")
    assert settle(IdempotencyKey.objects.get().pk, using="default") is True
    assert sender.send("/de/view/").status_code == 410
    translation.activate(settings.LANGUAGE_CODE)


@pytest.mark.postgres
def test_on_abandon_of_a_path_with_an_accent(sender: Sender, settings: Settings) -> None:
    def view(request: HttpRequest) -> HttpResponseBase:
        raise OSError("down")

    protected = idempotent(
        recovery_points=["unused"], on_abandon=lambda key: HttpResponse(status=410)
    )(view)
    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": [path("café/", protected)]})
    assert sender.send("/café/").status_code == 500
    make_older(80 * 3600, "created_at", "last_run_at")
    reap_once()
    assert IdempotencyKey.objects.get().response_code == 410


def test_without_one_a_person_hears_of_it(abandoned: Any, sender: Sender) -> None:
    key = abandoned()
    assert settle(key.pk, using="default") is False
    key.refresh_from_db()
    assert key.stuck_code == "retention_passed"
    assert "72 hours" in key.stuck_reason
    assert sender.send().status_code == 409


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (OSError("Stripe is down"), "OSError: Stripe is down"),
        (CancelledError("by its event loop"), "CancelledError: by its event loop"),
        (SystemExit(1), "SystemExit: 1"),
        (HttpResponse(status=503), "status 503"),
        (None, "it returned NoneType, not a response"),
    ],
    ids=["raises", "is cancelled", "exits", "503", "nothing"],
)
def test_one_that_fails_leaves_the_key_to_a_person(abandoned: Any, answer: Any, said: str) -> None:
    calls: list[int] = []

    def on_abandon(key: IdempotencyKey) -> HttpResponseBase:
        calls.append(1)
        if isinstance(answer, BaseException):
            raise answer
        found: HttpResponse = answer
        return found

    key = abandoned(on_abandon)
    assert [settle(key.pk, using="default") for _ in range(2)] == [False, None]
    assert len(calls) == 1
    key.refresh_from_db()
    assert key.stuck_code == "on_abandon"
    assert said in key.stuck_reason


@pytest.mark.parametrize("in_call", [False, True])
def test_one_that_leaves_a_transaction_open_leaves_the_key_to_a_person(
    in_call: bool, abandoned: Any
) -> None:
    """Its writes are rolled back, so its response would be wrong."""

    def on_abandon(key: IdempotencyKey) -> HttpResponseBase:
        with key.call("refund", at_most_once=True) if in_call else nullcontext() as call:
            with connection.cursor() as cursor:
                cursor.execute("BEGIN")
            Entry.objects.create(name="refunded")
            if in_call:
                call.record("refunded")
        return HttpResponse(status=410)

    key = abandoned(on_abandon)
    assert settle(key.pk, using="default") is False
    key.refresh_from_db()
    assert (key.stuck_code, key.finished_at) == ("on_abandon", None)
    said = "left it open" if in_call else "a transaction open on 'default', which was rolled back"
    assert said in key.stuck_reason
    assert not Entry.objects.exists()


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
def test_a_lost_connection_is_no_open_transaction(abandoned: Any) -> None:
    def on_abandon(key: IdempotencyKey) -> HttpResponseBase:
        cut_this_connection("shard_b")
        with suppress(OperationalError):
            Entry.objects.using("shard_b").exists()
        return HttpResponse(status=410)

    key = abandoned(on_abandon)
    connections["shard_b"].ensure_connection()
    assert settle(key.pk, using="default") is True


def begin(request: Any, key: Any) -> None:
    """Leave a transaction open, as PREPARE_REQUEST."""
    connection.cursor().execute("BEGIN")


def hand_back(request: Any, key: Any) -> None:
    """Hand the key back, as an operator does while PREPARE_REQUEST runs."""
    current = IdempotencyKey.objects.get(pk=key.pk)
    assert interventions.hand_back(current.pk, current.claim_token, by="jane")


@contextmanager
def in_transaction(request: Any, key: Any) -> Iterator[None]:
    with transaction.atomic():
        yield


@pytest.mark.parametrize("prepare", [begin, in_transaction])
def test_a_key_whose_environment_leaves_a_transaction_open_is_left_to_a_person(
    prepare: Any, abandoned: Any, settings: Settings
) -> None:
    """The reaper would try in each pass, and the completer would wait for the reaper."""
    calls: list[int] = []
    key = abandoned(lambda key: calls.append(1) or HttpResponse(status=410))
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": prepare, "COMPLETER_MAX_ATTEMPTS": 1}
    IdempotencyKey.objects.update(begun=True, locked_until=None, next_run_at=None)
    assert complete_once().stuck == 1
    key.refresh_from_db()
    assert (key.stuck_code, key.locked_until) == ("attempts_exhausted", None)
    assert "open" in key.stuck_reason or "inside a transaction" in key.stuck_reason
    assert not calls


@pytest.mark.parametrize("prepare", [begin, hand_back])
def test_it_does_not_run_in_a_transaction_or_for_a_key_that_was_handed_back(
    prepare: Any, abandoned: Any, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """The rollback would forget that it was begun, so it would run again in each pass."""
    calls: list[int] = []
    abandoned(lambda key: calls.append(1) or HttpResponse(status=410))
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": prepare}
    assert reap_once() == reap_once()
    assert not calls
    key = IdempotencyKey.objects.get()
    assert (key.stuck_at, key.finished_at) == (None, None)
    assert ("did not open is open on 'default'" in caplog.text) == (prepare is begin)
    settings.IDEMPOTENCY = {}
    IdempotencyKey.objects.update(handed_back_at=None)
    assert reap_once().settled == 1
    assert calls == [1]


def test_a_death_in_the_middle_leaves_the_key_to_a_person(abandoned: Any) -> None:
    def die(key: IdempotencyKey) -> HttpResponseBase:
        raise KeyboardInterrupt  # nothing of this app catches it, as nothing would a death

    key = abandoned(die)
    with pytest.raises(KeyboardInterrupt):
        settle(key.pk, using="default")
    key.refresh_from_db()
    assert key.stuck_code == "on_abandon"
    assert settle(key.pk, using="default") is None


@pytest.mark.postgres
def test_of_several_processes_one_settles_it(abandoned: Any) -> None:
    calls: list[int] = []

    def on_abandon(key: IdempotencyKey) -> HttpResponseBase:
        calls.append(1)
        return HttpResponse(status=410)

    key = abandoned(on_abandon)
    assert sorted(all_at_once(lambda number: settle(key.pk, using="default"), 4), key=str) == [
        None,
        None,
        None,
        True,
    ]
    assert len(calls) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_person_who_answers_while_it_runs_has_the_last_word(
    fails: bool, abandoned: Any, sender: Sender
) -> None:
    def refund(key: IdempotencyKey) -> HttpResponseBase:
        seen = IdempotencyKey.objects.get().claim_token
        assert interventions.answer(
            key.pk, seen, JsonResponse({"by": "a person"}, status=410), by="ann"
        )
        if fails:
            raise RuntimeError("too late")
        return HttpResponse("late")

    key = abandoned(refund)
    assert settle(key.pk, using="default") is None
    assert sender.send().json() == {"by": "a person"}


def test_a_call_in_doubt_is_not_settled_without_a_person(serve: Any, sender: Sender) -> None:
    paid_out: list[int] = []

    def pay_out(key: IdempotencyKey) -> None:
        with key.call("pay out", at_most_once=True) as call:
            if call.due:
                paid_out.append(2000)
                raise OSError  # the line broke before the answer

    def cancel(key: IdempotencyKey) -> HttpResponseBase:
        return JsonResponse({"cancelled": "nothing was paid out"}, status=410)

    serve(view=over_key(pay_out, on_abandon=cancel))
    sender.send()
    make_older(73 * 3600, "created_at", "last_run_at")
    reap_once()

    assert paid_out == [2000]
    assert sender.send().status_code == 409


def test_on_abandon_settles_what_the_completer_gave_up(
    serve: Any, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"RETENTION_HOURS": 168}

    def down(key: IdempotencyKey) -> None:
        raise OSError

    serve(view=over_key(down, on_abandon=lambda key: JsonResponse({}, status=410)))
    sender.send()
    for _ in range(26):
        make_older(5 * 3600, "created_at", "last_run_at", "next_run_at")
        complete_once()
    make_older(168 * 3600, "created_at")
    reap_once()

    assert sender.send().status_code == 410
