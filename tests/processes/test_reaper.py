"""The reaper: what has expired goes, what never finished is handed to a person, everything else
stays."""

import io
import re
from asyncio import CancelledError
from functools import partial
from pathlib import Path
from uuid import UUID, uuid4

import psycopg
import pytest
from django.core.management import call_command
from django.db import DatabaseError, IntegrityError, ProgrammingError, connection, transaction
from django.db.models import ProtectedError
from django.db.models.signals import post_delete, pre_delete
from django.db.transaction import TransactionManagementError
from pytest_django import Settings

from idempotency import reaper
from idempotency.inbox import STAGED_JOBS
from idempotency.models import IdempotencyKey, JobGroup, ProcessedMessage, StagedJob
from idempotency.monitoring.measures import keys_to_reap
from idempotency.reaper import ReapPass, _old_messages, reap_once
from idempotency.signals import key_stuck
from tests.factories import IdempotencyKeyFactory, RideFactory, StagedJobFactory, UserFactory
from tests.kit.ageing import ago, expired_key, expired_keys, lock_end, make_older
from tests.kit.breaking import BREAKS
from tests.kit.database import held_transaction
from tests.kit.shards import EntriesInShardB
from tests.kit.threads import at_once
from tests.models import Entry

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _no_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper, "RESTS_FOR_A_BATCH", 0)


def test_an_empty_table_does_nothing():
    assert reap_once() == ReapPass()


@pytest.mark.django_db(transaction=True)
def test_in_a_transaction_nothing_is_deleted():
    """Its rollback would forget that an on_abandon was begun."""
    expired_key()
    with transaction.atomic():
        assert reap_once(dry_run=True).deleted == 1
        with pytest.raises(RuntimeError, match="entered inside a transaction"):
            reap_once()
    assert reap_once().deleted == 1


@pytest.mark.django_db(transaction=True)
def test_without_autocommit_nothing_is_deleted():
    """No COMMIT would follow, so each pass would count the same rows."""
    expired_key()
    ProcessedMessage.objects.create(source="stripe", message_id="1", processed_at=ago(days=31))
    transaction.set_autocommit(False)
    try:
        with pytest.raises(RuntimeError, match="set_autocommit"):
            reap_once()
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    assert (IdempotencyKey.objects.count(), ProcessedMessage.objects.count()) == (1, 1)


def test_a_finished_key_past_its_retention_is_deleted():
    expired_key()
    assert reap_once() == ReapPass(deleted=1)
    assert not IdempotencyKey.objects.exists()


def test_a_younger_key_stays():
    expired_key(finished_at=ago(hours=71))
    IdempotencyKeyFactory(finished=True)
    assert reap_once() == ReapPass()
    assert IdempotencyKey.objects.count() == 2


def test_a_key_stays_until_it_expires_and_is_counted_if_it_stays_longer() -> None:
    refused = {"refused_at": ago(hours=73), "created_at": ago(hours=74)}
    for hours in (24, 100):
        expired_key(retention_hours=hours)
        IdempotencyKeyFactory(**refused, retention_hours=hours, expires_at=ago(hours=73 - hours))
    assert keys_to_reap("default", 0) == 2
    assert reap_once() == ReapPass(deleted=2)
    make_older(28 * 3600, "finished_at", "refused_at")
    assert [keys_to_reap("default", late) for late in (1800, 7200)] == [2, 0]
    assert reap_once() == ReapPass(deleted=2)
    expired_keys(4)
    assert keys_to_reap("default", 0) == 4


def test_a_changed_retention_applies_to_later_keys(settings: Settings) -> None:
    expired_key(retention_hours=100)
    settings.IDEMPOTENCY = {"RETENTION_HOURS": 24}
    assert reap_once() == ReapPass()
    settings.IDEMPOTENCY = {"RETENTION_HOURS": 1000}
    make_older(28 * 3600, "finished_at")
    assert reap_once() == ReapPass(deleted=1)


def test_a_key_without_an_end_of_its_retention_stays() -> None:
    IdempotencyKeyFactory(
        finished=True, retention_hours=None, expires_at=None, finished_at=ago(days=9999)
    )
    assert reap_once() == ReapPass()


def test_only_a_key_that_is_over_may_expire() -> None:
    """The reaper reads nothing else."""
    key = IdempotencyKeyFactory()
    with pytest.raises(IntegrityError), transaction.atomic():
        IdempotencyKey.objects.filter(pk=key.pk).update(expires_at=ago(hours=1))


@pytest.mark.postgres
def test_the_reaper_reads_an_index() -> None:
    IdempotencyKey.objects.bulk_create(IdempotencyKeyFactory.build_batch(300, finished=True))
    expired_keys(3)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE idempotency_idempotencykey")
    plan = (
        IdempotencyKey.objects.expired()
        .order_by("expires_at", "pk")
        .values_list("pk")[:100]
        .explain()
    )
    assert "idempotency_key_expires" in plan
    assert "Seq Scan" not in plan


def test_overdue_keys_come_first():
    """Their clients wait; and a statement that the database refuses must not keep them from being
    settled."""
    expired_keys(2)
    IdempotencyKeyFactory(created_at=ago(hours=73))
    told = []
    reap_once(progress=told.append)
    assert told == [ReapPass(settled=1), ReapPass(settled=1, deleted=2)]


def test_retention_counts_from_the_finish_not_from_the_creation():
    key = expired_key(created_at=ago(days=30), finished_at=ago(minutes=1))
    assert reap_once() == ReapPass()
    assert IdempotencyKey.objects.filter(pk=key.pk).exists()


def test_a_locked_key_stays():
    key = expired_key(locked_until=lock_end(), claim_token=uuid4())
    assert reap_once() == ReapPass()
    IdempotencyKey.objects.filter(pk=key.pk).update(locked_until=ago(hours=73))
    assert reap_once() == ReapPass(deleted=1)


def test_more_keys_than_a_batch_all_go():
    expired_keys(110)
    assert reap_once(batch_size=25) == ReapPass(deleted=110)


def test_it_stops_after_the_batch_when_asked_to():
    expired_keys(5)
    answers = iter([False, True])
    assert reap_once(batch_size=2, stop=lambda: next(answers, True)) == ReapPass(deleted=2)
    assert IdempotencyKey.objects.count() == 3


def test_a_rest_ends_when_it_is_asked_to_stop(monkeypatch):
    monkeypatch.setattr(reaper, "RESTS_FOR_A_BATCH", 1e9)
    expired_keys(3)
    asked = []

    def stop():
        asked.append(1)
        return len(asked) > 5  # by then it rests after the first batch

    assert reap_once(batch_size=1, stop=stop) == ReapPass(deleted=1)
    assert IdempotencyKey.objects.count() == 2


def test_what_points_at_a_deleted_key_keeps_living():
    key = expired_key()
    ride, job = RideFactory(idempotency_key=key), StagedJobFactory(idempotency_key=key)
    assert reap_once() == ReapPass(deleted=1)
    ride.refresh_from_db()
    assert ride.idempotency_key is None
    assert StagedJob.objects.get(pk=job.pk).idempotency_key is None


@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (ProtectedError("kept by a row of the user", set()), None),
        (FileNotFoundError("a.pdf"), "FileNotFoundError: a.pdf"),
        (CancelledError("by a task"), "CancelledError: by a task"),
    ],
)
def test_a_key_that_a_receiver_protects_is_kept_and_stops_no_other(error, logged, caplog):
    keys = expired_keys(20)
    protected = {keys[3].pk, keys[19].pk}

    def protect(instance, **kwargs):
        if instance.pk in protected:
            raise error

    pre_delete.connect(protect, sender=IdempotencyKey)
    try:
        assert reap_once(batch_size=7) == ReapPass(deleted=18, protected=2)
    finally:
        pre_delete.disconnect(protect, sender=IdempotencyKey)
    assert set(IdempotencyKey.objects.values_list("pk", flat=True)) == protected
    assert _warnings(caplog) == (
        [f"the key with the id {min(protected)} cannot be deleted: {logged}"] if logged else []
    )
    assert ("in protect" in caplog.text) == bool(logged), "the log names the line of the receiver"


@pytest.mark.parametrize(
    ("sqlstate", "refused", "most", "counts", "attempts"),
    [
        ("42501", 5, 16, (27, 5), 12),
        ("42501", 32, 16, (0, 32), 62),
        ("55P03", 1, 16, (31, 1), 5),
        # Of the keys 4 to 7, the first is refused, and all are kept.
        ("57014", 5, 16, (24, 8), 10),
        ("57014", 3, 8, (29, 3), 9),  # The second batch is only too large.
        ("55P03", 32, 16, (0, 16), 11),  # The second batch is not attempted.
    ],
)
def test_no_error_of_single_keys_keeps_the_reaper_from_all_others(
    sqlstate, refused, most, counts, attempts, caplog
):
    """They are the oldest, which each pass meets first: an append-only ledger refuses them, or a
    table is locked for long. A batch with more than ``most`` keys meets a time limit too."""
    keys = {key.pk for key in expired_keys(32)[:refused]}
    ProcessedMessage.objects.create(source="shop", message_id="1", processed_at=ago(days=31))
    seen = []

    def refuse(instance, origin, **kwargs):
        if instance.pk in keys or origin.count() > most:
            seen.append(instance.pk)
            raise DatabaseError("refused") from psycopg.errors.lookup(sqlstate)("refused")

    pre_delete.connect(refuse, sender=IdempotencyKey)
    try:
        assert reap_once(batch_size=16) == ReapPass(*counts, messages=1)
    finally:
        pre_delete.disconnect(refuse, sender=IdempotencyKey)
    assert (len(seen), len(_warnings(caplog))) == (attempts, 1)


@pytest.mark.django_db(transaction=True)
def test_the_error_of_a_hook_after_the_commit_ends_the_pass():
    """The keys are deleted: they are not protected, and the other hooks of the batch do not run."""
    expired_keys(3)

    def remove_file(instance, **kwargs):
        transaction.on_commit(lambda: Path("/nowhere/receipt.pdf").unlink())

    post_delete.connect(remove_file, sender=IdempotencyKey)
    try:
        with pytest.raises(FileNotFoundError):
            reap_once()
    finally:
        post_delete.disconnect(remove_file, sender=IdempotencyKey)
    assert not IdempotencyKey.objects.exists()
    assert reap_once() == ReapPass()


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("sqlstate", "error"),
    [
        ("P0001", "ProgrammingError"),
        ("42501", "ProgrammingError"),
        ("55P03", "OperationalError"),
        ("57014", "OperationalError"),
    ],
)
def test_a_key_that_a_trigger_protects_is_kept_and_stops_no_other(sqlstate, error, caplog):
    """An append-only ledger refuses the update of SET_NULL, or it exceeds a time limit."""
    keys = expired_keys(5)
    Entry.objects.create(name="ledger", idempotency_key=keys[2])
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION pg_temp.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE"
            f" EXCEPTION 'the ledger is append-only' USING ERRCODE = '{sqlstate}'; END $$; CREATE"
            " TRIGGER refuse BEFORE UPDATE ON tests_entry FOR EACH ROW EXECUTE FUNCTION"
            " pg_temp.refuse()"
        )
    assert reap_once() == ReapPass(deleted=4, protected=1)
    assert IdempotencyKey.objects.get() == keys[2]
    (told,) = _warnings(caplog)
    assert (
        told == f"the key with the id {keys[2].pk} cannot be deleted: {error}: the ledger is"
        " append-only …"
    )


def _warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "idempotency"]


@pytest.mark.postgres
def test_a_missing_column_of_another_table_ends_the_pass():
    """Otherwise each key would count as protected, and nothing would be deleted without anybody
    being told."""
    expired_keys(2)
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE tests_entry RENAME idempotency_key_id TO renamed_by_a_deploy")
    with pytest.raises(ProgrammingError, match="idempotency_key_id"):
        reap_once()


@pytest.fixture
def entries_in_shard_b(settings):
    """Let the database of the keys have no table of entries."""
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE tests_entry RENAME TO in_another_database")
    settings.DATABASE_ROUTERS = [EntriesInShardB()]


@pytest.mark.django_db(databases=["default", "shard_b"])
@pytest.mark.postgres
def test_rows_in_another_database_keep_the_keys_and_the_pass_goes_on(entries_in_shard_b, caplog):
    expired_keys(3)
    ProcessedMessage.objects.create(source="s", message_id="1", processed_at=ago(days=31))
    assert reap_once(batch_size=2) == ReapPass(protected=2, messages=1)
    assert IdempotencyKey.objects.count() == 3
    (told,) = _warnings(caplog)
    assert "tests.Entry.idempotency_key" in told


def test_an_error_that_is_not_of_a_key_ends_the_pass(monkeypatch):
    expired_keys(2)

    def fail(*args, **kwargs):
        raise ProgrammingError("no such column")

    monkeypatch.setattr(reaper, "held", fail)
    with pytest.raises(ProgrammingError):
        reap_once()


@pytest.mark.postgres
def test_a_constraint_that_only_the_database_knows_keeps_its_key():
    keys = expired_keys(5)
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TEMPORARY TABLE pinned (key_id bigint); CREATE FUNCTION pg_temp.refuse()"
            " RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF EXISTS (SELECT 1 FROM pinned WHERE"
            " key_id = OLD.id) THEN RAISE foreign_key_violation; END IF; RETURN NULL; END $$;"
            " CREATE CONSTRAINT TRIGGER pinned AFTER DELETE ON idempotency_idempotencykey"
            " DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION pg_temp.refuse()"
        )
        cursor.execute("INSERT INTO pinned VALUES (%s)", [keys[2].pk])
    assert reap_once() == ReapPass(deleted=4, protected=1)
    assert IdempotencyKey.objects.get().pk == keys[2].pk


@pytest.mark.django_db(transaction=True)
def test_an_unfinished_key_past_the_retention_is_handed_to_a_person():
    # The demo's ride has an on_abandon; the view of this path has none.
    key = IdempotencyKeyFactory(
        created_at=ago(hours=73), last_error="ConnectionError: no route", request_path="/healthz"
    )
    IdempotencyKeyFactory(created_at=ago(hours=71))
    told = []

    def listen(sender, key, request, **kwargs):
        told.append((sender, key.pk, key.stuck_code, request))

    key_stuck.connect(listen)
    try:
        assert reap_once() == ReapPass(stuck=1)
        assert reap_once() == ReapPass()
    finally:
        key_stuck.disconnect(listen)
    assert told == [(IdempotencyKey, key.pk, "retention_passed", None)]
    key.refresh_from_db()
    assert key.stuck_reason.endswith("ConnectionError: no route")
    assert key.stuck_at is not None
    assert key.finished_at is None
    assert "72 hours" in key.stuck_reason
    assert key.history[-1]["event"] == "stuck"


def test_an_unfinished_key_that_a_run_holds_is_left_alone():
    IdempotencyKeyFactory(created_at=ago(hours=73), locked_until=lock_end(), claim_token=uuid4())
    assert reap_once() == ReapPass()
    assert not IdempotencyKey.objects.stuck().exists()


def test_old_messages_go_and_younger_ones_stay():
    for age in (29, 31, 400):
        ProcessedMessage.objects.create(source="s", message_id=str(age), processed_at=ago(days=age))
    assert reap_once(batch_size=1) == ReapPass(messages=2)
    assert ProcessedMessage.objects.get().message_id == "29"


def test_the_message_of_a_staged_job_stays():
    staged = StagedJobFactory()
    for message_id in (str(staged.pk), staged.pk.hex, str(uuid4()), "no-uuid"):
        ProcessedMessage.objects.create(
            source=STAGED_JOBS, message_id=message_id, processed_at=ago(days=31)
        )
    assert reap_once() == ReapPass(messages=2)
    assert all(UUID(each.message_id) == staged.pk for each in ProcessedMessage.objects.all())


@pytest.mark.postgres
def test_a_staged_job_is_found_by_its_primary_key():
    """Otherwise each old message reads all staged jobs if their ids do not fit into work_mem."""
    StagedJob.objects.bulk_create(StagedJobFactory.build_batch(3000))
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE idempotency_stagedjob")
        # The workers of Citus make the plan.
        cursor.execute("SET LOCAL citus.propagate_set_commands = 'local'")
        cursor.execute("SET LOCAL work_mem = '64kB'")
        cursor.execute("SET LOCAL hash_mem_multiplier = 1")
    plan = _old_messages("default").explain()
    assert re.search(r"idempotency_stagedjob_pkey\S* .*\n +Index Cond: \(id = CASE", plan)


def test_progress_is_told_after_each_batch():
    expired_keys(5)
    told = []
    reap_once(batch_size=2, progress=told.append)
    assert told == [ReapPass(deleted=2), ReapPass(deleted=4), ReapPass(deleted=5)]


def test_a_dry_run_only_counts():
    expired_key()
    IdempotencyKeyFactory(created_at=ago(hours=73))
    ProcessedMessage.objects.create(source="s", message_id="1", processed_at=ago(days=31))
    assert reap_once(dry_run=True) == ReapPass(deleted=1, stuck=1, messages=1)
    assert IdempotencyKey.objects.count() == 2
    assert not IdempotencyKey.objects.stuck().exists()


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_several_reapers_share_the_work():
    expired_keys(90)
    passes = at_once([partial(reap_once, batch_size=6)] * 3)
    assert sum(found.deleted for found in passes) == 90
    assert not IdempotencyKey.objects.exists()


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_a_key_that_somebody_works_on_is_passed_over_not_waited_for():
    held, free = expired_key(), expired_key()
    with held_transaction(lambda: IdempotencyKey.objects.select_for_update().get(pk=held.pk)):
        assert reap_once() == ReapPass(deleted=1)
    assert not IdempotencyKey.objects.filter(pk=free.pk).exists()
    assert reap_once() == ReapPass(deleted=1)


class Terminal(io.StringIO):
    """A terminal, at which somebody waits."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("out", "counts"), [(Terminal(), True), (io.StringIO(), False)], ids=["terminal", "log"]
)
def test_the_reaper_counts_for_somebody_who_waits(out, counts):
    expired_key()
    call_command("reap_keys", stdout=out)
    assert ("\r1 of 1" in out.getvalue()) is counts
    assert out.getvalue().rpartition("\r\033[K")[2].startswith("reap_keys: 1 ")
    assert not IdempotencyKey.objects.exists()


@pytest.mark.django_db(transaction=True)
@pytest.mark.postgres
def test_a_message_that_the_database_keeps_does_not_stop_the_reaper():
    for name in "abc":
        ProcessedMessage.objects.create(source="s", message_id=name, processed_at=ago(days=31))
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
            " CREATE TRIGGER keep BEFORE DELETE ON idempotency_processedmessage FOR EACH ROW"
            " WHEN (OLD.message_id = 'b') EXECUTE FUNCTION keep()"
        )
    try:
        assert reap_once(batch_size=1) == ReapPass(messages=2)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP FUNCTION keep() CASCADE")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("break_transaction", BREAKS)
@pytest.mark.parametrize("model", [ProcessedMessage, JobGroup])
def test_a_pass_of_the_reaper_ends_at_a_deletion_that_was_rolled_back(model, break_transaction):
    UserFactory()
    if model is ProcessedMessage:
        model.objects.create(source="s", message_id="1", processed_at=ago(days=31))
    else:
        model.objects.create(name="g", position=1, used_at=ago(days=2))
    post_delete.connect(break_transaction)
    try:
        with pytest.raises(TransactionManagementError, match="The block caught an error"):
            reap_once()
    finally:
        post_delete.disconnect(break_transaction)
    assert reap_once() == ReapPass(messages=int(model is ProcessedMessage))
    assert not model.objects.exists()
