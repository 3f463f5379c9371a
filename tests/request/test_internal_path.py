"""No request from the network can use the completer's internal call of a view."""

from typing import Any

import pytest
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.views.decorators.http import require_POST

from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from tests.kit.serving import Sender

pytestmark = pytest.mark.django_db(transaction=True)
NAMES = ["idempotency_completion", "idempotency-completion", "idempotency_key"]


@pytest.mark.parametrize("name", NAMES)
def test_a_stranger_cannot_take_the_place_of_the_completer(
    serve: Any, sender: Sender, name: str
) -> None:
    ran: list[Any] = []

    @require_POST
    @login_required
    @idempotent(recovery_points=["one"])
    def view(request: HttpRequest) -> HttpResponse:
        ran.append(request.user.pk)
        return HttpResponse(status=503)

    serve(view=view)
    assert sender.send().status_code == 503
    before = IdempotencyKey.objects.values().get()
    pk = str(before["id"])
    stranger = Client(raise_request_exception=False)
    answer = stranger.post(
        f"/view/?{name}={pk}",
        {name: pk, "user": sender.user.pk},
        headers={"Idempotency-Key": "key-1", name: pk},
        **{name: pk},
    )
    assert answer.status_code == 302  # to the login page
    other = Sender()
    answer = other.send(
        f"/view/?{name}={pk}", headers={name: pk}, body={name: pk, "user": sender.user.pk}
    )
    assert answer.status_code == 503  # runs as its own user, with its own key
    assert ran == [sender.user.pk, other.user.pk]
    assert IdempotencyKey.objects.values().get(pk=pk) == before
