"""A call to a service that is not idempotent is made once per key; otherwise the key becomes
stuck."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection
from django.db.models.functions import Now
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, JsonResponse

from idempotency import interventions
from idempotency.decorators import idempotent
from idempotency.exceptions import CallNotRecorded
from idempotency.models import DownstreamCall, IdempotencyKey
from idempotency.phases import AtMostOnceCall, atomic_phase
from tests.kit.ageing import expire_lock, lock_end
from tests.kit.database import statements
from tests.kit.serving import Sender, problem
from tests.kit.threads import Gate, background
from tests.kit.views import over_key, texting
from tests.models import Entry

pytestmark = pytest.mark.django_db(transaction=True)


class SmsService:
    """A service without idempotency keys: each call sends a message."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def send(self) -> str:
        self.sent.append("sms")
        return f"receipt {len(self.sent)}"


class Trouble(Exception):
    """The error of these tests."""


def once(action: Callable[[], None]) -> Callable[[], None]:
    """Return ``action``, which does nothing from its second call on."""
    calls: list[int] = []

    def act() -> None:
        calls.append(1)
        if len(calls) == 1:
            action()

    return act


def calls_in_history() -> list[str]:
    """Return the calls that the history of the key names."""
    return [
        event["detail"]
        for event in IdempotencyKey.objects.get().history
        if event["event"] == "call begun"
    ]


def fail() -> None:
    """Raise Trouble."""
    raise Trouble("out of luck")


def test_the_call_is_made_and_its_result_kept(serve: Any, sender: Sender) -> None:
    service = SmsService()
    serve(view=texting(lambda call: call.record(service.send())))
    assert sender.send().json() == {"receipt": "receipt 1"}
    row = DownstreamCall.objects.get()
    assert (row.name, row.result) == ("sms", "receipt 1")
    assert row.recorded_at >= row.started_at


def test_the_call_has_a_reference_and_is_in_the_history(serve: Any, sender: Sender) -> None:
    references: list[bool] = []

    def body(key: IdempotencyKey) -> None:
        with key.call("sms", at_most_once=True) as call:
            references.append(call.key == key.derive("sms"))
            call.record()
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse())

    serve(view=over_key(body))
    assert sender.send().status_code == 200
    assert references == [True]
    key = IdempotencyKey.objects.get()
    assert [(event["event"], event["detail"]) for event in key.history][1:2] == [
        ("call begun", "sms")
    ]
    assert key.call_begun_at is not None


def test_a_call_that_no_retry_repeats_has_no_end_of_its_validity(
    serve: Any, sender: Sender
) -> None:
    def body(key: IdempotencyKey) -> None:
        with pytest.raises(ValueError, match="valid_seconds"):
            key.call("sms", 60, at_most_once=True)  # type: ignore[call-overload]
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse())

    serve(view=over_key(body))
    assert sender.send().status_code == 200
    assert not DownstreamCall.objects.exists()


def test_a_result_costs_one_statement(serve: Any, sender: Sender) -> None:
    counts: list[int] = []
    with statements() as seen:
        serve(
            view=texting(
                lambda call: (call.record("receipt"), counts.append(len(seen))),
                lambda: counts.append(len(seen)),
            )
        )
        assert sender.send().status_code == 200
    before, after = counts
    assert [query["sql"].split()[0] for query in seen.captured_queries[before:after]] == ["UPDATE"]


def test_an_at_most_once_call_renews_the_lock(serve: Any, sender: Sender) -> None:
    seen: list[bool] = []

    def body(key: IdempotencyKey) -> None:
        expire_lock(60)
        with key.call("sms", at_most_once=True) as call:
            seen.append(IdempotencyKey.objects.filter(locked_until__gt=lock_end(30)).exists())
            call.record()
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse())

    serve(view=over_key(body))
    sender.send()
    assert seen == [True]


def test_a_retry_after_the_call_does_not_make_it_again(serve: Any, sender: Sender) -> None:
    service = SmsService()

    def block(call: AtMostOnceCall) -> None:
        if call.due:
            call.record(service.send())

    serve(view=texting(block, after=once(fail)))
    assert sender.send().status_code == 500
    assert sender.send().json() == {"receipt": "receipt 1"}
    assert len(service.sent) == 1
    assert calls_in_history() == ["sms"]


def test_a_result_recorded_before_an_error_is_kept(serve: Any, sender: Sender) -> None:
    service = SmsService()
    trouble = once(fail)

    def block(call: AtMostOnceCall) -> None:
        if call.due:
            call.record(service.send())
        trouble()

    serve(view=texting(block))
    assert [sender.send().status_code for _ in range(2)] == [500, 200]
    assert len(service.sent) == 1


def test_a_call_in_doubt_is_not_made_again_but_handed_to_a_person(
    serve: Any, sender: Sender
) -> None:
    """The service may have sent the message before the connection was cut."""
    service = SmsService()

    def block(call: AtMostOnceCall) -> None:
        service.send()
        fail()

    serve(view=texting(block))
    assert sender.send().status_code == 500
    answer = sender.send()
    assert (answer.status_code, problem(answer)["code"]) == (409, "key_stuck")
    assert len(service.sent) == 1
    assert IdempotencyKey.objects.get().stuck_code == "call_in_doubt"
    assert calls_in_history() == ["sms"]


def test_a_call_that_took_no_effect_is_made_again(serve: Any, sender: Sender) -> None:
    service = SmsService()
    refused = once(fail)

    def block(call: AtMostOnceCall) -> None:
        try:
            refused()
        except Trouble:
            call.retryable()
            raise
        call.record(service.send())

    serve(view=texting(block))
    assert [sender.send().status_code for _ in range(2)] == [500, 200]
    assert len(service.sent) == 1


def refuse(call: AtMostOnceCall) -> None:
    call.retryable()
    raise OSError("refused")


def test_a_call_that_may_be_repeated_leaves_nothing_and_one_that_may_not_leaves_its_intent(
    serve: Any, sender: Sender
) -> None:
    left: list[int] = []

    def body(key: IdempotencyKey) -> None:
        with (
            pytest.raises(OSError, match="refused"),
            key.call("refused", at_most_once=True) as call,
        ):
            refuse(call)
        left.append(key.downstream_calls.count())
        with key.call("refused", at_most_once=True) as call:
            call.record("at last")
        with key.call("made", at_most_once=True) as call:
            call.record({"n": 1})
            call.retryable()
        left.append(key.downstream_calls.count())
        with (
            pytest.raises(RuntimeError, match="already made the call 'made'"),
            key.call("made", at_most_once=True),
        ):
            pass
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse())

    serve(view=over_key(body))
    assert sender.send().status_code == 200
    assert left == [0, 2]


def test_another_service_is_called_instead_of_one_whose_refusal_is_recorded(
    serve: Any, sender: Sender
) -> None:
    first, second = SmsService(), SmsService()
    crash = once(fail)

    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponse:
        key = request.idempotency_key
        for _ in key.phases():
            with key.call("first provider", at_most_once=True) as call:
                if call.due:
                    call.record({"refused": True} if key.attempts == 1 else first.send())
            with key.call("second provider", at_most_once=True) as call:
                if call.due:
                    call.record(second.send())
            crash()
            with atomic_phase(key) as phase:
                phase.set_response(HttpResponse("sent"))
        return key.response()

    serve(view=view)
    assert [sender.send().status_code for _ in range(2)] == [500, 200]
    assert (len(first.sent), len(second.sent)) == (0, 1)


@pytest.mark.parametrize("other", [False, True])
def test_no_other_call_settles_one_that_was_put_off(
    serve: Any, sender: Sender, other: bool
) -> None:
    """Otherwise a recorded message would hide a postponed payment, which would be lost."""

    def view(request: HttpRequest) -> HttpResponse:
        key = request.idempotency_key
        for _ in key.phases():
            with suppress(Trouble), key.call("payment", at_most_once=True) as call:
                call.retryable()
                fail()
            if other:
                with key.call("message", at_most_once=True) as call:
                    call.record()
            with atomic_phase(key) as phase:
                phase.set_response(HttpResponse("paid"))
        return key.response()

    serve(view=idempotent(recovery_points=[])(view))
    assert sender.send().status_code == 500
    assert IdempotencyKey.objects.get().last_error.startswith("CallNotRecorded")


def test_no_phase_commits_after_a_call_that_was_put_off(serve: Any, sender: Sender) -> None:
    def body(key: IdempotencyKey) -> None:
        with key.call("sms", at_most_once=True) as call:
            if key.attempts == 1:
                call.retryable()
            else:
                call.record("sent")
        with atomic_phase(key) as phase:
            Entry.objects.create(name="sent")
            phase.set_response(HttpResponse("sent"))

    serve(view=over_key(body))
    assert sender.send().status_code == 500
    assert IdempotencyKey.objects.get().last_error.startswith("CallNotRecorded")
    assert not Entry.objects.exists()
    assert not DownstreamCall.objects.exists()
    assert sender.send().content == b"sent"
    assert Entry.objects.count() == 1


@pytest.mark.parametrize("begun_before", [False, True])
def test_a_call_in_doubt_ends_no_phase_though_the_view_catches_what_it_raised(
    serve: Any, sender: Sender, begun_before: bool
) -> None:
    def view(request: HttpRequest) -> HttpResponse:
        key = request.idempotency_key
        for _ in key.phases():
            try:
                with key.call("payment", at_most_once=True):
                    fail()
            except Exception:
                if begun_before and key.attempts == 1:
                    raise
            with atomic_phase(key) as phase:
                phase.set_response(HttpResponse("declined", status=402))
        return key.response()

    serve(view=idempotent(recovery_points=[])(view))
    if begun_before:
        assert sender.send().status_code == 500
    assert problem(sender.send())["code"] == "key_stuck"
    assert IdempotencyKey.objects.get().stuck_code == "call_in_doubt"


def test_a_name_is_free_after_a_call_that_was_put_off_and_taken_after_one_that_has_its_result(
    serve: Any, sender: Sender
) -> None:
    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponse:
        key = request.idempotency_key
        for _ in key.phases():
            if key.attempts == 1:
                with key.call("sms", at_most_once=True) as call:
                    call.retryable()
            with key.call("sms", at_most_once=True) as call:
                if call.due:
                    call.record("sent")
            if key.attempts == 1:
                fail()
            with (
                pytest.raises(RuntimeError, match="already made the call 'sms'"),
                key.call("sms", at_most_once=True),
            ):
                pass
            with atomic_phase(key) as phase:
                phase.set_response(HttpResponse("sent"))
        return key.response()

    serve(view=view)
    assert sender.send().status_code == 500
    assert DownstreamCall.objects.get().result == "sent"
    assert sender.send().status_code == 200


def answered(request: HttpRequest) -> HttpResponse:
    return HttpResponse(status=404)


def raised(request: HttpRequest) -> HttpResponse:
    raise Http404


@pytest.mark.parametrize("early", [answered, raised])
@pytest.mark.parametrize("later_run", [False, True])
def test_an_early_answer_does_not_end_a_request_whose_call_was_made(
    serve: Any, sender: Sender, early: Any, later_run: bool
) -> None:
    """For example, the room was free when the card was charged, and is booked when the client
    retries."""

    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponse:
        key = request.idempotency_key
        if key.attempts == 1:
            with key.call("payment", at_most_once=True) as call:
                call.record("paid")
        if key.attempts == 1 and later_run:
            fail()
        response: HttpResponse = early(request)
        return response

    serve(view=view)
    for _ in range(1 + later_run):
        assert sender.send().status_code == 500
    key = IdempotencyKey.objects.get()
    assert (key.finished_at, key.locked_until, key.last_error[:20]) == (
        None,
        None,
        "ResponseNotCommitted",
    )


@pytest.mark.parametrize("early", [answered, raised])
def test_an_early_answer_does_not_end_a_request_whose_call_is_in_doubt(
    serve: Any, sender: Sender, early: Any
) -> None:
    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponse:
        if request.idempotency_key.attempts == 1:
            with request.idempotency_key.call("message", at_most_once=True) as call:
                call.record("sent")
            with request.idempotency_key.call("payment", at_most_once=True):
                fail()
        response: HttpResponse = early(request)
        return response

    serve(view=view)
    assert sender.send().status_code == 500
    assert problem(sender.send())["code"] == "key_stuck"
    assert IdempotencyKey.objects.get().stuck_code == "call_in_doubt"


def deep() -> Any:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize(
    "result",
    [deep(), 10**5000, "lone \udc80", {"name": "\ud800"}],
    ids=["deep", "long", "lone", "inner"],
)
def test_the_result_of_a_call_that_was_made_is_never_lost(
    serve: Any, sender: Sender, result: Any
) -> None:
    def block(call: AtMostOnceCall) -> None:
        call.record(result)

    serve(view=texting(block))
    assert sender.send().status_code == 500
    row = DownstreamCall.objects.get()
    assert row.recorded_at is not None
    assert isinstance(row.result, str)
    assert row.result


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
        with key.call("sms", at_most_once=True) as call:
            if call.due:
                made.append(1)
                call.record(result)
        with atomic_phase(key) as phase:
            phase.set_response(JsonResponse({"kept": call.result}))

    serve(view=over_key(body))
    assert sender.send().status_code == 500
    assert message in IdempotencyKey.objects.get().last_error
    assert sender.send().json() == {"kept": kept}
    assert len(made) == 1


@pytest.mark.postgres
def test_a_result_is_written_on_a_new_connection_when_the_old_one_broke(
    serve: Any, sender: Sender
) -> None:
    """PostgreSQL was restarted during the call."""

    def block(call: AtMostOnceCall) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            (pid,) = cursor.fetchone()
        with background(lambda: end_session(pid)) as ended:
            ended.result(60)
        call.record("paid")

    serve(view=texting(block))
    assert sender.send().status_code == 503
    assert DownstreamCall.objects.get().result == "paid"


@pytest.mark.skipif("connection.vendor != 'sqlite'", reason="needs SQLite")
def test_a_result_is_written_although_a_query_of_the_block_is_unfinished(
    serve: Any, sender: Sender
) -> None:
    """The connection holds an old snapshot, in which SQLite permits no write."""
    Entry.objects.bulk_create(Entry(name=str(number)) for number in range(5000))
    cursors: list[Any] = []

    def block(call: AtMostOnceCall) -> None:
        cursors.append(connection.connection.execute("SELECT name FROM tests_entry"))
        cursors[0].fetchone()
        with background(lambda: Entry.objects.filter(name="1").update(name="x")) as updated:
            updated.result(60)
        call.record("paid")

    serve(view=texting(block))
    assert sender.send().status_code == 200
    assert DownstreamCall.objects.get().result == "paid"


def end_session(pid: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s::int, 5000)", [pid])


def test_a_block_that_records_nothing_is_a_mistake(serve: Any, sender: Sender) -> None:
    serve(view=texting(lambda call: None))
    sender.client.raise_request_exception = True
    with pytest.raises(CallNotRecorded, match=r"call\.record"):
        sender.send()


def test_a_call_of_which_nothing_is_known_is_told_at_the_end_of_its_block(
    serve: Any, sender: Sender
) -> None:
    def body(key: IdempotencyKey) -> None:
        with pytest.raises(CallNotRecorded), key.call("sms", at_most_once=True):
            pass
        raise LookupError("told")

    serve(view=over_key(body))
    assert sender.send().status_code == 500
    assert IdempotencyKey.objects.get().last_error == "LookupError: told"


def test_a_result_of_none_is_a_result(serve: Any, sender: Sender) -> None:
    service = SmsService()

    def block(call: AtMostOnceCall) -> None:
        if call.due:
            service.send()
            call.record()

    serve(view=texting(block, after=once(fail)))
    assert [sender.send().status_code for _ in range(2)] == [500, 200]
    assert len(service.sent) == 1


@pytest.mark.postgres
def test_a_serialization_failure_after_the_call_does_not_make_it_again(
    serve: Any, sender: Sender
) -> None:
    service = SmsService()

    def lose_a_race() -> None:
        with connection.cursor() as cursor:
            cursor.execute("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40001'; END $$")

    def block(call: AtMostOnceCall) -> None:
        if call.due:
            call.record(service.send())

    serve(view=texting(block, after=once(lose_a_race)))
    assert sender.send().json() == {"receipt": "receipt 1"}
    assert len(service.sent) == 1


@pytest.mark.postgres
def test_a_late_result_is_recorded_after_a_takeover(serve: Any, sender: Sender) -> None:
    """The lock of the first run expires during its call: the retry must not call, and the result is
    not lost."""
    service, gate = SmsService(), Gate()

    def block(call: AtMostOnceCall) -> None:
        receipt = service.send()
        gate.wait_here()
        call.record(receipt)

    serve(view=texting(block))
    with background(sender.send) as first:
        gate.wait_until_reached()
        expire_lock()
        assert sender.send().status_code == 409
        assert IdempotencyKey.objects.get().stuck_code == "call_in_doubt"
        gate.open()
    assert first.result().status_code == 409
    assert DownstreamCall.objects.get().result == "receipt 1"
    assert len(service.sent) == 1


@pytest.mark.parametrize(
    "other_key", [False, True], ids=["the key was kept", "its id is that of another key"]
)
def test_a_result_is_recorded_though_a_failover_has_lost_the_intent(
    serve: Any, sender: Sender, other_key: bool
) -> None:
    service = SmsService()

    def fail_over() -> None:
        DownstreamCall.objects.all().delete()
        if other_key:
            IdempotencyKey.objects.update(
                claim_token=uuid4(), idempotency_key="another", seed=b"of another key"
            )

    def block(call: AtMostOnceCall) -> None:
        if call.due:
            receipt = service.send()
            once_only()
            call.record(receipt)

    once_only = once(fail_over)
    serve(view=texting(block, after=once(fail)))
    assert sender.send().status_code == (409 if other_key else 500)
    assert [call.result for call in DownstreamCall.objects.all()] == (
        [] if other_key else ["receipt 1"]
    )
    if not other_key:
        assert sender.send().json() == {"receipt": "receipt 1"}
        assert len(service.sent) == 1


def test_a_result_is_recorded_though_a_failover_has_lost_the_claim_of_a_retry_too(
    serve: Any, sender: Sender
) -> None:
    """The claim of a retry is an update, milliseconds before the intent."""
    service = SmsService()

    def fail_over() -> None:
        DownstreamCall.objects.all().delete()
        IdempotencyKey.objects.update(**before)

    @idempotent(recovery_points=["ordered"])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        first_fails()
        with key.call("sms", at_most_once=True) as call:
            if call.due:
                receipt = service.send()
                once_only()
                call.record(receipt)
        with atomic_phase(key) as phase:
            phase.set_response(JsonResponse({"receipt": call.result}))
        return key.response()

    first_fails, once_only = once(fail), once(fail_over)
    serve(view=view)
    assert sender.send().status_code == 500
    before = IdempotencyKey.objects.values(
        "claim_token", "locked_until", "attempts", "begun", "last_run_at", "history"
    ).get()
    assert sender.send().status_code == 409
    assert sender.send().json() == {"receipt": "receipt 1"}
    assert len(service.sent) == 1


@pytest.mark.parametrize("known", [True, False], ids=["with its result", "in doubt"])
def test_a_call_is_remembered_though_a_failover_has_lost_the_phase_before_it(
    serve: Any, sender: Sender, known: bool
) -> None:
    service = SmsService()

    def call_and_fail_over(call: AtMostOnceCall) -> None:
        receipt = service.send()
        DownstreamCall.objects.all().delete()
        IdempotencyKey.objects.update(recovery_point="started", begun=False)
        if not known:
            fail()
        call.record(receipt)

    @idempotent(recovery_points=["ordered"])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        with atomic_phase(key) as phase:
            phase.set_recovery_point("ordered")
        with key.call("sms", at_most_once=True) as call:
            if call.due:
                call_and_fail_over(call)
        with atomic_phase(key) as phase:
            phase.set_response(JsonResponse({"receipt": call.result}))
        return key.response()

    serve(view=view)
    assert sender.send().status_code == (409 if known else 500)
    assert not IdempotencyKey.objects.get().untouched
    if known:
        assert sender.send().json() == {"receipt": "receipt 1"}
    else:
        assert problem(sender.send())["code"] == "key_stuck"
        assert IdempotencyKey.objects.get().stuck_code == "call_in_doubt"
    assert len(service.sent) == 1


def test_a_result_that_somebody_recorded_during_the_call_stays(serve: Any, sender: Sender) -> None:
    due: list[bool] = []

    def block(call: AtMostOnceCall) -> None:
        due.append(call.due)
        DownstreamCall.objects.update(result="recorded by a person", recorded_at=Now())
        call.record("receipt 1")

    serve(view=texting(block))
    assert (sender.send().status_code, due) == (200, [True])
    assert DownstreamCall.objects.get().result == "recorded by a person"


def test_no_call_is_made_by_a_run_that_has_lost_its_key(serve: Any, sender: Sender) -> None:
    service = SmsService()

    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        IdempotencyKey.objects.update(claim_token="8e03978e-40d5-43e8-bc93-6894a57f9324")
        with key.call("sms", at_most_once=True) as call:
            call.record(service.send())
        raise AssertionError

    serve(view=view)
    assert sender.send().status_code == 409
    assert not service.sent
    assert not DownstreamCall.objects.exists()


def test_no_result_is_read_by_a_run_that_has_lost_its_key(serve: Any, sender: Sender) -> None:
    trouble, made = once(fail), []

    def work(key: Any) -> None:
        if key.attempts > 1:
            IdempotencyKey.objects.update(claim_token="8e03978e-40d5-43e8-bc93-6894a57f9324")
        with key.call("sms", at_most_once=True) as call:
            made.append(call.due)
            if call.due:
                call.record("sent")
        trouble()

    serve(view=over_key(work))
    assert [sender.send().status_code for _ in range(2)] == [500, 409]
    assert made == [True]


def test_an_at_most_once_call_cannot_stand_in_a_phase(serve: Any, sender: Sender) -> None:
    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        with atomic_phase(key) as phase:
            with pytest.raises(RuntimeError, match="nested"), key.call("sms", at_most_once=True):
                pass
            phase.set_response(JsonResponse({}))
        return key.response()

    serve(view=view)
    assert sender.send().status_code == 200


@pytest.mark.parametrize("at_most_once", [True, False])
@pytest.mark.parametrize("retried", [True, False])
def test_a_call_of_one_name_is_not_made_in_both_ways(
    retried: bool, at_most_once: bool, serve: Any, sender: Sender
) -> None:
    """The service may not know the key of a call that was made at most once."""
    service, trouble = SmsService(), once(fail)

    def pay_at_most_once(key: Any) -> None:
        with key.call("pay", at_most_once=True) as call:
            if call.due:
                call.record(service.send())

    def pay(key: Any) -> None:
        with key.call("pay"):
            service.send()

    first, second = (pay_at_most_once, pay) if at_most_once else (pay, pay_at_most_once)

    def work(key: Any) -> None:
        if not retried or key.attempts == 1:
            first(key)
        if retried:
            trouble()
        second(key)
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse())

    serve(view=over_key(work))
    answers = [sender.send().status_code for _ in range(2)]
    if retried and not at_most_once:
        # The history of the key alone tells of a call with a key: the page about deploys names this
        # limit.
        assert len(service.sent) == 2
    else:
        assert (answers, len(service.sent)) == ([500, 500], 1 if at_most_once or retried else 2)
        assert "Use another name" in IdempotencyKey.objects.get().last_error


def test_an_answered_key_expires_although_a_late_call_ends_without_a_result(
    serve: Any, sender: Sender
) -> None:
    gate = Gate()

    def block(call: AtMostOnceCall) -> None:
        gate.wait_here()
        fail()

    serve(view=texting(block))
    with background(sender.send) as late:
        gate.wait_until_reached()
        expire_lock()
        key = IdempotencyKey.objects.get()
        assert interventions.answer(
            key.pk, key.claim_token, HttpResponse("gone", status=410), by="jane"
        )
        gate.open()
        late.result(60)
    assert IdempotencyKey.objects.get().expires_at is not None
