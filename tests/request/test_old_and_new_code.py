"""Old and new code at once on one key, as while a deploy is rolled out: the old code knows none of the new columns."""

# ruff: noqa: S608 - the names of columns are the model's
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse

from idempotency.completer import CompletePass, complete_once
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from tests.kit.ageing import make_older
from tests.kit.serving import Sender

pytestmark = pytest.mark.django_db(transaction=True)

#: The columns that code from before refused requests neither reads nor writes.
NEW = {"untouched_attempts", "call_begun_at", "refused_at", "refused"}
TABLE = IdempotencyKey._meta.db_table
UNLOCKED = "locked_at = NULL, last_error = 'old code'"


class OldCode:
    """What a process of the old code writes about the only key, and nothing else."""

    def insert(self) -> None:
        """Insert the key anew, as its first attempt would have."""
        old = [field.column for field in IdempotencyKey._meta.concrete_fields if field.column not in NEW]
        columns = ", ".join(f'"{name}"' for name in old)
        with connection.cursor() as cursor:
            cursor.execute(f"CREATE TEMPORARY TABLE old_row AS SELECT {columns} FROM {TABLE}")
            cursor.execute(f"DELETE FROM {TABLE}")
            cursor.execute(f"INSERT INTO {TABLE} ({columns}) SELECT {columns} FROM old_row")
            cursor.execute("DROP TABLE old_row")

    def claim(self) -> None:
        """Claim the key for a further attempt."""
        token = uuid4() if connection.vendor == "postgresql" else uuid4().hex
        now = "CURRENT_TIMESTAMP"
        self._update(f"claim_token = '{token}', locked_at = {now}, last_run_at = {now}, attempts = attempts + 1")

    def release(self) -> None:
        """Let the key go after an error."""
        self._update(UNLOCKED)

    def advance(self) -> None:
        """Commit a phase."""
        self._update("recovery_point = 'ordered', locked_at = CURRENT_TIMESTAMP")

    def finish(self) -> None:
        """Store a response."""
        self._update(
            "recovery_point = 'finished', finished_at = CURRENT_TIMESTAMP, locked_at = NULL, response_code = 201, "
            "response_headers = '{}'"
        )

    def _update(self, changes: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"UPDATE {TABLE} SET {changes}")
            assert cursor.rowcount == 1


@pytest.fixture
def statuses(serve: Any) -> list[int]:
    """Return the statuses with which the new code answers at /view/, one an attempt; after the last it finishes its key."""
    statuses: list[int] = []

    @idempotent(recovery_points=["ordered"])
    def view(request: HttpRequest) -> HttpResponseBase:
        if statuses:
            return HttpResponse(status=statuses.pop(0))
        for _ in request.idempotency_key.phases():
            with atomic_phase(request.idempotency_key) as phase:
                phase.set_response(JsonResponse({}, status=201))
        return request.idempotency_key.response()

    serve(view=view)
    return statuses


def completed() -> CompletePass:
    """Return what the new completer does with the key once its client is silent."""
    make_older(1000, "created_at", "last_run_at", "locked_at")
    IdempotencyKey.objects.update(next_run_at=None)
    return complete_once()


def test_a_key_that_old_code_inserted_may_have_begun_something(statuses: list[int], sender: Sender) -> None:
    statuses += [503, 403]
    sender.send()
    OldCode().insert()
    assert not IdempotencyKey.objects.get().untouched
    assert sender.send().status_code == 403
    assert completed() == CompletePass(finished=1)


def test_an_attempt_of_old_code_may_have_begun_something(statuses: list[int], sender: Sender) -> None:
    """It may have called Stripe and then answered 503: the 403 that follows must not bury that."""
    statuses += [503, 403]
    sender.send()
    OldCode().claim()
    OldCode().release()
    assert sender.send().status_code == 403
    assert not IdempotencyKey.objects.refused().exists()
    assert completed() == CompletePass(finished=1)


def test_old_code_that_runs_a_refused_request_takes_the_refusal_back(statuses: list[int], sender: Sender) -> None:
    statuses += [403]
    sender.send()
    assert IdempotencyKey.objects.refused().exists()
    OldCode().claim()
    assert IdempotencyKey.objects.in_flight().exists()
    OldCode().release()
    assert completed() == CompletePass(finished=1)


def test_old_code_moves_and_finishes_a_refused_request(statuses: list[int], sender: Sender) -> None:
    statuses += [403]
    sender.send()
    for write in (OldCode().claim, OldCode().advance, OldCode().finish):
        write()
    replayed = sender.send()
    assert (replayed.status_code, replayed["Idempotent-Replayed"]) == (201, "true")
    assert IdempotencyKey.objects.finished().exists()


def test_new_code_goes_on_where_old_code_stopped_between_its_phases(statuses: list[int], sender: Sender) -> None:
    statuses += [503, 403]
    sender.send()
    for write in (OldCode().claim, OldCode().advance, OldCode().release):
        write()
    assert sender.send().status_code == 403
    assert completed() == CompletePass(finished=1)
