"""A transaction that a middleware opens around each request, over all kinds of view."""

from collections.abc import Callable

import pytest
from django.db import transaction
from django.http import HttpRequest, HttpResponseBase
from pytest_django import Settings

from idempotency.models import IdempotencyKey
from tests.frameworks.service import Service
from tests.frameworks.work import Invalid, Reply, Work
from tests.models import Entry

#: Whether the middleware rolls its transaction back.
ROLLBACK = {"wanted": False}


def around(
    get_response: Callable[[HttpRequest], HttpResponseBase],
) -> Callable[[HttpRequest], HttpResponseBase]:
    """Open a transaction around each request, and write in it."""

    def middleware(request: HttpRequest) -> HttpResponseBase:
        with transaction.atomic():
            Entry.objects.create(name="audit")
            response = get_response(request)
            transaction.set_rollback(ROLLBACK["wanted"])
        return response

    return middleware


def rows() -> tuple[int, int, int]:
    """Return the numbers of entries of the middleware and of the view, and of keys."""
    audits = Entry.objects.filter(name="audit").count()
    return audits, Entry.objects.count() - audits, IdempotencyKey.objects.count()


@pytest.fixture(autouse=True)
def _around_each_request(settings: Settings) -> None:
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.around"]


@pytest.mark.styles(False)
@pytest.mark.adapter
def test_55_key_writes_and_response_commit_or_vanish_with_the_transaction_of_a_middleware(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = service.serve()
    monkeypatch.setitem(ROLLBACK, "wanted", True)
    assert service.send().status_code == 201
    assert (work.runs, rows()) == (1, (0, 0, 0))
    monkeypatch.setitem(ROLLBACK, "wanted", False)
    first, second = service.send(), service.send()
    assert (first.status_code, second.content, second["Idempotent-Replayed"]) == (
        201,
        first.content,
        "true",
    )
    assert (work.runs, rows()) == (2, (2, 1, 1))


@pytest.mark.styles(False)
@pytest.mark.adapter
def test_55_a_raised_refusal_is_stored_in_it_and_the_writes_of_the_view_are_not(
    service: Service,
) -> None:
    def do(request: HttpRequest) -> Reply:
        Entry.objects.create(name="made")
        raise Invalid

    work = service.serve(Work(do))
    first, second = service.send(), service.send()
    assert (first.status_code, second.content, second["Idempotent-Replayed"]) == (
        400,
        first.content,
        "true",
    )
    assert (work.runs, rows()) == (1, (2, 0, 1))


@pytest.mark.styles(True)
@pytest.mark.adapter
def test_55_a_phased_view_in_it_is_refused(service: Service) -> None:
    work = service.serve()
    assert service.send().status_code == 500
    assert (work.runs, rows()[1:]) == (0, (0, 0))
