"""Settings of the benchmarks: those of the demo without its middleware, and with what the peers ask for."""

from rides_demo.settings import *  # noqa: F403
from rides_demo.settings import DATABASES, INSTALLED_APPS, REDIS_URL

INSTALLED_APPS = [*INSTALLED_APPS, "rest_framework", "rest_framework_idempotency_key", "drf_idempotencykey"]
# A peer that is a middleware is put around its view, so that nobody pays for another one's.
MIDDLEWARE = []
ROOT_URLCONF = "benchmarks.urls"

CACHES = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": REDIS_URL}}
#: django-idempotency-key for several processes: its storage in the cache, its lock in Redis.
IDEMPOTENCY_KEY = {
    "CONFLICT_STATUS_CODE": None,  # A replay has the status of the first response.
    "STORAGE": {"CLASS": "idempotency_key.storage.CacheKeyStorage", "CACHE_NAME": "default"},
    "LOCK": {"CLASS": "idempotency_key.locks.redis.MultiProcessRedisLock", "LOCATION": REDIS_URL},
}
#: djangorestframework-idempotency-key: seconds, without a default.
IDEMPOTENCY_KEY_LOCK_TIMEOUT = 90
# A connection is kept, and not asked before each request whether it is still there.
DATABASES["default"] |= {"CONN_MAX_AGE": None, "CONN_HEALTH_CHECKS": False}
