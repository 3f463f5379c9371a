"""Number 35: how long a finished key is replayed."""

from collections.abc import Callable

from django.core import checks
from django.http import HttpRequest, HttpResponse
from pytest_django import Settings

from idempotency.models import IdempotencyKey
from tests.kit.ageing import make_older
from tests.kit.serving import Sender, View
from tests.kit.views import Counted, both_kinds, create, two_phases
from tests.models import Entry

Kind = Callable[..., View]
Serve = Callable[..., None]

HOUR = 3600


@both_kinds
def test_35_key_is_replayed_for_72_hours(kind: Kind, serve: Serve, sender: Sender) -> None:
    serve(view=kind(work := Counted()))
    first = sender.send()
    make_older(72 * HOUR - 60, "created_at", "finished_at", "last_run_at")
    assert sender.send().content == first.content
    assert work.runs == 1


@both_kinds
def test_35_expired_key_is_a_new_request_with_a_new_row(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=kind(work := Counted()))
    first = sender.send()
    old = IdempotencyKey.objects.get()
    make_older(72 * HOUR + 60, "created_at", "finished_at", "last_run_at")
    second = sender.send(body={"another": "request"})
    assert (second.status_code, work.runs) == (201, 2)
    assert second.content != first.content
    assert "Idempotent-Replayed" not in second
    new = IdempotencyKey.objects.exclude(pk=old.pk).get()
    assert (new.scope, new.idempotency_key) == (old.scope, old.idempotency_key)
    assert {entry.idempotency_key_id for entry in Entry.objects.all()} == {old.pk, new.pk}
    assert sender.send(body={"another": "request"}).content == second.content


@both_kinds
def test_35_expired_key_that_fails_again_can_be_retried(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        if counted.runs == 2:
            raise RuntimeError("out of luck")
        return create(request)

    serve(view=kind(counted := Counted(work)))
    sender.send()
    make_older(72 * HOUR + 60, "created_at", "finished_at", "last_run_at")
    assert [sender.send().status_code for _ in range(3)] == [500, 201, 201]
    assert counted.runs == 3


def test_35_counted_from_the_end_not_from_creation(serve: Serve, sender: Sender) -> None:
    serve(view=two_phases(create, work := Counted(lambda request: HttpResponse(status=201))))
    sender.send()
    make_older(100 * HOUR, "created_at", "last_run_at")
    assert sender.send()["Idempotent-Replayed"] == "true"
    assert work.runs == 1


def test_35_unfinished_keys_do_not_expire(serve: Serve, sender: Sender) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        if second.runs == 1:
            raise RuntimeError("out of luck")
        return HttpResponse(status=201)

    serve(view=two_phases(first := Counted(), second := Counted(work)))
    sender.send()
    make_older(1000 * HOUR, "created_at", "last_run_at")
    assert sender.send().status_code == 201
    assert (first.runs, second.runs) == (1, 2)
    assert IdempotencyKey.objects.count() == 1


@both_kinds
def test_35_retention_is_a_setting(
    kind: Kind, serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"RETENTION_HOURS": 24}
    serve(view=kind(work := Counted()))
    sender.send()
    make_older(23 * HOUR, "created_at", "finished_at")
    sender.send()
    assert work.runs == 1
    make_older(2 * HOUR, "created_at", "finished_at")
    sender.send()
    assert work.runs == 2


def test_35_retention_below_24_hours_is_found_by_a_check(settings: Settings) -> None:
    settings.IDEMPOTENCY = {"RETENTION_HOURS": 23}
    assert [
        message.id
        for message in checks.run_checks(databases=[])
        if message.id.startswith("idempotency.")
    ]
