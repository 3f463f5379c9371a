"""Numbers 38 and 46: resuming, and keys that wait for a person."""

from collections.abc import Callable

import pytest
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.utils import timezone

from idempotency import signals
from idempotency.decorators import idempotent
from idempotency.exceptions import KeyStuck
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from tests.kit.serving import Sender, View, problem
from tests.kit.views import Counted, both_kinds, create, two_phases
from tests.models import Entry

Kind = Callable[..., View]
Serve = Callable[..., None]

POINTS = ["one", "two", "three"]


class FourPhases:
    """A view of four phases that notes which it enters, derives a key in each, and fails in those
    of ``fail_in``."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.derived: dict[str, set[str]] = {}
        self.fail_in: set[str] = set()
        self.view = idempotent(recovery_points=POINTS)(self._run)

    def _run(self, request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        following = dict(zip(["started", *POINTS], [*POINTS, None], strict=True))
        for recovery_point in key.phases():
            self.entered.append(recovery_point)
            self.derived.setdefault(recovery_point, set()).add(key.derive(recovery_point))
            with atomic_phase(key) as phase:
                Entry.objects.create(name=recovery_point)
                if recovery_point in self.fail_in:
                    self.fail_in.remove(recovery_point)
                    raise RuntimeError("out of luck")
                if (next_point := following[recovery_point]) is not None:
                    phase.set_recovery_point(next_point)
                else:
                    phase.set_response(JsonResponse({"done": True}, status=201))
        return key.response()


@pytest.mark.parametrize("failing", range(4))
def test_38_retry_runs_only_the_later_phases(failing: int, serve: Serve, sender: Sender) -> None:
    phases = FourPhases()
    every = ["started", *POINTS]
    phases.fail_in = {every[failing]}
    serve(view=phases.view)
    assert sender.send().status_code == 500
    assert list(Entry.objects.order_by("pk").values_list("name", flat=True)) == every[:failing]
    assert IdempotencyKey.objects.get().recovery_point == every[failing]
    phases.entered.clear()
    response = sender.send()
    assert (response.status_code, "Idempotent-Replayed" in response) == (201, False)
    assert phases.entered == every[failing:]
    assert list(Entry.objects.order_by("pk").values_list("name", flat=True)) == every
    assert all(len(keys) == 1 for keys in phases.derived.values())


def test_38_each_phase_may_fail_once(serve: Serve, sender: Sender) -> None:
    phases = FourPhases()
    phases.fail_in = {"started", *POINTS}
    serve(view=phases.view)
    assert [sender.send().status_code for _ in range(6)] == [500, 500, 500, 500, 201, 201]
    assert Entry.objects.count() == 4
    key = IdempotencyKey.objects.get()
    assert key.attempts == 5
    assert [
        event["detail"] for event in key.history if event["event"] == "recovery point"
    ] == POINTS


@both_kinds
def test_46_stuck_key_answers_without_running(kind: Kind, serve: Serve, sender: Sender) -> None:
    serve(view=two_phases(lambda request: None, work := Counted(_fail)))
    sender.send()
    IdempotencyKey.objects.update(
        stuck_at=timezone.now(), stuck_code="by_hand", stuck_reason="A person is looking."
    )
    response = sender.send()
    assert (response.status_code, problem(response)["code"], problem(response)["retryable"]) == (
        409,
        "key_stuck",
        False,
    )
    assert b"person is looking" not in response.content
    assert work.runs == 1


def _fail(request: HttpRequest) -> HttpResponse:
    raise RuntimeError("out of luck")


def test_46_view_hands_its_key_to_a_person(serve: Serve, sender: Sender) -> None:
    def give_up(request: HttpRequest) -> HttpResponse:
        Entry.objects.create(name="rolled back")
        raise KeyStuck("The charge is in doubt.")

    stuck = []
    receiver = lambda key, **kwargs: stuck.append(key)  # noqa: E731
    signals.key_stuck.connect(receiver)
    try:
        serve(view=two_phases(create, work := Counted(give_up)))
        answers = [sender.send() for _ in range(3)]
    finally:
        signals.key_stuck.disconnect(receiver)
    assert [problem(answer)["code"] for answer in answers] == ["key_stuck"] * 3
    assert work.runs == 1
    key = IdempotencyKey.objects.get()
    assert (key.stuck_code, key.stuck_reason, key.locked_until) == (
        "view_gave_up",
        "The charge is in doubt.",
        None,
    )
    assert key.recovery_point == "between"
    assert [entry.name for entry in Entry.objects.all()] == ["made"]
    assert stuck == [key]


def test_46_mismatch_with_a_stuck_key_stays_a_mismatch(serve: Serve, sender: Sender) -> None:
    serve(view=two_phases(lambda request: None, _fail))
    sender.send()
    IdempotencyKey.objects.update(
        stuck_at=timezone.now(), stuck_code="by_hand", stuck_reason="A person is looking."
    )
    assert problem(sender.send(body={"a": 2}))["code"] == "key_reused"


def test_46_key_that_a_deploy_left_behind_waits_for_code_that_knows_its_point(
    serve: Serve, sender: Sender
) -> None:
    serve(view=two_phases(create, Counted(_fail)))
    assert sender.send().status_code == 500

    serve(view=idempotent(recovery_points=["renamed"])(renamed := Counted()))
    for _ in range(2):
        response = sender.send()
        assert (response.status_code, problem(response)["code"]) == (503, "unknown_recovery_point")
        assert problem(response)["retryable"] is True
        assert int(response["Retry-After"]) >= 1
    key = IdempotencyKey.objects.get()
    assert (key.stuck_code, key.recovery_point, key.finished_at) == (
        "unknown_recovery_point",
        "between",
        None,
    )
    assert renamed.runs == 0

    serve(
        view=two_phases(
            first := Counted(), Counted(lambda request: HttpResponse("done", status=201))
        )
    )
    assert [sender.send().status_code for _ in range(2)] == [201, 201]
    assert first.runs == 0
    key.refresh_from_db()
    assert (key.stuck_at, key.stuck_code, key.recovery_point) == (None, "", "finished")


def test_46_view_that_is_plain_now_leaves_a_phased_key_alone(serve: Serve, sender: Sender) -> None:
    serve(view=two_phases(create, _fail))
    sender.send()
    serve(view=idempotent(work := Counted()))
    response = sender.send()
    assert (response.status_code, problem(response)["code"]) == (503, "unknown_recovery_point")
    assert work.runs == 0
    assert IdempotencyKey.objects.get().recovery_point == "between"
