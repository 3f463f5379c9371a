"""What small bugs in a claim, in the fence or in a phase would break; most of it below HTTP."""

import logging
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse

from idempotency import claims, keys, signals
from idempotency.claims import Outcome
from idempotency.decorators import idempotent
from idempotency.exceptions import LockLost
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase, foreign_call
from tests.kit.ageing import expire_lock
from tests.kit.claims import claim, claim_as_completer, claim_plain, finish, request
from tests.kit.serving import Sender
from tests.kit.threads import background

pytestmark = pytest.mark.django_db(transaction=True)
LONG_AGO = timedelta(seconds=91)


def test_a_claim_writes_down_all_of_the_request() -> None:
    key = claim(request("a key", scope="user:7", fingerprint="v1:it")).key
    row = IdempotencyKey.objects.get()
    assert (row.scope, row.idempotency_key, row.request_fingerprint) == ("user:7", "a key", "v1:it")
    assert (row.request_method, row.request_path, bytes(row.request_body)) == ("POST", "/rides", b"{}")
    assert (row.request_content_type, row.request_headers, row.remote_addr) == ("application/json", {}, "127.0.0.1")
    assert (row.claim_token, row.seed, row.attempts) == (key.fence, key.seed, 1)
    assert [(event["event"], event["detail"]) for event in row.history] == [("claimed", "client")]


def test_what_a_claim_returns_is_what_the_row_says() -> None:
    held, row = claim().key, IdempotencyKey.objects.get()
    for name in ("scope", "idempotency_key", "request_method", "request_path", "request_fingerprint", "claim_token"):
        assert getattr(held, name) == getattr(row, name)
    for name in ("stuck_at", "stuck_code", "stuck_reason", "response_code", "response_headers", "response_body"):
        assert getattr(held, name) == getattr(row, name)
    assert held.finished_at is None


def test_the_age_of_a_key_goes_by_its_creation() -> None:
    first = claim().key
    IdempotencyKey.objects.update(created_at=Now() - timedelta(hours=1), locked_at=None)
    for key in (claim().key, keys.read(first.pk, using="default")):
        assert 3599 < time.monotonic() - key.born_monotonic < 3700  # SQLite tells milliseconds


def test_a_key_that_is_gone_is_read_as_none() -> None:
    key = claim().key
    IdempotencyKey.objects.all().delete()
    assert keys.read(key.pk, using="default") is None
    with pytest.raises(LockLost):
        keys.read_own(key, using="default")


def test_a_takeover_by_a_client_renews_lock_and_time_of_the_run() -> None:
    claim()
    IdempotencyKey.objects.update(locked_at=Now() - LONG_AGO, last_run_at=Now() - LONG_AGO)
    claim()
    age = IdempotencyKey.objects.filter(
        locked_at__gt=Now() - timedelta(seconds=30), last_run_at__gt=Now() - timedelta(seconds=30)
    )
    assert age.exists()


def test_a_finished_key_cannot_be_claimed_by_the_completer() -> None:
    key = claim().key
    finish(key)
    assert claim_as_completer(key) is None


def test_the_completer_claims_what_nobody_holds_and_not_before_its_delay() -> None:
    key = claim().key
    assert claim_as_completer(key) is None
    expire_lock(91)
    taken = claim_as_completer(key)
    assert taken is not None
    assert (taken.attempts, taken.completer_attempts) == (2, 1)
    assert taken.fence not in (None, key.fence)
    assert [(event["event"], event["detail"]) for event in taken.history][-1] == ("claimed", "completer")
    assert IdempotencyKey.objects.filter(locked_at__gt=Now() - timedelta(seconds=30)).exists()
    expire_lock(91)
    assert claim_as_completer(key) is None
    assert claim_as_completer(key, early=True) is not None


def test_a_stuck_key_is_not_claimed_by_the_completer() -> None:
    key = claim().key
    keys.mark_stuck(key, "code", "reason", using="default")
    assert claim_as_completer(key) is None


def test_only_a_view_that_knows_the_point_takes_a_key_over() -> None:
    claim()
    IdempotencyKey.objects.update(recovery_point="elsewhere", locked_at=None)
    refused = claim()
    assert (refused.outcome, refused.key.recovery_point) == (Outcome.UNKNOWN_POINT, "elsewhere")
    assert IdempotencyKey.objects.get().attempts == 1


def test_the_attempts_of_the_completer_start_again_when_a_deploy_alone_left_the_key() -> None:
    for code, left in (("code", 3), ("unknown_recovery_point", 0)):
        key = claim(request(code)).key
        IdempotencyKey.objects.filter(pk=key.pk).update(completer_attempts=3)
        keys.mark_stuck(key, code, "reason", using="default")
        assert IdempotencyKey.objects.get(pk=key.pk).completer_attempts == left


def test_a_claim_of_what_a_deploy_left_takes_the_mark_off() -> None:
    key = claim().key
    keys.mark_stuck(key, "unknown_recovery_point", "reason", using="default")
    again = claim()
    assert again.outcome is Outcome.CLAIMED
    row = IdempotencyKey.objects.get()
    assert (row.stuck_at, row.stuck_code, row.stuck_reason) == (None, "", "")
    assert (again.key.stuck_at, again.key.stuck_code, again.key.stuck_reason) == (None, "", "")


def test_finishing_frees_the_lock_and_keeps_the_answer() -> None:
    key = claim().key
    keys.finish(key, 201, {"A": "b"}, b"body", using="default")
    row = IdempotencyKey.objects.get()
    assert (row.locked_at, row.response_code, row.response_headers, bytes(row.response_body)) == (
        None,
        201,
        {"A": "b"},
        b"body",
    )
    assert [(event["event"], event["detail"]) for event in row.history][-1] == ("finished", "status 201")


def test_a_run_that_does_not_know_of_its_commit_cannot_write_over_it() -> None:
    """Its recovery point is an older one than that of the row, and its token still holds the key."""
    key = claim().key
    keys.advance(key, "paid", using="default")
    assert key.recovery_point == "started"
    for change in (lambda: keys.advance(key, "paid", using="default"), lambda: finish(key)):
        with pytest.raises(LockLost):
            change()
    assert IdempotencyKey.objects.get().recovery_point == "paid"


def test_what_is_finished_is_neither_released_nor_stuck() -> None:
    key = claim().key
    finish(key)
    keys.release(key, "late", using="default")
    assert keys.give_up(key.pk, "code", "reason", using="default") is False
    with pytest.raises(LockLost):
        keys.mark_stuck(key, "code", "reason", using="default")
    row = IdempotencyKey.objects.get()
    assert (row.last_error, row.stuck_code, row.history[-1]["event"]) == ("", "", "finished")


def test_a_release_says_what_went_wrong_and_frees_the_lock() -> None:
    key = claim().key
    keys.release(key, "first line\nsecond line", using="default")
    row = IdempotencyKey.objects.get()
    assert (row.locked_at, row.last_error) == (None, "first line\nsecond line")
    assert (row.history[-1]["event"], row.history[-1]["detail"]) == ("error", "first line")


def test_no_reason_is_a_reason() -> None:
    keys.mark_stuck(claim().key, "code", "", using="default")
    assert IdempotencyKey.objects.get().stuck_reason


def test_a_release_that_comes_late_is_logged_with_the_hash_of_the_key(caplog: pytest.LogCaptureFixture) -> None:
    late = claim().key
    expire_lock(91)
    claim()
    with caplog.at_level(logging.INFO, "idempotency"):
        keys.release(late, "late", using="default")
    (record,) = caplog.records
    assert record.key_hash == late.key_hash
    assert late.key_hash in record.getMessage()


def test_a_key_that_gets_stuck_is_logged_with_its_code(caplog: pytest.LogCaptureFixture) -> None:
    key = claim().key
    with caplog.at_level(logging.WARNING, "idempotency"):
        keys.mark_stuck(key, "a code", "the reason", using="default")
        keys.announce_stuck(key.pk, None, using="default")
    (record,) = caplog.records
    assert all(part in record.getMessage() for part in (key.key_hash, "a code", "the reason"))


@pytest.mark.parametrize("look", [claim, claim_plain])
def test_a_key_is_compared_by_the_way_in_which_its_fingerprint_was_made(look: Any) -> None:
    finish(claim(request(fingerprint="v1:old")).key)
    for made, outcome in (("v1:old", Outcome.FINISHED), ("v1:other", Outcome.MISMATCH), (None, Outcome.IN_PROGRESS)):
        described = replace(request(fingerprint="v2:new"), made_alike={"v1:old": made}.__getitem__)
        assert look(described).outcome is outcome


def test_the_plain_claim_refuses_what_a_phased_view_left() -> None:
    claim()
    assert claim_plain().outcome is Outcome.IN_PROGRESS
    expire_lock(91)
    refused = claim_plain()
    assert (refused.outcome, refused.key.recovery_point) == (Outcome.UNKNOWN_POINT, "started")
    assert claim_plain(request(fingerprint="v1:two")).outcome is Outcome.MISMATCH


@pytest.mark.postgres
@pytest.mark.parametrize("look", [claim, claim_plain])
def test_while_a_plain_view_runs_another_session_learns_whether_it_is_the_same_request(look: Any) -> None:
    with transaction.atomic():
        assert claim_plain().outcome is Outcome.CLAIMED
        for described, outcome in ((request(), Outcome.IN_PROGRESS), (request(fingerprint="v1:two"), Outcome.MISMATCH)):
            with background(lambda described=described: look(described)) as other:
                refused = other.result(60)
            assert (refused.outcome, refused.lock_seconds) == (outcome, 1)
        with background(lambda: look(request("another key")).outcome) as other:
            assert other.result(60) is Outcome.CLAIMED


def test_locks_are_numbers_of_the_width_that_postgresql_takes() -> None:
    wide = [claims._lock_parameters(request(str(number))) for number in range(64)]
    for name, bits in (("lock", 63), ("mark_key", 31), ("mark_request", 31)):
        values = [numbers[name] for numbers in wide]
        assert all(-(2**bits) <= value < 2**bits for value in values)
        assert name == "mark_request" or (min(values) < 0 < max(values))
        assert name == "mark_request" or len(set(values)) == 64
    marks = {claims._lock_parameters(request(fingerprint=str(number)))["mark_request"] for number in range(64)}
    assert len(marks) == 64
    assert len({numbers["mark_request"] for numbers in wide}) == 64, "equal requests under different keys share neither half"
    for values, bits in (({one["lock"] for one in wide}, 63), ({one["mark_key"] for one in wide}, 31), (marks, 31)):
        assert max(map(abs, values)) > 2 ** (bits - 1), "all of the width is used, so that locks of different keys seldom meet"


def phased(body: Any) -> Any:
    """Return a phased view that runs ``body(key)`` in each pass."""

    @idempotent(recovery_points=["one"])
    def view(request: HttpRequest) -> HttpResponseBase:
        for _ in request.idempotency_key.phases():
            body(request.idempotency_key)
        return request.idempotency_key.response()

    return view


def test_a_phase_is_told_its_end_once(serve: Any, sender: Sender) -> None:
    def body(key: IdempotencyKey) -> None:
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse("first"))
            with pytest.raises(RuntimeError, match="given its end already"):
                phase.no_op()

    serve(view=phased(body))
    assert sender.send().content == b"first"


def test_each_phase_is_told_to_listeners_once(serve: Any, sender: Sender) -> None:
    heard: list[str] = []

    def committed(key: IdempotencyKey, **_: Any) -> None:
        heard.append(key.recovery_point)

    def finished(key: IdempotencyKey, **_: Any) -> None:
        heard.append("key_finished")

    def body(key: IdempotencyKey) -> None:
        with atomic_phase(key) as phase:
            if key.recovery_point == "started":
                phase.set_recovery_point("one")
            else:
                phase.set_response(HttpResponse())

    signals.phase_committed.connect(committed)
    signals.key_finished.connect(finished)
    try:
        serve(view=phased(body))
        sender.send()
    finally:
        signals.phase_committed.disconnect(committed)
        signals.key_finished.disconnect(finished)
    assert heard == ["one", "finished", "key_finished"]


def test_a_phase_waits_for_a_lock_no_longer_than_the_lock_timeout(serve: Any, sender: Sender) -> None:
    seen: list[str] = []

    def body(key: IdempotencyKey) -> None:
        with atomic_phase(key) as phase:
            if connection.vendor == "postgresql":
                with connection.cursor() as cursor:
                    cursor.execute("SHOW lock_timeout")
                    seen.append(cursor.fetchone()[0])
            phase.set_response(HttpResponse())

    serve(view=phased(body))
    sender.send()
    assert seen == (["90s"] if connection.vendor == "postgresql" else [])


def test_a_phase_is_over_when_its_block_is_left(serve: Any, sender: Sender) -> None:
    def body(key: IdempotencyKey) -> None:
        with pytest.raises(OSError, match="once"), atomic_phase(key):
            raise OSError("once")
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse("after"))

    serve(view=phased(body))
    assert sender.send().content == b"after"


@pytest.mark.parametrize(
    ("result", "message", "kept"),
    [
        (object, "not JSON serializable", "<class 'object'>"),
        (float("nan"), "not JSON compliant", "nan"),
        ({"a": "x\0y"}, "NUL character", r"{'a': 'x\x00y'}"),
    ],
)
def test_a_result_that_is_no_json_is_an_error_and_the_call_is_not_made_again(
    serve: Any, sender: Sender, result: Any, message: str, kept: str
) -> None:
    made: list[int] = []

    def body(key: IdempotencyKey) -> None:
        with foreign_call(key, "sms") as call:
            if call.due:
                made.append(1)
                call.record(result)
        with atomic_phase(key) as phase:
            phase.set_response(JsonResponse({"kept": call.result}))

    serve(view=phased(body))
    assert sender.send().status_code == 500
    assert message in IdempotencyKey.objects.get().last_error
    assert sender.send().json() == {"kept": kept}
    assert len(made) == 1


def test_a_call_that_may_be_repeated_leaves_nothing_and_one_that_may_not_leaves_its_intent(serve: Any, sender: Sender) -> None:
    serve(view=phased(lambda key: None))
    left: list[int] = []

    def body(key: IdempotencyKey) -> None:
        with pytest.raises(OSError, match="refused"), foreign_call(key, "refused") as call:  # noqa: PT012
            call.retryable()
            raise OSError("refused")
        left.append(key.foreign_calls.count())
        with foreign_call(key, "refused") as call:
            call.record("at last")
        with foreign_call(key, "made") as call:
            call.record({"n": 1})
            call.retryable()
        left.append(key.foreign_calls.count())
        with pytest.raises(RuntimeError, match="made the call 'made' before"), foreign_call(key, "made"):
            pass
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse())

    serve(view=phased(body))
    assert sender.send().status_code == 200
    assert left == [0, 2]


def test_a_foreign_call_renews_the_lock(serve: Any, sender: Sender) -> None:
    seen: list[bool] = []

    def body(key: IdempotencyKey) -> None:
        expire_lock(60)
        with foreign_call(key, "sms") as call:
            seen.append(IdempotencyKey.objects.filter(locked_at__gt=Now() - timedelta(seconds=30)).exists())
            call.record()
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse())

    serve(view=phased(body))
    sender.send()
    assert seen == [True]


@pytest.mark.parametrize("end", ["advance", "no_op"])
def test_a_phase_renews_the_lock_however_it_ends(serve: Any, sender: Sender, end: str) -> None:
    seen: list[bool] = []

    def body(key: IdempotencyKey) -> None:
        expire_lock(60)
        with atomic_phase(key) as phase:
            if end == "advance":
                phase.set_recovery_point("one")
            else:
                phase.no_op()
        seen.append(IdempotencyKey.objects.filter(locked_at__gt=Now() - timedelta(seconds=30)).exists())
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse())

    serve(view=phased(body))
    sender.send()
    assert seen == [True]


def test_an_expired_key_is_retired_by_whoever_comes_and_only_then() -> None:
    key = claim().key
    finish(key)
    IdempotencyKey.objects.update(created_at=Now() - timedelta(hours=99))
    assert claim(request(fingerprint="v1:two")).outcome is Outcome.MISMATCH
    IdempotencyKey.objects.update(finished_at=Now() - timedelta(hours=73))
    assert claim_plain(request(fingerprint="v1:two")).outcome is Outcome.CLAIMED
    assert IdempotencyKey.objects.filter(scope=f"expired:{key.pk}").count() == 1


def test_a_free_key_is_refused_to_another_request() -> None:
    keys.release(claim().key, "error", using="default")
    assert claim(request(fingerprint="v1:two")).outcome is Outcome.MISMATCH
    assert IdempotencyKey.objects.get().attempts == 1


def test_a_finished_key_is_not_claimed_by_a_view_that_knows_the_last_point() -> None:
    finish(claim().key)
    found = claims.claim_phased(request(), ("started", "paid", "finished"), using="default")
    assert (found.outcome, found.key.response_code) == (Outcome.FINISHED, 200)
    assert IdempotencyKey.objects.get().attempts == 1
