"""``applies=`` over every kind of view: the requests to which it does not apply run as if the view
were not decorated."""

import json
from typing import Any

import pytest

from idempotency.models import IdempotencyKey
from tests.frameworks.service import Service
from tests.frameworks.work import Work, crash, create
from tests.models import Entry

pytestmark = [pytest.mark.styles(False, True), pytest.mark.adapter]

PREVIEW, ORDER = {"action": "preview"}, {"action": "place_order"}


def places_order(request: Any) -> bool:
    """Read the fields as a view of each framework would."""
    fields = getattr(request, "data", None) or request.POST or json.loads(request.body)
    return bool(fields["action"] == "place_order")


def test_09_what_it_does_not_apply_to_runs_unprotected_and_the_rest_once(service: Service) -> None:
    work = service.serve(applies=places_order)
    for key in (None, "key-1", "key-1"):
        assert service.send(key, PREVIEW).status_code == 201
    assert (work.runs, IdempotencyKey.objects.exists()) == (3, False)
    assert service.send(None, ORDER).json()["code"] == "key_missing"
    first, again = (service.send(body=ORDER) for _ in range(2))
    assert (first.status_code, again.content, again["Idempotent-Replayed"]) == (
        201,
        first.content,
        "true",
    )
    assert (work.runs, Entry.objects.count()) == (4, 4)


def test_42_what_it_does_not_apply_to_keeps_atomic_requests(service: Service) -> None:
    service.use_atomic_requests()

    def fail(request: Any) -> Any:
        create(request)
        crash()

    service.serve(Work(fail), applies=places_order)
    assert service.send(body=PREVIEW).status_code == 500
    assert not Entry.objects.exists()
