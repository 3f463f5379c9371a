"""A payment of three phases under random interleavings: never twice, never lost, the same answer to
each retry.

The model is small: a key belongs to the first body that claimed it; its work is done at most once;
its first answer is its answer. What may happen is drawn by Hypothesis: requests, retries, other
bodies, completer passes, each stopped between any two steps, let go on, made to fail or killed
there, and locks that expire under them.
"""

import json
from collections import Counter
from typing import Any

import pytest
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.test import Client
from django.test.utils import override_settings
from django.urls import path
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from idempotency.completer import complete_once
from idempotency.decorators import idempotent
from idempotency.jobs import stage_job
from idempotency.models import IdempotencyKey, StagedJob
from idempotency.phases import atomic_phase
from idempotency.reaper import reap_once
from tests.kit.ageing import make_older
from tests.model.actors import Actor, send, stop_here
from tests.models import Entry

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True), pytest.mark.processes]

KEYS, BODIES = ("a", "b", "c"), (1, 2)
#: So many runs of so many steps: at least 5,000 steps.
RUNS, STEPS = 110, 50

#: The other system, which keeps one charge for each key that it is given, as Stripe does: key to
#: number.
charges: dict[str, int] = {}
#: What the runs met, so that they cannot pass without having met it.
happened: Counter[str] = Counter()


@idempotent(recovery_points=["reserved", "charged"], scope=lambda request: "everybody")
def pay(request: HttpRequest) -> HttpResponseBase:
    """Reserve, charge, and send a receipt."""
    key = request.idempotency_key
    name = f"{key.idempotency_key}:{json.loads(request.body)}"
    for recovery_point in key.phases():
        stop_here(recovery_point)
        match recovery_point:
            case "started":
                with atomic_phase(key) as phase:
                    Entry.objects.create(name=f"reserved {name}")
                    stop_here("before COMMIT of reserved")
                    phase.set_recovery_point("reserved")
            case "reserved":
                number = charges.setdefault(key.derive("charge"), len(charges) + 1)
                stop_here("after the charge")
                with atomic_phase(key) as phase:
                    Entry.objects.create(name=f"charged {name} {number}")
                    phase.set_recovery_point("charged")
            case "charged":
                with atomic_phase(key) as phase:
                    stage_job("tests.kit.jobs.anything", {"text": name})
                    stop_here("before COMMIT of finished")
                    phase.set_response(
                        JsonResponse({"paid": name, "run": key.attempts}, status=201)
                    )
    return key.response()


urlpatterns = [path("pay/", pay)]


class Promise(RuleBasedStateMachine):
    """Whatever happens, in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[Actor] = []
        self.requests: dict[Actor, tuple[str, int]] = {}
        self.answers: dict[str, bytes] = {}
        self.owners: dict[str, set[int]] = {}
        for model in (StagedJob, Entry, IdempotencyKey):
            model.objects.all().delete()
        charges.clear()

    def _start(self, name: str, work: Any) -> Actor:
        actor = Actor(name, work)
        self.running.append(actor)
        actor.start()
        return actor

    @precondition(lambda self: len(self.running) < 4)
    @rule(key=st.sampled_from(KEYS), body=st.sampled_from(BODIES))
    def a_client_sends(self, key: str, body: int) -> None:
        actor = self._start(
            f"client {key}:{body}", lambda: send(Client(raise_request_exception=False), key, body)
        )
        self.requests[actor] = (key, body)

    @precondition(lambda self: len(self.running) < 4)
    @rule()
    def a_completer_passes(self) -> None:
        make_older(400, "created_at", "last_run_at")
        IdempotencyKey.objects.update(next_run_at=None)
        self._start("completer", complete_once)

    @precondition(lambda self: any(actor.stopped for actor in self.running))
    @rule(
        one=st.integers(0, 3),
        order=st.sampled_from(["go", "go", "go", "fail", "die"]),
        stops=st.integers(1, 4),
    )
    def an_actor_goes_on(self, one: int, order: str, stops: int) -> None:
        stopped = [actor for actor in self.running if actor.stopped]
        actor = stopped[one % len(stopped)]
        for _ in range(stops):
            if actor.stopped:
                actor.tell("go")
        if actor.stopped and order != "go":
            happened[order] += 1
            actor.tell(order)

    @rule()
    def the_locks_expire(self) -> None:
        make_older(100, "locked_until")

    @rule()
    def the_reaper_passes(self) -> None:
        reap_once()

    @invariant()
    def nothing_happens_twice(self) -> None:
        happened["steps"] += 1
        self._look_at_answers()
        names = list(Entry.objects.values_list("name", flat=True))
        assert len(names) == len(set(names)), names
        work = [tuple(name.split()[:2]) for name in names]
        assert len({(kind, name.partition(":")[0]) for kind, name in work}) == len(work), (
            f"two bodies under one key: {names}"
        )
        assert len(charges) <= len(KEYS), f"another downstream key: {charges}"

    def _look_at_answers(self) -> None:
        for actor in [actor for actor in self.running if actor.ended]:
            self.running.remove(actor)
            if actor not in self.requests or actor.died:
                continue
            (key, body), answer = self.requests[actor], actor.result
            assert answer.status_code in (201, 409, 422, 500), answer.content
            happened[
                f"{answer.status_code}{' replayed' if 'Idempotent-Replayed' in answer else ''}"
            ] += 1
            if answer.status_code == 201:
                assert json.loads(answer.content)["paid"] == f"{key}:{body}"
                assert self.answers.setdefault(key, answer.content) == answer.content, (
                    "two answers to one request"
                )
            if answer.status_code == 422:
                assert not IdempotencyKey.objects.filter(
                    idempotency_key=key, request_body=str(body).encode()
                ).exists()

    def teardown(self) -> None:
        for actor in list(self.running):
            actor.run_out()
        happened["resumed"] += IdempotencyKey.objects.filter(attempts__gt=1).count()
        self._look_at_answers()
        for _ in range(10):
            make_older(500, "created_at", "last_run_at", "locked_until")
            IdempotencyKey.objects.update(next_run_at=None)
            complete_once()
        for key in IdempotencyKey.objects.all():
            assert key.finished_at is not None, (
                f"lost: {key.recovery_point} {key.last_error} {key.stuck_reason}"
            )
            name = f"{key.idempotency_key}:{bytes(key.request_body).decode()}"
            kept = bytes(key.response_body)
            assert self.answers.get(key.idempotency_key, kept) == kept, (
                "a client has seen another answer"
            )
            work = [
                entry.split()[0]
                for entry in Entry.objects.filter(name__contains=name).values_list(
                    "name", flat=True
                )
            ]
            assert sorted(work) == ["charged", "reserved"]
            assert StagedJob.objects.filter(job_args={"text": name}).count() == 1
        keys = IdempotencyKey.objects.count()
        assert (len(charges), Entry.objects.count(), StagedJob.objects.count()) == (
            keys,
            2 * keys,
            keys,
        )


@override_settings(ROOT_URLCONF=__name__)
def test_no_interleaving_breaks_the_promise(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    run_state_machine_as_test(
        Promise,
        settings=settings(
            max_examples=RUNS,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(f"what happened: {dict(happened)}")  # noqa: T201
    assert happened["steps"] >= 5000
    for what in ("201", "201 replayed", "409", "422", "500", "fail", "die", "resumed"):
        assert happened[what] >= 10, (
            f"{what} happened {happened[what]} times: this run proves little"
        )
