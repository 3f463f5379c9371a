"""The configurations: each function changes the settings of the project as the project of somebody
else has them.

A new function is a new configuration. What a configuration cannot have is in ``LACKS``, with the
reason.
"""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MIDDLEWARE = "tests.configurations.shop.middleware"


@dataclass
class Project:
    """The settings of a project, and the functions of ``starts`` that it calls when it starts."""

    settings: dict[str, Any]
    starts: list[str] = field(default_factory=list)

    @property
    def database(self) -> dict[str, Any]:
        """The default database."""
        found: dict[str, Any] = self.settings["DATABASES"]["default"]
        return found

    def option(self, **options: Any) -> None:
        """Set options of the default database."""
        self.database["OPTIONS"].update(options)

    def limit(self, **limits: str) -> None:
        """Set limits of the sessions, as a role may have them."""
        self.option(options=" ".join(f"-c {name}={value}" for name, value in limits.items()))

    def alias(self, name: str, **changes: Any) -> None:
        """Add a database, which is like the default one."""
        other = copy.deepcopy(self.database)
        other["TEST"] = {"NAME": f"{other['TEST']['NAME']}_{name}"}
        self.settings["DATABASES"][name] = other | changes

    def outermost(self, *paths: str) -> None:
        """Add middleware before all others."""
        self.settings["MIDDLEWARE"][:0] = paths

    def innermost(self, *paths: str) -> None:
        """Add middleware after all others."""
        self.settings["MIDDLEWARE"] += paths

    def install(self, *apps: str) -> None:
        """Add apps."""
        self.settings["INSTALLED_APPS"] += apps


def plain(project: Project) -> None:
    """Change nothing."""


# Databases


def atomic_requests(project: Project) -> None:
    """Use ATOMIC_REQUESTS."""
    project.database["ATOMIC_REQUESTS"] = True


def another_database(project: Project) -> None:
    """Have a second database, with a router."""
    project.alias("other")
    project.settings["DATABASE_ROUTERS"] = ["tests.configurations.shop.routers.TwoDatabases"]


def another_database_with_atomic_requests(project: Project) -> None:
    """Have a second database with ATOMIC_REQUESTS."""
    another_database(project)
    project.settings["DATABASES"]["other"]["ATOMIC_REQUESTS"] = True


def atomic_requests_everywhere(project: Project) -> None:
    """Have two databases with ATOMIC_REQUESTS."""
    another_database_with_atomic_requests(project)
    atomic_requests(project)


def reads_from_a_replica(project: Project) -> None:
    """Read through another alias."""
    project.alias("replica")
    project.settings["DATABASES"]["replica"]["TEST"] = {"MIRROR": "default"}
    project.settings["DATABASE_ROUTERS"] = ["tests.configurations.shop.routers.ReadsFromReplica"]


def pool(project: Project) -> None:
    """Use the pool of Django."""
    project.option(pool={"min_size": 1, "max_size": 6, "timeout": 60})


def repeatable_read(project: Project) -> None:
    """Run each transaction at REPEATABLE READ."""
    from psycopg import IsolationLevel

    project.option(isolation_level=IsolationLevel.REPEATABLE_READ)


def serializable(project: Project) -> None:
    """Run each transaction at SERIALIZABLE."""
    from psycopg import IsolationLevel

    project.option(isolation_level=IsolationLevel.SERIALIZABLE)


def serializable_role(project: Project) -> None:
    """Have a role whose transactions run at SERIALIZABLE."""
    project.limit(default_transaction_isolation="serializable")


def server_side_binding(project: Project) -> None:
    """Bind parameters in the server."""
    project.option(server_side_binding=True)


def prepared_at_once(project: Project) -> None:
    """Prepare each statement."""
    project.option(prepare_threshold=0)


def never_prepared(project: Project) -> None:
    """Prepare no statement."""
    project.option(prepare_threshold=None)


def assumed_role(project: Project) -> None:
    """Act as another role, which is no superuser."""
    project.option(assume_role="shop")


def search_path(project: Project) -> None:
    """Have all tables in a schema of another name."""
    project.database["TEST"]["TEMPLATE"] = "template_shop"
    project.option(options="-c search_path=shop")


def short_limits(project: Project) -> None:
    """Have a role with short limits of time."""
    project.limit(
        statement_timeout="5s",
        lock_timeout="2s",
        idle_in_transaction_session_timeout="4s",
        transaction_timeout="8s",
        idle_session_timeout="30s",
    )


def no_persistent_connections(project: Project) -> None:
    """Close each connection after the request, with health checks."""
    project.database.update(CONN_MAX_AGE=0, CONN_HEALTH_CHECKS=True)


def checked_connections(project: Project) -> None:
    """Keep connections, with health checks."""
    project.database.update(CONN_MAX_AGE=None, CONN_HEALTH_CHECKS=True)


def unmerged(project: Project) -> None:
    """Send each statement by itself."""
    project.settings["IDEMPOTENCY"]["MERGE_ROUND_TRIPS"] = False


def prometheus_backend(project: Project) -> None:
    """Use the backend of django-prometheus."""
    project.database["ENGINE"] = "django_prometheus.db.backends.postgresql"
    project.install("django_prometheus")
    project.outermost("django_prometheus.middleware.PrometheusBeforeMiddleware")
    project.innermost("django_prometheus.middleware.PrometheusAfterMiddleware")


def postgres_extra_backend(project: Project) -> None:
    """Use the backend of django-postgres-extra."""
    project.database["ENGINE"] = "psqlextra.backend"
    project.install("django.contrib.postgres", "psqlextra")
    project.starts.append("postgres_extra_without_hstore")


def gevent_pool(project: Project) -> None:
    """Use the pool of django-db-geventpool."""
    project.database["ENGINE"] = "django_db_geventpool.backends.postgresql_psycopg3"
    # The pool connects before the database of the tests exists, and keeps to that name.
    project.database.update(CONN_MAX_AGE=0, NAME="shop_of_gevent")
    project.option(MAX_CONNS=6, REUSE_CONNS=2)


# Settings


def naive_times(project: Project) -> None:
    """Have USE_TZ off, and a time zone far from UTC."""
    project.settings.update(USE_TZ=False, TIME_ZONE="Pacific/Kiritimati")


def far_zone(project: Project) -> None:
    """Have a time zone far from UTC, and another language."""
    project.settings.update(
        TIME_ZONE="Pacific/Marquesas", LANGUAGE_CODE="ar", USE_THOUSAND_SEPARATOR=True
    )


def sessions_in_cookies(project: Project) -> None:
    """Keep sessions and messages in cookies."""
    project.settings.update(
        SESSION_ENGINE="django.contrib.sessions.backends.signed_cookies",
        MESSAGE_STORAGE="django.contrib.messages.storage.cookie.CookieStorage",
    )


def sessions_in_a_cache(project: Project) -> None:
    """Keep sessions in a cache, and save them in each request."""
    project.settings.update(
        SESSION_ENGINE="django.contrib.sessions.backends.cache", SESSION_SAVE_EVERY_REQUEST=True
    )


def sessions_in_both(project: Project) -> None:
    """Keep sessions in the database and in a cache."""
    project.settings["SESSION_ENGINE"] = "django.contrib.sessions.backends.cached_db"


def users_with_a_uuid(project: Project) -> None:
    """Have users with a UUID."""
    project.settings["AUTH_USER_MODEL"] = "users.UuidUser"


def users_with_a_text(project: Project) -> None:
    """Have users whose primary key is a text."""
    project.settings["AUTH_USER_MODEL"] = "users.TextUser"


def debug(project: Project) -> None:
    """Have DEBUG on, which records the statements."""
    project.settings["DEBUG"] = True
    os.environ["CONFIGURATION_DEBUG"] = "1"


def script_name(project: Project) -> None:
    """Serve the project under a path."""
    project.settings["FORCE_SCRIPT_NAME"] = "/shop"


def urls_of_the_request(project: Project) -> None:
    """Choose the URLs for each request."""
    project.settings["ROOT_URLCONF"] = "tests.configurations.no_urls"
    project.outermost(f"{MIDDLEWARE}.sets_the_urls")


def not_for_browsers(project: Project) -> None:
    """Have stricter defaults: no trailing slash is appended, no thousand separators, secure
    cookies."""
    project.settings.update(APPEND_SLASH=False, CSRF_USE_SESSIONS=True, CSRF_COOKIE_HTTPONLY=True)


# Middleware


def many_middlewares(project: Project) -> None:
    """Use the middleware of Django that changes responses."""
    project.outermost(
        "django.middleware.gzip.GZipMiddleware",
        "django.middleware.http.ConditionalGetMiddleware",
    )
    project.innermost(
        "django.middleware.locale.LocaleMiddleware",
        "django.middleware.clickjacking.XFrameOptionsMiddleware",
    )


def cached_site(project: Project) -> None:
    """Cache each page."""
    project.outermost("django.middleware.cache.UpdateCacheMiddleware")
    project.innermost("django.middleware.cache.FetchFromCacheMiddleware")


def body_that_is_read(project: Project) -> None:
    """Read each body."""
    project.outermost(f"{MIDDLEWARE}.reads_the_body")


def body_that_is_decoded(project: Project) -> None:
    """Decode compressed bodies."""
    project.outermost(f"{MIDDLEWARE}.decodes_the_body")
    os.environ["CONFIGURATION_GZIP"] = "1"


def headers_of_a_middleware(project: Project) -> None:
    """Set a header that differs in each response."""
    project.innermost(f"{MIDDLEWARE}.sets_headers")


def attributes_that_cannot_be_copied(project: Project) -> None:
    """Set a lock on each request."""
    project.innermost(f"{MIDDLEWARE}.sets_a_lock")


def wrapper_of_statements(project: Project) -> None:
    """Wrap each statement."""
    project.innermost(f"{MIDDLEWARE}.wraps_statements")


# Packages


def sentry(project: Project) -> None:
    """Use sentry-sdk."""
    project.starts.append("sentry")


def opentelemetry(project: Project) -> None:
    """Use OpenTelemetry for Django and psycopg."""
    project.starts.append("opentelemetry")


def ddtrace(project: Project) -> None:
    """Use ddtrace."""
    project.starts.append("ddtrace")


def debug_toolbar(project: Project) -> None:
    """Use django-debug-toolbar."""
    project.settings.update(
        INTERNAL_IPS=["127.0.0.1"], EXTRA_URLS={"__debug__/": "debug_toolbar.urls"}
    )
    project.settings["DEBUG_TOOLBAR_CONFIG"] = {
        "IS_RUNNING_TESTS": False,
        "SHOW_TOOLBAR_CALLBACK": lambda request: True,
    }
    project.install("debug_toolbar")
    project.outermost("debug_toolbar.middleware.DebugToolbarMiddleware")


def silk(project: Project) -> None:
    """Use django-silk, which explains statements."""
    project.install("silk")
    project.outermost("silk.middleware.SilkyMiddleware")
    project.settings.update(SILKY_ANALYZE_QUERIES=True, EXTRA_URLS={"silk/": "silk.urls"})


def cachalot(project: Project) -> None:
    """Use django-cachalot."""
    project.install("cachalot")


def reversion(project: Project) -> None:
    """Use django-reversion with its middleware, which opens a transaction."""
    project.install("reversion")
    project.innermost("reversion.middleware.RevisionMiddleware")
    os.environ["CONFIGURATION_HISTORY"] = "reversion"


def pghistory(project: Project) -> None:
    """Use django-pghistory with its middleware, which wraps statements."""
    project.install("pgtrigger", "pghistory")
    project.innermost("pghistory.middleware.HistoryMiddleware")
    os.environ["CONFIGURATION_HISTORY"] = "pghistory"


def pgtrigger(project: Project) -> None:
    """Use django-pgtrigger."""
    project.install("pgtrigger")
    os.environ["CONFIGURATION_HISTORY"] = "pgtrigger"


def simple_history(project: Project) -> None:
    """Use django-simple-history."""
    project.install("simple_history")
    project.innermost("simple_history.middleware.HistoryRequestMiddleware")
    os.environ["CONFIGURATION_HISTORY"] = "simple_history"


def auditlog(project: Project) -> None:
    """Use django-auditlog."""
    project.install("auditlog")
    project.innermost("auditlog.middleware.AuditlogMiddleware")
    os.environ["CONFIGURATION_HISTORY"] = "auditlog"


PROJECTS: dict[str, Callable[[Project], None]] = {
    name: function
    for name, function in list(globals().items())
    if callable(function)
    and getattr(function, "__module__", "") == __name__
    and name not in ("Project", "dataclass", "field")
}
#: Configurations that projects have together.
PAIRS = [
    "atomic_requests+another_database_with_atomic_requests",
    "atomic_requests+serializable",
    "pool+short_limits",
    "server_side_binding+prepared_at_once",
    "atomic_requests_everywhere+pghistory",
    "reads_from_a_replica+atomic_requests",
    "debug+debug_toolbar",
    "sentry+opentelemetry",
    "ddtrace+opentelemetry",
    "serializable+wrapper_of_statements",
    "unmerged+another_database_with_atomic_requests",
    "users_with_a_uuid+sessions_in_cookies",
    "no_persistent_connections+never_prepared",
]
#: The sample that ``make test`` runs, on the plain and the phased view.
SAMPLE = [
    "another_database_with_atomic_requests",
    "wrapper_of_statements",
    "serializable",
    "short_limits",
    "users_with_a_text",
    "attributes_that_cannot_be_copied",
]
#: The parts of the contract that a configuration cannot keep, with the reason.
LACKS: dict[str, dict[str, str]] = {
    "reversion": {
        "phased": (
            "its middleware opens a transaction around each request, in which a phased view is"
            " refused"
        ),
        "retries": (
            "its middleware opens a transaction around each request, which only its owner can"
            " repeat"
        ),
    },
    "gevent_pool": {
        "async": (
            "a thread is a greenlet, which shares the event loop of the view: Django's ORM"
            " refuses it"
        )
    },
}
