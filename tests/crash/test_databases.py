"""Each model is compared in the database of its router; a write elsewhere is not passed over."""

from collections.abc import Callable
from typing import Any

import pytest
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from pytest_django import Settings

from idempotency.decorators import idempotent
from idempotency.testing import CannotProve, DoesNotSurvive, assert_survives
from tests.kit.serving import Sender
from tests.models import Account, Entry

OTHER = "shard_b"

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True, databases=["default", OTHER])]


class Router:
    """Sends accounts to the other database."""

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        """Return the other database for accounts."""
        return OTHER if model is Account else None

    db_for_read = db_for_write


@idempotent
def writes_elsewhere(request: HttpRequest) -> HttpResponseBase:
    """Write a row in another database, which has a transaction of its own."""
    Account.objects.using(OTHER).create(name=f"account {Account.objects.using(OTHER).count()}")
    Entry.objects.create(name="made")
    return JsonResponse({}, status=201)


@pytest.fixture
def send(serve: Callable[..., None], sender: Sender) -> Callable[[str], Any]:
    """Return what sends a request to the view."""
    serve(view=writes_elsewhere)
    return lambda key: sender.send(key=key)


def test_a_write_to_a_database_that_is_not_compared_proves_nothing(send: Callable[[str], Any]) -> None:
    with pytest.raises(CannotProve, match=r"tests\.Account in the database 'shard_b'"):
        assert_survives(send, races=False)


def test_a_model_that_its_router_sends_there_is_compared(send: Callable[[str], Any], settings: Settings) -> None:
    settings.DATABASE_ROUTERS = [Router()]
    with pytest.raises(DoesNotSurvive, match=r"rows of tests\.Account"):
        assert_survives(send, races=False)
    assert not Account.objects.exists()


def test_a_model_that_is_ignored_may_be_written_anywhere(send: Callable[[str], Any]) -> None:
    assert_survives(send, races=False, ignore=["tests.Account"])


def test_a_state_of_the_test_replaces_the_comparison(send: Callable[[str], Any]) -> None:
    accounts = Account.objects.using(OTHER)

    def empty() -> None:
        accounts.all().delete()

    with pytest.raises(DoesNotSurvive, match="state / accounts"):
        assert_survives(send, races=False, state=lambda: {"accounts": accounts.count()}, reset=empty)
