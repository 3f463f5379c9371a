"""A second database with ATOMIC_REQUESTS that a view does not write to, over all kinds of view."""

from collections.abc import Callable

import pytest
from django.db import connections, transaction
from django.http import HttpRequest

from tests.frameworks.service import Service
from tests.frameworks.work import Reply, Work, create
from tests.kit.threads import elsewhere
from tests.models import Entry

ALIAS = "shard_b"


def leave() -> None:
    """Send nothing to the second database."""


def read() -> None:
    """Only read from it."""
    assert not Entry.objects.using(ALIAS).exists()


def open_savepoint() -> None:
    """Open and release a savepoint there, and send nothing else."""
    with transaction.atomic(using=ALIAS):
        pass


def mark_for_rollback() -> None:
    """Mark the transaction for rollback, as handlers of errors do on each alias, without a
    statement in it."""
    transaction.set_rollback(True, using=ALIAS)


def close() -> None:
    """Close the connection, as ``connections.close_all()`` does, without a statement before."""
    connections[ALIAS].close()


def cut() -> None:
    """Let the server end the session, without a statement in the transaction."""
    pid = connections[ALIAS].connection.info.backend_pid

    def end() -> None:
        with connections[ALIAS].cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])

    elsewhere(end)


USES: list[Callable[[], None]] = [leave, read, open_savepoint, mark_for_rollback, close, cut]


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True, databases=["default", ALIAS])
@pytest.mark.styles(False)
def test_57_a_database_that_the_view_does_not_write_to_changes_nothing(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections.settings[ALIAS], "ATOMIC_REQUESTS", True)
    for use in USES:

        def do(request: HttpRequest, use: Callable[[], None] = use) -> Reply:
            use()
            return create(request)

        work = service.serve(Work(do))
        answers = [service.send(key=use.__name__) for _ in range(2)]
        seen = [(answer.status_code, "Idempotent-Replayed" in answer) for answer in answers]
        assert (use.__name__, seen, work.runs) == (use.__name__, [(201, False), (201, True)], 1)
        connections[ALIAS].close()
    assert Entry.objects.count() == len(USES)
