"""A view in a transaction of a middleware, and a view that another one calls, survive a crash at
each place."""

from collections.abc import Callable

import pytest
from django.db import transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from pytest_django import Settings

from idempotency.testing import assert_survives
from tests.kit.serving import Sender, View
from tests.kit.views import create, plain, two_phases
from tests.models import Entry

pytestmark = pytest.mark.django_db(transaction=True)


def in_a_transaction(get_response: View) -> View:
    """Open a transaction around each request, as the middleware of django-reversion does."""

    def middleware(request: HttpRequest) -> HttpResponseBase:
        with transaction.atomic():
            return get_response(request)

    return middleware


def named(request: HttpRequest) -> HttpResponseBase:
    """Create an entry."""
    Entry.objects.create(name="inner")
    return HttpResponse(status=201)


def test_a_plain_view_in_a_transaction_of_a_middleware(
    serve: Callable[..., None], sender: Sender, settings: Settings
) -> None:
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.in_a_transaction"]
    serve(view=plain(create))
    assert_survives(lambda key: sender.send(key=key))


def test_a_view_that_is_called_in_a_phase(serve: Callable[..., None], sender: Sender) -> None:
    inner = plain(named)
    serve(view=two_phases(inner, lambda request: (inner(request), create(request))[1]))
    assert_survives(lambda key: sender.send(key=key), races=False)
