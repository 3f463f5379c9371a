"""Settings of the benchmarks: the settings of the demo without its middleware, plus the settings of
the peers."""

from rides_demo.settings import *  # noqa: F403
from rides_demo.settings import DATABASES, INSTALLED_APPS, REDIS_URL

INSTALLED_APPS = [
    *INSTALLED_APPS,
    "benchmarks",
    "rest_framework",
    "rest_framework_idempotency_key",
    "drf_idempotencykey",
]
# The middleware of a peer wraps only the view of this peer, so that it costs the other systems
# nothing.
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
# Connections are persistent, and are not checked before each request.
DATABASES["default"] |= {"CONN_MAX_AGE": None, "CONN_HEALTH_CHECKS": False}
