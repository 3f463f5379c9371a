"""The two ways of a phased view for clients without keys, as the guide to phases describes them."""

import uuid
from collections.abc import Callable

import pytest
from django.http import HttpRequest, HttpResponse, HttpResponseBase

from idempotency.completer import CompletePass, complete_once
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from tests.kit.ageing import abandon
from tests.kit.serving import Sender
from tests.models import Entry

Serve = Callable[..., None]


def test_required_false_is_refused() -> None:
    with pytest.raises(ValueError, match="applies="):
        idempotent(recovery_points=["made"], required=False)


def test_unprotected_requests_do_their_work_without_phases(serve: Serve, sender: Sender) -> None:
    @idempotent(recovery_points=[], applies=lambda request: "Idempotency-Key" in request.headers)
    def view(request: HttpRequest) -> HttpResponseBase:
        if (key := request.idempotency_key) is None:
            Entry.objects.create(name="unprotected")
            return HttpResponse(status=201)
        for _ in key.phases():
            with atomic_phase(key) as phase:
                Entry.objects.create(name="protected")
                phase.set_response(HttpResponse(status=201))
        return key.response()

    serve(view=view)
    assert [sender.send(key=key).status_code for key in (None, None, "key-1", "key-1")] == [201] * 4
    assert [entry.name for entry in Entry.objects.order_by("pk")] == [
        "unprotected",
        "unprotected",
        "protected",
    ]


def test_requests_with_a_key_of_the_server_are_completed(serve: Serve, sender: Sender) -> None:
    runs = []

    @idempotent(recovery_points=[], key_from=lambda request: uuid.uuid4().hex)
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        runs.append(1)
        for _ in key.phases():
            if len(runs) == 1:
                raise OSError("on purpose")
            with atomic_phase(key) as phase:
                Entry.objects.create(name="made")
                phase.set_response(HttpResponse(status=201))
        return key.response()

    serve(view=view)
    assert [sender.send(key=None).status_code for _ in range(2)] == [500, 201]
    abandon()
    assert complete_once() == CompletePass(finished=1)
    assert (Entry.objects.count(), IdempotencyKey.objects.count()) == (
        2,
        2,
    ), "the client has ordered twice"
