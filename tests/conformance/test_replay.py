"""Numbers 20 to 24: the replay."""

from collections.abc import Callable, Iterator

import pytest
from django.db.models import F
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import condition
from pytest_django import Settings

from idempotency import signals
from idempotency.jobs import stage_job
from idempotency.models import IdempotencyKey, StagedJob
from tests.kit.serving import Sender, View
from tests.kit.views import Counted, both_kinds, create
from tests.models import Entry

Kind = Callable[..., View]
Serve = Callable[..., None]


@pytest.fixture
def sent() -> Iterator[list[str]]:
    """Return the names of the signals that are sent."""
    names: list[str] = []
    every = (
        "key_claimed",
        "key_replayed",
        "key_conflict",
        "phase_committed",
        "key_finished",
        "key_stuck",
    )
    receivers = {name: lambda name=name, **kwargs: names.append(name) for name in every}
    for name, receiver in receivers.items():
        getattr(signals, name).connect(receiver)
    yield names
    for name, receiver in receivers.items():
        getattr(signals, name).disconnect(receiver)


@both_kinds
def test_20_replay_is_the_same_and_does_nothing_else(
    kind: Kind, serve: Serve, sender: Sender, sent: list[str]
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        stage_job("tests.kit.jobs.anything", {"a": 1})
        return create(request)

    serve(view=kind(counted := Counted(work)))
    first = sender.send()
    before = IdempotencyKey.objects.values().get()
    sent.clear()
    replayed = sender.send()
    assert (replayed.status_code, replayed.content, replayed["Content-Type"]) == (
        201,
        first.content,
        "application/json",
    )
    assert sent == ["key_replayed"]
    assert (counted.runs, Entry.objects.count(), StagedJob.objects.count()) == (1, 1, 1)
    assert IdempotencyKey.objects.values().get() == before


@both_kinds
def test_21_replays_alone_are_marked(kind: Kind, serve: Serve, sender: Sender) -> None:
    serve(view=kind(Counted()))
    responses = [sender.send(), sender.send(), sender.send(body={"a": 2}), sender.send(key=None)]
    assert [response.get("Idempotent-Replayed") for response in responses] == [
        None,
        "true",
        None,
        None,
    ]


@both_kinds
def test_21_name_of_the_mark_is_a_setting(
    kind: Kind, serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"REPLAYED_HEADER": "Idempotency-Replayed"}
    serve(view=kind(Counted()))
    assert "Idempotency-Replayed" not in sender.send()
    replayed = sender.send()
    assert replayed["Idempotency-Replayed"] == "true"
    assert "Idempotent-Replayed" not in replayed


@both_kinds
def test_22_original_answer_stays_after_the_resource_changed_and_went(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=kind(Counted()))
    first = sender.send()
    Entry.objects.update(name="changed")
    assert sender.send().content == first.content
    Entry.objects.all().delete()
    assert sender.send().content == first.content
    assert not Entry.objects.exists()


@both_kinds
def test_23_finished_key_is_replayed_although_it_is_locked(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=kind(work := Counted()))
    first = sender.send()
    IdempotencyKey.objects.update(locked_until=F("expires_at"))
    replayed = sender.send()
    assert (replayed.status_code, replayed.content) == (201, first.content)
    assert work.runs == 1


@both_kinds
def test_24_replay_comes_before_if_match_is_evaluated(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    def version(request: HttpRequest) -> str:
        return f'"{Entry.objects.count()}"'

    evaluated = condition(etag_func=version)(create)
    serve(view=kind(work := Counted(evaluated)))
    first = sender.send(headers={"If-Match": '"0"'})
    assert first.status_code == 201
    replayed = sender.send(headers={"If-Match": '"0"'})
    assert (replayed.status_code, replayed.content) == (201, first.content)
    assert work.runs == 1
