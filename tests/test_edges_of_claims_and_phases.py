"""Claims that meet somebody just coming or going, and phases in places where few put them."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import Error, OperationalError, connection, connections, transaction
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.template import engines
from django.template.response import SimpleTemplateResponse
from django.test import Client, RequestFactory

from idempotency import claims, rows, sql
from idempotency.claims import Claim, Outcome
from idempotency.decorators import idempotent
from idempotency.exceptions import CallNotRecorded, UnknownRecoveryPoint
from idempotency.models import ForeignCall, IdempotencyKey
from idempotency.phases import atomic_phase, foreign_call
from tests.factories import IdempotencyKeyFactory
from tests.kit.ageing import expire_lock, past_the_retention
from tests.kit.claims import claim, claim_as_completer, claim_plain, finish, request
from tests.kit.database import default_isolation, statements, waits_for_a_lock
from tests.kit.serving import Sender
from tests.kit.threads import Gate, background
from tests.kit.waiting import eventually
from tests.models import Entry

Body = Callable[[IdempotencyKey], None]


@pytest.fixture
def committing(transactional_db: None) -> None:
    """Let transactions of the test be real."""


def phased(body: Body, **options: Any) -> Any:
    """Return a phased view that runs ``body(key)`` in each pass."""

    @idempotent(recovery_points=["one", "two"], **options)
    def view(request: HttpRequest) -> HttpResponseBase:
        for _ in request.idempotency_key.phases():
            body(request.idempotency_key)
        return request.idempotency_key.response()

    return view


@contextmanager
def meanwhile(first: Callable[[], Any], second: Callable[[], Any]) -> Iterator["Future[Any]"]:
    """Do ``first`` in a transaction that commits when ``second``, in another session, waits for it; yield its future."""
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


# Claims


def plainly_at_once() -> Claim:
    """Claim as a claim_plain view does, in a transaction of its own."""
    with transaction.atomic():
        return claim_plain()


@pytest.mark.postgres
@pytest.mark.parametrize("look", [claim, plainly_at_once])
def test_a_claim_that_waited_for_the_row_of_another_tells_what_it_says(committing: None, look: Callable[[], Claim]) -> None:
    described = request()

    def insert() -> None:
        IdempotencyKeyFactory(
            finished=True,
            scope=described.scope,
            idempotency_key=described.idempotency_key,
            request_fingerprint=described.fingerprint,
        )

    with meanwhile(insert, look) as other:
        found = other.result(60)
    assert (found.outcome, found.key.response_code) == (Outcome.FINISHED, 201)


@pytest.fixture
def rows_that_vanish(committing: None) -> Iterator[None]:
    """Let each row that is inserted for a key be gone when somebody looks, as with rivals who are always faster."""
    with connection.cursor() as cursor:
        cursor.execute("CREATE FUNCTION vanish() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
        cursor.execute(
            f"CREATE TRIGGER vanish BEFORE INSERT ON {IdempotencyKey._meta.db_table} FOR EACH ROW EXECUTE FUNCTION vanish()"
        )
    yield
    with connection.cursor() as cursor:
        cursor.execute("DROP FUNCTION vanish() CASCADE")


@pytest.mark.postgres
@pytest.mark.parametrize("look", [claim, plainly_at_once])
def test_a_claim_that_is_always_outrun_sends_its_client_away_for_a_second(
    rows_that_vanish: None, look: Callable[[], Claim]
) -> None:
    assert look() == Claim(Outcome.IN_PROGRESS, None, lock_seconds=1)


def table_id() -> int:
    """Return the identity of the table of keys, which is part of the number of each advisory lock."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT %s::regclass::oid::bigint", [IdempotencyKey._meta.db_table])
        return int(cursor.fetchone()[0])


@pytest.mark.postgres
def test_who_holds_the_same_key_in_another_database_of_the_server_is_in_nobodys_way(rows_that_vanish: None) -> None:
    number = claims._lock_parameters(request())["lock"] ^ table_id()
    with connection._nodb_cursor() as elsewhere, statements() as seen:
        elsewhere.execute("SELECT pg_advisory_lock(%s)", [number])
        claim()
    assert len(seen) == 2 * claims._CLAIM_TRIES, "it looks again, and asks again who holds the key"


@pytest.mark.postgres
def test_a_duplicate_of_a_plain_request_is_refused_with_one_statement(committing: None) -> None:
    def again() -> tuple[Outcome, int]:
        with transaction.atomic(), statements() as seen:
            return claim_plain().outcome, len(seen)

    with transaction.atomic():
        assert claim_plain().outcome is Outcome.CLAIMED
        with background(again) as other:
            assert other.result(60) == (Outcome.IN_PROGRESS, 1)


def test_a_plain_key_is_finished_at_the_time_that_its_claim_wrote(committing: None) -> None:
    """Another time would move the row in the index of finished keys."""
    with transaction.atomic():
        key = claim_plain().key
        claimed_at = IdempotencyKey.objects.get().finished_at
        finish(key)
    assert IdempotencyKey.objects.get().finished_at == claimed_at


def test_only_an_expired_key_of_its_scope_is_moved_out_of_the_way(committing: None) -> None:
    """Between the look and the move somebody may have moved it, or a longer retention may have been set."""
    key = claim().key
    finish(key)

    def retired(scope: str) -> int:
        return rows.execute(rows.statements("default").retire, {"id": key.pk, "scope": scope}, "default")

    assert retired(key.scope) == 0
    past_the_retention()
    assert [retired(scope) for scope in ("user:2", key.scope, key.scope)] == [0, 1, 0]


@pytest.mark.postgres
def test_who_holds_the_lock_of_a_key_is_another_session_with_this_very_lock(committing: None) -> None:
    table = table_id()

    def held(lock: int) -> Any:
        return rows.fetch(sql.HOLDER, {"lock": lock ^ table, "mark_key": 1 ^ table, "mark_request": 1}, "default")

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
def test_while_a_plain_view_runs_over_an_expired_key_the_next_is_refused_at_once(committing: None) -> None:
    def at_once() -> Claim:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SET LOCAL lock_timeout = '3s'")
            return claim_plain()

    finish(claim().key)
    past_the_retention()
    with transaction.atomic():
        assert claim_plain().outcome is Outcome.CLAIMED
        with background(at_once) as other:
            assert other.result(60).outcome is Outcome.IN_PROGRESS


@pytest.mark.postgres
def test_what_is_wrong_with_a_claim_is_raised_at_once(committing: None) -> None:
    """Only a rival who was faster is worth another look."""
    with pytest.raises(Error):
        claim(request("NUL \0 is no text for PostgreSQL"))
    key = claim().key
    expire_lock(91)
    with pytest.raises(Error):
        claims.claim_by_id(key.pk, delay_seconds=float("inf"), using="default")


def test_the_completer_waits_for_the_end_of_its_delay_unless_it_is_told_not_to(committing: None) -> None:
    key = claim().key
    expire_lock(91)
    IdempotencyKey.objects.update(next_run_at=Now() + timedelta(hours=1))
    assert claims.claim_by_id(key.pk, delay_seconds=60, using="default") is None
    assert claims.claim_by_id(key.pk, delay_seconds=60, using="default", early=True) is not None


def test_a_key_is_locked_to_the_last_moment(committing: None) -> None:
    claim()

    def claimed_too_early() -> Claim | None:
        expire_lock(89.2)
        found = claim()
        return None if found.outcome is Outcome.CLAIMED else found  # the machine was too slow

    found = eventually(claimed_too_early)
    assert found.key is not None
    assert 0 < found.lock_seconds < 1


@pytest.mark.postgres
@pytest.mark.parametrize("look", [claim_as_completer, lambda key: claim()])
@pytest.mark.parametrize("in_transaction", [False, True], ids=["autocommit", "transaction"])
def test_a_claim_that_a_rival_outran_at_a_high_level_looks_again_where_it_can(
    committing: None, look: Callable[[IdempotencyKey], Any], in_transaction: bool
) -> None:
    """In a transaction it says so: no other statement could follow there."""
    key = claim().key
    expire_lock(91)

    def take_over() -> Any:
        with default_isolation("repeatable read"):
            if not in_transaction:
                return look(key)
            with pytest.raises(OperationalError), transaction.atomic():
                look(key)
            return None

    with meanwhile(lambda: IdempotencyKey.objects.update(locked_at=Now()), take_over) as other:
        found = other.result(60)
    if look is claim_as_completer or in_transaction:
        assert found is None
    else:
        assert (found.outcome, found.key) == (Outcome.IN_PROGRESS, key)


# Phases


def test_a_phase_cannot_end_where_it_began(serve: Any, sender: Sender) -> None:
    def body(key: IdempotencyKey) -> None:
        with atomic_phase(key) as phase:
            if key.recovery_point == "started":
                phase.set_recovery_point("one")
            else:
                with pytest.raises(UnknownRecoveryPoint, match="'one' cannot follow 'one'"):
                    phase.set_recovery_point("one")
                phase.set_response(HttpResponse("done"))

    serve(view=phased(body))
    assert sender.send().content == b"done"


def test_a_phase_tells_what_it_cannot_hold(serve: Any, sender: Sender) -> None:
    def body(key: IdempotencyKey) -> None:
        with atomic_phase(key) as phase:
            for inner in (atomic_phase(key), foreign_call(key, "sms")):
                with pytest.raises(RuntimeError, match="holds no other and no foreign_call"), inner:
                    pass
            phase.set_response(HttpResponse("done"))

    serve(view=phased(body))
    assert sender.send().content == b"done"


def test_a_call_of_which_nothing_is_known_is_told_at_the_end_of_its_block(serve: Any, sender: Sender) -> None:
    def body(key: IdempotencyKey) -> None:
        with pytest.raises(CallNotRecorded), foreign_call(key, "sms"):
            pass
        raise LookupError("told")

    serve(view=phased(body))
    assert sender.send().status_code == 500
    assert IdempotencyKey.objects.get().last_error == "LookupError: told"


def test_no_phase_commits_after_a_call_that_was_put_off(serve: Any, sender: Sender) -> None:
    def body(key: IdempotencyKey) -> None:
        with foreign_call(key, "sms") as call:
            if key.attempts == 1:
                call.retryable()
            else:
                call.record("sent")
        with atomic_phase(key) as phase:
            Entry.objects.create(name="sent")
            phase.set_response(HttpResponse("sent"))

    serve(view=phased(body))
    assert sender.send().status_code == 500
    assert IdempotencyKey.objects.get().last_error.startswith("CallNotRecorded")
    assert not Entry.objects.exists()
    assert not ForeignCall.objects.exists()
    assert sender.send().content == b"sent"
    assert Entry.objects.count() == 1


def test_a_template_is_rendered_in_the_transaction_of_its_phase(serve: Any, sender: Sender) -> None:
    template = engines["django"].from_string("{{ in_phase }}")

    def body(key: IdempotencyKey) -> None:
        with atomic_phase(key) as phase:
            context = {"in_phase": lambda: connection.in_atomic_block}
            phase.set_response(SimpleTemplateResponse(template, context))

    serve(view=phased(body))
    assert [sender.send().content for _ in range(2)] == [b"True", b"True"]


def test_a_phase_is_known_to_be_committed_before_a_hook_fails(serve: Any, sender: Sender) -> None:
    """The view turns the error into an answer of its own, and the stored one is given all the same."""

    def fail() -> None:
        raise OSError

    def body(key: IdempotencyKey) -> None:
        with pytest.raises(OSError), atomic_phase(key) as phase:  # noqa: PT012 - the hook's
            transaction.on_commit(fail)
            phase.set_response(HttpResponse("stored"))

    serve(view=phased(body))
    assert sender.send().content == b"stored"
    assert IdempotencyKey.objects.get().attempts == 1


def test_phases_go_on_in_a_transaction_of_a_test_that_never_commits(db: None, serve: Any) -> None:
    def body(key: IdempotencyKey) -> None:
        with atomic_phase(key) as phase:
            if key.recovery_point == "started":
                phase.set_recovery_point("one")
            else:
                phase.set_response(HttpResponse(key.recovery_point))

    serve(view=phased(body, scope=lambda request: "everybody"))
    assert Client().post("/view/", headers={"Idempotency-Key": "key-1"}).content == b"one"


@pytest.mark.postgres
def test_two_tasks_of_one_thread_share_no_transaction_but_wait_for_calls_together(committing: None) -> None:
    """Each asyncio task has a key; the connection is that of the one thread in which both wait for the database."""
    refused: list[str] = []

    @idempotent(recovery_points=[], scope=lambda request: "everybody")
    async def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        async for _ in key.aphases():
            async with foreign_call(key, "sms") as call:
                if key.idempotency_key == "outer":
                    await asyncio.create_task(ask("inner"))
                call.record()
            async with atomic_phase(key) as phase:
                if key.idempotency_key == "outer":
                    await asyncio.create_task(attempt(key))
                phase.set_response(HttpResponse(key.idempotency_key))
        return key.response()

    async def attempt(key: IdempotencyKey) -> None:
        with pytest.raises(RuntimeError, match="Another asyncio task holds a transaction") as told:
            async with atomic_phase(key):
                pass
        refused.append(str(told.value))

    async def ask(name: str) -> HttpResponseBase:
        given = RequestFactory().post("/", headers={"Idempotency-Key": name})
        return await view(given)

    async def whole() -> None:
        try:
            answer = await ask("outer")
            assert (answer.status_code, answer.content) == (200, b"outer")
        finally:
            await sync_to_async(connections.close_all)()

    asyncio.run(whole())
    assert len(refused) == 1
    assert IdempotencyKey.objects.finished().count() == 2
