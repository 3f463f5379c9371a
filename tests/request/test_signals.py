"""The signals of a request: their order, sent outside any transaction, and never for work that was
rolled back."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.http import Http404, HttpRequest, HttpResponse

from idempotency import signals
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from tests.kit.serving import Sender, View
from tests.kit.views import Counted, both_kinds, create, plain, two_phases

Kind = Callable[..., View]
Serve = Callable[..., None]


@pytest.fixture
def sent(transactional_db: None) -> Iterator[list[tuple[str, str, bool]]]:
    """Yield the sent signals: name, recovery point of the key, and whether no transaction was
    open."""
    received: list[tuple[str, str, bool]] = []
    every = (
        "key_claimed",
        "key_replayed",
        "key_conflict",
        "phase_committed",
        "key_finished",
        "key_stuck",
    )

    def receiver(name: str) -> Callable[..., None]:
        def receive(
            *, sender: Any, key: IdempotencyKey | None, request: HttpRequest | None, **kwargs: Any
        ) -> None:
            assert sender is IdempotencyKey
            assert request is not None
            received.append(
                (name, key.recovery_point if key else "", not connection.in_atomic_block)
            )

        return receive

    receivers = {name: receiver(name) for name in every}
    for name, receive in receivers.items():
        getattr(signals, name).connect(receive)
    yield received
    for name, receive in receivers.items():
        getattr(signals, name).disconnect(receive)


def test_signals_of_a_plain_view(
    serve: Serve, sender: Sender, sent: list[tuple[str, str, bool]]
) -> None:
    serve(view=plain(create))
    sender.send()
    assert [(name, outside) for name, _, outside in sent] == [
        ("key_claimed", True),
        ("key_finished", True),
    ]
    sent.clear()
    sender.send()
    assert sent == [("key_replayed", "finished", True)]
    sent.clear()
    sender.send(body={"a": 2})
    assert [(name, outside) for name, _, outside in sent] == [("key_conflict", True)]


def test_signals_of_a_phased_view(
    serve: Serve, sender: Sender, sent: list[tuple[str, str, bool]]
) -> None:
    serve(view=two_phases(create, lambda request: HttpResponse(status=201)))
    sender.send()
    assert sent == [
        ("key_claimed", "started", True),
        ("phase_committed", "between", True),
        ("phase_committed", "finished", True),
        ("key_finished", "finished", True),
    ]


def test_signals_of_a_refusal_before_the_first_phase(
    serve: Serve, sender: Sender, sent: list[tuple[str, str, bool]]
) -> None:
    @idempotent(recovery_points=["a"])
    def view(request: HttpRequest) -> HttpResponse:
        raise Http404

    serve(view=view)
    sender.send()
    assert [name for name, _, _ in sent] == ["key_claimed", "key_finished"]


@both_kinds
def test_no_signal_says_that_what_was_rolled_back_is_done(
    kind: Kind, serve: Serve, sender: Sender, sent: list[tuple[str, str, bool]]
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        raise RuntimeError("out of luck")

    serve(view=kind(work))
    sender.send()
    assert {name for name, _, _ in sent} <= {"key_claimed"}


@both_kinds
def test_receiver_that_fails_changes_nothing(kind: Kind, serve: Serve, sender: Sender) -> None:
    def broken(**kwargs: Any) -> None:
        raise OperationalError("metrics are down")

    every = [
        signals.key_claimed,
        signals.key_replayed,
        signals.phase_committed,
        signals.key_finished,
    ]
    for signal in every:
        signal.connect(broken)
    try:
        serve(view=kind(work := Counted()))
        assert [sender.send().status_code for _ in range(2)] == [201, 201]
        assert work.runs == 1
    finally:
        for signal in every:
            signal.disconnect(broken)
