"""``not_stored(response, keep_writes=True)``: the writes are committed, and the key is free for the
next request."""

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib import messages
from django.db import connections, transaction
from django.db.models import F
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.test import RequestFactory, TestCase
from rest_framework.exceptions import APIException
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency.completer import CompletePass, complete_once
from idempotency.decorators import idempotent
from idempotency.exceptions import ResponseNotCommitted
from idempotency.http import not_stored
from idempotency.jobs import stage_job
from idempotency.models import IdempotencyKey, StagedJob
from idempotency.phases import atomic_phase
from idempotency.reaper import reap_once
from tests.kit.ageing import abandon, past_the_retention
from tests.kit.serving import Sender, another_client
from tests.kit.threads import Gate, background
from tests.kit.views import Counted, create, phased_outside, plain
from tests.models import Account, Entry

Serve = Callable[..., None]


def count_attempt(status: int = 403, **marks: Any) -> HttpResponse:
    """Count a wrong PIN, and refuse it."""
    Account.objects.update_or_create(
        name="wrong PINs", defaults={"balance": F("balance") + 1}, create_defaults={"balance": 1}
    )
    response = HttpResponse("wrong PIN", status=status)
    return not_stored(response, **marks) if marks else response


def attempts() -> int:
    """Return how many wrong PINs were counted."""
    return sum(Account.objects.values_list("balance", flat=True))


@pytest.mark.parametrize("status", [403, 429])
def test_a_response_that_is_not_stored_undoes_the_count(
    status: int, serve: Serve, sender: Sender
) -> None:
    serve(view=plain(lambda request: count_attempt(status)))
    assert [sender.send().status_code for _ in range(3)] == [status] * 3
    assert attempts() == 0


@pytest.mark.parametrize("status", [202, 402, 403, 409, 429, 500, 503])
@pytest.mark.parametrize("isolation", [None, "serializable"])
def test_the_count_is_kept_and_each_retry_runs(
    status: int, isolation: Any, serve: Serve, sender: Sender
) -> None:
    serve(
        view=plain(
            work := Counted(lambda request: count_attempt(status, keep_writes=True)),
            isolation=isolation,
        )
    )
    responses = [sender.send() for _ in range(3)]
    assert [response.status_code for response in responses] == [status] * 3
    assert not any("Idempotent-Replayed" in response for response in responses)
    assert (attempts(), work.runs) == (3, 3)
    assert not IdempotencyKey.objects.in_flight().exists()


def test_the_right_pin_is_stored_under_the_same_key(serve: Serve, sender: Sender) -> None:
    answers = iter([lambda request: count_attempt(keep_writes=True), create])
    serve(view=plain(lambda request: next(answers)(request)))
    assert [sender.send().status_code for _ in range(3)] == [403, 201, 201]
    assert (attempts(), Entry.objects.count()) == (1, 1)


def test_another_request_may_use_the_key(serve: Serve, sender: Sender) -> None:
    """The client may correct the PIN, as after a 4xx that claims no key."""
    serve(view=plain(lambda request: count_attempt(keep_writes=True)))
    assert [sender.send(body={"pin": pin}).status_code for pin in range(3)] == [403] * 3
    assert attempts() == 3


def test_rows_that_refer_to_the_key_are_kept_until_its_row_is_deleted(
    serve: Serve, sender: Sender
) -> None:
    serve(view=plain(lambda request: not_stored(create(request), keep_writes=True)))
    assert [sender.send().status_code for _ in range(2)] == [201, 201]
    keys = IdempotencyKey.objects.order_by("pk")
    assert [entry.idempotency_key_id for entry in Entry.objects.order_by("pk")] == [
        key.pk for key in keys
    ]
    assert [(key.response_code, key.response_body, key.stuck_at) for key in keys] == [
        (201, None, None)
    ] * 2
    past_the_retention()
    assert reap_once().deleted == 2
    assert [entry.idempotency_key_id for entry in Entry.objects.all()] == [None, None]


def test_jobs_hooks_session_and_messages_are_kept(serve: Serve, sender: Sender) -> None:
    hooks = []

    def work(request: HttpRequest) -> HttpResponse:
        stage_job("rides_demo.jobs.send_ride_receipt", {"ride_id": 1})
        transaction.on_commit(lambda: hooks.append(1))
        request.session["pins"] = request.session.get("pins", 0) + 1
        messages.info(request, "wrong PIN")
        return count_attempt(keep_writes=True)

    serve(view=plain(work))
    for number in (1, 2):
        assert sender.send().status_code == 403
        assert (StagedJob.objects.count(), len(hooks), sender.client.session["pins"]) == (
            number,
            number,
            number,
        )


@pytest.mark.postgres
def test_a_duplicate_is_refused_while_the_first_runs(serve: Serve, sender: Sender) -> None:
    gate = Gate()

    def work(request: HttpRequest) -> HttpResponse:
        response = count_attempt(keep_writes=True)
        gate.wait_here()
        return response

    serve(view=plain(work))
    second = another_client(sender)
    with background(sender.send) as first:
        gate.wait_until_reached()
        refused = second.send()
        gate.open()
    assert (refused.status_code, refused.json()["code"]) == (409, "key_in_use")
    assert (first.result().status_code, attempts()) == (403, 1)
    assert (second.send().status_code, attempts()) == (403, 2)


@pytest.mark.postgres
def test_a_waiting_duplicate_runs_after_the_first(serve: Serve, sender: Sender) -> None:
    gate = Gate()

    def work(request: HttpRequest) -> HttpResponse:
        response = count_attempt(keep_writes=True)
        gate.wait_here()
        return response

    serve(view=plain(work, wait_seconds=20))
    second = another_client(sender)
    with background(sender.send) as first:
        gate.wait_until_reached()
        with background(second.send) as waiting:
            gate.open()
    assert (first.result().status_code, waiting.result().status_code, attempts()) == (403, 403, 2)


@pytest.mark.postgres
def test_a_failure_at_commit_keeps_nothing(serve: Serve, sender: Sender) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        Entry.objects.create(name="broken", idempotency_key_id=-1)
        return count_attempt(keep_writes=True)

    serve(view=plain(work))
    assert sender.send().status_code == 500
    assert (attempts(), IdempotencyKey.objects.count()) == (0, 0)


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
def test_the_writes_in_other_databases_are_kept(
    serve: Serve, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections.settings["shard_b"], "ATOMIC_REQUESTS", True)
    monkeypatch.setitem(connections["shard_b"].settings_dict, "ATOMIC_REQUESTS", True)

    def work(request: HttpRequest) -> HttpResponse:
        Entry.objects.using("shard_b").create(name="attempt")
        return count_attempt(keep_writes=True)

    serve(view=plain(work))
    assert [sender.send().status_code for _ in range(2)] == [403, 403]
    assert (attempts(), Entry.objects.using("shard_b").count()) == (2, 2)


def test_the_writes_stand_or_fall_with_an_outer_transaction(serve: Serve, sender: Sender) -> None:
    protected = plain(lambda request: count_attempt(keep_writes=True))

    def outer(request: HttpRequest) -> HttpResponseBase:
        with transaction.atomic():
            response = protected(request)
            transaction.set_rollback("undo" in request.GET)
        return response

    serve(view=outer)
    assert [sender.send(f"/view/{query}").status_code for query in ("", "", "?undo")] == [403] * 3
    assert attempts() == 2
    assert IdempotencyKey.objects.count() == 2


def test_an_exception_keeps_nothing_and_its_response_is_refused(
    serve: Serve, sender: Sender
) -> None:
    class WrongPin(APIException):
        status_code = 403

    class View(APIView):
        @idempotent(scope=lambda request: "one")
        def post(self, request: Any) -> Response:
            count_attempt()
            raise WrongPin

        def handle_exception(self, exc: Exception) -> Any:
            return not_stored(super().handle_exception(exc), keep_writes=True)

    serve(view=View.as_view())
    sender.client.raise_request_exception = True
    with pytest.raises(RuntimeError, match="keep_writes"):
        sender.send()
    assert attempts() == 0


def test_in_a_phased_view_the_writes_outside_a_phase_are_kept_anyway(
    serve: Serve, sender: Sender
) -> None:
    serve(view=phased_outside(lambda request: count_attempt(keep_writes=True)))
    assert [sender.send().status_code for _ in range(2)] == [403, 403]
    assert attempts() == 2
    abandon()
    assert complete_once() == CompletePass(), "a refused request is its client's alone"
    assert sender.send().status_code == 403
    assert attempts() == 3


def test_in_a_phased_view_the_phases_are_kept(serve: Serve, sender: Sender) -> None:
    answers = iter([True, False])

    @idempotent(recovery_points=["made"])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for recovery_point in key.phases():
            if recovery_point == "started":
                with atomic_phase(key) as phase:
                    Entry.objects.create(name="made")
                    phase.set_recovery_point("made")
            elif next(answers):
                return count_attempt(keep_writes=True)
            else:
                with atomic_phase(key) as phase:
                    phase.set_response(HttpResponse(status=201))
        return key.response()

    serve(view=view)
    assert [sender.send().status_code for _ in range(3)] == [403, 201, 201]
    assert (attempts(), Entry.objects.count()) == (1, 1)


def test_a_phase_does_not_store_it(serve: Serve, sender: Sender) -> None:
    errors = []

    def work(request: HttpRequest) -> HttpResponse:
        return count_attempt(keep_writes=True)

    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for _ in key.phases():
            try:
                with atomic_phase(key) as phase:
                    phase.set_response(work(request))
            except ResponseNotCommitted as error:
                errors.append(error)
                raise
        return key.response()

    serve(view=view)
    assert sender.send().status_code == 500
    assert (len(errors), attempts()) == (1, 0)


class InTestCase(TestCase):
    """A user's own test, whose transaction never commits."""

    def test_the_writes_are_kept_in_a_test_case(self) -> None:
        """The session and the counter are those of the view."""
        view = plain(lambda request: count_attempt(keep_writes=True), scope=lambda request: "one")
        for _ in range(2):
            request = RequestFactory().post("/view/", headers={"Idempotency-Key": "key-1"})
            assert view(request).status_code == 403
        assert attempts() == 2


@pytest.mark.postgres
def test_a_conflict_of_a_hook_does_not_write_again(serve: Serve, sender: Sender) -> None:
    def conflict() -> None:
        with connections["default"].cursor() as cursor:
            cursor.execute("DO $$ BEGIN RAISE EXCEPTION 'hook' USING ERRCODE = '40001'; END $$")

    def work(request: HttpRequest) -> HttpResponse:
        transaction.on_commit(conflict)
        return count_attempt(keep_writes=True)

    serve(view=plain(work))
    assert sender.send().status_code == 500
    assert attempts() == 1
