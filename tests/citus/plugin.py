"""Skip tests of the core that need a single server, with the reason; ``tests.kit.tiers`` allows no
other skip."""

from typing import Any

import pytest

from tests.kit import tiers

#: The name of a test or of its module, and the reason why it cannot run on Citus.
NOT_ON_CITUS = {
    "test_a_replay_writes_nothing_and_takes_no_transaction_id": (
        "the coordinator takes advisory locks of its own"
    ),
    "test_a_constraint_that_only_the_database_knows_keeps_its_key": (
        "distributed tables have no triggers"
    ),
    "test_connection_lost_in_commit_is_no_success": "distributed tables have no triggers",
    "test_60_error_of_a_statement_on_keys": "distributed tables have no triggers",
    "test_59_what_a_wrapper_sets_holds_for_the_writes_of_the_key": (
        "distributed tables have no triggers"
    ),
    "test_59_a_wrapper_that_the_view_installs_gets_the_statements_after_it": (
        "distributed tables have no triggers"
    ),
    "test_a_key_that_a_trigger_protects_is_kept_and_stops_no_other": (
        "distributed tables have no triggers"
    ),
    "test_a_message_that_the_database_keeps_does_not_stop_the_reaper": (
        "distributed tables have no triggers"
    ),
    "test_threads_stop_between_keys_and_leave_no_connection": (
        "the cluster has connections of its own"
    ),
    "test_phased_view_costs_a_claim_and_its_replay_one_statement": (
        "BEGIN and the lock timeout are two messages"
    ),
    "test_tenants.py": "it makes its schemas from tables in public; citus_tenants.py is its like",
    "test_round_trips.py": "each statement is a round trip of its own",
    "test_replication.py": (
        "a commit of the coordinator proves nothing about the standbys of its workers"
    ),
    "test_read_only.py": "the coordinator cannot undo that its database is read-only",
}
_REASON = "on Citus: "
tiers.ALLOWED_SKIPS = (*tiers.ALLOWED_SKIPS, _REASON)


def _databases(item: pytest.Item) -> Any:
    marker = item.get_closest_marker("django_db")
    return (marker.kwargs.get("databases") if marker else None) or ()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests with two databases, and the tests in NOT_ON_CITUS."""
    for item in items:
        reason = NOT_ON_CITUS.get(getattr(item, "originalname", item.name)) or NOT_ON_CITUS.get(
            item.path.name
        )
        if "shard_b" in _databases(item):
            reason = "the cluster has one database"
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"{_REASON}{reason}"))
