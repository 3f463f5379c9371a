"""Settings of the tests on Citus: the database of ``CITUS_URL`` is the test database, because its schema is prepared."""

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES

DATABASES["default"]["TEST"] = {"NAME": DATABASES["default"]["NAME"]}
# One database. Tests with two are left out by tests.citus.plugin.
DATABASES["shard_b"]["TEST"] = {"MIRROR": "default"}
