"""The services of a test run: one PostgreSQL for the whole run, and a Redis for each process that
needs one."""

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import redis
from django.conf import settings
from pytest_django import Settings

from rides_demo.processes import debian
from rides_demo.processes.embedded import Postgres, Redis
from rides_demo.processes.process import ProcessError
from tests.kit import pgbouncer, tables, tiers
from tests.kit.packages import built, checkout  # noqa: F401 - fixtures
from tests.kit.servers import HastyPostgres
from tests.kit.serving import sender, serve  # noqa: F401 - fixtures

if TYPE_CHECKING:
    from tests.kit.frames import Planted

POSTGRES = pytest.StashKey[Postgres]()
UNMERGED = os.environ.get("RIDES_TEST_UNMERGED") == "1"
PGBOUNCER = pytest.StashKey[pgbouncer.PgBouncer]()

#: A seed that shuffles the tests, because no test may depend on an earlier test.
ORDER = os.environ.get("TEST_ORDER", "")
#: Tests that need control of their own connection, which a pooler does not give.
NOT_BEHIND_A_POOLER = {
    "test_a_statement_is_prepared_after_the_uses_that_the_connection_names": (
        "it sets what belongs to a session"
    ),
    "test_the_tables_are_those_of_a_new_project": "it sets what belongs to a session",
    "test_a_retry_gets_the_response_of_the_release_or_continues": (
        "it sets what belongs to a session"
    ),
    "test_the_completer_finishes_what_the_release_left_unfinished": (
        "it sets what belongs to a session"
    ),
    "test_results_jobs_and_messages_of_the_release_are_found": "it sets what belongs to a session",
    "test_two_schemas_of_one_database_are_two": "it sets what belongs to a session",
    "test_a_role_that_may_read_nothing_but_the_tables_is_enough": "a pooler chooses the role",
    "test_a_result_is_written_on_a_new_connection_when_the_old_one_broke": (
        "a pooler chooses the connection to the server"
    ),
    "test_connection_lost_between_phases_is_a_503_and_the_retry_resumes": (
        "a pooler chooses the connection to the server"
    ),
    "test_a_phase_replaces_a_session_that_timed_out_during_a_call": (
        "a pooler keeps its connections to the server"
    ),
    "test_a_call_replaces_a_session_that_timed_out_during_another_call": (
        "a pooler keeps its connections to the server"
    ),
    "test_after_a_connection_was_lost_in_an_at_most_once_call_a_retry_has_its_result": (
        "a pooler keeps its connections to the server"
    ),
    "test_a_phase_on_a_new_connection_is_confirmed": "a pooler keeps its connections to the server",
    "test_a_phase_on_a_new_connection_that_a_hook_closes_is_confirmed": (
        "a pooler keeps its connections to the server"
    ),
    "test_an_error_whose_commit_on_a_new_connection_did_not_wait_is_a_503": (
        "a pooler keeps its connections to the server"
    ),
    "test_a_result_is_kept_when_the_database_comes_back": (
        "a pooler keeps its connections to the server"
    ),
    "test_threads_stop_between_keys_and_leave_no_connection": (
        "a pooler keeps its connections to the server"
    ),
    "test_takeover_at_once_on_a_database_that_is_repeatable_read_by_default": (
        "it sets what belongs to a session"
    ),
    "test_completers_at_one_key_on_a_database_that_is_repeatable_read_by_default": (
        "it sets what belongs to a session"
    ),
    "test_a_first_request_that_a_twin_outran_takes_its_scope": "it sets what belongs to a session",
    "test_a_claim_that_a_rival_outran_at_a_high_level_looks_again_where_it_can": (
        "it sets what belongs to a session"
    ),
    "test_52_read_only_connection_is_not_used_again": "it sets what belongs to a session",
    "test_52_database_made_read_only_between_two_phases_is_a_503_and_the_retry_resumes": (
        "it sets what belongs to a session"
    ),
    "test_52_request_to_a_read_only_database_is_a_503_and_the_view_does_not_run": (
        "a pooler keeps its connections"
    ),
    "test_52_standby_is_a_503_until_it_is_promoted": "a pooler keeps its connections",
    "test_a_loop_says_once_that_the_database_takes_no_writes": "a pooler keeps its connections",
    "test_a_database_that_takes_no_writes_does_not_answer": "a pooler keeps its connections",
    "test_a_delivery_to_a_read_only_database_is_one_to_a_lost_database": (
        "a pooler keeps its connections"
    ),
    "test_a_command_says_in_one_line_that_the_database_takes_no_writes": (
        "a pooler keeps its connections"
    ),
    "test_the_result_of_a_call_is_kept_once_the_database_takes_writes_again": (
        "it sets what belongs to a session"
    ),
    "test_the_key_of_a_run_that_the_outage_ended_is_free_once_the_database_is_back": (
        "a pooler keeps its connections"
    ),
    "test_a_late_release_is_given_up_when_the_lock_has_expired": "a pooler keeps its connections",
    "test_a_barrier_that_would_pass_for_nothing_is_refused": "it sets what belongs to a session",
    "test_a_connection_that_loses_its_statements_once_prepares_them_again": (
        "it sets what belongs to a session"
    ),
    "test_a_connection_that_loses_its_statements_again_and_again_prepares_no_more": (
        "it sets what belongs to a session"
    ),
    "test_a_connection_whose_server_has_the_statements_of_another_one_prepares_no_more": (
        "it sets what belongs to a session"
    ),
    "test_a_rollback_of_a_message_does_not_drop_the_prepared_statements": (
        "it sets what belongs to a session"
    ),
    "test_51_one_key_of_two_tenants_is_two_keys": "it sets what belongs to a session",
    "test_51_one_key_in_one_table_is_one_key": "it sets what belongs to a session",
    "test_51_views_of_two_kinds_of_two_tenants_do_not_meet": "it sets what belongs to a session",
    "test_51_a_statement_that_is_prepared_for_one_tenant_locks_for_the_next": (
        "it sets what belongs to a session"
    ),
    "test_58_a_request_only_lowers_the_limits_of_the_role": "it sets what belongs to a session",
    "test_58_a_limit_that_changes_between_requests_is_not_raised": (
        "it sets what belongs to a session"
    ),
    "test_58_a_message_only_lowers_the_limits_of_the_role": "it sets what belongs to a session",
    "test_58_a_delivery_waits_for_another_one_no_longer_than_the_role_allows": (
        "it sets what belongs to a session"
    ),
    "test_58_the_limits_take_no_snapshot": "it sets what belongs to a session",
    "test_round_trips_under_stricter_limits": "it sets what belongs to a session",
}
NOT_WITH_A_POOL = {
    "test_a_claim_runs_on_the_connection_that_a_health_check_opens": (
        "a pooler chooses the connection that follows a lost one"
    ),
    "test_phased_view_costs_a_claim_and_its_replay_one_statement": (
        "statements prepared by an earlier test have no text"
    ),
    "test_18_database_that_is_not_reachable_is_a_503_and_the_view_does_not_run": (
        "the pool has connections to the old address"
    ),
    "test_a_connection_cut_around_commit_leaves_one_effect": (
        "the pool has connections to the old address"
    ),
    "test_a_garbled_reply_is_a_broken_connection": "the pool has connections to the old address",
}
#: Tests of merged round trips, which do not apply if round trips are not merged.
ONLY_MERGED = {
    "test_phased_view_costs_a_claim_and_its_replay_one_statement": "each statement is a round trip",
    "test_round_trips": "each statement is a round trip",
    "test_costs_of_a_first_call": "each statement is a round trip",
    "test_costs_of_a_repeat": "each statement is a round trip",
    "test_round_trips_under_stricter_limits": "each statement is a round trip",
    "test_no_statement_uses_a_cursor": "each statement is a message",
    "test_an_interrupt_after_commit_does_not_skip_the_next_one": "each statement is a message",
    "test_a_statement_is_prepared_after_the_uses_that_the_connection_names": (
        "psycopg prepares the statements"
    ),
    "test_a_connection_that_loses_its_statements_once_prepares_them_again": (
        "psycopg prepares the statements"
    ),
    "test_a_connection_that_loses_its_statements_again_and_again_prepares_no_more": (
        "psycopg prepares the statements"
    ),
    "test_a_connection_whose_server_has_the_statements_of_another_one_prepares_no_more": (
        "psycopg prepares the statements"
    ),
    "test_a_rollback_of_a_message_does_not_drop_the_prepared_statements": (
        "psycopg prepares the statements"
    ),
}


def pytest_configure(config: pytest.Config) -> None:
    """Start PostgreSQL in the folder of the settings; the workers of pytest-xdist use the running
    server."""
    tables.install()
    if UNMERGED:
        from idempotency._engine import round_trips

        round_trips.can_be_merged = lambda connection: False
    config.pluginmanager.register(tiers, "tiers")
    behind_pgbouncer = os.environ.get("RIDES_TEST_PGBOUNCER") == "1"
    if behind_pgbouncer:
        # A database cannot be dropped while PgBouncer has connections to it. The folder of the run
        # is removed anyway.
        config.option.reuse_db = True
    if (
        hasattr(config, "workerinput")
        or "RIDES_TEST_POSTGRES" not in os.environ
        or config.option.collectonly
    ):
        return
    _remove_what_killed_runs_left()
    server = config.stash[POSTGRES] = HastyPostgres(
        settings.TEST_FOLDER / "postgres", max_connections=200
    )
    try:
        server.start()
    except ProcessError as error:
        raise pytest.UsageError(str(error)) from None
    if behind_pgbouncer:
        _start_pgbouncer(config, server)


def _start_pgbouncer(config: pytest.Config, server: Postgres) -> None:
    try:
        config.stash[PGBOUNCER] = pgbouncer.start(
            settings.TEST_FOLDER / "pgbouncer", server.sockets
        )
    except debian.NotToBeHad as error:
        pytest.exit(f"skipped behind PgBouncer: {error}", 0)


def _remove_what_killed_runs_left() -> None:
    for folder in settings.TEST_FOLDER.parent.glob("rides-tests-*"):
        pid = folder.name.rpartition("-")[2]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the servers, and remove the folder of the run."""
    if PGBOUNCER in config.stash:
        config.stash[PGBOUNCER].stop()
    if POSTGRES in config.stash:
        config.stash[POSTGRES].stop()
    if not hasattr(config, "workerinput") and "TEST_FOLDER" in dir(settings):
        shutil.rmtree(settings.TEST_FOLDER, ignore_errors=True)


def pytest_report_header() -> str:
    """Print the order of the tests."""
    return (
        f"order: shuffled by TEST_ORDER={ORDER}"
        if ORDER
        else "order: as collected (TEST_ORDER=<a seed> shuffles)"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffle the tests if a seed is given. Skip tests of PostgreSQL on other databases, and some
    tests behind a pooler."""
    if ORDER:
        random.Random(ORDER).shuffle(items)
    if "postgresql" in settings.DATABASES["default"]["ENGINE"]:
        _skip_behind_poolers(items)
        return
    for item in items:
        if item.get_closest_marker("postgres") or item.get_closest_marker("processes"):
            item.add_marker(pytest.mark.skip(reason="needs PostgreSQL"))


def _skip_behind_poolers(items: list[pytest.Item]) -> None:
    pool = os.environ.get("RIDES_TEST_POOL") == "1"
    left_out = NOT_WITH_A_POOL if pool else {}
    if pool or os.environ.get("RIDES_TEST_PGBOUNCER") == "1":
        left_out = left_out | NOT_BEHIND_A_POOLER
    if UNMERGED:
        left_out = left_out | ONLY_MERGED
    for item in items:
        if reason := left_out.get(getattr(item, "originalname", item.name)):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Redis | None]:
    """Run the Redis of ``RQ_QUEUES``; yield None if ``REDIS_URL`` names a server, whose database
    must be empty."""
    if os.environ.get("REDIS_URL"):
        with redis.Redis.from_url(settings.REDIS_URL) as connection:
            if connection.dbsize():
                pytest.exit(
                    "The tests empty the Redis of REDIS_URL, and it holds something. Name an empty"
                    " database of it.",
                    4,
                )
        yield None
        return
    with Redis(settings.RUN_FOLDER / "redis") as server:
        yield server


@pytest.fixture
def broker(redis_server: Redis | None) -> Iterator["redis.Redis"]:
    """Return a connection to the Redis of ``RQ_QUEUES``, which is emptied before the test."""
    with redis.Redis.from_url(settings.REDIS_URL) as connection:
        connection.flushdb()
        yield connection


@pytest.fixture
def planted(settings: Settings) -> "Planted":
    """Return secrets that no report of an error may show; those of the settings are set."""
    # models cannot be imported when pytest collects its fixtures
    from tests.kit.frames import plant

    return plant(settings)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Return an empty folder with a path short enough for unix sockets."""
    settings.TEST_FOLDER.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="t", dir=settings.TEST_FOLDER))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
