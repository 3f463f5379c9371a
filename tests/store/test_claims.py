"""Claims, without HTTP: what they write, what they find, and what they refuse."""

import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import DataError, Error, OperationalError, connection, transaction
from django.db.models.functions import Now

from idempotency import interventions
from idempotency._engine import claims, decisions, fence, rows
from idempotency._engine.adapter import ClaimedRequest
from idempotency._engine.advisory_locks import HOLDER
from idempotency._engine.claims import Claim, ClaimOutcome
from idempotency._engine.dialects import HISTORY_LIMIT
from idempotency._hidden import Hidden
from idempotency.models import IdempotencyKey
from tests.factories import IdempotencyKeyFactory
from tests.kit.ageing import ago, expire_lock, lock_end, make_older, past_the_retention
from tests.kit.claims import claim, claim_as_completer, claim_plain, finish, locks, request
from tests.kit.cutting import Cut, cutting_proxy
from tests.kit.database import default_isolation, held_transaction, statements, waits_for_a_lock
from tests.kit.threads import Gate, background, in_background
from tests.kit.waiting import eventually

pytestmark = pytest.mark.django_db(transaction=True)

#: A request that can only continue a key for which something was begun. Its claim is two
#: statements.
UNSTORABLE = replace(request(), unstorable=ValueError("The request cannot be stored."))


def test_a_claim_writes_down_all_of_the_request() -> None:
    key = claim(request("a key", scope="user:7", fingerprint="v1:it")).key
    row = IdempotencyKey.objects.get()
    assert (row.scope, row.idempotency_key, row.request_fingerprint) == ("user:7", "a key", "v1:it")
    assert (row.request_method, row.request_path, bytes(row.request_body)) == (
        "POST",
        "/rides",
        b"{}",
    )
    assert (row.request_content_type, row.request_headers, row.remote_addr) == (
        "application/json",
        {},
        "127.0.0.1",
    )
    assert (row.claim_token, row.seed, row.attempts) == (key.fence, key.seed, 1)
    assert [(event["event"], event["detail"]) for event in row.history] == [("claimed", "client")]


def test_what_a_claim_returns_is_what_the_row_says() -> None:
    held, row = claim().key, IdempotencyKey.objects.get()
    for name in (
        "scope",
        "idempotency_key",
        "request_method",
        "request_path",
        "request_fingerprint",
        "claim_token",
    ):
        assert getattr(held, name) == getattr(row, name)
    for name in (
        "stuck_at",
        "stuck_code",
        "stuck_reason",
        "response_code",
        "response_headers",
        "response_body",
    ):
        assert getattr(held, name) == getattr(row, name)
    with statements() as seen:
        assert held.finished_at is None
    assert not seen, "no column is read for it"


def test_the_age_of_a_key_goes_by_its_creation() -> None:
    first = claim().key
    IdempotencyKey.objects.update(created_at=Now() - timedelta(hours=1), locked_until=None)
    for key in (claim().key, rows.read(first.pk, using="default")):
        assert 3599 < time.monotonic() - key.created_monotonic < 3700  # SQLite has milliseconds


@pytest.mark.postgres
def test_the_age_of_a_key_includes_the_wait_of_its_claim_for_a_lock() -> None:
    """Otherwise a downstream key would seem valid for longer than the downstream service stores
    it."""
    first = claim().key
    created = time.monotonic()
    fence.release(first, "error", using="default")
    with held_transaction(lambda: IdempotencyKey.objects.update(remote_addr="127.0.0.2")):
        waiting = in_background(claim)
        eventually(waits_for_a_lock)
    key = waiting.result(60).key
    assert key.pk == first.pk
    assert key.created_monotonic <= created


@pytest.mark.postgres
@pytest.mark.parametrize(
    "take", [lambda key: claim(), claim_as_completer], ids=["client", "completer"]
)
def test_a_lock_that_is_renewed_while_a_claim_waits_for_it_has_not_expired(
    take: Callable[[IdempotencyKey], Any],
) -> None:
    key = claim().key
    expire_lock()
    with held_transaction(lambda: fence.renew(key, using="default")):
        waiting = in_background(lambda: take(key))
        eventually(waits_for_a_lock)
    found = waiting.result(60)
    assert found is None or found.outcome is ClaimOutcome.IN_PROGRESS
    assert IdempotencyKey.objects.get().claim_token == key.fence


def test_a_takeover_by_a_client_renews_lock_and_time_of_the_run() -> None:
    claim()
    IdempotencyKey.objects.update(
        locked_until=lock_end(91), last_run_at=Now() - timedelta(seconds=91)
    )
    claim()
    age = IdempotencyKey.objects.filter(
        locked_until__gt=lock_end(30), last_run_at__gt=Now() - timedelta(seconds=30)
    )
    assert age.exists()


def test_a_key_is_locked_to_the_last_moment() -> None:
    claim()

    def claimed_too_early() -> Claim | None:
        expire_lock(89.2)
        found = claim()
        # the machine was too slow: try again
        return None if found.outcome is ClaimOutcome.CLAIMED else found

    found = eventually(claimed_too_early)
    assert found.key is not None
    assert 0 < found.lock_seconds < 1


def test_a_free_key_is_refused_to_another_request() -> None:
    fence.release(claim().key, "error", using="default")
    assert claim(request(fingerprint="v1:two")).outcome is ClaimOutcome.MISMATCH
    assert IdempotencyKey.objects.get().attempts == 1


def test_a_finished_key_is_not_claimed_by_a_view_that_knows_the_last_point() -> None:
    finish(claim().key)
    found = claims.claim_phased(request(), ("started", "paid", "finished"), using="default")
    assert (found.outcome, found.key.response_code) == (ClaimOutcome.FINISHED, 200)
    assert IdempotencyKey.objects.get().attempts == 1


def test_only_a_view_that_knows_the_point_takes_a_key_over() -> None:
    claim()
    IdempotencyKey.objects.update(recovery_point="elsewhere", locked_until=None)
    refused = claim()
    assert (refused.outcome, refused.key.recovery_point) == (
        ClaimOutcome.UNKNOWN_POINT,
        "elsewhere",
    )
    assert IdempotencyKey.objects.get().attempts == 1


def test_a_claim_of_what_a_deploy_left_takes_the_mark_off() -> None:
    key = claim().key
    fence.mark_stuck(key, "unknown_recovery_point", "reason", using="default")
    again = claim()
    assert again.outcome is ClaimOutcome.CLAIMED
    row = IdempotencyKey.objects.get()
    assert (row.stuck_at, row.stuck_code, row.stuck_reason) == (None, "", "")
    assert (again.key.stuck_at, again.key.stuck_code, again.key.stuck_reason) == (None, "", "")


@pytest.mark.parametrize("look", [claim, claim_plain])
def test_a_key_is_compared_by_the_way_in_which_its_fingerprint_was_made(look: Any) -> None:
    finish(claim(request(fingerprint="v1:old")).key)
    for made, outcome in (
        ("v1:old", ClaimOutcome.FINISHED),
        ("v1:other", ClaimOutcome.MISMATCH),
        (None, ClaimOutcome.IN_PROGRESS),
    ):
        described = replace(
            request(fingerprint="v2:new"), fingerprint_as={"v1:old": made}.__getitem__
        )
        assert look(described).outcome is outcome


@pytest.mark.postgres
def test_what_is_wrong_with_a_claim_is_raised_at_once() -> None:
    """A claim is repeated only after a concurrent claim was faster."""
    with pytest.raises(Error):
        claim(request("NUL \0 is no text for PostgreSQL"))
    key = claim().key
    expire_lock()
    with pytest.raises(Error):
        claims.claim_by_id(key.pk, delay_seconds=float("inf"), using="default")


def test_an_expired_key_is_retired_by_whoever_comes_and_only_then() -> None:
    key = claim().key
    finish(key)
    IdempotencyKey.objects.update(created_at=Now() - timedelta(hours=99))
    assert claim(request(fingerprint="v1:two")).outcome is ClaimOutcome.MISMATCH
    make_older(73 * 3600, "finished_at")
    assert claim_plain(request(fingerprint="v1:two")).outcome is ClaimOutcome.CLAIMED
    assert IdempotencyKey.objects.filter(scope=f"expired:{key.pk}").count() == 1


@pytest.mark.parametrize(
    ("kept", "hours", "outcome"),
    [
        (100, 99, ClaimOutcome.FINISHED),
        (100, 101, ClaimOutcome.CLAIMED),
        (None, 9999, ClaimOutcome.FINISHED),
    ],
)
@pytest.mark.parametrize("first", ["phased", "plain"])
@pytest.mark.parametrize("look", [claim, claim_plain])
def test_a_key_is_replayed_until_it_expires(
    look: Callable[..., Any], first: str, kept: int | None, hours: int, outcome: ClaimOutcome
) -> None:
    described = replace(request(), retention_hours=kept)
    finish((claim if first == "phased" else claim_plain)(described).key)
    key = IdempotencyKey.objects.get()
    assert key.expires_at == (kept and key.finished_at + timedelta(hours=kept))
    make_older(hours * 3600, "created_at", "finished_at")
    assert IdempotencyKey.objects.expired().count() == (outcome is ClaimOutcome.CLAIMED)
    assert look(described).outcome is outcome


@pytest.mark.parametrize(("begun", "kept"), [(False, 200), (True, 100)])
def test_the_retention_is_that_of_the_view_when_the_work_begins(begun: bool, kept: int) -> None:
    key = claim(replace(request(), retention_hours=100)).key
    if begun:
        fence.advance(key, "paid", using="default")
    fence.release(key, "It failed.", using="default")
    assert claim(replace(request(), retention_hours=200)).outcome is ClaimOutcome.CLAIMED
    assert IdempotencyKey.objects.get().retention_hours == kept


def test_only_an_expired_key_of_its_scope_is_moved_out_of_the_way() -> None:
    """Between the read and the move, another run may have moved it, or a longer retention may have
    been set."""
    key = claim().key
    finish(key)

    def retired(scope: str) -> int:
        return rows.execute(
            rows.statements_for("default").retire, Hidden({"id": key.pk, "scope": scope}), "default"
        )

    assert retired(key.scope) == 0
    past_the_retention()
    assert [retired(scope) for scope in ("user:2", key.scope, key.scope)] == [0, 1, 0]


@contextmanager
def meanwhile(first: Callable[[], Any], second: Callable[[], Any]) -> Iterator["Future[Any]"]:
    """Call ``first`` in a transaction that commits when ``second``, in another session, waits;
    yield ``second``'s future."""
    gate = Gate()

    def work() -> None:
        with transaction.atomic():
            first()
            gate.wait_here()

    with background(work) as holder:
        gate.wait_until_reached()
        with background(second) as other:
            eventually(lambda: waits_for_a_lock() or other.done())
            gate.open()
            holder.result(60)
            yield other


def plainly_at_once() -> Claim:
    """Claim like a plain view, in a separate transaction."""
    with transaction.atomic():
        return claim_plain()


@pytest.mark.postgres
@pytest.mark.parametrize("look", [claim, plainly_at_once])
def test_a_claim_that_waited_for_the_row_of_another_tells_what_it_says(
    look: Callable[[], Claim],
) -> None:
    described = request()

    def insert() -> None:
        IdempotencyKeyFactory(
            finished=True,
            scope=described.scope,
            idempotency_key=described.idempotency_key,
            request_fingerprint=described.request_fingerprint,
        )

    with meanwhile(insert, look) as other:
        found = other.result(60)
    assert (found.outcome, found.key.response_code) == (ClaimOutcome.FINISHED, 201)


@pytest.mark.postgres
@pytest.mark.parametrize(
    "look", [claim_as_completer, lambda key: claim(), lambda key: claim(UNSTORABLE)]
)
@pytest.mark.parametrize("in_transaction", [False, True], ids=["autocommit", "transaction"])
def test_a_claim_that_a_rival_outran_at_a_high_level_looks_again_where_it_can(
    look: Callable[[IdempotencyKey], Any], in_transaction: bool
) -> None:
    """In a transaction the claim raises the error, because no other statement could follow
    there."""
    key = claim().key
    IdempotencyKey.objects.update(begun=True)
    expire_lock()

    def take_over() -> Any:
        with default_isolation("repeatable read"):
            if not in_transaction:
                return look(key)
            with pytest.raises(OperationalError), transaction.atomic():
                look(key)
            return None

    with meanwhile(
        lambda: IdempotencyKey.objects.update(locked_until=lock_end()), take_over
    ) as other:
        found = other.result(60)
    if look is claim_as_completer or in_transaction:
        assert found is None
    else:
        assert (found.outcome, found.key) == (ClaimOutcome.IN_PROGRESS, key)


@pytest.fixture
def rows_that_vanish(transactional_db: None) -> Iterator[None]:
    """Let each inserted row of a key vanish, as if concurrent runs were always faster."""
    begin = f"CREATE TRIGGER vanish BEFORE INSERT ON {IdempotencyKey._meta.db_table} "
    postgresql = (
        "CREATE FUNCTION vanish() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
        begin + "FOR EACH ROW EXECUTE FUNCTION vanish()",
        "DROP FUNCTION vanish() CASCADE",
    )
    sqlite = begin + "BEGIN SELECT RAISE(IGNORE); END", "DROP TRIGGER vanish"
    *create, drop = postgresql if connection.vendor == "postgresql" else sqlite
    with connection.cursor() as cursor:
        for text in create:
            cursor.execute(text)
    yield
    with connection.cursor() as cursor:
        cursor.execute(drop)


@pytest.mark.parametrize("look", [claim, plainly_at_once])
def test_a_claim_that_is_always_outrun_sends_its_client_away_for_a_second(
    rows_that_vanish: None, look: Callable[[], Claim]
) -> None:
    assert look() == Claim(ClaimOutcome.IN_PROGRESS, None, lock_seconds=1)


def test_the_completer_claims_what_nobody_holds_and_not_before_its_delay() -> None:
    key = claim().key
    assert claim_as_completer(key) is None
    expire_lock()
    taken = claim_as_completer(key)
    assert taken is not None
    assert (taken.attempts, taken.completer_attempts) == (2, 1)
    assert taken.fence not in (None, key.fence)
    assert [(event["event"], event["detail"]) for event in taken.history][-1] == (
        "claimed",
        "completer",
    )
    assert IdempotencyKey.objects.filter(locked_until__gt=lock_end(30)).exists()
    expire_lock()
    assert claim_as_completer(key) is None
    assert claim_as_completer(key, early=True) is not None


def test_the_completer_waits_for_the_end_of_its_delay_unless_it_is_told_not_to() -> None:
    key = claim().key
    expire_lock()
    IdempotencyKey.objects.update(next_run_at=Now() + timedelta(hours=1))
    assert claims.claim_by_id(key.pk, delay_seconds=60, using="default") is None
    assert claim_as_completer(key, early=True) is not None


def events() -> list[str]:
    return [
        f"{event['event']}: {event['detail']}" for event in IdempotencyKey.objects.get().history
    ]


CLAIMANTS: dict[str, Callable[[IdempotencyKey], Any]] = {
    "client": lambda key: claim(),
    "completer": claim_as_completer,
    "reaper": lambda key: claim_as_completer(key, early=True),
}
claimants = pytest.mark.parametrize("who", CLAIMANTS)


@claimants
def test_a_claim_of_an_expired_lock_records_the_lost_run(who: str) -> None:
    key = claim().key
    expire_lock()
    left = IdempotencyKey.objects.get()

    CLAIMANTS[who](key)

    assert events() == ["claimed: client", "run lost: lock expired", f"claimed: {who}"]
    lost = IdempotencyKey.objects.get().history[1]
    expired, begun = (datetime.fromisoformat(lost[name]) for name in ("at", "claimed_at"))
    assert left.locked_until is not None
    assert abs(expired - left.locked_until) < timedelta(milliseconds=2)  # SQLite has milliseconds
    assert abs(begun - left.last_run_at) < timedelta(milliseconds=2)


RELEASES: dict[str, Callable[[IdempotencyKey], Any]] = {
    "run": lambda key: fence.release(key, "error", using="default"),
    "operator": lambda key: interventions.release_lock(key.pk, key.fence, by="jane"),
    "stuck": lambda key: fence.mark_stuck(key, "unknown_recovery_point", "reason", using="default"),
}


@claimants
@pytest.mark.parametrize("how", RELEASES)
def test_a_run_whose_key_was_released_is_not_lost(who: str, how: str) -> None:
    key = claim().key
    RELEASES[how](key)
    IdempotencyKey.objects.update(last_run_at=Now() - timedelta(hours=1))

    CLAIMANTS[who](key)

    assert (len(events()), events()[-1]) == (3, f"claimed: {who}")


@claimants
@pytest.mark.parametrize("length", [HISTORY_LIMIT - 2, HISTORY_LIMIT - 1, HISTORY_LIMIT])
def test_a_lost_run_does_not_make_the_history_too_long(who: str, length: int) -> None:
    key = claim().key
    old = [
        {"at": "2026-01-01T00:00:00Z", "event": "error", "detail": str(number)}
        for number in range(length)
    ]
    IdempotencyKey.objects.update(history=old)
    expire_lock()

    CLAIMANTS[who](key)

    assert HISTORY_LIMIT - 1 <= len(events()) <= HISTORY_LIMIT
    assert events()[-3:] == [f"error: {length - 1}", "run lost: lock expired", f"claimed: {who}"]


def test_a_key_that_is_given_up_records_the_lost_run() -> None:
    key = claim().key
    expire_lock()
    assert decisions.give_up(key.pk, "code", "reason", using="default")
    assert events() == ["claimed: client", "run lost: lock expired", "stuck: reason"]


def test_a_finished_key_cannot_be_claimed_by_the_completer() -> None:
    key = claim().key
    finish(key)
    assert claim_as_completer(key) is None


def test_a_stuck_key_is_not_claimed_by_the_completer() -> None:
    key = claim().key
    fence.mark_stuck(key, "code", "reason", using="default")
    assert claim_as_completer(key) is None


def test_the_attempts_of_the_completer_start_again_when_a_deploy_alone_left_the_key() -> None:
    for code, left in (("code", 3), ("unknown_recovery_point", 0)):
        key = claim(request(code)).key
        IdempotencyKey.objects.filter(pk=key.pk).update(completer_attempts=3)
        fence.mark_stuck(key, code, "reason", using="default")
        assert IdempotencyKey.objects.get(pk=key.pk).completer_attempts == left


def test_the_plain_claim_refuses_what_a_phased_view_left() -> None:
    claim()
    assert claim_plain().outcome is ClaimOutcome.IN_PROGRESS
    expire_lock()
    refused = claim_plain()
    assert (refused.outcome, refused.key.recovery_point) == (ClaimOutcome.UNKNOWN_POINT, "started")
    assert claim_plain(request(fingerprint="v1:two")).outcome is ClaimOutcome.MISMATCH


@pytest.mark.postgres
def test_a_duplicate_of_a_plain_request_is_refused_with_one_statement() -> None:
    def again() -> tuple[ClaimOutcome, int]:
        with transaction.atomic(), statements() as seen:
            return claim_plain().outcome, len(seen)

    with transaction.atomic():
        assert claim_plain().outcome is ClaimOutcome.CLAIMED
        with background(again) as other:
            assert other.result(60) == (ClaimOutcome.IN_PROGRESS, 1)


@pytest.mark.postgres
def test_while_a_plain_view_runs_over_an_expired_key_the_next_is_refused_at_once() -> None:
    def at_once() -> Claim:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SET LOCAL lock_timeout = '3s'")
            return claim_plain()

    finish(claim().key)
    past_the_retention()
    with transaction.atomic():
        assert claim_plain().outcome is ClaimOutcome.CLAIMED
        with background(at_once) as other:
            assert other.result(60).outcome is ClaimOutcome.IN_PROGRESS


@pytest.mark.postgres
@pytest.mark.parametrize("look", [claim, claim_plain])
def test_while_a_plain_view_runs_another_session_learns_whether_it_is_the_same_request(
    look: Any,
) -> None:
    def counted(described: ClaimedRequest) -> tuple[Claim, int]:
        with statements() as seen:
            return look(described), len(seen)

    with transaction.atomic():
        assert claim_plain().outcome is ClaimOutcome.CLAIMED
        for described, outcome in (
            (request(), ClaimOutcome.IN_PROGRESS),
            (request(fingerprint="v1:two"), ClaimOutcome.MISMATCH),
        ):
            with background(lambda described=described: counted(described)) as other:
                refused, sent = other.result(60)
            assert (refused.outcome, refused.lock_seconds) == (outcome, 1)
            assert sent <= 2, "the claim is not repeated"
        with background(lambda: look(request("another key")).outcome) as other:
            assert other.result(60) is ClaimOutcome.CLAIMED


@pytest.mark.postgres
@pytest.mark.parametrize("look", [claim, claim_plain])
@pytest.mark.parametrize("fingerprint", ["v1:one", "v1:two"])
def test_keys_of_two_scopes_that_agree_in_32_bits_are_not_in_each_others_way(
    look: Any, fingerprint: str
) -> None:
    """An attacker finds such a pair of keys in a second, because the mark of a key is half of its
    lock number."""
    theirs = request("order-76053", scope="user:1")
    mine = request("order-15215", scope="user:2", fingerprint=fingerprint)
    assert locks(theirs)["mark_key"] == locks(mine)["mark_key"]
    with transaction.atomic():
        assert claim_plain(theirs).outcome is ClaimOutcome.CLAIMED
        with background(lambda: look(mine).outcome) as other:
            assert other.result(60) is ClaimOutcome.CLAIMED


def test_locks_are_numbers_of_the_width_that_postgresql_takes() -> None:
    wide = [locks(request(str(number))) for number in range(64)]
    for name, bits in (("lock", 63), ("mark_key", 31), ("mark_request", 31)):
        values = [numbers[name] for numbers in wide]
        assert all(-(2**bits) <= value < 2**bits for value in values)
        assert name == "mark_request" or (min(values) < 0 < max(values))
        assert name == "mark_request" or len(set(values)) == 64
    marks = {locks(request(fingerprint=str(number)))["mark_request"] for number in range(64)}
    assert len(marks) == 64
    assert len({numbers["mark_request"] for numbers in wide}) == 64, (
        "equal requests under different keys share neither half"
    )
    for values, bits in (
        ({one["lock"] for one in wide}, 63),
        ({one["mark_key"] for one in wide}, 31),
        (marks, 31),
    ):
        assert max(map(abs, values)) > 2 ** (bits - 1), (
            "all of the width is used, so that locks of different keys seldom meet"
        )


def table_id() -> int:
    """Return the identity of the table of keys, which is part of the number of each advisory
    lock."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT %s::regclass::oid::bigint", [IdempotencyKey._meta.db_table])
        return int(cursor.fetchone()[0])


@pytest.mark.postgres
def test_who_holds_the_lock_of_a_key_is_another_session_with_this_very_lock() -> None:
    table = table_id()

    def held(lock: int) -> Any:
        return rows.fetch(
            HOLDER,
            Hidden({"lock": lock ^ table, "mark_key": 1 ^ table, "mark_request": 1}),
            "default",
        )

    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(5)")
        assert held(5) == (False, False)
        with background(lambda: [held(lock) for lock in (5, 5 + 2**32)]) as other:
            assert other.result(60) == [(True, False), (False, False)]

        def beside_the_mark_of_another_session() -> Any:
            with transaction.atomic(), connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_xact_lock(1, 2)")
                with background(lambda: held(5)) as third:
                    return third.result(60)

        with background(beside_the_mark_of_another_session) as other:
            assert other.result(60) == (True, False)
        cursor.execute("SELECT pg_advisory_xact_lock(1, 2)")
        with background(lambda: held(5)) as other:
            assert other.result(60) == (True, True)


@pytest.mark.postgres
def test_who_holds_the_same_key_in_another_database_of_the_server_is_in_nobodys_way(
    rows_that_vanish: None,
) -> None:
    number = locks(request())["lock"] ^ table_id()
    with connection._nodb_cursor() as elsewhere, statements() as seen:
        elsewhere.execute("SELECT pg_advisory_lock(%s)", [number])
        claim()
    assert len(seen) == 2 * claims._CLAIM_TRIES, "it looks again, and asks again who holds the key"


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("look", "begun"),
    [
        (claim_as_completer, True),
        (lambda key: claim(), False),
        (lambda key: claim(UNSTORABLE), True),
    ],
)
def test_a_claim_whose_result_is_lost_is_released(
    look: Callable[[Any], Any], begun: bool, short_folder: Path
) -> None:
    """Otherwise the key is locked until the lock expires, although no run holds it."""
    key = None
    if begun:
        key = claim().key
        IdempotencyKey.objects.update(
            begun=True, locked_until=None, created_at=ago(hours=1), last_run_at=ago(hours=1)
        )
    with cutting_proxy(short_folder) as proxy:
        proxy.cut = Cut(word=b"claim_token", reply_bytes=0)
        with pytest.raises(OperationalError):
            look(key)
    assert IdempotencyKey.objects.in_flight().exists()
    eventually(lambda: not IdempotencyKey.objects.in_flight().exists())


@pytest.mark.postgres
def test_the_release_of_a_claim_whose_result_is_lost_is_repeated_for_its_lease(
    monkeypatch: pytest.MonkeyPatch, short_folder: Path
) -> None:
    leases = []
    monkeypatch.setattr(
        claims, "release_later", lambda key, error, using: leases.append(key.lease_seconds)
    )
    with cutting_proxy(short_folder) as proxy:
        proxy.cut = Cut(word=b"claim_token", reply_bytes=0)
        with pytest.raises(OperationalError):
            claim(replace(request(), lease_seconds=7))
    assert leases == [7]


@pytest.mark.postgres
def test_a_claim_that_was_not_sent_or_was_refused_has_nothing_to_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        claims, "release_later", lambda key, error, using: pytest.fail("It tries to release.")
    )
    with pytest.raises(DataError):
        claim(replace(request(), request_method="M" * 30))
    connection.close()
    monkeypatch.setitem(connection.settings_dict["OPTIONS"], "host", "/nowhere")
    with pytest.raises(OperationalError):
        claim()


@pytest.mark.parametrize("look", [claim, claim_plain])
def test_a_fingerprint_of_an_unknown_way_can_be_compared_soon(look: Callable[..., Any]) -> None:
    claim(request(fingerprint="v9:newer"))
    expire_lock()
    met = look(replace(request(fingerprint="v2:new"), fingerprint_as=lambda stored: None))
    assert (met.outcome, met.lock_seconds) == (ClaimOutcome.IN_PROGRESS, 1)


@pytest.mark.skipif(connection.vendor != "sqlite", reason="needs SQLite")
def test_a_claim_of_an_expired_key_waits_once_for_the_writer_of_sqlite() -> None:
    finish(claim().key)
    past_the_retention()
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA busy_timeout = 200")
    updates = []

    def count(execute: Any, sql: str, *arguments: Any) -> Any:
        updates.extend([sql] * sql.startswith("UPDATE"))
        return execute(sql, *arguments)

    with (
        connection.execute_wrapper(count),
        closing(sqlite3.connect(connection.settings_dict["NAME"], isolation_level=None)) as other,
    ):
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(OperationalError, match="locked"):
            claim()
        other.execute("ROLLBACK")
    connection.close()
    assert len(updates) == 1
