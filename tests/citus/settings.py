"""Settings of the tests on Citus: the database of ``CITUS_URL`` is the test database, because its
schema is prepared."""

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES

DATABASES["default"]["TEST"] = {"NAME": DATABASES["default"]["NAME"]}
# The cluster has one database. tests.citus.plugin skips tests with two.
DATABASES["shard_b"]["TEST"] = {"MIRROR": "default"}
