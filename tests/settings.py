"""Settings of the tests: those of the demo, on services of their own unless ``DATABASE_URL`` /
``REDIS_URL`` name others.

``RIDES_TEST_PGBOUNCER=1`` puts PgBouncer in transaction mode before the PostgreSQL of its own;
``RIDES_TEST_POOL=1`` lets Django keep a pool of connections.
"""

import os
import tempfile
from copy import deepcopy
from pathlib import Path

#: Short, because the paths of unix sockets are; the first process of a run chooses, the workers of
#: pytest-xdist inherit it.
TEST_FOLDER = Path(
    os.environ.setdefault("RIDES_TEST_FOLDER", f"{tempfile.gettempdir()}/rides-tests-{os.getpid()}")
)
os.environ["RIDES_RUN_FOLDER"] = str(TEST_FOLDER / os.environ.get("PYTEST_XDIST_WORKER", "main"))

if "DATABASE_URL" not in os.environ:
    from rides_demo.processes.embedded import postgres_url

    _bouncer = os.environ.get("RIDES_TEST_PGBOUNCER") == "1"
    os.environ["DATABASE_URL"] = postgres_url(
        TEST_FOLDER / ("pgbouncer" if _bouncer else "postgres")
    )
    os.environ["RIDES_TEST_POSTGRES"] = "embedded"

from rides_demo.settings import *  # noqa: E402, F403
from rides_demo.settings import (  # noqa: E402
    BASE_DIR,
    DATABASES,
    IDEMPOTENCY,
    INSTALLED_APPS,
    LOGGING,
)


def _pooler(section: str) -> str:
    """Return what the how-to guide of poolers puts into settings."""
    page = (BASE_DIR / "docs" / "how-to" / "use-a-pooler.md").read_text()
    return page.partition(f"## {section}")[2].partition("```python\n")[2].partition("```")[0]


INSTALLED_APPS = [*INSTALLED_APPS, "django_tasks_db", "tests"]
TASKS = {"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}}
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
# A connection of a thread must end with it, or the test database cannot be dropped.
DATABASES["default"]["CONN_MAX_AGE"] = 0
if "sqlite" in DATABASES["default"]["ENGINE"]:
    # In a file: threads need connections of their own, and one in memory is shared.
    TEST_FOLDER.mkdir(parents=True, exist_ok=True)
    DATABASES["default"]["TEST"] = {"NAME": str(TEST_FOLDER / "test.sqlite3")}
    # Only a power failure could lose what SQLite has not synchronized.
    DATABASES["default"]["OPTIONS"]["init_command"] += "; PRAGMA synchronous=OFF"
elif os.environ.get("RIDES_TEST_PGBOUNCER") == "1":
    exec(_pooler("PgBouncer"))
if os.environ.get("RIDES_TEST_POOL") == "1":
    exec(_pooler("Django's pool"))
    DATABASES["default"]["OPTIONS"]["pool"]["max_size"] = 80  # As many threads as a test has.
# The tests of the app run at the default level of a Django project, which those of the demo do not
# change.
DATABASES["default"]["OPTIONS"].pop("isolation_level", None)
IDEMPOTENCY.pop("PHASE_ISOLATION")
# A second database, for the tests of sharding: pytest-django makes it in a run that has some of
# them; processes get its name.
DATABASES["shard_b"] = deepcopy(DATABASES["default"])
DATABASES["shard_b"]["NAME"] = os.environ.get(
    "RIDES_TEST_SHARD_B", f"{DATABASES['default']['NAME']}_b"
)
if "sqlite" in DATABASES["shard_b"]["ENGINE"]:
    DATABASES["shard_b"]["TEST"] = {"NAME": str(TEST_FOLDER / "test_b.sqlite3")}
# Only what the tests look at.
LOGGING["root"]["level"] = "WARNING"
