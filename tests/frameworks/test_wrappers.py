"""Wrappers of ``connection.execute_wrapper()``, over all kinds of view."""

import pytest
from django.db import connection

from idempotency.models import IdempotencyKey
from tests.frameworks.service import Service
from tests.kit.wrappers import history
from tests.models import Entry


@pytest.mark.postgres
@pytest.mark.styles(False, True)
def test_59_a_wrapper_around_the_request_gets_statements_as_from_the_orm(service: Service) -> None:
    work = service.serve()
    with connection.execute_wrapper(history):
        answers = [service.send() for _ in range(2)]
    assert [(answer.status_code, "Idempotent-Replayed" in answer) for answer in answers] == [
        (201, False),
        (201, True),
    ]
    assert (work.runs, Entry.objects.count(), IdempotencyKey.objects.finished().count()) == (
        1,
        1,
        1,
    )
