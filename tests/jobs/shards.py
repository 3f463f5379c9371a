"""The shop of docs/how-to/shard-by-tenant.md, with jobs of its two shards."""

from typing import Any

from idempotency.contrib.celery import OnceTask
from tests.kit.celery_app import app
from tests.kit.examples import file_of
from tests.models import Entry

#: The code of the guide. The app of the tests replaces the app of the shop.
GUIDE: dict[str, Any] = {"__name__": "shop.sharding"}
exec(file_of("shard-by-tenant.md", "shop/sharding.py").replace('"shop")', '"tests")'), GUIDE)

router = GUIDE["TenantRouter"]()


def enter_for_tenant(shard: str, name: str) -> None:
    """Create an entry of the tenant that the argument names, as the guide says."""
    GUIDE["shard_of_request"].set(shard)
    Entry.objects.create(name=name)


def enter_for_nobody(name: str) -> None:
    """Create an entry where the router sends it by default."""
    Entry.objects.create(name=name)


for _function in (enter_for_tenant, enter_for_nobody):
    app.task(base=OnceTask)(_function)
