"""The how-to guides, followed as they are printed, from an empty folder.

What their examples promise is tested in ``tests/docs/test_howtos.py``, ``tests/frameworks`` and
``tests/crash``.
"""

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.conf import settings
from django.db import connection
from psycopg.sql import SQL, Identifier

from rides_demo.processes import debian
from rides_demo.processes.ports import free_port
from rides_demo.simulator import limits
from tests.kit import pgbouncer
from tests.kit.celery_app import broker_url
from tests.kit.examples import file_of
from tests.kit.printed import GUIDES, ROOT, Command, Project, Write, steps
from tests.kit.waiting import eventually

pytestmark = pytest.mark.processes

AS_PRINTED = [
    "a-key-is-stuck.md",
    "add-phases.md",
    "checkout-in-the-session.md",
    "class-based-and-async-views.md",
    "consume-messages.md",
    "deploy-a-change.md",
    "django-ninja.md",
    "django-rest-framework.md",
    "do-without-a-key.md",
    "forms.md",
    "hand-the-key-on.md",
    "metrics-and-alerts.md",
    "move-from-another-middleware.md",
    "prepare-a-request.md",
    "protect-a-function.md",
    pytest.param("protect-a-view.md", marks=pytest.mark.sample),
    "publish-in-openapi.md",
    "receive-webhooks.md",
    "run-a-command-once.md",
    "run-the-processes.md",
    "shard-by-tenant.md",
    "stage-a-job.md",
    "test-your-views.md",
    "traces.md",
]
#: ... and those that need a service, or another package. ``make examples`` follows the guide to
#: GraphQL and agents; test_kafka.py, test_rabbitmq.py and test_sqs.py run the consumers of theirs.
WITH_MORE = [
    "call-from-a-client.md",
    "choose-a-queue.md",
    "graphql-and-agents.md",
    "jobs-on-a-broker.md",
    "use-a-pooler.md",
]

#: The guides that each CI run follows in an environment of the reader's own; ``make docs FULL=1``
#: follows all.
FRESH = ["add-phases.md", "protect-a-view.md", "receive-webhooks.md"]


#: Tests of the project of a guide.
TESTS = {
    "protect-a-function.md": """
from django.contrib.auth.models import User
from django.test import TransactionTestCase
from shop.models import Payout


class RefusalTests(TransactionTestCase):
    def test_a_refusal_is_undone_and_stored(self):
        self.client.force_login(User.objects.create(username="jane"))
        for _ in range(2):
            refused = self.client.post(
                "/payouts/18/", {"cents": 200_000}, headers={"Idempotency-Key": "first"}
            )
            self.assertEqual((refused.status_code, refused.json()["code"]), (422, "refused"))
        self.assertFalse(Payout.objects.exists())
""",
    "shard-by-tenant.md": """
from django.contrib.auth.models import User
from django.test import TransactionTestCase
from shop.models import Order
from shop.operations import import_orders
from shop.sharding import SHARDS


class ShardTests(TransactionTestCase):
    databases = "__all__"

    def test_each_tenant_has_its_orders_once(self):
        self.client.force_login(User.objects.create(username="jane"))
        for host, database in [*SHARDS.items()] * 2:
            headers = {"Host": host, "Idempotency-Key": "first"}
            self.client.post("/orders/", {"name": host}, headers=headers)
            import_orders(database, ["tea"])
        for host, database in SHARDS.items():
            names = Order.objects.using(database).values_list("name", flat=True)
            self.assertCountEqual(names, [host, "tea"])
""",
}

#: The shop of the guide to a move, with the package from which it moves.
OLD_PACKAGE = "django-idempotency-key==1.3.0"
OLD_SETTINGS = """
ROOT_URLCONF = "shop.old_urls"
MIDDLEWARE += ["idempotency_key.middleware.ExemptIdempotencyKeyMiddleware"]
IDEMPOTENCY_KEY = {
    "STORAGE": {"CLASS": "idempotency_key.storage.CacheKeyStorage", "CACHE_NAME": "default"}
}
CACHES = {
    "default": {"BACKEND": "django.core.cache.backends.db.DatabaseCache", "LOCATION": "cache"}
}
"""
OLD_VIEWS = """
from django.contrib.auth.decorators import login_required
from django.http import JsonResponse
from idempotency_key.decorators import idempotency_key
from shop.models import Order


@idempotency_key
@login_required
def create_order(request):
    order = Order.objects.create(name=request.POST["name"])
    return JsonResponse({"id": order.pk}, status=201)
"""
OLD_URLS = """
from django.urls import path
from shop.views import create_order

urlpatterns = [path("orders/", create_order)]
"""
SEND = """
from django.contrib.auth.models import User
from django.test import Client

client = Client(SERVER_NAME="localhost")
client.force_login(User.objects.get_or_create(username="jane")[0])
answer = client.post("/orders/", {"name": "tea"}, headers={"Idempotency-Key": "first"})
print(answer.status_code, answer.json())
"""


def test_each_guide_is_followed() -> None:
    names = [getattr(guide, "values", [guide])[0] for guide in AS_PRINTED]
    assert sorted(names + WITH_MORE) == sorted(guide.name for guide in GUIDES.glob("*.md"))


@pytest.mark.parametrize("guide", AS_PRINTED)
def test_a_guide_can_be_followed_from_an_empty_folder(guide: str, tmp_path: Path) -> None:
    follow_and_check(Project(tmp_path), guide)


@pytest.mark.sample
@pytest.mark.parametrize("guide", AS_PRINTED if os.environ.get("GUIDES") == "all" else FRESH)
def test_a_guide_installs_all_that_it_needs(guide: str, checkout: Path, tmp_path: Path) -> None:
    follow_and_check(Project(tmp_path, checkout=checkout), guide)


def follow_and_check(project: Project, guide: str) -> None:
    """Follow a guide; the system checks then find nothing in the project, if there is one."""
    project.follow((GUIDES / guide).read_text())
    if (project.folder / "manage.py").exists():
        assert "no issues" in project.run("python manage.py check")
    if guide in TESTS:
        project.write(Write("shop/tests.py", TESTS[guide], at_the_end=False))
        assert "OK" in project.run("python manage.py test shop --verbosity 0")


def test_the_guide_to_clients_can_be_followed(tmp_path: Path) -> None:
    port = free_port()
    here = {
        "localhost:8000": f"localhost:{port}",
        "runserver --noreload": f"runserver --noreload {port}",
    }
    Project(tmp_path, here).follow((GUIDES / "call-from-a-client.md").read_text())


def test_the_guide_to_queues_can_be_followed(broker: Any, tmp_path: Path) -> None:
    here = {
        "redis://localhost:6379/0": settings.REDIS_URL,
        "redis://localhost:6379/1": broker_url(settings.REDIS_URL),
    }
    Project(tmp_path, here).follow((GUIDES / "choose-a-queue.md").read_text())


def test_a_retry_across_a_move_gets_the_response_of_the_old_package(tmp_path: Path) -> None:
    page, packages = (GUIDES / "move-from-another-middleware.md").read_text(), tmp_path / "packages"
    assert OLD_PACKAGE.replace("==", "` ") in page
    pip = f"{sys.executable} -m pip install --quiet --no-deps --target {packages} {OLD_PACKAGE}"
    try:
        debian.run(pip.split(), f"pip could not fetch {OLD_PACKAGE}")
    except debian.NotToBeHad as reason:
        pytest.skip(str(reason))
    shop = Project(tmp_path / "shop", PYTHONPATH=f"{packages}:{ROOT}")
    shop.follow((ROOT / "docs" / "example-project.md").read_text())
    shop.write(Write("shop/settings.py", OLD_SETTINGS, at_the_end=True))
    shop.write(Write("shop/views.py", OLD_VIEWS, at_the_end=False))
    shop.write(Write("shop/old_urls.py", OLD_URLS, at_the_end=False))
    shop.write(Write("send.py", SEND, at_the_end=False))
    shop.run("python manage.py createcachetable --verbosity 0")
    for _ in range(2):
        assert shop.run("python manage.py shell --verbosity 0 < send.py") == "201 {'id': 1}"
        shop.follow(page.partition("### The move of a view")[2])


def test_the_app_is_removed_without_a_table_of_the_project(tmp_path: Path) -> None:
    shop = Project(tmp_path)
    shop.follow((ROOT / "docs" / "example-project.md").read_text())
    shell = 'python manage.py shell -c "from shop.models import Order; {}"'.format
    shop.run(shell("Order.objects.create(name='tea')"))
    page = (ROOT / "docs" / "incidents.md").read_text().partition("To remove the app")[2]
    make, migrate, squash, migrate_squashed, plan, zero = (
        f"python {' '.join(command.split())}"
        for command in re.findall(r"`(manage\.py [^`]+)`", page)
    )

    def remove(pattern: str, path: str) -> None:
        (file,) = tmp_path.glob(path)
        text, found = re.subn(pattern, "", file.read_text(), flags=re.S | re.M)
        assert found == 1, f"{path} has {found} times {pattern}"
        file.write_text(text)

    remove(r"^    idempotency_key = .*?^    \)$", "shop/models.py")
    shop.run(make)
    shop.run(migrate)
    assert "shop.0001_initial" in shop.run(plan)
    shop.run(f"{squash} --noinput")
    remove(r"^ *\('idempotency', .*?$", "shop/migrations/*squashed*.py")
    shop.run(migrate_squashed)
    for old in ("0001_initial", "0002_remove_order_idempotency_key"):
        (tmp_path / "shop" / "migrations" / f"{old}.py").unlink()
    remove(r"^ *replaces = .*?$", "shop/migrations/*squashed*.py")
    assert "shop" not in shop.run(plan)
    shop.run(zero)
    remove('"idempotency", ', "shop/settings.py")
    assert "No changes detected" in shop.run("python manage.py makemigrations --check")
    assert "No migrations to apply" in shop.run(migrate)
    tables = "from django.db import connection; print(connection.introspection.table_names())"
    printed = shop.run(shell(f"print(Order.objects.get()); {tables}"))
    assert "Order object (1)" in printed
    assert "idempotency_" not in printed


def test_the_command_of_the_soak_is_a_target_of_make() -> None:
    """A soak of some seconds is run by ``tests/processes/test_soak.py``."""
    page = (ROOT / "docs" / "contributing" / "soak.md").read_text()
    (line,) = [step.line for step in steps(page) if isinstance(step, Command)]
    assert "manage.py soak" in Project(ROOT).run(line.replace("make", "make --dry-run"))


def test_the_limits_of_the_soak_are_on_its_page() -> None:
    page = (ROOT / "docs" / "contributing" / "soak.md").read_text()
    assert dict(re.findall(r"`(\w+_timeout)` \((\d+ m?s)\)", page)) == {
        name: re.sub(r"(?<=\d)(?=m?s)", " ", value) for name, (value, _) in limits.SETTINGS.items()
    }


def test_the_router_of_the_soak_is_that_of_the_guide_to_shards() -> None:
    printed = file_of("shard-by-tenant.md", "shop/sharding.py").replace('"shop"', '"rides_demo"')
    assert (ROOT / "rides_demo" / "sharding.py").read_text().endswith(f"\n\n{printed}")


@pytest.fixture
def sockets() -> Path:
    """Return the folder of the sockets of the server, if it is the tests' own."""
    reached = connection.settings_dict
    postgres = reached["HOST"] or reached["OPTIONS"].get("host", "")
    if not postgres.startswith("/"):
        pytest.skip("the server is not the tests' own")
    return Path(postgres)


def administer(statement: str, name: str) -> None:
    """Execute a statement about a database."""
    with psycopg.connect(
        **connection.get_connection_params() | {"dbname": "postgres"}, autocommit=True
    ) as server:
        server.execute(SQL(statement).format(Identifier(name)))


@pytest.fixture
def behind_pgbouncer(short_folder: Path, sockets: Path) -> Iterator[dict[str, str]]:
    """Return the variables with which a reader reaches a new database through PgBouncer."""
    name = f"pooler_{os.getpid()}"
    try:
        pooler = pgbouncer.start(short_folder / "pgbouncer", sockets)
    except debian.NotToBeHad as reason:
        pytest.skip(str(reason))
    administer("CREATE DATABASE {}", name)
    yield {"PGHOST": str(pooler.sockets), "PGUSER": "postgres", "PGDATABASE": name}
    pooler.stop()
    administer("DROP DATABASE {} WITH (FORCE)", name)


@pytest.mark.postgres
@pytest.mark.django_db
def test_the_guide_to_poolers_can_be_followed(
    behind_pgbouncer: dict[str, str], tmp_path: Path
) -> None:
    Project(tmp_path, **behind_pgbouncer).follow((GUIDES / "use-a-pooler.md").read_text())


@pytest.fixture
def on_postgres(sockets: Path, tmp_path: Path) -> Iterator[Project]:
    """Return a project whose pages write their settings for a new database on PostgreSQL, with a
    short lease."""
    name = f"guide_{os.getpid()}"
    database = {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": str(sockets),
        "USER": "postgres",
        "NAME": name,
    }
    apps = 'INSTALLED_APPS += ["idempotency", "shop"]'
    more = f"DATABASES = {{'default': {database}}}\nIDEMPOTENCY = {{'LOCK_TIMEOUT_SECONDS': 2}}"
    administer("CREATE DATABASE {}", name)
    project = Project(tmp_path, {apps: f"{apps}\n{more}"})
    yield project
    project.stop()
    administer("DROP DATABASE {} WITH (FORCE)", name)


@pytest.mark.postgres
@pytest.mark.django_db
def test_two_commands_at_once_and_one_that_is_killed_pay_each_pilot_once(
    on_postgres: Project,
) -> None:
    on_postgres.follow((GUIDES / "run-a-command-once.md").read_text())
    transfers, line = on_postgres.folder / "transfers", "python manage.py pay_pilots 2026-11-26"
    for _ in range(2):
        on_postgres.enter(f"{line} &", [])
    eventually(lambda: len(list(transfers.iterdir())) > 22)
    os.killpg(on_postgres.running[0].pid, signal.SIGKILL)
    # Until the lease of the killed one has ended, its pilot may be in progress.
    eventually(lambda: on_postgres.run(f"{line} 2>/dev/null") == "20 paid")
    assert len(list(transfers.iterdir())) == 40
    count = "from shop.models import *; print(Payout.objects.exclude(transfer='').count())"
    assert on_postgres.run(f'python manage.py shell --verbosity 0 -c "{count}"') == "40"
