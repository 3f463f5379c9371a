"""An error of a view of any kind: its report shows no secret in a frame of this app."""

from typing import Any

import pytest
from django.http import HttpRequest
from django.test import Client
from django.urls import path
from ninja import NinjaAPI, Schema
from ninja.decorators import decorate_view
from pytest_django import Settings

from idempotency.contrib.ninja import idempotent
from tests.frameworks.conftest import PHASED, PLAIN
from tests.frameworks.service import Service
from tests.frameworks.work import Reply, Work
from tests.kit.frames import OutOfLuck, Planted


@pytest.mark.adapter
@pytest.mark.styles(PLAIN, PHASED)
def test_60_error_of_a_view_of_each_kind(planted: Planted, service: Service) -> None:
    def do(request: HttpRequest) -> Reply:
        key = request.idempotency_key
        planted.of_key(key, derived=key.derive("charge") if service.phased else "")
        raise OutOfLuck

    service.serve(Work(do), **({"store_body": False} if service.phased else {}))
    service.caller.client.raise_request_exception = True
    with pytest.raises(OutOfLuck) as caught:
        service.send(planted["key"], {"a": planted["body"]})
    planted.refuse_shown(caught.value, at_least=10)


@pytest.mark.adapter
@pytest.mark.styles(PHASED)
def test_60_error_between_phases_of_a_view_of_each_kind(planted: Planted, service: Service) -> None:
    def call() -> None:
        raise OutOfLuck

    service.serve(call=call)
    service.caller.client.raise_request_exception = True
    with pytest.raises(OutOfLuck) as caught:
        service.send(planted["key"], {"a": planted["body"]})
    planted.refuse_shown(caught.value, at_least=10)


class Card(Schema):
    """What a client sends to an operation of Ninja."""

    number: str


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("recovery_points", [None, []])
@pytest.mark.parametrize("is_async", [False, True])
def test_60_error_of_an_operation_with_parsed_values(
    recovery_points: Any, is_async: bool, planted: Planted, settings: Settings
) -> None:
    api = NinjaAPI(docs_url=None, openapi_url=None)
    protect = idempotent(recovery_points=recovery_points, scope=lambda request: "one")

    def pay(request: HttpRequest, card: Card) -> None:
        assert card.number == planted["body"]
        raise OutOfLuck

    async def pay_async(request: HttpRequest, card: Card) -> None:
        pay(request, card)

    api.post("/pay")(decorate_view(protect)(pay_async if is_async else pay))
    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": [path("", api.urls)]})
    with pytest.raises(OutOfLuck) as caught:
        Client().post(
            "/pay",
            {"number": planted["body"]},
            content_type="application/json",
            headers={"Idempotency-Key": planted["key"]},
        )
    planted.refuse_shown(caught.value, at_least=10)
