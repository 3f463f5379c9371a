"""What later requests with a key get, over all kinds of view."""

from collections.abc import Callable

import pytest
from django.db.models import F
from django.http import HttpRequest
from pytest_django import Settings

from idempotency.completer import CompletePass, complete_once
from idempotency.models import IdempotencyKey
from tests.frameworks.service import Caller, Service
from tests.frameworks.work import Reply, Work, crash, create, failing_first
from tests.kit.ageing import abandon, expire_lock, past_the_retention
from tests.kit.duplicates import waiting_requests
from tests.kit.threads import Gate, background, elsewhere
from tests.kit.waiting import eventually
from tests.models import Account, Entry

plain = pytest.mark.styles(False)
phased = pytest.mark.styles(True)
both = pytest.mark.styles(False, True)


@both
@pytest.mark.adapter
def test_20_replay_has_the_same_status_bytes_and_headers(service: Service) -> None:
    work = service.serve()
    first, second = service.send(), service.send()
    assert (second.status_code, second.content) == (first.status_code, first.content)
    assert {name: second[name] for name in first.headers if name != "Vary"} == {
        name: value for name, value in first.headers.items() if name != "Vary"
    }
    assert set(second.get("Vary", "").split(", ")) == set(first.get("Vary", "").split(", "))
    assert second["Idempotent-Replayed"] == "true"
    assert (work.runs, Entry.objects.count()) == (1, 1)


@both
def test_14_cookies_and_fresh_headers_are_not_stored(service: Service) -> None:
    reply = Reply(
        {"a": 1},
        headers={"X-Request-Id": "first", "X-RateLimit-Remaining": "7"},
        cookies={"private": "secret"},
    )
    service.serve(Work(lambda request: reply))
    first, second = service.send(), service.send()
    assert (first["X-Request-Id"], "private" in first.cookies) == ("first", True)
    assert not {"X-Request-Id", "X-RateLimit-Remaining"} & set(second.headers)
    assert "private" not in second.cookies
    assert "secret" not in str(IdempotencyKey.objects.values().get())


@both
def test_15_redirect_is_replayed(service: Service) -> None:
    work = service.serve(Work(lambda request: Reply(status=302, headers={"Location": "/thanks/"})))
    first, second = service.send(), service.send()
    assert [(response.status_code, response["Location"]) for response in (first, second)] == [
        (302, "/thanks/")
    ] * 2
    assert second["Idempotent-Replayed"] == "true"
    assert work.runs == 1


@both
def test_15_answer_without_a_body_is_replayed(service: Service) -> None:
    work = service.serve(Work(lambda request: Reply(status=204)))
    first, second = service.send(), service.send()
    assert [(response.status_code, response.content) for response in (first, second)] == [
        (204, b"")
    ] * 2
    assert second["Idempotent-Replayed"] == "true"
    assert work.runs == 1


@both
def test_17_body_above_the_limit_is_delivered_and_its_replay_says_so(
    service: Service, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"MAX_STORED_BODY_BYTES": 1000}
    work = service.serve(
        Work(lambda request: Reply({"text": "x" * 2000}, headers={"X-Custom": "kept"}))
    )
    first, second = service.send(), service.send()
    assert len(first.content) > 2000
    assert (second.status_code, second.content, second["X-Custom"]) == (201, b"", "kept")
    assert second["Idempotent-Body-Omitted"] == "true"
    assert work.runs == 1


@both
@pytest.mark.parametrize(
    "other",
    [{"body": {"a": 2}}, {"url": "/other/"}, {"url": "/view/?page=2"}],
    ids=["body", "path", "query"],
)
def test_25_key_of_another_request_is_refused_and_the_original_replayed(
    service: Service, other: dict[str, str]
) -> None:
    work = service.serve()
    first, refused, again = service.send(), service.send(**other), service.send()
    assert (refused.status_code, refused.json()["code"]) == (422, "key_reused")
    assert again.content == first.content
    assert work.runs == 1


@both
@pytest.mark.not_for(
    lambda kind: kind.by_form,
    "a form is sent by POST, and Django parses the fields of no other method",
)
def test_25_key_of_another_method_is_refused(service: Service) -> None:
    work = service.serve()
    assert service.send().status_code == 201
    refused = service.send(method="PUT")
    assert (refused.status_code, refused.json()["code"]) == (422, "key_reused")
    assert work.runs == 1


@plain
@pytest.mark.not_for(
    lambda kind: kind.by_form, "the fields of a form have an order, which browsers keep"
)
def test_27_order_of_members_is_no_difference(service: Service) -> None:
    work = service.serve()
    first, second = service.send(body={"a": 1, "b": 2}), service.send(body={"b": 2, "a": 1})
    assert (first.status_code, second.content) == (201, first.content)
    assert work.runs == 1


@plain
@pytest.mark.adapter
@pytest.mark.parametrize("status", [409, 423, 429, 503])
def test_54_returned_response_that_asks_to_be_retried_is_not_stored(
    service: Service, status: int
) -> None:
    work = service.serve(
        failing_first(lambda: Reply({"detail": "locked"}, status, {"Retry-After": "5"}))
    )
    assert [service.send().status_code for _ in range(3)] == [status, 201, 201]
    assert (work.runs, Entry.objects.count()) == (2, 1)


@phased
@pytest.mark.adapter
def test_54_response_that_a_phase_stores_is_stored_though_it_asks_to_be_retried(
    service: Service,
) -> None:
    work = service.serve(
        Work(lambda request: Reply({"detail": "sold out"}, 409, {"Retry-After": "5"}))
    )
    first, replayed = service.send(), service.send()
    assert (first.status_code, replayed.status_code, replayed["Retry-After"]) == (409, 409, "5")
    assert (replayed["Idempotent-Replayed"], work.runs) == ("true", 1)


@both
@pytest.mark.adapter
@pytest.mark.parametrize("status", [202, 402, 422])
def test_54_stored_response_keeps_retry_after_in_its_replay(service: Service, status: int) -> None:
    work = service.serve(Work(lambda request: Reply({"a": 1}, status, {"Retry-After": "5"})))
    first, replayed = service.send(), service.send()
    assert (first["Retry-After"], replayed["Retry-After"], replayed["Idempotent-Replayed"]) == (
        "5",
        "5",
        "true",
    )
    assert (replayed.status_code, replayed.content, work.runs) == (status, first.content, 1)


@both
@pytest.mark.postgres
@pytest.mark.parametrize(
    ("body", "status", "code"), [({"a": 1}, 409, "key_in_use"), ({"a": 2}, 422, "key_reused")]
)
def test_29_second_request_is_refused_while_the_first_runs(
    service: Service, body: dict[str, int], status: int, code: str
) -> None:
    gate = Gate()

    def do(request: HttpRequest) -> Reply:
        gate.wait_here()
        return create(request)

    work = service.serve(Work(do))
    second = service.caller.again()
    with background(service.send) as first:
        gate.wait_until_reached()
        refused = second.send(body=body)
        gate.open()
    assert (refused.status_code, refused.json()["code"]) == (status, code)
    assert status == 422 or int(refused["Retry-After"]) >= 1
    assert first.result().status_code == 201
    assert service.send().content == first.result().content
    assert (work.runs, Entry.objects.count()) == (1, 1)


@both
@pytest.mark.postgres
def test_30_second_request_may_wait_for_the_first(service: Service) -> None:
    gate = Gate()

    def do(request: HttpRequest) -> Reply:
        gate.wait_here()
        return create(request)

    work = service.serve(Work(do), wait_seconds=20)
    waiting = service.caller.again()
    with background(service.send) as first:
        gate.wait_until_reached()
        with background(waiting.send) as second:
            eventually(lambda: waiting_requests() == 1)
            gate.open()
    assert (second.result().content, second.result()["Idempotent-Replayed"]) == (
        first.result().content,
        "true",
    )
    assert (work.runs, Entry.objects.count()) == (1, 1)


@phased
@pytest.mark.postgres
def test_31_late_run_changes_nothing_after_another_took_over(service: Service) -> None:
    gate = Gate()
    work = service.serve(call=gate.wait_here)
    other = service.caller.again()
    with background(service.send) as late:
        gate.wait_until_reached()
        expire_lock()
        winner = other.send()
        gate.open()
    assert (winner.status_code, "Idempotent-Replayed" in winner) == (201, False)
    assert (late.result().content, late.result()["Idempotent-Replayed"]) == (winner.content, "true")
    assert (work.runs, Entry.objects.count()) == (1, 1)


@both
@pytest.mark.postgres
@pytest.mark.adapter
def test_32_serialization_failure_is_retried_inside_the_request(
    service: Service, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"PHASE_ISOLATION": "serializable", "PLAIN_ISOLATION": "serializable"}
    account = Account.objects.create(name="one")

    def interfere() -> None:
        Account.objects.filter(pk=account.pk).update(balance=F("balance") + 100)

    def do(request: HttpRequest) -> Reply:
        balance = Account.objects.get(pk=account.pk).balance
        request.user.first_name += "x"
        if work.runs == 1:
            elsewhere(interfere)
        Account.objects.filter(pk=account.pk).update(balance=balance + 1)
        return Reply({"balance": balance + 1, "name": request.user.first_name})

    work = service.serve(Work(do))
    first, second = service.send(), service.send()
    assert (first.status_code, first.json()) == (201, {"balance": 101, "name": "x"})
    assert second.content == first.content
    assert work.runs == 2


@both
def test_nobody_sees_the_key_of_another_user(service: Service) -> None:
    work = service.serve()
    mine, theirs = service.send(), Caller(service.kind).sign_in().send()
    assert [mine.status_code, theirs.status_code] == [201, 201]
    assert theirs.content != mine.content
    assert "Idempotent-Replayed" not in theirs
    assert work.runs == 2


@both
def test_scope_of_the_view_s_own_is_kept(service: Service) -> None:
    work = service.serve(scope=lambda request: "tenant:1")
    first, second = service.send(), Caller(service.kind).sign_in().send()
    assert (second.content, second["Idempotent-Replayed"]) == (first.content, "true")
    assert work.runs == 1


@both
def test_35_expired_key_is_a_new_request(service: Service) -> None:
    work = service.serve()
    first = service.send()
    past_the_retention()
    second = service.send()
    assert (second.status_code, "Idempotent-Replayed" in second) == (201, False)
    assert second.content != first.content
    assert work.runs == 2


@phased
def test_38_retry_goes_on_after_the_last_committed_phase(service: Service) -> None:
    first, calls = Work(lambda request: Reply()), iter([crash, lambda: None])
    work = service.serve(first=first, call=lambda: next(calls)())
    assert service.send().status_code == 500
    assert (
        IdempotencyKey.objects.get().recovery_point,
        IdempotencyKey.objects.get().locked_until,
    ) == ("made", None)
    assert [service.send().status_code for _ in range(2)] == [201, 201]
    assert (first.runs, work.runs, Entry.objects.count()) == (1, 1, 1)


def abandoned(service: Service, calls: Callable[[], object]) -> Work:
    """Serve a view whose first request fails between two phases, send it, and let its client stay
    away."""
    work = service.serve(call=calls)
    assert service.send().status_code == 500
    abandon()
    return work


@phased
@pytest.mark.adapter
def test_39_completer_finishes_it_as_its_user(service: Service) -> None:
    calls = iter([crash, lambda: None])
    work = abandoned(service, lambda: next(calls)())
    assert complete_once() == CompletePass(finished=1)
    key = IdempotencyKey.objects.get()
    assert (key.response_code, Entry.objects.get().idempotency_key) == (201, key)
    replayed = service.send()
    assert (replayed.status_code, replayed.json(), replayed["Idempotent-Replayed"]) == (
        201,
        {"id": Entry.objects.get().pk},
        "true",
    )
    assert work.runs == 1


@phased
def test_46_stuck_key_is_refused_without_running(service: Service) -> None:
    calls = iter([crash])
    work = abandoned(service, lambda: next(calls)())
    IdempotencyKey.objects.update(
        stuck_at=F("created_at"), stuck_code="test", stuck_reason="A person looks at it."
    )
    response = service.send()
    assert (response.status_code, response.json()["code"], response.json()["retryable"]) == (
        409,
        "key_stuck",
        False,
    )
    assert work.runs == 0


@plain
@pytest.mark.not_for(lambda kind: kind.by_form, "it has the key in the field of a form already")
def test_06_key_may_come_in_the_body(service: Service) -> None:
    work = service.serve(key_from="body:request_id")
    first, second = (service.send(key=None, body={"request_id": "one"}) for _ in range(2))
    assert (first.status_code, second.content) == (201, first.content)
    assert IdempotencyKey.objects.get().idempotency_key == "one"
    assert work.runs == 1


@both
def test_failing_view_is_the_same_to_its_second_client(service: Service) -> None:
    """A first request that failed leaves nothing behind that a retry from another connection would
    trip over."""
    work = service.serve(failing_first(crash))
    other = service.caller.again()
    assert service.send().status_code == 500
    assert elsewhere(other.send).status_code == 201
    assert work.runs == 2
