"""A rolling deploy from the code whose advisory locks did not name the table: its locks and the new ones do not meet.

The unique constraint decides then: a second run of the key waits for the first one's COMMIT instead of being refused at once.
"""

import hashlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection
from django.http import HttpRequest, HttpResponseBase
from django.test import RequestFactory

from idempotency._store import advisory_locks, claims, rows, statements
from idempotency._store.advisory_locks import KEY_LOCK, MARK_KEY
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from tests.kit.threads import Gate, background
from tests.kit.views import create, phased
from tests.kit.waiting import eventually
from tests.models import Entry

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

new_parameters = advisory_locks.lock_parameters
running_old_code = threading.local()


class OldStatements(statements.Statements):
    """The claims of the old code: the same, but for the numbers of the locks."""

    @property
    def claim_plain(self) -> str:  # type: ignore[override]
        """Return the claim of a plain view."""
        return _with_old_locks(super().claim_plain)

    @property
    def claim_phased(self) -> str:  # type: ignore[override]
        """Return the claim of a phased view."""
        return _with_old_locks(super().claim_phased)


def _with_old_locks(text: str) -> str:
    assert KEY_LOCK in text
    return text.replace(KEY_LOCK, "%(lock)s").replace(MARK_KEY, "%(mark_key)s")


def lock_parameters(scope: str, idempotency_key: str, fingerprint: str) -> dict[str, Any]:
    """Return the numbers of the locks as the code of this thread computes them."""
    found = new_parameters(scope, idempotency_key, fingerprint)
    if not getattr(running_old_code, "here", False):
        return found
    request_hash = hashlib.blake2b(fingerprint.encode(), digest_size=4).digest()
    return found | {"mark_request": int.from_bytes(request_hash, "big", signed=True)}


def statements_for(using: str) -> statements.Statements:
    """Return the statements of the code of this thread."""
    found = rows.statements_for(using)
    if not getattr(running_old_code, "here", False):
        return found
    return OldStatements("postgresql", found.lock_timeout_seconds, 72 * 3600)


@pytest.fixture(autouse=True)
def _two_versions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(claims, "statements_for", statements_for)
    monkeypatch.setattr(claims, "lock_parameters", lock_parameters)
    return


def plain(work: Callable[[HttpRequest], HttpResponseBase], isolation: Any) -> Callable[..., HttpResponseBase]:
    """Return a plain view."""
    return idempotent(scope=lambda request: "one", isolation=isolation)(work)


def send(view: Callable[..., HttpResponseBase], *, old: bool, body: bytes = b"{}") -> Any:
    """Send the request to a process with the old code or with the new code."""
    running_old_code.here = old
    try:
        return view(RequestFactory().post("/", body, content_type="application/json", headers={"Idempotency-Key": "key-1"}))
    finally:
        running_old_code.here = False


def waits_for_the_first() -> bool:
    """Tell whether a session waits for the transaction of another one."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'")
        return bool(cursor.fetchone()[0])


@pytest.mark.parametrize("first_fails", [False, True], ids=["the first commits", "the first fails"])
@pytest.mark.parametrize("isolation", [None, "serializable"])
@pytest.mark.parametrize("old_first", [True, False], ids=["old first", "new first"])
def test_one_of_two_plain_runs_commits_and_the_other_waits_for_it(old_first: bool, isolation: Any, first_fails: bool) -> None:
    gate = Gate()

    def work(request: HttpRequest) -> HttpResponseBase:
        response = create(request)
        gate.wait_here()
        if first_fails and threading.current_thread().name == "first":
            response.status_code = 503
        return response

    def first() -> Any:
        threading.current_thread().name = "first"
        return send(plain(work, isolation), old=old_first)

    with background(first) as running:
        gate.wait_until_reached()
        with background(lambda: send(plain(work, isolation), old=not old_first)) as second:
            eventually(waits_for_the_first)
            gate.open()
    assert [running.result().status_code, second.result().status_code] == [503 if first_fails else 201, 201]
    assert ("Idempotent-Replayed" in second.result()) is not first_fails
    assert (Entry.objects.count(), IdempotencyKey.objects.count()) == (1, 1)


@pytest.mark.parametrize("old_first", [True, False], ids=["old first", "new first"])
def test_another_request_under_the_key_is_refused_once_the_first_has_committed(old_first: bool) -> None:
    gate = Gate()

    def work(request: HttpRequest) -> HttpResponseBase:
        response = create(request)
        gate.wait_here()
        return response

    with background(lambda: send(plain(work, None), old=old_first)) as running:
        gate.wait_until_reached()
        with background(lambda: send(plain(work, None), old=not old_first, body=b'{"a": 2}')) as second:
            eventually(waits_for_the_first)
            gate.open()
    assert (running.result().status_code, second.result().status_code) == (201, 422)
    assert Entry.objects.count() == 1


@pytest.mark.parametrize("old_first", [True, False], ids=["old first", "new first"])
def test_a_phased_run_holds_its_row_for_both(old_first: bool) -> None:
    gate = Gate()

    def work(request: HttpRequest) -> HttpResponseBase:
        gate.wait_here()
        return create(request)

    view = phased(work, isolation="serializable", scope=lambda request: "one")
    with background(lambda: send(view, old=old_first)) as running:
        gate.wait_until_reached()
        with background(lambda: [send(view, old=not old_first, body=body) for body in (b"{}", b'{"a": 2}')]) as others:
            assert [answer.status_code for answer in others.result(60)] == [409, 422]
        gate.open()
    assert (running.result().status_code, Entry.objects.count()) == (201, 1)
