"""The router of docs/how-to/shard-by-tenant.md, as printed there. The soak uses it: two tenants,
each with its own database."""

from contextvars import ContextVar

SHARDS = {"a.example": "default", "b.example": "shard_b"}
shard_of_request = ContextVar("shard", default="default")


def shard(request):
    return SHARDS[request.get_host()]


class TenantRouter:
    def db_for_read(self, model, **hints):
        sharded = model._meta.app_label in ("idempotency", "rides_demo")
        return shard_of_request.get() if sharded else "default"

    db_for_write = db_for_read


def tenant_middleware(get_response):
    def middleware(request):
        token = shard_of_request.set(shard(request))
        try:
            return get_response(request)
        finally:
            shard_of_request.reset(token)

    return middleware


def prepare_request(request, key):
    shard_of_request.set(key._state.db)
