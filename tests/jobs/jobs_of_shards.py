"""Jobs of the two shards of the tests."""

from pathlib import Path

from idempotency.contrib.celery import OnceTask
from tests.kit.celery_app import app
from tests.kit.shards import shard_of_request
from tests.models import Entry


def enter(alias: str, fail: bool = False) -> None:
    """Create an entry in a shard."""
    Entry.objects.using(alias).create(name="entry")
    if fail:
        raise OSError("on purpose")


def enter_after_a_failure(alias: str, mark: str) -> None:
    """Create an entry in a shard, and raise in the first run, in which the file ``mark`` does not
    exist yet."""
    first = not Path(mark).exists()
    Path(mark).touch()
    enter(alias, fail=first)


def enter_for_tenant(shard: str, name: str) -> None:
    """Create an entry of the tenant that the argument names, as the guide says."""
    shard_of_request.set(shard)
    Entry.objects.create(name=name)


def enter_for_nobody(name: str) -> None:
    """Create an entry where the router sends it by default."""
    Entry.objects.create(name=name)


for _function in (enter_after_a_failure, enter_for_tenant, enter_for_nobody):
    app.task(base=OnceTask)(_function)
