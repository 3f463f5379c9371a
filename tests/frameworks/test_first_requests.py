"""What the first request with a key does, over all kinds of view."""

import pytest
from django.core.checks import run_checks
from django.db import transaction
from django.http import HttpRequest, JsonResponse

from idempotency.jobs import stage_job
from idempotency.models import IdempotencyKey, StagedJob
from idempotency.policy import protected_views
from tests.frameworks.service import Caller, Service
from tests.frameworks.work import (
    Forbidden,
    Invalid,
    Missing,
    Reply,
    Work,
    crash,
    create,
    failing_first,
)
from tests.kit.threads import all_at_once, elsewhere
from tests.models import Entry

plain = pytest.mark.styles(False)
phased = pytest.mark.styles(True)
both = pytest.mark.styles(False, True)


def refusing(refusal: type[Exception]) -> Work:
    """Return work that writes an entry, and then refuses."""

    def do(request: HttpRequest) -> Reply:
        create(request)
        raise refusal

    return Work(do)


@both
@pytest.mark.adapter
def test_01_first_request_runs_and_its_writes_point_at_the_key(service: Service) -> None:
    work = service.serve()
    response = service.send()
    key = IdempotencyKey.objects.get()
    assert (response.status_code, response.json()) == (201, {"id": Entry.objects.get().pk})
    assert "Idempotent-Replayed" not in response
    assert (key.scope, key.user_id) == (f"user:{service.caller.user.pk}", service.caller.user.pk)
    assert Entry.objects.get().idempotency_key == key
    assert (work.runs, key.finished_at is not None) == (1, True)


@plain
def test_08_safe_methods_run_each_time_and_store_nothing(service: Service) -> None:
    work = service.serve(Work(lambda request: Reply({"read": True}, 200)))
    assert [service.send(method="GET").status_code for _ in range(2)] == [200, 200]
    assert work.runs == 2
    assert not IdempotencyKey.objects.exists()


@both
def test_09_missing_key_is_refused(service: Service) -> None:
    work = service.serve()
    response = service.send(key=None)
    assert (response.status_code, response.json()["code"]) == (400, "key_missing")
    assert work.runs == 0


@plain
def test_09_view_that_requires_no_key_runs_unprotected(service: Service) -> None:
    work = service.serve(required=False)
    assert [service.send(key=None).status_code for _ in range(2)] == [201, 201]
    assert work.runs == 2
    assert not IdempotencyKey.objects.exists()


@both
def test_04_key_that_is_not_valid_is_refused(service: Service) -> None:
    work = service.serve()
    response = service.send(key="k" * 256)
    assert (response.status_code, response.json()["code"]) == (400, "key_invalid")
    assert work.runs == 0
    assert not IdempotencyKey.objects.exists()


@both
@pytest.mark.adapter
def test_10_refused_authentication_leaves_no_record(service: Service) -> None:
    work = service.serve()
    assert Caller(service.kind).send().status_code == service.kind.refusal
    assert work.runs == 0
    assert not IdempotencyKey.objects.exists()


@both
def test_10_stored_response_is_replayed_only_to_who_passes(service: Service) -> None:
    service.serve()
    service.send()
    response = Caller(service.kind).send()
    assert response.status_code == service.kind.refusal
    assert "Idempotent-Replayed" not in response


@both
@pytest.mark.postgres
def test_12_identical_requests_at_once_run_the_view_once(service: Service) -> None:
    work = service.serve()
    callers = [service.caller.again() for _ in range(6)]
    responses = all_at_once(lambda number: callers[number].send(), len(callers))
    created = [response for response in responses if response.status_code == 201]
    assert {response.status_code for response in responses} <= {201, 409}
    assert len({response.content for response in created}) == 1
    assert (work.runs, Entry.objects.count()) == (1, 1)


@plain
@pytest.mark.parametrize("status", [400, 404, 422])
def test_15_definitive_refusal_is_stored(service: Service, status: int) -> None:
    work = service.serve(Work(lambda request: Reply({"no": status}, status)))
    first, second = service.send(), service.send()
    assert (
        (second.status_code, second.content)
        == (first.status_code, first.content)
        == (status, first.content)
    )
    assert second["Idempotent-Replayed"] == "true"
    assert work.runs == 1


@both
@pytest.mark.parametrize(
    ("refusal", "status"), [(Missing, 404), (Invalid, 400)], ids=["missing", "invalid"]
)
@pytest.mark.adapter
def test_15_raised_refusal_is_rolled_back_and_its_answer_stored(
    service: Service, refusal: type[Exception], status: int
) -> None:
    work = service.serve(refusing(refusal))
    first, second = service.send(), service.send()
    assert not Entry.objects.exists()
    # Something was committed before: the request goes on, so its client must not take it for
    # refused.
    if service.phased:
        assert [first.status_code, second.status_code, work.runs] == [500, 500, 2]
        assert IdempotencyKey.objects.get().last_error.startswith("ResponseNotCommitted")
        return
    assert (first.status_code, second.status_code) == (status, status)
    assert (second.content, second["Content-Type"]) == (first.content, first["Content-Type"])
    assert second["Idempotent-Replayed"] == "true"
    assert work.runs == 1


@both
def test_15_answer_with_another_cure_is_rolled_back_and_not_stored(service: Service) -> None:
    def forbid() -> Reply:
        raise Forbidden

    work = service.serve(failing_first(forbid))
    assert service.send().status_code == 403
    assert not Entry.objects.exists()
    assert [service.send().status_code for _ in range(2)] == [201, 201]
    assert (work.runs, Entry.objects.count()) == (2, 1)


@plain
def test_16_returned_5xx_is_rolled_back_and_not_stored(service: Service) -> None:
    work = service.serve(failing_first(lambda: Reply({"down": True}, 503)))
    assert service.send().status_code == 503
    assert not Entry.objects.exists()
    assert [service.send().status_code for _ in range(2)] == [201, 201]
    assert (work.runs, Entry.objects.count()) == (2, 1)


@both
@pytest.mark.adapter
def test_16_raised_error_is_rolled_back_and_not_stored(service: Service) -> None:
    work = service.serve(failing_first(crash))
    assert service.send().status_code == 500
    assert not Entry.objects.exists()
    assert [service.send().status_code for _ in range(2)] == [201, 201]
    assert (work.runs, Entry.objects.count()) == (2, 1)


@both
def test_19_failure_at_commit_is_no_success(service: Service) -> None:
    def point_nowhere() -> Reply:
        Entry.objects.create(name="broken", idempotency_key_id=-1)
        return Reply({}, 201)

    work = service.serve(failing_first(point_nowhere))
    assert service.send().status_code == 500
    assert not Entry.objects.exists()
    assert not IdempotencyKey.objects.finished().exists()
    assert [service.send().status_code for _ in range(2)] == [201, 201]
    assert work.runs == 2


@both
def test_validate_refuses_before_the_key_is_spent(service: Service) -> None:
    refusals = iter([JsonResponse({"wrong": "name"}, status=422), None, None])
    work = service.serve(validate=lambda request: next(refusals))
    refused, first, second = (service.send() for _ in range(3))
    assert (refused.status_code, refused.json()) == (422, {"wrong": "name"})
    assert (first.status_code, second.content) == (201, first.content)
    assert work.runs == 1


@plain
def test_validate_refuses_a_request_without_a_key_too(service: Service) -> None:
    """The view may rely on it, so that clients without keys get no 500."""
    refusals = iter([JsonResponse({"wrong": "name"}, status=422), None])
    work = service.serve(required=False, validate=lambda request: next(refusals))
    refused, ran = (service.send(key=None) for _ in range(2))
    assert (refused.status_code, refused.json(), ran.status_code) == (422, {"wrong": "name"}, 201)
    assert work.runs == 1


@both
def test_staged_job_is_committed_with_the_work_or_not_at_all(service: Service) -> None:
    def do(request: HttpRequest) -> Reply:
        reply = create(request)
        stage_job("tests.kit.jobs.record", {"user": 1})
        return crash() if work.runs == 1 else reply

    work = service.serve(Work(do))
    assert service.send().status_code == 500
    assert not StagedJob.objects.exists()
    assert [service.send().status_code for _ in range(2)] == [201, 201]
    assert StagedJob.objects.get().idempotency_key == IdempotencyKey.objects.get()


@both
def test_33_refusals_of_this_app_are_problems(service: Service) -> None:
    service.serve()
    response = service.send(key=None)
    assert (response["Content-Type"], response["Cache-Control"]) == (
        "application/problem+json",
        "no-store",
    )
    assert (
        response.json().items()
        >= {
            "status": 400,
            "code": "key_missing",
            "retryable": False,
        }.items()
    )


@both
@pytest.mark.postgres
def test_hook_runs_once_and_after_the_commit(service: Service) -> None:
    seen: list[int] = []

    def do(request: HttpRequest) -> Reply:
        reply = create(request)
        transaction.on_commit(lambda: seen.append(elsewhere(Entry.objects.count)))
        return crash() if work.runs == 1 else reply

    work = service.serve(Work(do))
    assert [service.send().status_code for _ in range(3)] == [500, 201, 201]
    assert seen == [1]


@both
@pytest.mark.adapter
def test_system_checks_have_nothing_to_say(service: Service) -> None:
    before = run_checks()
    service.serve()
    assert [message for message in run_checks() if message not in before] == []
    assert {view.path for view in protected_views() if "POST" in view.methods} == {
        "/view/",
        "/other/",
    }


@both
@pytest.mark.adapter
def test_42_atomic_requests_change_nothing(service: Service) -> None:
    service.use_atomic_requests()
    work = service.serve(failing_first(crash))
    assert service.send().status_code == 500
    assert not Entry.objects.exists()
    first, second = service.send(), service.send()
    assert (first.status_code, second.content) == (201, first.content)
    assert second["Idempotent-Replayed"] == "true"
    assert (work.runs, Entry.objects.count()) == (2, 1)


@both
def test_42_atomic_requests_change_nothing_behind_a_urlconf_of_a_middleware(
    service: Service,
) -> None:
    service.use_atomic_requests()
    work = service.serve(failing_first(crash))
    # Django itself refuses an async view that nobody has taken out of ATOMIC_REQUESTS, before this
    # app is called.
    by_hand = service.kind.name in ("async method", "async, post", "Ninja async")
    service.behind_a_middleware_that_chooses_the_urlconf("ByHost" if by_hand else "by_host")
    assert service.send().status_code == 500
    assert not Entry.objects.exists()
    first, second = service.send(), service.send()
    assert (first.status_code, second.content) == (201, first.content)
    assert second["Idempotent-Replayed"] == "true"
    assert (work.runs, Entry.objects.count()) == (2, 1)


@both
@pytest.mark.inside_testcase
def test_42_it_works_in_the_transaction_of_a_testcase(service: Service) -> None:
    work = service.serve(failing_first(crash))
    assert service.send().status_code == 500
    assert not Entry.objects.exists()
    first, second = service.send(), service.send()
    assert (first.status_code, second.content) == (201, first.content)
    assert second["Idempotent-Replayed"] == "true"
    assert (work.runs, Entry.objects.count()) == (2, 1)


@plain
@pytest.mark.inside_testcase
def test_42_refusals_under_atomic_requests_leave_the_testcase_usable(service: Service) -> None:
    service.use_atomic_requests()
    service.serve(refusing(Missing))
    assert [service.send().status_code for _ in range(2)] == [404, 404]
    assert not Entry.objects.exists()
