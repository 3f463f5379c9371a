"""CONFIRM_REPLICATED on a server without standbys: no response uses data that a failover could
lose.

``tests/processes/test_replication.py`` has tests with a standby.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from idempotency import interventions
from idempotency._engine import fence, replication
from idempotency._engine.attempts import waiting_slots
from idempotency.backends import BrokerUnavailable, OneByOne
from idempotency.completer import complete_once
from idempotency.enqueuer import EnqueuePass, enqueue_once
from idempotency.exceptions import KeyStuck, NotReplicated
from idempotency.inbox import STAGED_JOBS, process_once, took_effect
from idempotency.models import DownstreamCall, IdempotencyKey, ProcessedMessage, StagedJob
from idempotency.monitoring.doctor import diagnose
from idempotency.phases import atomic_phase
from idempotency.testing import age
from tests.factories import IdempotencyKeyFactory, StagedJobFactory
from tests.kit.claims import claim
from tests.kit.commands import FAILING
from tests.kit.loops import lines, looping
from tests.kit.outages import time_out_this_session
from tests.kit.serving import Sender, View, another_client, problem
from tests.kit.threads import Gate, background, elsewhere
from tests.kit.views import (
    Counted,
    both_kinds,
    over_key,
    phased_outside,
    plain,
    texting,
    two_phases,
)
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

Kind = Callable[..., View]
Serve = Callable[..., None]


@pytest.fixture
def confirm(settings: Settings) -> Callable[..., None]:
    """Return a function that sets CONFIRM_REPLICATED and other settings."""

    def put(value: Any, **others: Any) -> None:
        settings.IDEMPOTENCY = {"CONFIRM_REPLICATED": value, **others}

    return put


@pytest.fixture
def execute() -> Iterator[Callable[[str], None]]:
    """Return a function that runs a statement in a session of this test."""

    def run(statement: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(statement)

    yield run
    connection.close()


@pytest.fixture
def cancelled_waits(
    execute: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], None]]:
    """Return a function that cancels the wait of each commit with a change: PostgreSQL reports it
    with a warning, which a trigger sends here."""

    def cancel(change: str) -> None:
        execute(
            f"CREATE CONSTRAINT TRIGGER warn AFTER {change} DEFERRABLE"
            " INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION warn()"
        )

    monkeypatch.setattr(replication, "_WAIT", "exec_stmt_raise")
    execute(
        "CREATE FUNCTION warn() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE WARNING"
        " 'cancelled'; RETURN NULL; END $$"
    )
    yield cancel
    execute("DROP FUNCTION warn CASCADE")


#: The jobs that the backend of these tests has received.
taken: list[Any] = []


def take(job: StagedJob) -> None:
    taken.append(job.pk)


class Followed(OneByOne):
    """A backend that may lose jobs."""

    follow_up_seconds = 30


def is_unconfirmed(answer: Any) -> bool:
    told = problem(answer)
    waits = int(answer["Retry-After"]) >= 1
    return (answer.status_code, told["code"], told["retryable"], waits) == (
        503,
        "not_replicated",
        True,
        True,
    )


# Requests


@both_kinds
def test_a_replay_is_a_503_while_no_standby_can_confirm_it(
    kind: Kind, serve: Serve, sender: Sender, confirm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    serve(view=kind(work := Counted()))
    first = sender.send()
    confirm(True)
    with caplog.at_level(logging.WARNING, logger="idempotency"):
        assert is_unconfirmed(sender.send())
    assert "synchronous_standby_names is empty" in caplog.text
    assert sender.send(key="key-2").status_code == 201  # A first run relies on its own COMMIT.
    for value in ("storage", False):
        confirm(value)
        again = sender.send()
        assert (again.content, again["Idempotent-Replayed"]) == (first.content, "true")
    assert work.runs == 2


def test_a_duplicate_that_waited_is_a_503(serve: Serve, sender: Sender, confirm: Any) -> None:
    confirm(True)
    gate = Gate()

    def slow(request: HttpRequest) -> HttpResponse:
        gate.wait_here()
        return HttpResponse(status=201)

    serve(view=plain(slow, wait_seconds=30))
    with background(sender.send) as first:
        gate.wait_until_reached()
        with background(another_client(sender).send) as second:
            eventually(lambda: waiting_slots(2)._value < 2)
            gate.open()
    assert first.result().status_code == 201
    assert is_unconfirmed(second.result())


def test_a_run_that_lost_its_lock_is_a_503(serve: Serve, sender: Sender, confirm: Any) -> None:
    confirm(True)

    def lose_the_lock() -> None:
        if calls.runs == 1:
            age(IdempotencyKey.objects.get(), seconds=91)
            assert elsewhere(another_client(sender).send).status_code == 201

    calls = Counted(lambda request: lose_the_lock())
    serve(
        view=two_phases(
            lambda request: None, lambda request: HttpResponse(status=201), call=lambda: calls(None)
        )
    )
    assert is_unconfirmed(sender.send())
    assert calls.runs == 2


def test_a_release_that_finds_another_claim_is_confirmed(confirm: Any) -> None:
    key = claim().key
    IdempotencyKey.objects.update(claim_token=uuid4())
    confirm(True)
    with pytest.raises(NotReplicated):
        fence.release(key, "on purpose", using="default")
    confirm(False)
    fence.release(key, "on purpose", using="default")
    assert IdempotencyKey.objects.get().locked_until is not None


def test_a_recorded_call_is_used_again_only_when_it_is_confirmed(
    serve: Serve, sender: Sender, confirm: Any
) -> None:
    calls, failures = [], iter([True])

    def after() -> None:
        if next(failures, False):
            raise RuntimeError("on purpose")

    def pay(call: Any) -> None:
        if call.due:
            calls.append("paid")
            call.record("paid")

    serve(view=texting(pay, after))
    assert sender.send().status_code == 500
    confirm(True)
    assert is_unconfirmed(sender.send())
    eventually(lambda: not IdempotencyKey.objects.in_flight().exists())
    confirm("storage")
    assert sender.send().json() == {"receipt": "paid"}
    assert calls == ["paid"]


def test_a_phase_on_a_new_connection_is_confirmed(
    serve: Serve, sender: Sender, confirm: Any
) -> None:
    """The watch of its COMMIT is on the connection that was lost, so a barrier confirms it."""
    serve(
        view=two_phases(
            lambda request: None,
            lambda request: HttpResponse(status=201),
            call=time_out_this_session,
        )
    )
    confirm(True)
    assert is_unconfirmed(sender.send())
    confirm("storage")
    assert sender.send(key="key-2").status_code == 201


def test_a_phase_on_a_new_connection_that_a_hook_closes_is_confirmed(
    serve: Serve, sender: Sender, confirm: Any
) -> None:
    def second(request: HttpRequest) -> HttpResponse:
        transaction.on_commit(connection.close)
        return HttpResponse(status=201)

    serve(view=two_phases(lambda request: None, second, call=time_out_this_session))
    confirm(True)
    assert is_unconfirmed(sender.send())


def test_the_error_of_a_hook_does_not_hide_that_the_commit_did_not_wait(
    serve: Serve, sender: Sender, confirm: Any, cancelled_waits: Any
) -> None:
    def fail() -> None:
        raise LookupError

    def body(key: Any) -> None:
        with suppress(LookupError), atomic_phase(key) as phase:
            transaction.on_commit(fail)
            phase.set_response(HttpResponse(status=201))

    serve(view=over_key(body))
    confirm(True)
    cancelled_waits("UPDATE OF response_code ON idempotency_idempotencykey")
    assert is_unconfirmed(sender.send())


def test_an_error_whose_commit_on_a_new_connection_did_not_wait_is_a_503(
    serve: Serve, sender: Sender, confirm: Any, cancelled_waits: Any
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        time_out_this_session()
        return HttpResponse(status=422)

    serve(view=phased_outside(work))
    confirm(True)
    cancelled_waits("UPDATE OF response_code ON idempotency_idempotencykey")
    assert is_unconfirmed(sender.send())


def test_a_key_is_marked_as_stuck_once_if_the_commit_did_not_wait(
    serve: Serve, sender: Sender, confirm: Any, cancelled_waits: Any
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        raise KeyStuck("on purpose")

    serve(view=phased_outside(work))
    confirm(True)
    cancelled_waits("UPDATE OF stuck_code ON idempotency_idempotencykey")
    assert is_unconfirmed(sender.send())
    key = IdempotencyKey.objects.get()
    assert [event["event"] for event in key.history].count("stuck") == 1


# The settings of the server


@pytest.mark.parametrize(
    ("value", "statement", "why"),
    [
        (True, "SELECT 1", "synchronous_standby_names is empty"),
        (True, "SET synchronous_commit = local", "synchronous_commit is local"),
        (True, "SET synchronous_commit = off", "synchronous_commit is off"),
        ("storage", "SET synchronous_commit = off", "synchronous_commit is off"),
        ("storage", "SET client_min_messages = error", "client_min_messages is error"),
        ("storage", "SET synchronous_commit = local", ""),
        ("storage", "SET default_transaction_read_only = on", ""),
        (False, "SET synchronous_commit = off", ""),
    ],
)
def test_a_barrier_that_would_pass_for_nothing_is_refused(
    value: Any, statement: str, why: str, confirm: Any, execute: Callable[[str], None]
) -> None:
    confirm(value)
    execute(statement)
    if not why:
        replication.confirm("default")
        return
    with pytest.raises(NotReplicated, match=why):
        replication.confirm("default")


def test_the_doctor_finds_a_setting_that_refuses_each_replay(confirm: Any) -> None:
    def found() -> set[str]:
        return {finding.code for finding in diagnose().findings} & {
            "replays_refused",
            "not_replicated",
        }

    assert found() == set()
    confirm(True)
    assert found() == {"replays_refused"}
    confirm("storage")
    assert found() == set()


def test_a_barrier_is_one_statement_and_without_the_setting_there_is_none(confirm: Any) -> None:
    for value, statements in ((False, 0), ("storage", 1)):
        confirm(value)
        with CaptureQueriesContext(connection) as captured:
            replication.confirm("default")
        assert len(captured) == statements


def test_a_barrier_in_a_transaction_leaves_it_as_it_is(confirm: Any) -> None:
    confirm("storage")
    with transaction.atomic():
        StagedJobFactory()
        with CaptureQueriesContext(connection) as captured:
            replication.confirm("default")
        assert len(captured) == 0
    assert StagedJob.objects.exists()


@pytest.mark.django_db(transaction=False)
def test_inside_a_test_case_nothing_is_confirmed(confirm: Any) -> None:
    confirm(True)
    replication.confirm("default")


# Jobs, messages and answers


def test_no_job_of_a_batch_is_handed_over_unconfirmed(confirm: Any) -> None:
    taken.clear()
    backends = {"*": f"{__name__}.take"}
    confirm(True, ENQUEUERS=backends)
    StagedJobFactory.create_batch(3)
    with pytest.raises(NotReplicated):
        enqueue_once()
    assert (taken, StagedJob.objects.filter(refusals=0).count()) == ([], 3)
    confirm("storage", ENQUEUERS=backends)
    with patch.object(replication, "_pass_barrier", wraps=replication._pass_barrier) as barriers:
        assert enqueue_once() == EnqueuePass(handed_over=3)
    assert (len(taken), barriers.call_count) == (3, 1)


def test_an_effect_that_is_not_confirmed_repeats_no_hand_over_of_another_queue(
    confirm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_standby(job: StagedJob) -> None:
        confirm(True, ENQUEUERS=backends)
        taken.append(job.pk)

    monkeypatch.setattr(f"{__name__}.take", lose_standby)
    monkeypatch.setattr("idempotency._hand_over._built", {})
    taken.clear()
    backends = {"*": f"{__name__}.take", "followed": f"{__name__}.Followed"}
    confirm("storage", ENQUEUERS=backends)
    job = StagedJobFactory(queue="other")
    followed = StagedJobFactory(queue="followed", hand_overs=1)
    with process_once(STAGED_JOBS, str(followed.pk)):
        pass
    with pytest.raises(BrokerUnavailable):
        enqueue_once()
    assert (taken, StagedJob.objects.get().pk) == ([job.pk], followed.pk)
    confirm("storage", ENQUEUERS=backends)
    assert enqueue_once() == EnqueuePass()
    assert not StagedJob.objects.exists()


def test_a_loop_logs_one_line_while_no_standby_confirms(
    confirm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    confirm(True)
    StagedJobFactory()
    with caplog.at_level(logging.WARNING, logger="idempotency"), looping(enqueue_once) as passes:
        eventually(lambda: len(passes) > 2)
    assert lines(caplog) == [("WARNING", f"this_loop: {FAILING}", False)]


def test_the_completer_stops_its_pass_and_leaves_no_key_locked(
    serve: Serve, sender: Sender, confirm: Any
) -> None:
    def fail_once() -> None:
        if IdempotencyKey.objects.get().attempts == 1:
            raise RuntimeError("on purpose")

    serve(view=texting(lambda call: call.record("paid") if call.due else None, fail_once))
    assert sender.send().status_code == 500
    age(IdempotencyKey.objects.get(), seconds=3600)
    confirm(True)
    with pytest.raises(NotReplicated):
        complete_once()
    eventually(lambda: not IdempotencyKey.objects.in_flight().exists())


def test_an_effect_whose_commit_did_not_wait_for_the_standby_is_not_reported(
    confirm: Any, cancelled_waits: Any
) -> None:
    confirm(True)
    cancelled_waits("INSERT ON idempotency_processedmessage")
    with pytest.raises(NotReplicated, match="cancelled"), process_once("stripe", "evt_1"):
        pass
    assert ProcessedMessage.objects.count() == 1


def test_a_message_is_called_processed_only_when_it_is_confirmed(confirm: Any) -> None:
    confirm(True)
    with process_once("stripe", "evt_1") as first:
        assert first
    for around in (nullcontext, transaction.atomic):
        with pytest.raises(NotReplicated), around(), process_once("stripe", "evt_1"):
            pytest.fail("the message counts as processed")
    with pytest.raises(NotReplicated):
        took_effect("stripe", ["evt_1"])
    assert took_effect("stripe", ["evt_2"]) == set()
    confirm("storage")
    with process_once("stripe", "evt_1") as first:
        assert not first
    assert took_effect("stripe", ["evt_1"]) == {"evt_1"}
    assert ProcessedMessage.objects.count() == 1


def test_the_commit_of_an_outer_transaction_confirms_the_message(confirm: Any) -> None:
    confirm(True)
    with (
        pytest.raises(NotReplicated),
        transaction.atomic(),
        process_once("stripe", "evt_1") as first,
    ):
        assert first
    assert ProcessedMessage.objects.exists()


def test_an_answer_of_a_person_counts_only_when_it_is_confirmed(confirm: Any) -> None:
    key = IdempotencyKeyFactory(
        claim_token=uuid4(), stuck_at=Now(), stuck_code="call_in_doubt", stuck_reason="Look."
    )
    confirm(True)
    with pytest.raises(NotReplicated):
        interventions.answer(key.pk, key.claim_token, HttpResponse(status=410), by="jane")
    key.refresh_from_db()
    assert key.response_code == 410
    assert not DownstreamCall.objects.exists()
