"""Settings: the lists of apps as ``docs/how-to/shard-by-tenant.md`` names them."""

import os

import dj_database_url

_ROOT = "tests.citus.tenants_project"
SECRET_KEY = "not a secret"
ALLOWED_HOSTS = ["*"]
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {
    "default": (
        dj_database_url.parse(os.environ["CITUS_URL"])
        | {"ENGINE": "django_tenants.postgresql_backend"}
    )
}
DATABASE_ROUTERS = ["django_tenants.routers.TenantSyncRouter"]
SHARED_APPS = ["django_tenants", f"{_ROOT}.customers"]
TENANT_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "idempotency", f"{_ROOT}.shop"]
INSTALLED_APPS = [*SHARED_APPS, *TENANT_APPS]
TENANT_MODEL, TENANT_DOMAIN_MODEL = "customers.Customer", "customers.Domain"
MIDDLEWARE = ["django_tenants.middleware.main.TenantMainMiddleware"]
ROOT_URLCONF = f"{_ROOT}.urls"
IDEMPOTENCY = {"ENQUEUERS": {"*": f"{_ROOT}.urls.hand_over"}, "JOB_MODULES": [_ROOT]}
