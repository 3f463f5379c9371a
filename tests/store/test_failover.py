"""Work outside or after a request while the database is unavailable or read-only."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import OperationalError, connection
from django.http import HttpResponse
from pytest_django import Settings

from idempotency._engine import late_releases
from idempotency._engine.late_releases import release_later
from idempotency.completer import complete_once
from idempotency.enqueuer import enqueue_once
from idempotency.inbox import process_once
from idempotency.management.failures import one_line_of
from idempotency.models import DownstreamCall, IdempotencyKey
from idempotency.reaper import reap_once
from idempotency.testing import age
from tests.factories import IdempotencyKeyFactory
from tests.kit.claims import claim
from tests.kit.commands import FAILING, RECOVERED
from tests.kit.loops import lines, looping
from tests.kit.outages import allow_connections, make_read_only, writable_at_the_end
from tests.kit.serving import Sender, problem
from tests.kit.views import Counted, create, texting, two_phases
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

Serve = Callable[..., None]


@pytest.fixture(autouse=True)
def _writable_again(transactional_db: None) -> Iterator[None]:
    with writable_at_the_end():
        yield


def test_the_result_of_a_call_is_kept_once_the_database_takes_writes_again(
    serve: Serve, sender: Sender
) -> None:
    def block(call: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET default_transaction_read_only = on")
        call.record("paid")

    serve(view=texting(block))
    assert sender.send().status_code == 503
    assert DownstreamCall.objects.get().result == "paid"


@pytest.mark.parametrize("work", [enqueue_once, complete_once, reap_once])
def test_a_loop_says_once_that_the_database_takes_no_writes(
    work: Any, caplog: pytest.LogCaptureFixture
) -> None:
    age(IdempotencyKeyFactory(), seconds=3600)
    make_read_only(True)
    with caplog.at_level(logging.WARNING, logger="idempotency"), looping(work) as passes:
        eventually(lambda: len(passes) > 3)
        before_recovery = lines(caplog)
        with connection.cursor() as cursor:
            cursor.execute("SET default_transaction_read_only = off")
        IdempotencyKey.objects.all().delete()
        make_read_only(False)
        eventually(lambda: RECOVERED in caplog.text)
    assert before_recovery == [("WARNING", f"this_loop: {FAILING}", False)]


def test_a_command_says_in_one_line_that_the_database_takes_no_writes() -> None:
    make_read_only(True)
    with pytest.raises(Exception, match="read-only") as raised:
        reap_once()
    assert one_line_of(raised.value, "default") is not None


def test_a_delivery_to_a_read_only_database_is_one_to_a_lost_database() -> None:
    """Workers repeat a delivery that ended with an OperationalError, without a limit."""
    make_read_only(True)
    with pytest.raises(OperationalError, match="read-only"), process_once("stripe", "evt_1"):
        pytest.fail("the message counts as new")


def test_the_key_of_a_run_that_the_outage_ended_is_free_once_the_database_is_back(
    serve: Serve, sender: Sender
) -> None:
    calls = Counted(lambda request: allow_connections(False) if calls.runs == 1 else HttpResponse())
    serve(
        view=two_phases(create, lambda request: HttpResponse(status=201), call=partial(calls, None))
    )
    answer = sender.send()
    assert (answer.status_code, problem(answer)["code"]) == (503, "database_unavailable")
    allow_connections(True)
    assert IdempotencyKey.objects.get().recovery_point == "between"
    eventually(lambda: not IdempotencyKey.objects.in_flight().exists())
    assert IdempotencyKey.objects.get().last_error
    assert sender.send().status_code == 201


def nothing_waits() -> bool:
    """Return whether the thread of late releases has ended."""
    return late_releases._thread is None


def test_a_late_release_leaves_the_key_to_the_run_that_claimed_it_since() -> None:
    late = claim().key
    age(late, seconds=91)
    winner = claim().key
    release_later(late, "out of luck", using="default")
    eventually(nothing_waits)
    row = IdempotencyKey.objects.get()
    assert (row.claim_token, row.last_error) == (winner.fence, "")
    assert row.locked_until is not None


def test_a_late_release_is_given_up_when_the_lock_has_expired(settings: Settings) -> None:
    settings.IDEMPOTENCY = {"LOCK_TIMEOUT_SECONDS": 1}
    key = claim().key
    allow_connections(False)
    release_later(key, "out of luck", using="default")
    eventually(nothing_waits)
    allow_connections(True)
    connection.close()
    assert IdempotencyKey.objects.get().last_error == ""


def lost_claim(key: IdempotencyKey, token: UUID | None) -> IdempotencyKey:
    """Return a key as a process has it if it did not get the result of its claim."""
    lost = IdempotencyKey(scope=key.scope, idempotency_key=key.idempotency_key)
    lost.fence = token
    return lost


def test_a_claim_whose_result_was_lost_is_released() -> None:
    key = claim().key
    release_later(lost_claim(key, key.fence), "out of luck", using="default")
    eventually(nothing_waits)
    key.refresh_from_db()
    assert (key.locked_until, key.last_error) == (None, "out of luck")


def test_a_claim_that_was_never_committed_changes_nothing() -> None:
    key = claim().key
    release_later(lost_claim(key, uuid4()), "out of luck", using="default")
    eventually(nothing_waits)
    key.refresh_from_db()
    assert key.locked_until is not None
