"""Number 49: a plain view that writes to two databases. ``tests/request/test_several_databases.py``
has the rest."""

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections
from django.http import HttpRequest, HttpResponse

from idempotency.models import IdempotencyKey
from tests.kit.serving import Sender
from tests.kit.views import Counted, plain
from tests.models import Entry

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.django_db(transaction=True, databases=["default", "shard_b"]),
]


@pytest.mark.parametrize("refusing", ["default", "shard_b"])
def test_49_a_commit_that_one_database_refuses_is_reported_by_no_answer(
    refusing: str, serve: Callable[..., None], sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        for alias in ("default", "shard_b"):
            nowhere = -1 if (alias, counted.runs) == (refusing, 1) else None  # seen at COMMIT
            Entry.objects.using(alias).create(name="made", idempotency_key_id=nowhere)
        return HttpResponse(status=201)

    def send() -> tuple[Any, ...]:
        answer = sender.send()
        rows = [Entry.objects.using(alias).count() for alias in ("default", "shard_b")]
        return (
            answer.status_code,
            "Idempotent-Replayed" in answer,
            rows,
            IdempotencyKey.objects.finished().count(),
        )

    monkeypatch.setitem(connections.settings["shard_b"], "ATOMIC_REQUESTS", True)
    serve(view=plain(counted := Counted(work)))
    assert send() == (500, False, [0, 0], 0)
    assert send() == (201, False, [1, 1], 1)
    assert send() == (201, True, [1, 1], 1)
    assert counted.runs == 2
