"""Operations in one process: what runs, what is stored, and what each caller gets."""

import asyncio
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import get_ident
from typing import Any

import pytest
from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.contrib.auth import get_user_model
from django.contrib.auth.models import AnonymousUser, Group
from django.db import DatabaseError, OperationalError, connection, connections, transaction
from django.db.models.signals import post_save
from django.test.utils import CaptureQueriesContext
from django.utils import timezone, translation
from django.utils.translation import get_language

from idempotency import conf
from idempotency._engine.calls import Calls
from idempotency._engine.phased_run import current_key
from idempotency._operations.results import encoded
from idempotency.completer import complete_key
from idempotency.exceptions import (
    InProgress,
    InterventionRequired,
    KeyReused,
    Rejected,
    StuckCode,
    Unavailable,
    Unfinished,
)
from idempotency.models import IdempotencyKey
from idempotency.reaper import reap_once
from tests.kit.ageing import abandon, expire_lock, make_older
from tests.kit.database import no_migration
from tests.models import Account, Entry
from tests.operations import Bank, charge, note, outer, pay, pay_without_undo, ship, tell

pytestmark = pytest.mark.django_db(transaction=True)


def broken() -> None:
    raise OSError("no route")


@contextmanager
def on_save(receiver: Callable[..., None]) -> Iterator[None]:
    """Call the receiver when the block has saved an entry: in the transaction of an operation."""
    post_save.connect(receiver, sender=Entry)
    try:
        yield
    finally:
        post_save.disconnect(receiver, sender=Entry)


def names() -> list[str]:
    return sorted(Entry.objects.values_list("name", flat=True))


def test_o01_the_row_of_a_plain_operation_has_no_arguments() -> None:
    first = note.once("key", name="one")
    assert first == {"entry": Entry.objects.get().pk, "list": [1, 2]}
    assert note.once("key", name="one") == first
    assert names() == ["one"]
    key = IdempotencyKey.objects.get()
    assert (key.scope, key.request_path, key.lease_seconds) == ("tests.note", "tests.note", 30)
    assert key.finished_at is not None
    assert key.request_body is None


def test_o03_each_user_has_keys_of_their_own() -> None:
    note.once("key", name="one")
    with pytest.raises(KeyReused):
        note.once("key", name="two")
    note.by(get_user_model()(pk=7)).once("key", name="two")  # It has keys of its own.
    assert names() == ["one", "two"]
    assert IdempotencyKey.objects.get(user_id=7).scope == "tests.note:user:7"


@pytest.mark.parametrize(
    "other",
    [AnonymousUser(), Group(pk=7), get_user_model()()],
    ids=lambda other: type(other).__name__,
)
def test_what_is_not_a_saved_user_needs_a_scope(other: Any) -> None:
    """Anonymous users must not share keys, and a partner must not get the result of a user of the
    same id."""
    note.by(get_user_model()(pk=7)).once("key", name="one")
    with pytest.raises(ValueError, match=f"{type(other).__name__} is not a saved user"):
        note.by(other)
    note.by(other, scope="session:a").once("key", name="two")
    assert IdempotencyKey.objects.get(user_id=None).scope == "tests.note:session:a"
    assert names() == ["one", "two"]


def test_a_refusal_survives_pickle_and_cannot_be_subclassed() -> None:
    why = pickle.loads(pickle.dumps(Rejected("code", "message", [1])))
    assert (why.code, why.message, why.data) == ("code", "message", [1])
    with pytest.raises(TypeError, match="cannot be subclassed"):
        type("Worse", (Rejected,), {})


@pytest.mark.parametrize(("fails", "error"), [("breaks", ValueError), ("no json", TypeError)])
def test_o09_after_an_exception_of_a_plain_operation_nothing_is_stored(
    fails: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        note.once("key", name="one", fails=fails)
    assert not names()
    assert not IdempotencyKey.objects.exists()


@pytest.mark.parametrize("key", ["", "x" * 256, "a\0b", 17, None])
def test_an_invalid_key_is_refused_before_anything(key: Any) -> None:
    with pytest.raises(ValueError, match="1 to 255 characters"):
        note.once(key, name="one")
    with transaction.atomic(), pytest.raises(ValueError, match="1 to 255 characters"):
        note.stage(key, name="one")


def test_arguments_that_are_no_json_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="argument 'name'"):
        note.once("key", name=object())  # type: ignore[arg-type]
    with transaction.atomic(), pytest.raises(TypeError, match=r"arguments of tests\.note"):
        note.stage("key", name=object())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="required"):
        note.once("key", nome="one")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"note\.once"):
        note(name="one")  # type: ignore[operator]
    assert not IdempotencyKey.objects.exists()


def test_an_async_call_of_a_request_uses_the_thread_of_the_request() -> None:
    threads, results = [], []

    async def view() -> None:
        async with ThreadSensitiveContext():
            await sync_to_async(lambda: threads.append(get_ident()))()
            results.append(await note.aonce("key", name="one"))
            await sync_to_async(connections.close_all)()

    with on_save(lambda **_: threads.append(get_ident())):
        asyncio.run(view())
    assert (len(threads), len(set(threads))) == (2, 1)
    assert results == [note.once("key", name="one")]


def test_o01_a_phased_operation_commits_calls_and_commits(bank: Bank) -> None:
    assert pay.once("key", name="one", cents=9) == {"transfer": 0}
    assert pay.once("key", name="one", cents=9) == {"transfer": 0}
    assert names() == ["booked one"]
    assert Account.objects.get().balance == 9
    assert bank.requests == 1
    key = IdempotencyKey.objects.get()
    assert key.expires_at is None, "kept forever, without arguments"
    assert key.request_body is None, "kept forever, without arguments"
    assert Entry.objects.get().idempotency_key == key
    assert [event["detail"] for event in key.history if event["event"] != "claimed"] == [
        "booked",
        "transfer",
        "result",
    ]


def test_a_call_is_made_at_most_once(bank: Bank) -> None:
    with pytest.raises(Unfinished):
        tell.once("key", name="one", cents=500)
    with pytest.raises(Unfinished):
        tell.once("key", name="one", cents=500)
    assert bank.requests == 1, "its value is stored"
    bank.before = broken
    with pytest.raises(Unfinished):
        tell.once("key 2", name="two", cents=1)
    with pytest.raises(InterventionRequired) as caught:
        tell.once("key 2", name="two", cents=1)
    assert caught.value.stuck_code == StuckCode.CALL_IN_DOUBT
    bank.before = lambda: None
    for _ in range(2):
        with pytest.raises(Rejected, match="unknown address"):
            tell.once("key 3", name="three", cents=402)


def test_the_value_of_a_call_at_most_once_that_is_no_json_is_for_a_person(bank: Bank) -> None:
    with pytest.raises(Unfinished) as caught:
        tell.once("key", name="one", cents=501)
    assert isinstance(caught.value.__cause__, TypeError)
    with pytest.raises(InterventionRequired):
        tell.once("key", name="one", cents=501)
    assert "Bank object" in IdempotencyKey.objects.get().stuck_reason


def test_a_chain_of_calls(bank: Bank) -> None:
    assert ship.once("key", name="one", cents=5) == {"told": 1}
    assert names() == ["booked one", "paid one 0", "shipped one"]
    assert ship.once("key", name="one", cents=5) == {"told": 1}


def test_o12_an_operation_inside_another_commits_with_it() -> None:
    assert outer.once("key", name="one", inner="inner")["entry"]
    assert names() == ["one", "outer one"]
    assert outer.once("key 2", name="one", inner="inner")["entry"], "the inner one is a repeat"
    assert names() == ["one", "outer one", "outer one"]


def test_an_operation_that_calls_itself_with_its_own_key_is_told_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def again(**kwargs: Any) -> None:
        note.once("key", name="one")

    with on_save(again), pytest.raises(RuntimeError, match="inside its own run"):
        note.once("key", name="one")
    assert "manual intervention" not in caplog.text
    assert not IdempotencyKey.objects.exists()


def test_a_call_under_another_name_is_not_made(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    bank.after = broken
    with pytest.raises(Unfinished):
        charge.once("key", name="one", cents=1)
    monkeypatch.setattr(charge._definition.steps, "calls", {})
    with pytest.raises(Unavailable):
        charge.once("key", name="one", cents=1)
    assert IdempotencyKey.objects.get().stuck_code == StuckCode.UNKNOWN_RECOVERY_POINT
    assert bank.requests == 1


@pytest.mark.postgres
def test_a_lost_database_is_unavailable(bank: Bank) -> None:
    def lose() -> None:
        with connection.cursor() as cursor, pytest.raises(OperationalError):
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    bank.inside = lose
    with pytest.raises(Unavailable):
        charge.once("key", name="one", cents=1)
    bank.inside = lambda: None
    assert charge.once("key", name="one", cents=1) == {"transfer": 0}


@pytest.mark.postgres
def test_a_database_that_is_lost_as_a_run_resumes_is_unavailable(
    bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(self: Calls) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    bank.after = broken
    with pytest.raises(Unfinished):
        charge.once("key", name="one", cents=1)
    monkeypatch.setattr(Calls, "read_doubts", lose)
    with pytest.raises(Unavailable):
        charge.once("key", name="one", cents=1)


@pytest.mark.postgres
@pytest.mark.parametrize(
    "statement",
    [
        "SELECT pg_terminate_backend(pg_backend_pid())",
        "DO $$ BEGIN RAISE EXCEPTION 'disk full' USING ERRCODE = '53100'; END $$",
    ],
    ids=["lost", "disk full"],
)
def test_a_database_that_fails_before_the_first_effect_is_no_refusal(statement: str) -> None:
    def lose(**kwargs: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute(statement)

    with on_save(lose), pytest.raises(Unavailable) as caught:
        pay.once("key", name="one", cents=1)
    key = IdempotencyKey.objects.get()
    assert (caught.value.code, key.refused_at) == ("database_unavailable", None)


@pytest.mark.parametrize("refusal", [InProgress, KeyReused])
@pytest.mark.parametrize("of", [note, pay])
def test_before_the_first_effect_only_the_progress_of_another_key_is_passed_on(
    of: Any, refusal: Any
) -> None:
    """A queue then retries the call. Another refusal concerns a key that the caller does not
    know."""

    def refuse(**kwargs: Any) -> None:
        raise refusal

    more = {"cents": 1} if of is pay else {}
    expected = InProgress if refusal is InProgress else RuntimeError
    with on_save(refuse), pytest.raises(expected):
        of.once("key", name="one", **more)
    assert of.once("key", name="one", **more)


def test_the_progress_of_another_key_after_the_first_effect_leaves_the_key_unfinished(
    bank: Bank,
) -> None:
    def refuse() -> None:
        raise InProgress

    bank.before = refuse
    with pytest.raises(Unfinished) as caught:
        pay.once("key", name="one", cents=1)
    assert "InProgress of another key" in str(caught.value.__cause__)


@pytest.mark.parametrize("key", ["k", "k" * 255])
def test_the_shortest_and_the_longest_key_and_the_code_after_them(key: str) -> None:
    assert note.once(key, name="one")
    assert current_key.get() is None


@pytest.mark.postgres
def test_a_plain_operation_has_the_isolation_of_plain_views(settings: Any) -> None:
    settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "PLAIN_ISOLATION": "serializable"}
    levels = []

    def read_level(**kwargs: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SHOW transaction_isolation")
            levels.append(cursor.fetchone()[0])

    with on_save(read_level):
        note.once("key", name="one")
    assert levels == ["serializable"]


def test_o08_a_refusal_before_anything_is_committed_undoes_nothing() -> None:
    Entry.objects.create(name="booked one")  # by another key
    with pytest.raises(Rejected, match="negative"):
        pay.once("key", name="one", cents=-1)
    assert names() == ["booked one"]


def test_a_call_is_made_first_at_any_age_and_not_repeated_after_its_validity(bank: Bank) -> None:
    with pytest.raises(ValueError, match="positive"):
        pay.once("key", name="one", cents=0)
    old = timezone.now() - timedelta(days=40)
    bank.after = broken
    with pytest.raises(Unfinished):
        pay.once("key 2", name="two", cents=2)
    bank.after = lambda: None
    IdempotencyKey.objects.update(created_at=old)
    with pytest.raises(ValueError, match="positive"):
        pay.once("key", name="one", cents=0)
    with pytest.raises(InterventionRequired) as caught:
        pay.once("key 2", name="two", cents=2)
    assert caught.value.stuck_code == StuckCode.DOWNSTREAM_KEY_EXPIRED
    assert bank.requests == 1


@pytest.mark.parametrize("seconds_late", [-10, 10])
def test_a_call_is_repeated_up_to_the_end_of_its_validity(seconds_late: int, bank: Bank) -> None:
    bank.after = broken
    with pytest.raises(Unfinished):
        pay.once("key", name="one", cents=2)
    bank.after = lambda: None
    make_older(23 * 3600 + seconds_late, "created_at", "call_begun_at")
    if seconds_late < 0:
        assert pay.once("key", name="one", cents=2) == {"transfer": 0}
        return
    with pytest.raises(InterventionRequired):
        pay.once("key", name="one", cents=2)


def test_a_key_that_was_refused_before_its_first_call_is_not_too_old_for_it(bank: Bank) -> None:
    first = IdempotencyKey.objects
    bank.before = broken
    with pytest.raises(Unfinished):
        pay.once("key", name="one", cents=5)
    first.update(created_at=timezone.now() - timedelta(days=40), call_begun_at=None)
    bank.before = lambda: None
    assert pay.once("key", name="one", cents=5) == {"transfer": 0}


def test_a_scope_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="99 characters"):
        note.by(get_user_model()(pk=1), scope="x" * 100)
    assert note.by(get_user_model()(pk=None), scope="x" * 99).once("key", name="one")


def prepare_shard(request: Any, key: IdempotencyKey) -> None:
    PREPARED.append((request, key._state.db))


PREPARED: list[Any] = []


def test_the_completer_lets_the_project_choose_the_shard(settings: Any, bank: Bank) -> None:
    bank.after = broken
    with pytest.raises(Unfinished):
        charge.once("key", name="one", cents=1)
    bank.after = lambda: None
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": f"{__name__}.prepare_shard"}
    PREPARED.clear()
    assert complete_key(IdempotencyKey.objects.get().pk) == "finished"
    assert PREPARED == [(None, "default")]


def prepare_nothing(request: Any, key: IdempotencyKey) -> None:
    raise LookupError("no tenant")


def test_without_its_environment_the_completer_runs_no_operation(settings: Any, bank: Bank) -> None:
    bank.after = broken
    with pytest.raises(Unfinished):
        charge.once("key", name="one", cents=1)
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": f"{__name__}.prepare_nothing"}
    key = IdempotencyKey.objects.get()
    assert complete_key(key.pk) == "failed"
    key.refresh_from_db()
    assert key.last_error == "LookupError: no tenant"
    assert bank.requests == 1


def test_the_completer_runs_an_operation_in_the_language_of_the_project(bank: Bank) -> None:
    bank.after = broken
    with pytest.raises(Unfinished):
        charge.once("key", name="one", cents=1)
    languages: list[str | None] = []
    bank.after = lambda: languages.append(get_language())
    with translation.override("de"):
        assert complete_key(IdempotencyKey.objects.get().pk) == "finished"
    assert languages == ["en"]


def test_a_refusal_that_nothing_undoes_is_stuck_for_the_completer_too(bank: Bank) -> None:
    def declined() -> None:
        raise Rejected("declined")

    bank.before = broken
    with pytest.raises(Unfinished):
        pay_without_undo.once("key", name="one", cents=1)
    bank.before = declined
    key = IdempotencyKey.objects.get()
    assert complete_key(key.pk) == "stuck"
    key.refresh_from_db()
    assert "declined" in key.stuck_reason


def begun(bank: Bank) -> IdempotencyKey:
    """Let a process end in the first transaction of a key."""

    def ends(**kwargs: Any) -> None:
        raise SystemExit

    with on_save(ends), pytest.raises(SystemExit):
        pay.once("key", name="one", cents=1)
    return IdempotencyKey.objects.get()


def test_an_exception_before_the_first_effect_refuses_no_run_of_the_completer(bank: Bank) -> None:
    key = begun(bank)
    with on_save(lambda **kwargs: broken()):
        assert complete_key(key.pk) == "failed"
    key.refresh_from_db()
    assert (key.refused_at, key.last_error) == (None, "OSError: no route")
    abandon()
    assert complete_key(key.pk) == "finished"


def test_an_operation_that_always_fails_is_for_a_person(settings: Any, bank: Bank) -> None:
    settings.IDEMPOTENCY = {"COMPLETER_MAX_ATTEMPTS": 2}
    bank.after = broken
    with pytest.raises(Unfinished):
        charge.once("key", name="one", cents=1)
    key = IdempotencyKey.objects.get()
    abandon()
    assert complete_key(key.pk) == "failed"
    abandon()
    assert complete_key(key.pk) == "stuck"
    key.refresh_from_db()
    assert key.stuck_code == StuckCode.ATTEMPTS_EXHAUSTED


@pytest.mark.parametrize("is_begun", [True, False])
def test_an_overdue_operation_is_for_a_person(is_begun: bool, bank: Bank) -> None:
    if is_begun:
        bank.after = broken
        with pytest.raises(Unfinished):
            pay.once("key", name="one", cents=1)
    else:
        begun(bank)
    make_older(73 * 3600, "created_at", "last_run_at")
    expire_lock()
    reap_once()
    assert IdempotencyKey.objects.get().stuck_code == StuckCode.RETENTION_PASSED


@pytest.mark.postgres
def test_serialization_failures_of_each_attempt_are_a_conflict(settings: Any, bank: Bank) -> None:
    settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "SERIALIZATION_RETRIES": 1}

    def fails() -> None:
        with connection.cursor() as cursor:
            cursor.execute("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40001'; END $$")

    bank.inside = fails
    with pytest.raises(Unavailable) as caught:
        charge.once("key", name="one", cents=1)
    assert caught.value.code == "conflict"
    assert bank.requests == 1, "only the transaction is repeated"


def test_results_and_all_arguments_have_at_most_the_stored_bytes() -> None:
    most = conf.get().MAX_STORED_BODY_BYTES
    assert len(encoded("x" * (most - 2), "The result")) == most
    with pytest.raises(TypeError, match="MAX_STORED_BODY_BYTES"):
        encoded("x" * (most - 1), "The result")
    with pytest.raises(TypeError, match=r"arguments of tests\.note has"):
        note.once("key", name="x" * (most // 2), fails="x" * (most // 2))


def test_a_hook_that_fails_after_the_last_commit_is_no_failure_of_the_operation(
    bank: Bank,
) -> None:
    bank.inside = lambda: transaction.on_commit(broken)
    with pytest.raises(RuntimeError, match="after the result was stored") as caught:
        charge.once("key", name="one", cents=1)
    assert isinstance(caught.value.__cause__, OSError)
    assert charge.once("key", name="one", cents=1) == {"transfer": 0}
    assert Account.objects.count() == 1


def test_a_keyed_call_that_a_deploy_changes_to_one_at_most_once_is_not_repeated(bank: Bank) -> None:
    bank.after = broken
    with pytest.raises(Unfinished):
        charge.once("key", name="one", cents=1)
    bank.after = lambda: None
    call = charge._definition.steps.calls["transfer"]
    object.__setattr__(call, "valid_hours", None)
    try:
        with pytest.raises(InterventionRequired) as caught:
            charge.once("key", name="one", cents=1)
        assert caught.value.stuck_code == StuckCode.CALL_IN_DOUBT
    finally:
        object.__setattr__(call, "valid_hours", 23)
    assert bank.requests == 1


def test_a_missing_migration_is_named_with_its_cure() -> None:
    with (
        no_migration(),
        pytest.raises(DatabaseError, match=r"idempotency_idempotencykey\W.*manage\.py migrate"),
    ):
        note.once("key", name="one")


def test_the_statements_can_be_logged_as_under_debug(bank: Bank) -> None:
    """With DEBUG, Django binds all parameters on SQLite once more."""
    with CaptureQueriesContext(connection) as captured:
        for _ in range(2):
            assert note.once("plain", name="one")
            assert pay.once("phased", name="one", cents=5)
    assert captured.captured_queries
