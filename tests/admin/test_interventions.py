"""What a person does to a key takes effect once, only on what the person saw, and fences off
whoever comes late."""

from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from pytest_django import Settings

from idempotency import inbox, interventions
from idempotency.completer import CompletePass, complete_once
from idempotency.contrib.rq import run_once
from idempotency.decorators import idempotent
from idempotency.exceptions import KeyStuck
from idempotency.inbox import STAGED_JOBS, process_once
from idempotency.models import IdempotencyKey, ProcessedMessage, StagedJob
from idempotency.reaper import ReapPass, reap_once
from idempotency.signals import key_finished, key_stuck
from rides_demo.models import AuditRecord
from tests.factories import IdempotencyKeyFactory, StagedJobFactory, UserFactory
from tests.kit.ageing import lock_end, make_older, past_the_retention
from tests.kit.claims import hand_back_and_meet_another_run
from tests.kit.serving import Sender, another_client, problem
from tests.kit.threads import Gate, all_at_once, background, elsewhere
from tests.kit.views import two_phases
from tests.models import Entry

pytestmark = pytest.mark.django_db(transaction=True)


class Shop:
    """A phased view that writes an entry, calls out, and answers; the call fails while ``broken``,
    or waits at ``gate``."""

    def __init__(self) -> None:
        self.broken = True
        self.gate: Gate | None = None
        self.view = two_phases(self._write, self._answer, call=self._call)

    def _write(self, request: HttpRequest) -> None:
        Entry.objects.create(name="ordered", idempotency_key=request.idempotency_key)

    def _call(self) -> None:
        if self.gate:
            self.gate.wait_here()
        if self.broken:
            raise OSError("The supplier is down")

    def _answer(self, request: HttpRequest) -> HttpResponseBase:
        Entry.objects.update(name="delivered")
        return JsonResponse({"delivered": True}, status=201)


@pytest.fixture
def shop(serve: Any) -> Shop:
    """Return the shop, which answers at /view/."""
    shop = Shop()
    serve(view=shop.view)
    return shop


def the_key() -> IdempotencyKey:
    return IdempotencyKey.objects.get()


def make_stuck(code: str = "attempts_exhausted") -> IdempotencyKey:
    IdempotencyKey.objects.update(
        stuck_at=Now(), stuck_code=code, stuck_reason="Somebody must look.", completer_attempts=25
    )
    return the_key()


def last_event() -> str:
    event = the_key().history[-1]
    return f"{event['event']}: {event['detail']}"


def test_a_stuck_key_is_completed_with_all_its_attempts_anew(shop: Shop, sender: Sender) -> None:
    sender.send()
    key = make_stuck()
    shop.broken = False
    assert interventions.complete_now(key.pk, key.claim_token, by="jane") == "finished"
    assert [e["detail"] for e in the_key().history if e["event"] == "claimed"][-1] == "jane"
    assert "handed back: to the completer, by jane" in [
        f"{event['event']}: {event['detail']}" for event in the_key().history
    ]
    answer = sender.send()
    assert (answer.status_code, answer["Idempotent-Replayed"]) == (201, "true")
    assert Entry.objects.get().name == "delivered"


def test_what_a_person_gives_back_past_the_retention_is_not_undone_by_the_reaper(
    sender: Sender, serve: Any
) -> None:
    refunds: list[int] = []

    def refund(key: IdempotencyKey) -> HttpResponseBase:
        refunds.append(1)
        return HttpResponse(status=410)

    @idempotent(recovery_points=[], on_abandon=refund)
    def view(request: HttpRequest) -> HttpResponseBase:
        raise KeyStuck("The account must be looked at.")

    serve(view=view)
    sender.send()
    past_the_retention()
    key = the_key()
    assert interventions.hand_back(key.pk, key.claim_token, by="jane")
    assert reap_once() == ReapPass()
    assert complete_once() == CompletePass(stuck=1)
    assert not refunds


def test_what_a_person_gives_back_while_the_reaper_is_at_work_is_not_undone_either(
    sender: Sender, serve: Any
) -> None:
    settled: list[int] = []

    def refund(key: IdempotencyKey) -> HttpResponseBase:
        settled.append(key.pk)
        for other in IdempotencyKey.objects.exclude(pk=key.pk):
            assert interventions.hand_back(other.pk, other.claim_token, by="jane")
        return HttpResponse(status=410)

    serve(
        view=idempotent(recovery_points=[], on_abandon=refund)(
            lambda request: HttpResponse(status=503)
        )
    )
    for number in range(2):
        sender.send(key=f"key-{number}")
    past_the_retention()
    assert reap_once() == ReapPass(settled=1)
    assert len(settled) == 1


def test_a_run_that_fails_past_the_retention_is_tried_again_for_as_long_anew(
    shop: Shop, sender: Sender
) -> None:
    sender.send()
    past_the_retention()
    assert reap_once() == ReapPass(stuck=1)
    assert interventions.complete_now(the_key().pk, the_key().claim_token, by="jane") == "failed"
    assert reap_once() == ReapPass()
    IdempotencyKey.objects.update(handed_back_at=Now() - timedelta(hours=73))
    assert reap_once() == ReapPass(stuck=1)


def test_a_key_that_fails_again_is_the_completers_with_its_first_attempt_counted(
    shop: Shop, sender: Sender
) -> None:
    sender.send()
    key = make_stuck()
    assert interventions.complete_now(key.pk, key.claim_token, by="jane") == "failed"
    assert (the_key().stuck_at, the_key().completer_attempts, the_key().recovery_point) == (
        None,
        1,
        "between",
    )


def test_a_key_that_is_handed_back_is_run_by_the_completer(shop: Shop, sender: Sender) -> None:
    sender.send()
    key = make_stuck()
    make_older(301, "created_at", "last_run_at")
    shop.broken = False
    assert complete_once() == CompletePass()
    assert interventions.hand_back(key.pk, key.claim_token, by="jane")
    assert complete_once() == CompletePass(finished=1)


def test_completing_a_key_that_another_run_took_once_it_was_handed_back_says_so(
    shop: Shop, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender.send()
    key = make_stuck()
    monkeypatch.setattr(
        interventions, "hand_back", partial(hand_back_and_meet_another_run, interventions.hand_back)
    )
    assert interventions.complete_now(key.pk, key.claim_token, by="jane") == "handed back"


def test_what_a_middleware_has_set_for_the_operator_is_not_there_for_the_view(
    serve: Any, sender: Sender
) -> None:
    """The completer would refuse the request, since it does not know the tenant."""
    tenant = ContextVar[str]("tenant")

    def answer(request: HttpRequest) -> HttpResponseBase:
        return HttpResponse(tenant.get())

    shop = Shop()
    serve(view=two_phases(shop._write, answer, call=shop._call))
    sender.send()
    key = make_stuck()
    shop.broken = False
    tenant.set("that of the operator")
    assert interventions.complete_now(key.pk, key.claim_token, by="jane") == "failed"
    assert "LookupError" in the_key().last_error


def test_completing_refuses_to_run_in_a_transaction(shop: Shop, sender: Sender) -> None:
    sender.send()
    key = make_stuck()
    with pytest.raises(RuntimeError), transaction.atomic():
        interventions.complete_now(key.pk, key.claim_token, by="jane")
    assert the_key().stuck_code == "attempts_exhausted"


def test_what_on_abandon_has_begun_is_not_built_upon(shop: Shop, sender: Sender) -> None:
    sender.send()
    key = make_stuck("on_abandon")
    shop.broken = False
    assert interventions.complete_now(key.pk, key.claim_token, by="jane") is None
    assert the_key().stuck_code == "on_abandon"
    assert interventions.answer(
        key.pk, key.claim_token, HttpResponse("gone", status=410), by="jane"
    )


def test_an_answer_is_what_the_clients_retry_gets(shop: Shop, sender: Sender) -> None:
    sender.send()
    key = make_stuck()
    told: list[str] = []

    def hear(*, key: IdempotencyKey, **kwargs: Any) -> None:
        told.append(key.recovery_point)

    key_finished.connect(hear)
    try:
        assert interventions.answer(
            key.pk, key.claim_token, JsonResponse({"sorry": True}, status=410), by="jane"
        )
    finally:
        key_finished.disconnect(hear)
    answer = sender.send()
    assert (answer.status_code, answer.json(), answer["Idempotent-Replayed"]) == (
        410,
        {"sorry": True},
        "true",
    )
    assert told == ["finished"]
    assert last_event() == "answered: status 410, by jane"
    assert Entry.objects.get().name == "ordered"


def test_an_answer_is_told_after_the_commit_of_the_callers_transaction(
    shop: Shop, sender: Sender
) -> None:
    sender.send()
    key = make_stuck()
    told: list[bool] = []

    def hear(**kwargs: Any) -> None:
        told.append(connection.in_atomic_block)

    key_finished.connect(hear)
    try:
        with transaction.atomic():
            gone = HttpResponse("gone", status=410)
            assert interventions.answer(key.pk, key.claim_token, gone, by="jane")
            assert not told
    finally:
        key_finished.disconnect(hear)
    assert told == [False]


@pytest.mark.parametrize("status", [100, 302, 401, 429, 500])
def test_an_answer_that_ends_nothing_is_refused(status: int) -> None:
    key = IdempotencyKeyFactory(claim_token=uuid4())
    with pytest.raises(ValueError, match=str(status)):
        interventions.answer(key.pk, key.claim_token, HttpResponse(status=status), by="jane")
    assert the_key().finished_at is None


def test_an_answer_that_would_not_be_kept_is_refused(settings: Settings) -> None:
    settings.IDEMPOTENCY = {"MAX_STORED_BODY_BYTES": 10}
    key = IdempotencyKeyFactory(claim_token=uuid4())
    with pytest.raises(ValueError, match="longer than 10 bytes"):
        interventions.answer(key.pk, key.claim_token, HttpResponse(b"x" * 11), by="jane")
    assert the_key().finished_at is None


def test_an_acknowledged_key_is_off_the_list_and_still_stuck(shop: Shop, sender: Sender) -> None:
    sender.send()
    key = make_stuck()
    assert interventions.acknowledge(key.pk, key.claim_token, by="jane", note="ticket 7")
    assert not IdempotencyKey.objects.stuck().exists()
    assert IdempotencyKey.objects.acknowledged().get() == key
    assert problem(sender.send())["code"] == "key_stuck"
    assert last_event() == "acknowledged: by jane: ticket 7"


def test_the_undo_of_an_acknowledgement_takes_effect_once_and_on_what_was_seen(
    shop: Shop, sender: Sender
) -> None:
    sender.send()
    key = make_stuck()
    assert not interventions.unacknowledge(key.pk, key.claim_token, by="jane")
    assert interventions.acknowledge(key.pk, key.claim_token, by="jane")
    assert not interventions.unacknowledge(key.pk, uuid4(), by="jane")
    assert interventions.unacknowledge(key.pk, key.claim_token, by="jane", note="ticket 7")
    assert not interventions.unacknowledge(key.pk, key.claim_token, by="joe")
    assert IdempotencyKey.objects.stuck().get() == key
    assert IdempotencyKey.objects.get().claim_token == key.claim_token
    assert last_event() == "unacknowledged: by jane: ticket 7"


def test_a_key_that_gets_stuck_anew_is_on_the_list_again(shop: Shop, sender: Sender) -> None:
    sender.send()
    key = make_stuck()
    assert interventions.acknowledge(key.pk, key.claim_token, by="jane")
    assert interventions.hand_back(key.pk, key.claim_token, by="jane")
    assert not IdempotencyKey.objects.acknowledged().exists()
    make_stuck()
    assert IdempotencyKey.objects.stuck().get() == key


@pytest.mark.postgres
def test_a_run_that_lost_its_lock_to_a_person_commits_nothing_more(
    shop: Shop, sender: Sender
) -> None:
    shop.broken, shop.gate = False, Gate()
    with background(lambda: another_client(sender).send()) as late:
        shop.gate.wait_until_reached()
        key = the_key()
        assert interventions.release_lock(key.pk, key.claim_token, by="jane")
        assert last_event() == "lock released: by jane"
        shop.gate.open()
    assert problem(late.result())["code"] == "key_in_use"
    assert Entry.objects.get().name == "ordered"
    assert sender.send().status_code == 201
    assert Entry.objects.get().name == "delivered"


@pytest.mark.postgres
def test_a_run_that_is_answered_for_after_its_lock_expired_commits_nothing_more(
    shop: Shop, sender: Sender
) -> None:
    shop.broken, shop.gate = False, Gate()
    with background(lambda: another_client(sender).send()) as late:
        shop.gate.wait_until_reached()
        key = the_key()
        assert not interventions.answer(
            key.pk, key.claim_token, HttpResponse(status=410), by="jane"
        ), "a run holds it"
        make_older(91, "locked_until")
        assert interventions.answer(key.pk, key.claim_token, HttpResponse(status=410), by="jane")
        shop.gate.open()
    assert late.result().status_code == 410
    assert Entry.objects.get().name == "ordered"


@pytest.mark.postgres
def test_that_nothing_was_done_cannot_be_answered_after_a_run_thought_dead_has_done_something(
    serve: Any, sender: Sender
) -> None:
    gate = Gate()
    serve(
        view=two_phases(lambda request: gate.wait_here(), lambda request: HttpResponse(status=503))
    )
    with background(lambda: another_client(sender).send()):
        gate.wait_until_reached()
        make_older(91, "locked_until")
        make_older(73 * 3600, "created_at")
        assert reap_once() == ReapPass(stuck=1)
        seen = the_key()
        gate.open()
    nothing_was_done = HttpResponse(status=409)
    assert the_key().recovery_point == "between"
    assert not interventions.answer(
        seen.pk, seen.claim_token, nothing_was_done, by="jane", at=seen.recovery_point
    )
    assert (
        interventions.complete_now(seen.pk, seen.claim_token, by="jane", at=seen.recovery_point)
        is None
    )


INTERVENTIONS = {
    "hand back": (interventions.hand_back, {}),
    "acknowledge": (interventions.acknowledge, {}),
    "answer": (
        lambda pk, seen, **more: interventions.answer(pk, seen, HttpResponse(status=410), **more),
        {},
    ),
    "release": (interventions.release_lock, {"locked_until": lock_end()}),
}
each_intervention = pytest.mark.parametrize(
    ("intervene", "state"), INTERVENTIONS.values(), ids=INTERVENTIONS
)


def stuck_key(state: dict[str, Any]) -> IdempotencyKey:
    stuck = (
        {}
        if "locked_until" in state
        else {"stuck_at": Now(), "stuck_code": "view_gave_up", "stuck_reason": "Look."}
    )
    key = IdempotencyKeyFactory(claim_token=uuid4())
    IdempotencyKey.objects.update(**stuck, **state)
    return key


@each_intervention
def test_what_was_run_since_a_person_looked_is_left_alone(
    intervene: Any, state: dict[str, Any]
) -> None:
    key = stuck_key(state)
    before = IdempotencyKey.objects.values().get()
    assert not intervene(key.pk, uuid4(), by="jane")
    assert not intervene(key.pk, None, by="jane")
    assert IdempotencyKey.objects.values().get() == before
    assert intervene(key.pk, key.claim_token, by="jane")


@each_intervention
def test_what_has_moved_on_under_its_old_claim_is_left_alone(
    intervene: Any, state: dict[str, Any]
) -> None:
    key = stuck_key(state)
    IdempotencyKey.objects.update(recovery_point="charged")
    assert not intervene(key.pk, key.claim_token, by="jane", at="started")
    assert intervene(key.pk, key.claim_token, by="jane", at="charged")


def test_who_listens_is_told_why_a_key_that_cannot_be_run_is_stuck() -> None:
    key = IdempotencyKeyFactory(request_path="/nowhere", claim_token=uuid4())
    told: list[str] = []

    def hear(*, key: IdempotencyKey, **kwargs: Any) -> None:
        told.append(key.stuck_code)

    key_stuck.connect(hear)
    try:
        assert interventions.complete_now(key.pk, key.claim_token, by="jane") == "stuck"
    finally:
        key_stuck.disconnect(hear)
    assert told == ["view_missing"]


@each_intervention
def test_a_finished_key_is_left_alone(intervene: Any, state: dict[str, Any]) -> None:
    key = IdempotencyKeyFactory(finished=True, claim_token=uuid4())
    assert not intervene(key.pk, key.claim_token, by="jane")


@pytest.mark.postgres
@each_intervention
def test_of_many_who_press_at_once_one_succeeds(intervene: Any, state: dict[str, Any]) -> None:
    key = stuck_key(state)
    assert sorted(
        all_at_once(lambda number: intervene(key.pk, key.claim_token, by=f"person {number}"), 8)
    ) == [False] * 7 + [True]
    assert len(the_key().history) == 1


@pytest.mark.parametrize("note", ["a\0b", "\ud800", "x" * 5000])
def test_any_note_can_be_written_down(note: str) -> None:
    key = stuck_key({})
    assert interventions.acknowledge(key.pk, key.claim_token, by="jane", note=note)
    assert len(the_key().history[-1]["detail"]) <= 300


@pytest.mark.parametrize("intervention", [*INTERVENTIONS, "complete"])
def test_the_history_keeps_the_note_of_each_intervention(intervention: str) -> None:
    intervene, state = INTERVENTIONS.get(intervention, (interventions.complete_now, {}))
    key = stuck_key(state)
    assert intervene(key.pk, key.claim_token, by="j" * 100, note="ticket 7" * 15)
    assert [
        event
        for event in the_key().history
        if event["detail"].endswith(f"by {'j' * 100}: {'ticket 7' * 15}")
    ]


def test_a_note_that_is_cut_shows_a_sign() -> None:
    key = stuck_key({})
    assert interventions.acknowledge(key.pk, key.claim_token, by="jane", note="x" * 5000)
    assert the_key().history[-1]["detail"].endswith("x…")


def test_each_intervention_is_one_statement(django_assert_num_queries: Any) -> None:
    key = stuck_key({})
    with django_assert_num_queries(1) as queries:
        interventions.acknowledge(key.pk, key.claim_token, by="jane")
    assert queries.captured_queries[0]["sql"].startswith("UPDATE")
    assert connection.get_autocommit()


def test_only_failed_jobs_are_retried_and_discarded() -> None:
    waiting, failed, other = (
        StagedJobFactory(),
        StagedJobFactory(failed_at=Now(), hand_overs=10, refusals=10),
        StagedJobFactory(failed_at=Now()),
    )
    assert interventions.retry_jobs([waiting.pk, failed.pk]) == 1
    assert StagedJob.objects.filter(failed_at=None, hand_overs=0, refusals=0).count() == 2
    assert interventions.discard_jobs([waiting.pk, failed.pk, other.pk]) == 1
    assert set(StagedJob.objects.values_list("pk", flat=True)) == {waiting.pk, failed.pk}


def test_a_discarded_job_never_runs_although_a_queue_still_has_it() -> None:
    job = StagedJobFactory(
        job_name="tests.kit.jobs.record", job_args=[UserFactory().pk], failed_at=Now()
    )
    assert interventions.discard_jobs() == 1
    run_once(job.job_name, job.job_args, str(job.pk))
    assert not AuditRecord.objects.exists()
    assert not StagedJob.objects.exists()


@pytest.mark.postgres
def test_a_job_that_runs_at_this_moment_is_not_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "WAIT_SECONDS", 0.1)
    job, other = StagedJobFactory(failed_at=Now()), StagedJobFactory(failed_at=Now())
    with process_once(STAGED_JOBS, str(job.pk)):
        assert elsewhere(interventions.discard_jobs) == 1
    assert StagedJob.objects.get() == job
    assert interventions.discard_jobs() == 1, "it took effect, and its row is no use any more"
    assert set(ProcessedMessage.objects.values_list("message_id", flat=True)) == {
        str(job.pk),
        str(other.pk),
    }
