"""A protected view that a protected view calls, over all kinds of view."""

from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse

from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from tests.frameworks.service import Service
from tests.frameworks.work import Reply, Work, create
from tests.models import Entry


def inner_view(service: Service, **options: Any) -> Any:
    """Return a protected view that creates an entry."""

    def work(request: HttpRequest) -> HttpResponse:
        Entry.objects.create(name="inner")
        return HttpResponse(status=201)

    return idempotent(
        **options, **({"key_from": "form:idempotency_key"} if service.kind.by_form else {})
    )(work)


@pytest.mark.styles(False, True)
@pytest.mark.adapter
def test_56_a_view_that_is_called_in_the_transaction_with_the_same_key_is_a_part_of_the_run(
    service: Service,
) -> None:
    inner = inner_view(service)

    def do(request: HttpRequest) -> Reply:
        assert inner(request).status_code == 201
        return create(request)

    work = service.serve(Work(do), first=inner)
    first, second = service.send(), service.send()
    assert (first.status_code, second.content, second["Idempotent-Replayed"]) == (
        201,
        first.content,
        "true",
    )
    assert (work.runs, Entry.objects.filter(name="inner").count()) == (1, 1 + service.phased)
    assert IdempotencyKey.objects.count() == 1


@pytest.mark.styles(False, True)
@pytest.mark.adapter
def test_56_with_another_scope_it_is_refused_and_nothing_is_left(service: Service) -> None:
    inner = inner_view(service, scope=lambda request: "somebody else")

    def do(request: HttpRequest) -> Reply:
        inner(request)
        return create(request)

    service.serve(Work(do))
    assert [service.send().status_code for _ in range(2)] == [500, 500]
    assert not Entry.objects.exists()
    assert not IdempotencyKey.objects.finished().exists()
