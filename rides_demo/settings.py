"""Settings of Rocket Rides. Environment variables override the defaults, which fit ``make serve``.

``DATABASE_URL``, ``REDIS_URL``, ``STRIPE_API_KEY``, ``STRIPE_API_BASE``, ``STRIPE_WEBHOOK_SECRET``,
``PORT``, ``RIDES_RUN_FOLDER``, ``LOCK_TIMEOUT_SECONDS``, ``COMPLETER_MIN_AGE_SECONDS``,
``COMPLETER_IDLE_SECONDS``. ``CONFIRM_REPLICATED=1`` sets that setting. ``TRACES=1`` traces the
bookings: see ``rides_demo.traces``. ``BROKER=rabbitmq`` and ``BROKER=kafka`` run the jobs over that
broker instead of RQ; ``BROKER_URL`` is its address. The soak sets ``SHARD_B_DATABASE_URL``, the
database of a second tenant: see ``rides_demo.sharding``.
"""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import dj_database_url
import django
from django.core.exceptions import ImproperlyConfigured
from psycopg import IsolationLevel

from rides_demo.processes.embedded import postgres_url, redis_url
from rides_demo.processes.ports import sandbox_port
from rides_demo.sharding import SHARDS

BASE_DIR = Path(__file__).resolve().parent.parent


def _number(name: str, default: int | None = None) -> int:
    """Return the environment variable ``name`` as a number.

    Raises ImproperlyConfigured if it is not a number.
    """
    value = os.environ.get(name) or str(default)
    if not (value.isascii() and value.isdigit()):
        raise ImproperlyConfigured(f"{name} must be a whole number, not {value!r}.")
    return int(value)


PORT = _number("PORT", 8000)
if not 0 < PORT < 65536:
    raise ImproperlyConfigured(f"PORT must be 1 to 65535, not {PORT}.")
#: The folder of one `make serve`: data, logs, e-mails and process ids.
RUN_FOLDER = Path(os.environ.get("RIDES_RUN_FOLDER", BASE_DIR / ".run" / f"serve-{PORT}"))

# For a demo: every process listens on loopback, and the data is disposable.
SECRET_KEY = os.environ.get("SECRET_KEY", "rocket-rides-demo-only-not-a-secret")
DEBUG = False
ALLOWED_HOSTS = ["127.0.0.1", "localhost", "[::1]", "testserver"]
CSRF_TRUSTED_ORIGINS = [f"http://127.0.0.1:{PORT}", f"http://localhost:{PORT}"]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_rq",
    "idempotency",
    "rides_demo",
]
MIDDLEWARE = [
    "rides_demo.switches.register_bookings",
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
TRACES = os.environ.get("TRACES") == "1"
if TRACES:
    MIDDLEWARE = ["rides_demo.traces.server_span", *MIDDLEWARE]
ROOT_URLCONF = "rides_demo.urls"
WSGI_APPLICATION = "rides_demo.wsgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]
AUTH_USER_MODEL = "rides_demo.User"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
STATIC_URL = "static/"
LANGUAGE_CODE = "en"
TIME_ZONE = "UTC"
USE_TZ = True


def _database(variable: str, url: str) -> Any:
    """Return the database of ``url``, with the options of its engine."""
    try:
        database = dj_database_url.parse(url, conn_max_age=60, conn_health_checks=True)
    except ValueError as error:
        raise ImproperlyConfigured(f"{variable} cannot be read: {error}") from None
    options = database.setdefault("OPTIONS", {})
    if "postgresql" in database["ENGINE"]:
        # PostgreSQL prepares a statement at its fifth use, which halves the time of a replay.
        options.setdefault("prepare_threshold", 5)
        options.setdefault("connect_timeout", 5)
        # As in the article. SERIALIZABLE protects only where each transaction of the project has
        # it.
        options.setdefault("isolation_level", IsolationLevel.SERIALIZABLE)
    elif "sqlite" in database["ENGINE"]:
        # A transaction that begins as IMMEDIATE waits for the write lock. A deferred one that reads
        # first fails instead.
        options.setdefault("transaction_mode", "IMMEDIATE")
        options.setdefault("init_command", "PRAGMA journal_mode=WAL")
        options.setdefault("timeout", 10)
    return database


DATABASES = {
    "default": _database(
        "DATABASE_URL", os.environ.get("DATABASE_URL") or postgres_url(RUN_FOLDER / "postgres")
    )
}
if _url := os.environ.get("SHARD_B_DATABASE_URL"):
    DATABASES["shard_b"] = _database("SHARD_B_DATABASE_URL", _url)
    DATABASE_ROUTERS = ["rides_demo.sharding.TenantRouter"]
    MIDDLEWARE = ["rides_demo.sharding.tenant_middleware", *MIDDLEWARE]
    ALLOWED_HOSTS = [*SHARDS]

REDIS_URL = os.environ.get("REDIS_URL") or redis_url(RUN_FOLDER / "redis")
RQ_QUEUES = {"default": {"URL": REDIS_URL, "DEFAULT_TIMEOUT": 60}}
# The enqueuer sends jobs to RQ inside its transaction, before it deletes them.
RQ = {"COMMIT_MODE": "auto"}

_mail_backend, _mail_folder = (
    "django.core.mail.backends.filebased.EmailBackend",
    RUN_FOLDER / "mail",
)
if django.VERSION >= (6, 1):
    MAILERS = {"default": {"BACKEND": _mail_backend, "OPTIONS": {"file_path": _mail_folder}}}
else:
    EMAIL_BACKEND, EMAIL_FILE_PATH = _mail_backend, _mail_folder
DEFAULT_FROM_EMAIL = "receipts@rocketrides.example"

IDEMPOTENCY = {
    name: _number(name)
    for name in ("LOCK_TIMEOUT_SECONDS", "COMPLETER_MIN_AGE_SECONDS", "COMPLETER_IDLE_SECONDS")
    if os.environ.get(name)
}
# The only messages are webhooks, and their processing calls no other service. The transaction of a
# lost web worker ends after the lock timeout, as in a booking.
IDEMPOTENCY["INBOX_IDLE_SECONDS"] = IDEMPOTENCY.get("LOCK_TIMEOUT_SECONDS", 90)
# The completer does not know the token of the client.
IDEMPOTENCY["PREPARE_REQUEST"] = "rides_demo.auth.prepare_request"

IDEMPOTENCY["PHASE_ISOLATION"] = "serializable"
IDEMPOTENCY["CONFIRM_REPLICATED"] = os.environ.get("CONFIRM_REPLICATED") == "1"

if BROKER := os.environ.get("BROKER"):
    if BROKER not in ("rabbitmq", "kafka"):
        raise ImproperlyConfigured(f"BROKER must be rabbitmq or kafka, not {BROKER!r}.")
    if not (find_spec("pika") and find_spec("confluent_kafka")):
        raise ImproperlyConfigured("BROKER needs `pip install -r requirements/brokers.txt`.")
    IDEMPOTENCY["ENQUEUERS"] = {"*": f"rides_demo.brokers.{BROKER}.Backend"}
    RABBITMQ_URL = os.environ.get("BROKER_URL")
    KAFKA = {"bootstrap.servers": os.environ.get("BROKER_URL")}

#: None means the real Stripe, which needs STRIPE_API_KEY. The default is the sandbox of `make
#: serve`.
STRIPE_API_BASE = os.environ.get("STRIPE_API_BASE") or (
    None if os.environ.get("STRIPE_API_KEY") else f"http://127.0.0.1:{sandbox_port(PORT)}"
)
STRIPE_API_KEY = os.environ.get("STRIPE_API_KEY") or "sk_test_rocket_rides_demo"
STRIPE_WEBHOOK_SECRET = os.environ.get("STRIPE_WEBHOOK_SECRET") or "whsec_rocket_rides_demo_only"

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "line": {
            "()": "rides_demo.logs.LineFormatter",
            "fmt": "%(asctime)s %(levelname)s %(name)s: %(message)s",
        }
    },
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": "INFO"},
    "loggers": {
        "django": {"handlers": [], "propagate": True},
        "django.server": {"handlers": [], "propagate": True},
        # pika logs seven lines for each connection, Stripe two for each call, and httpx one.
        "pika": {"level": "WARNING"},
        "stripe": {"level": "WARNING"},
        "httpx": {"level": "WARNING"},
    },
}
