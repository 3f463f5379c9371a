"""The shop of docs/how-to/shard-by-tenant.md as printed: its router, its middleware and its
PREPARE_REQUEST."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connection, connections

from tests.kit.examples import file_of
from tests.kit.threads import elsewhere
from tests.models import Entry

#: The app of the tests replaces the app of the shop.
GUIDE: dict[str, Any] = {"__name__": "shop.sharding"}
exec(file_of("shard-by-tenant.md", "shop/sharding.py").replace('"shop")', '"tests")'), GUIDE)
SHARDS, shard, shard_of_request = GUIDE["SHARDS"], GUIDE["shard"], GUIDE["shard_of_request"]
tenant_middleware, prepare_request = GUIDE["tenant_middleware"], GUIDE["prepare_request"]


def routed(settings: Any, **idempotency: Any) -> None:
    """Give the project of the test the router, the middleware and the setting of the guide."""
    settings.ALLOWED_HOSTS = list(SHARDS)
    settings.DATABASE_ROUTERS = [GUIDE["TenantRouter"]()]
    settings.MIDDLEWARE = [f"{__name__}.tenant_middleware", *settings.MIDDLEWARE]
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": prepare_request} | idempotency


class EntriesInShardB:
    """A router that keeps the entries of the tests in another database than the keys."""

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return "shard_b" if model is Entry else None

    db_for_read = db_for_write

    def allow_migrate(self, alias: str, app_label: str, **hints: Any) -> bool | None:
        return alias == "shard_b" if app_label == "tests" else None


@contextmanager
def tenant(alias: str | None) -> Iterator[None]:
    """Set the current tenant to the tenant of a shard, or to no tenant."""
    token = shard_of_request.set(alias or "default")
    try:
        yield
    finally:
        shard_of_request.reset(token)


def end_sessions(alias: str) -> None:
    """End all sessions of a database, as its restart does."""
    name = connections[alias].settings_dict["NAME"]

    def end() -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s"
                " AND pid <> pg_backend_pid()",
                [name],
            )

    elsewhere(end)
