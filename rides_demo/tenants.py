"""The tenants of the service: their hosts, each with a database."""

from django.conf import settings

from rides_demo.sharding import SHARDS


def shards() -> dict[str, str]:
    """Return the database of each host; without the router, one database for a host without a
    name."""
    routed = "rides_demo.sharding.TenantRouter" in settings.DATABASE_ROUTERS
    return SHARDS if routed else {"": "default"}
