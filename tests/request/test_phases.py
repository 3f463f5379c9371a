"""Phases commit with their recovery point or not at all; a late run changes nothing."""

import json
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from django.core.exceptions import PermissionDenied
from django.db import connection, transaction
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.template import engines
from django.template.response import SimpleTemplateResponse
from pytest_django import Settings

from idempotency.decorators import idempotent
from idempotency.exceptions import (
    DownstreamKeyExpired,
    KeyStuck,
    PhaseDidNotAdvance,
)
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from idempotency.signals import key_finished, key_stuck
from tests.factories import IdempotencyKeyFactory
from tests.kit.ageing import expire_lock, lock_end, make_older
from tests.kit.serving import Sender, another_client, problem
from tests.kit.threads import Gate, background, in_background
from tests.kit.views import phased, phased_outside, plain
from tests.models import Entry

pytestmark = pytest.mark.django_db(transaction=True)


def two_phases(between: Any = lambda: None, inside: Any = lambda: None) -> Any:
    """Return a view with two phases that calls ``between`` at the place of a downstream call."""

    @idempotent(recovery_points=["entry_created"])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for recovery_point in key.phases():
            match recovery_point:
                case "started":
                    with atomic_phase(key) as phase:
                        # The entry has no unique foreign key to the key: a takeover would wait for
                        # the row of the first run.
                        Entry.objects.create(name="ours")
                        inside()
                        phase.set_recovery_point("entry_created")
                case "entry_created":
                    between()
                    with atomic_phase(key) as phase:
                        entry = Entry.objects.get(name="ours")
                        Entry.objects.create(name="second phase")
                        phase.set_response(JsonResponse({"entry": entry.pk}, status=201))
        return key.response()

    return view


def one_phase(body: Any) -> Any:
    """Return a phased view with ``body(key)`` as its only pass."""

    @idempotent(recovery_points=["one", "two"])
    def view(request: HttpRequest) -> HttpResponseBase:
        for _ in request.idempotency_key.phases():
            if (response := body(request.idempotency_key)) is not None:
                return response
        return request.idempotency_key.response()

    return view


def test_a_crash_between_phases_is_resumed_from_the_last_recovery_point(
    serve: Any, sender: Sender
) -> None:
    calls = []

    def crash_once() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("the other system cut the line")

    serve(view=two_phases(crash_once))
    assert sender.send().status_code == 500
    key = IdempotencyKey.objects.get()
    assert (key.recovery_point, key.locked_until, key.finished_at) == ("entry_created", None, None)
    assert key.last_error == "OSError: the other system cut the line"
    answer = sender.send()
    assert answer.status_code == 201
    assert "Idempotent-Replayed" not in answer
    assert sorted(Entry.objects.values_list("name", flat=True)) == ["ours", "second phase"]
    key.refresh_from_db()
    assert [event["event"] for event in key.history] == [
        "claimed",
        "recovery point",
        "error",
        "claimed",
        "finished",
    ]


def test_a_phase_that_fails_leaves_nothing(serve: Any, sender: Sender) -> None:
    def fail() -> None:
        raise OSError

    serve(view=two_phases(inside=fail))
    assert sender.send().status_code == 500
    assert not Entry.objects.exists()
    assert IdempotencyKey.objects.get().recovery_point == "started"


def test_a_phase_that_forgets_to_move_is_rolled_back(serve: Any, sender: Sender) -> None:
    def forget(key: IdempotencyKey) -> None:
        with atomic_phase(key):
            Entry.objects.create(name="forgotten")

    serve(view=one_phase(forget))
    sender.client.raise_request_exception = True
    with pytest.raises(PhaseDidNotAdvance):
        sender.send()
    assert not Entry.objects.exists()
    assert IdempotencyKey.objects.get().locked_until is None


@pytest.mark.parametrize("moves", [0, 1])
def test_a_pass_that_moves_nothing_does_not_spin(moves: int, serve: Any, sender: Sender) -> None:
    passes = []

    def no_op(key: IdempotencyKey) -> None:
        passes.append(1)
        assert len(passes) <= 5
        with atomic_phase(key) as phase:
            Entry.objects.create(name="repeated")
            if len(passes) <= moves:
                phase.set_recovery_point("one")
            else:
                phase.no_op()

    serve(view=one_phase(no_op))
    assert sender.send().status_code == 500
    assert len(passes) == moves + 1
    assert Entry.objects.count() == moves + 1
    assert "committed no progress" in IdempotencyKey.objects.get().last_error


@pytest.mark.parametrize("name", ["unheard_of", "started", "finished", ""])
def test_an_undeclared_recovery_point_is_refused_at_once(
    serve: Any, sender: Sender, name: str
) -> None:
    def jump(key: IdempotencyKey) -> None:
        with atomic_phase(key) as phase:
            Entry.objects.create(name="lost")
            with pytest.raises(PhaseDidNotAdvance, match="Declare it"):
                phase.set_recovery_point(name)

    serve(view=one_phase(jump))
    assert sender.send().status_code == 500
    assert not Entry.objects.exists()


def test_a_recovery_point_cannot_go_back(serve: Any, sender: Sender) -> None:
    def back(key: IdempotencyKey) -> HttpResponseBase | None:
        with atomic_phase(key) as phase:
            if key.recovery_point == "started":
                phase.set_recovery_point("two")
                return None
            with pytest.raises(PhaseDidNotAdvance, match="'one' cannot follow 'two'"):
                phase.set_recovery_point("one")
            phase.set_response(HttpResponse("done"))
        return None

    serve(view=one_phase(back))
    assert sender.send().status_code == 200


def test_a_phase_cannot_end_where_it_began(serve: Any, sender: Sender) -> None:
    def body(key: IdempotencyKey) -> None:
        with atomic_phase(key) as phase:
            if key.recovery_point == "started":
                phase.set_recovery_point("one")
            else:
                with pytest.raises(PhaseDidNotAdvance, match="'one' cannot follow 'one'"):
                    phase.set_recovery_point("one")
                phase.set_response(HttpResponse("done"))

    serve(view=one_phase(body))
    assert sender.send().content == b"done"


def test_phases_cannot_be_nested_nor_stand_in_a_transaction(serve: Any, sender: Sender) -> None:
    def nest(key: IdempotencyKey) -> HttpResponseBase | None:
        with atomic_phase(key) as phase:
            with pytest.raises(RuntimeError, match="nested"), atomic_phase(key):
                pass
            phase.set_recovery_point("one")
        with (
            transaction.atomic(),
            pytest.raises(RuntimeError, match="inside a transaction"),
            atomic_phase(key),
        ):
            pass
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse("done"))
        return None

    serve(view=one_phase(nest))
    assert sender.send().status_code == 200


def test_a_phase_is_told_its_end_once(serve: Any, sender: Sender) -> None:
    def body(key: IdempotencyKey) -> None:
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse("first"))
            with pytest.raises(RuntimeError, match="already set"):
                phase.no_op()

    serve(view=one_phase(body))
    assert sender.send().content == b"first"


def test_a_phase_is_over_when_its_block_is_left(serve: Any, sender: Sender) -> None:
    def body(key: IdempotencyKey) -> None:
        with pytest.raises(OSError, match="once"), atomic_phase(key):
            raise OSError("once")
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse("after"))

    serve(view=one_phase(body))
    assert sender.send().content == b"after"


@pytest.mark.postgres
@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
def test_a_takeover_rolls_the_late_runs_writes_back(
    serve: Any, sender: Sender, settings: Settings, isolation: str
) -> None:
    """The lock of the first run expires in its first phase; a retry finishes; then the first run
    continues."""
    settings.IDEMPOTENCY = {"PHASE_ISOLATION": isolation}
    gate = Gate()
    serve(view=two_phases(inside=gate.wait_here))
    with background(sender.send) as first:
        gate.wait_until_reached()
        expire_lock()
        retry = sender.send()
        assert retry.status_code == 201
        gate.open()
    late = first.result()
    assert (late.status_code, late.content) == (201, retry.content)
    assert late["Idempotent-Replayed"] == "true"
    assert sorted(Entry.objects.values_list("name", flat=True)) == ["ours", "second phase"]


@pytest.mark.postgres
def test_a_late_run_between_phases_writes_nothing_more(serve: Any, sender: Sender) -> None:
    """The lock of the first run expires during a downstream call; both runs return the same
    response."""
    gate = Gate()
    serve(view=two_phases(between=gate.wait_here))
    with background(sender.send) as first:
        gate.wait_until_reached()
        expire_lock()
        retry = sender.send()
        gate.open()
    late = first.result()
    assert (
        (late.status_code, late.content)
        == (retry.status_code, retry.content)
        == (201, retry.content)
    )
    assert Entry.objects.count() == 2


@pytest.mark.postgres
def test_a_late_run_is_sent_round_again_while_the_winner_is_at_work(
    serve: Any, sender: Sender
) -> None:
    first_gate, second_gate = Gate(), Gate()
    runs = []

    def wait() -> None:
        runs.append(1)
        (first_gate if len(runs) == 1 else second_gate).wait_here()

    serve(view=two_phases(between=wait))
    with background(sender.send) as first:
        first_gate.wait_until_reached()
        expire_lock()
        with background(sender.send) as second:
            second_gate.wait_until_reached()
            first_gate.open()
            late = first.result(60)
            assert late.status_code == 409
            assert problem(late)["retryable"] is True
            second_gate.open()
        assert second.result().status_code == 201
    assert Entry.objects.count() == 2


@pytest.mark.postgres
def test_reading_the_key_again_does_not_pass_the_fence(serve: Any, sender: Sender) -> None:
    """Otherwise a late run that refreshes its key would get the winner's token, and commit too."""
    gate = Gate()
    runs = []

    @idempotent(recovery_points=["unused"])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for _ in key.phases():
            runs.append(key.pk)
            if len(runs) == 1:
                make_older(91, "locked_until")
                winner.append(in_background(another_client(sender).send))
                gate.wait_until_reached()
                key.refresh_from_db()  # the late run continues, and reads its recovery point
            else:
                gate.wait_here()
            with atomic_phase(key) as phase:
                Entry.objects.create(name="paid")
                phase.set_response(HttpResponse(status=201))
        return key.response()

    winner: list[Any] = []
    serve(view=view)
    late = sender.send()
    gate.open()
    assert winner[0].result(60).status_code == 201
    assert (late.status_code, late.json()["code"]) == (409, "key_in_use")
    assert Entry.objects.count() == 1


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
        seen.append(IdempotencyKey.objects.filter(locked_until__gt=lock_end(30)).exists())
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse())

    serve(view=one_phase(body))
    sender.send()
    assert seen == [True]


def test_a_phase_waits_for_a_lock_no_longer_than_the_lock_timeout(
    serve: Any, sender: Sender
) -> None:
    seen: list[str] = []

    def body(key: IdempotencyKey) -> None:
        with atomic_phase(key) as phase:
            if connection.vendor == "postgresql":
                with connection.cursor() as cursor:
                    cursor.execute("SHOW lock_timeout")
                    seen.append(cursor.fetchone()[0])
            phase.set_response(HttpResponse())

    serve(view=one_phase(body))
    sender.send()
    assert seen == (["90s"] if connection.vendor == "postgresql" else [])


def test_the_first_answer_is_definitive_before_anything_was_committed(
    serve: Any, sender: Sender
) -> None:
    def refuse(key: IdempotencyKey) -> HttpResponseBase:
        return JsonResponse({"error": "no"}, status=422)

    serve(view=one_phase(refuse))
    first, second = sender.send(), sender.send()
    assert (first.status_code, second.status_code, second.content) == (422, 422, first.content)
    assert "Idempotent-Replayed" not in first
    assert second["Idempotent-Replayed"] == "true"


def test_http404_at_started_is_stored(serve: Any, sender: Sender) -> None:
    def missing(key: IdempotencyKey) -> None:
        raise Http404

    serve(view=one_phase(missing))
    assert [sender.send().status_code for _ in range(2)] == [404, 404]
    assert IdempotencyKey.objects.get().response_code == 404


@pytest.mark.parametrize(
    ("status", "stored"), [(399, False), (400, True), (499, True), (500, False)]
)
def test_a_phase_stores_any_4xx_and_no_other_status_that_is_never_stored(
    serve: Any, sender: Sender, settings: Settings, status: int, stored: bool
) -> None:
    settings.IDEMPOTENCY = {"NEVER_STORED_STATUSES": [status]}

    def body(key: IdempotencyKey) -> HttpResponseBase:
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse(status=status))
        return key.response()

    serve(view=one_phase(body))
    assert [sender.send().status_code for _ in range(2)] == ([status] if stored else [500]) * 2
    assert IdempotencyKey.objects.finished().exists() == stored


def raise_404() -> HttpResponseBase:
    raise Http404


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        *(
            (partial(HttpResponse, status=status), f"A result with status {status}")
            for status in (200, 302, 404)
        ),
        (raise_404, "A result with status 404"),
    ],
)
def test_a_response_that_no_phase_stored_is_refused(
    serve: Any, sender: Sender, answer: Any, what: str
) -> None:
    def commit_then_answer(key: IdempotencyKey) -> HttpResponseBase:
        with atomic_phase(key) as phase:
            phase.set_recovery_point("one")
        response: HttpResponseBase = answer()
        return response

    serve(view=one_phase(commit_then_answer))
    assert sender.send().status_code == 500
    key = IdempotencyKey.objects.get()
    assert key.last_error.startswith(f"ResponseNotCommitted: {what} is not the one")
    assert (key.recovery_point, key.locked_until) == ("one", None)


def test_an_exception_after_the_response_was_stored_is_named(
    serve: Any, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    def store_then_raise(key: IdempotencyKey) -> HttpResponseBase:
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse(status=201))
        raise PermissionDenied

    serve(view=one_phase(store_then_raise))
    assert [sender.send().status_code for _ in range(2)] == [500, 201]
    assert "ResponseNotCommitted: PermissionDenied is not the one" in caplog.text


def test_a_refusal_after_a_phase_that_moved_nothing_is_refused_too(
    serve: Any, sender: Sender
) -> None:
    def commit_then_refuse(key: IdempotencyKey) -> HttpResponseBase:
        with atomic_phase(key) as phase:
            Entry.objects.create(name="committed")
            phase.no_op()
        return HttpResponse(status=422)

    serve(view=one_phase(commit_then_refuse))
    assert sender.send().status_code == 500
    key = IdempotencyKey.objects.get()
    assert key.last_error.startswith("ResponseNotCommitted")
    assert (key.recovery_point, key.finished_at, key.locked_until) == ("started", None, None)


def test_nothing_begins_after_the_response_is_stored(serve: Any, sender: Sender) -> None:
    begun = []

    def finish_then_begin(key: IdempotencyKey) -> None:
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse("paid"))
        with pytest.raises(RuntimeError), atomic_phase(key):
            begun.append("phase")
        with pytest.raises(RuntimeError), key.call("charge", at_most_once=True):
            begun.append("call")

    serve(view=one_phase(finish_then_begin))
    assert [sender.send().content, sender.send().content] == [b"paid", b"paid"]
    assert begun == []


def test_a_503_releases_the_key_at_its_recovery_point(serve: Any, sender: Sender) -> None:
    answers = [HttpResponse(status=503), None]

    def sometimes_down(key: IdempotencyKey) -> HttpResponseBase | None:
        with atomic_phase(key) as phase:
            if key.recovery_point == "started":
                phase.set_recovery_point("one")
                return None
            if (answer := answers.pop(0)) is not None:
                phase.no_op()
                return answer
            phase.set_response(HttpResponse("paid"))
        return None

    serve(view=one_phase(sometimes_down))
    assert sender.send().status_code == 503
    assert IdempotencyKey.objects.get().recovery_point == "one"
    assert sender.send().content == b"paid"


def test_a_response_that_is_never_stored_cannot_be_set(serve: Any, sender: Sender) -> None:
    def store_503(key: IdempotencyKey) -> None:
        with atomic_phase(key) as phase:
            Entry.objects.create(name="lost")
            phase.set_response(HttpResponse(status=503))

    serve(view=one_phase(store_503))
    assert sender.send().status_code == 500
    assert "never stored" in IdempotencyKey.objects.get().last_error
    assert not Entry.objects.exists()


def test_a_template_is_rendered_in_the_transaction_of_its_phase(serve: Any, sender: Sender) -> None:
    template = engines["django"].from_string("{{ in_phase }}")

    def body(key: IdempotencyKey) -> None:
        with atomic_phase(key) as phase:
            context = {"in_phase": lambda: connection.in_atomic_block}
            phase.set_response(SimpleTemplateResponse(template, context))

    serve(view=one_phase(body))
    assert [sender.send().content for _ in range(2)] == [b"True", b"True"]


def test_a_derived_key_is_stable_over_attempts_and_unique_over_keys(
    serve: Any, sender: Sender
) -> None:
    derived = []

    def derive_and_fail(key: IdempotencyKey) -> None:
        derived.append((key.derive("charge"), key.derive("refund")))
        raise OSError

    serve(view=one_phase(derive_and_fail))
    for name in ("key-1", "key-1", "key-2"):
        sender.send(key=name)
    first, again, other = derived
    assert first == again
    assert len({*first, *other}) == 4
    assert all(len(value) == 64 and "key-1" not in value for value in first)


def test_a_downstream_key_past_its_validity_makes_the_key_stuck(serve: Any, sender: Sender) -> None:
    def charge(key: IdempotencyKey) -> HttpResponseBase | None:
        key.derive("charge", valid_seconds=23 * 3600)
        raise OSError

    serve(view=one_phase(charge))
    assert sender.send().status_code == 500
    make_older(24 * 3600, "created_at")
    answer = sender.send()
    assert (answer.status_code, problem(answer)["code"], problem(answer)["retryable"]) == (
        409,
        "key_stuck",
        False,
    )
    key = IdempotencyKey.objects.get()
    assert (key.stuck_code, key.locked_until) == (DownstreamKeyExpired.code, None)


def test_a_view_can_hand_its_key_to_a_person(serve: Any, sender: Sender) -> None:
    runs = []

    def give_up(key: IdempotencyKey) -> None:
        runs.append(1)
        with atomic_phase(key):
            Entry.objects.create(name="lost")
            raise KeyStuck("Two charges were found for this ride.")

    serve(view=one_phase(give_up))
    assert [sender.send().status_code for _ in range(3)] == [409, 409, 409]
    assert len(runs) == 1
    assert not Entry.objects.exists()
    key = IdempotencyKey.objects.get()
    assert key.stuck_reason == "Two charges were found for this ride."
    assert list(IdempotencyKey.objects.stuck()) == [key]


def test_a_key_left_by_another_deploy_waits_for_code_that_knows_its_point(
    serve: Any, sender: Sender
) -> None:
    told: list[int] = []

    def listen(key: IdempotencyKey, **kwargs: Any) -> None:
        told.append(key.pk)

    key_stuck.connect(listen)
    serve(view=one_phase(lambda key: HttpResponse(status=500)))
    sender.send()
    IdempotencyKey.objects.update(recovery_point="point_of_next_deploy")
    answer = sender.send()
    assert (answer.status_code, problem(answer)["code"]) == (503, "unknown_recovery_point")
    assert int(answer["Retry-After"]) >= 1
    key = IdempotencyKey.objects.stuck().get()
    assert (key.stuck_code, "'point_of_next_deploy'" in key.stuck_reason) == (
        "unknown_recovery_point",
        True,
    )
    assert told == [key.pk]
    IdempotencyKey.objects.update(recovery_point="one")

    def finish(key: IdempotencyKey) -> None:
        with atomic_phase(key) as phase:
            phase.set_response(JsonResponse({"at": key.recovery_point}))

    serve(view=one_phase(finish))
    assert json.loads(sender.send().content) == {"at": "one"}
    key = IdempotencyKey.objects.get()
    assert (key.stuck_at, key.stuck_code, key.stuck_reason) == (None, "", "")


def test_a_plain_view_cannot_derive_a_key_that_its_next_attempt_would_not_get(
    serve: Any, sender: Sender
) -> None:
    @idempotent
    def view(request: HttpRequest) -> HttpResponse:
        with pytest.raises(RuntimeError, match="its run is plain, and each attempt"):
            request.idempotency_key.derive("charge")
        return HttpResponse(status=201)

    serve(view=view)
    assert sender.send().status_code == 201


def test_a_key_read_from_the_database_has_no_phases(db: None) -> None:
    from tests.factories import IdempotencyKeyFactory

    key = IdempotencyKeyFactory()
    assert not [name for name in ("phases", "response", "derive", "call") if hasattr(key, name)]
    with pytest.raises(RuntimeError, match="recovery_points"), atomic_phase(key):
        pass


def test_a_response_that_no_phase_has_stored_is_asked_for_in_vain(
    serve: Any, sender: Sender
) -> None:
    serve(view=idempotent(recovery_points=[])(lambda request: request.idempotency_key.response()))
    sender.client.raise_request_exception = True
    with pytest.raises(RuntimeError, match="before a phase stored a response"):
        sender.send()
    assert IdempotencyKey.objects.get().recovery_point == "started"


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    "end", ["ROLLBACK", "COMMIT", pytest.param("ROLLBACK AND CHAIN", marks=pytest.mark.postgres)]
)
def test_a_phase_whose_transaction_the_view_has_ended_is_not_run_again(
    end: str, later: bool, serve: Any, sender: Sender
) -> None:
    runs = []

    def respond(request: HttpRequest) -> HttpResponseBase:
        runs.append(1)
        Entry.objects.create(name="work")
        with connection.cursor() as cursor:
            cursor.execute(end)
        if later:  # psycopg begins another transaction with this query.
            Entry.objects.exists()
        return HttpResponse(status=201)

    serve(view=phased(respond))
    for _ in range(2):
        answer = sender.send()
        assert (answer.status_code, problem(answer)["code"]) == (409, "key_stuck")
    key = IdempotencyKey.objects.get()
    assert (key.finished_at, key.stuck_code) == (None, "transaction_ended")
    assert "ended the transaction of a phase" in key.stuck_reason
    assert (len(runs), Entry.objects.count()) == (1, int(end == "COMMIT"))


def test_a_plain_view_that_has_rolled_back_stores_no_response(serve: Any, sender: Sender) -> None:
    def respond(request: HttpRequest) -> HttpResponseBase:
        Entry.objects.create(name="work")
        with connection.cursor() as cursor:
            cursor.execute("ROLLBACK")
        return HttpResponse(status=201)

    serve(view=plain(respond))
    assert sender.send().status_code == 500
    assert not Entry.objects.exists()
    assert not IdempotencyKey.objects.exists()


def test_a_view_that_gives_up_after_its_answer_was_stored_is_an_error_of_the_view(
    serve: Any, sender: Sender
) -> None:
    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for _ in key.phases():
            with atomic_phase(key) as phase:
                phase.set_response(HttpResponse(status=201))
        raise KeyStuck("It is too late.")

    serve(view=view)
    assert [sender.send().status_code for _ in range(2)] == [500, 201]
    assert not IdempotencyKey.objects.stuck().exists()


def test_a_late_run_that_gives_up_gets_the_answer_of_the_run_that_has_the_key(
    serve: Any, sender: Sender
) -> None:
    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponseBase:
        IdempotencyKey.objects.update(claim_token=uuid4())
        raise KeyStuck("It is too late.")

    told: list[str] = []
    receiver = lambda key, **kwargs: told.append(key.stuck_code)  # noqa: E731
    key_stuck.connect(receiver)
    serve(view=view)
    answer = sender.send()
    key_stuck.disconnect(receiver)
    assert (answer.status_code, problem(answer)["code"], told) == (409, "key_in_use", [])
    assert not IdempotencyKey.objects.stuck().exists()


def test_a_phased_view_inside_a_transaction_leaves_no_key(rf: Any) -> None:
    view = phased(lambda request: HttpResponse(status=201), scope=lambda request: "one")
    with transaction.atomic():
        with pytest.raises(RuntimeError, match="was entered inside a transaction"):
            view(rf.post("/", headers={"Idempotency-Key": "key-1"}))
        assert not IdempotencyKey.objects.exists()


def test_a_5xx_after_a_phase_is_not_stored_with_store_5xx_either(
    serve: Any, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"STORE_5XX": True}

    @idempotent(recovery_points=["one"])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for recovery_point in key.phases():
            if recovery_point == "one":
                return HttpResponse(status=500)
            with atomic_phase(key) as phase:
                phase.set_recovery_point("one")
        return key.response()

    serve(view=view)
    assert sender.send().status_code == 500
    assert IdempotencyKey.objects.get().last_error.startswith("The view responded with")


def test_a_key_is_finished_when_it_is_said_so(serve: Any, sender: Sender) -> None:
    told: list[str] = []
    receiver = lambda key, **kwargs: told.append(key.recovery_point)  # noqa: E731
    key_finished.connect(receiver)
    serve(view=phased_outside(lambda request: HttpResponse(status=422)))
    assert sender.send().status_code == 422
    key_finished.disconnect(receiver)
    assert told == ["finished"]


@pytest.mark.parametrize("copied", [(), ("scope", "idempotency_key")])
def test_a_run_whose_key_was_lost_does_not_answer_with_another_one_that_has_its_id(
    copied: tuple[str, ...], serve: Any, sender: Sender
) -> None:
    """After a failover the sequence may restart earlier. Behind a pooler, the run continues on the
    new primary. In the table of another tenant, a new session may find a key of the same text."""
    lost: list[Any] = []

    def fail_over() -> None:
        own = IdempotencyKey.objects.get()
        IdempotencyKey.objects.all().delete()
        values = {name: getattr(own, name) for name in copied}
        lost.append(IdempotencyKeyFactory(pk=own.pk, finished=True, **values).pk)

    serve(view=two_phases(fail_over))
    answer = sender.send()
    assert (answer.status_code, problem(answer)["code"]) == (409, "key_in_use")
    assert IdempotencyKey.objects.get().pk == lost[0]
