"""Two tenants on two workers: each key has one effect and one response, even if sessions end or a
tenant moves."""

import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from threading import Event
from typing import Any

import psycopg
import pytest
from django.core.management import call_command
from django.db import IntegrityError, connection, transaction
from django.http import HttpRequest, JsonResponse
from django.test import Client
from pytest_django import DjangoDbBlocker, Settings

from idempotency._engine import replication
from idempotency._engine.database_product import is_citus
from idempotency._engine.transactions import durable_transaction
from idempotency.completer import complete_once
from idempotency.enqueuer import backlog
from idempotency.exceptions import NotReplicated
from idempotency.inbox import process_once
from idempotency.jobs import stage_job
from idempotency.models import IdempotencyKey
from idempotency.reaper import reap_once
from tests.kit.ageing import abandon, expired_keys
from tests.kit.chance import chance
from tests.kit.database import session_setting
from tests.kit.threads import all_at_once, in_background
from tests.kit.views import phased, plain
from tests.kit.waiting import eventually
from tests.models import Entry

TENANTS = ("tenant_a", "tenant_b")
Serve = Callable[..., None]

pytestmark = pytest.mark.django_db(transaction=True)


def schema(name: str) -> AbstractContextManager[None]:
    """Let the connection of this thread use the tables of a tenant."""
    return session_setting("search_path", f"{name}, public")


class TenantMiddleware:
    """Use the schema of the tenant that the host names, like django-tenants."""

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> Any:
        """Handle the request in the schema of the tenant."""
        with schema(request.get_host().partition(".")[0].replace("-", "_")):
            return self.get_response(request)


@pytest.fixture(scope="module", autouse=True)
def _tables(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> None:
    with django_db_blocker.unblock():
        for tenant in TENANTS:
            with schema(tenant):
                call_command("migrate", verbosity=0)
        connection.close()


@pytest.fixture(autouse=True)
def _hosts(settings: Settings) -> None:
    settings.MIDDLEWARE = [f"{__name__}.TenantMiddleware"]
    settings.ALLOWED_HOSTS = ["*"]
    # A run whose worker is killed may leave its lock.
    settings.IDEMPOTENCY = {"LOCK_TIMEOUT_SECONDS": 5}


def coordinator(statement: str) -> list[Any]:
    """Run a statement in a separate session and return its rows."""
    with psycopg.connect(_url(), autocommit=True) as session:
        cursor = session.execute(statement)
        return cursor.fetchall() if cursor.description else []


def _url() -> str:
    parts = connection.settings_dict
    return f"postgresql://{parts['USER']}@{parts['HOST']}:{parts['PORT']}/{parts['NAME']}"


def nodes() -> dict[str, tuple[str, int]]:
    """Return the worker of each tenant."""
    found = coordinator(
        "SELECT DISTINCT schema_name::text, nodename, nodeport FROM citus_shards JOIN citus_schemas"
        " USING (colocation_id)"
    )
    return {name: (host, port) for name, host, port in found if name in TENANTS}


def everybody(request: HttpRequest) -> str:
    return "everybody"


def work(request: HttpRequest) -> JsonResponse:
    """Create an entry with the name of the key, and return a random value."""
    Entry.objects.create(name=request.headers["Idempotency-Key"])
    return JsonResponse({"value": uuid.uuid4().hex}, status=201)


def send(tenant: str, key: str, url: str) -> Any:
    host = f"{tenant.replace('_', '-')}.example"
    client = Client(raise_request_exception=False)
    return client.post(
        url, {}, content_type="application/json", headers={"Idempotency-Key": key, "Host": host}
    )


def effects(tenant: str, keys: set[str]) -> Counter[str]:
    with schema(tenant):
        return Counter(Entry.objects.filter(name__in=keys).values_list("name", flat=True))


def test_the_tenants_are_on_two_workers() -> None:
    assert len(set(nodes().values())) == 2
    with schema(TENANTS[0]):
        assert IdempotencyKey.objects.count() >= 0
        with durable_transaction(None, using="default"):
            assert is_citus(connection)


@pytest.mark.parametrize("url", ["/plain/", "/phased/"])
def test_one_key_of_two_tenants_is_two_keys(url: str, serve: Serve) -> None:
    serve(plain=plain(work, scope=everybody), phased=phased(work, scope=everybody))
    key = uuid.uuid4().hex
    answers = {tenant: [send(tenant, key, url) for _ in range(2)] for tenant in TENANTS}
    assert [answer.status_code for of_tenant in answers.values() for answer in of_tenant] == [
        201
    ] * 4
    assert len({answer.content for of_tenant in answers.values() for answer in of_tenant}) == 2
    assert [effects(tenant, {key}) for tenant in TENANTS] == [{key: 1}] * 2


def kill() -> None:
    """End the sessions of the coordinator on all workers."""
    coordinator(
        "SELECT run_command_on_workers($$SELECT count(pg_terminate_backend(pid)) FROM"
        " pg_stat_activity WHERE application_name LIKE 'citus_internal%' AND pid <>"
        " pg_backend_pid()$$)"
    )


def move() -> None:
    """Move the first tenant to the worker of the second one, or back."""
    at = nodes()
    if at[TENANTS[0]] == at[TENANTS[1]]:
        host, port = next(iter({*map(tuple, coordinator(WORKERS))} - {at[TENANTS[0]]}))
    else:
        host, port = at[TENANTS[1]]
    coordinator(f"SELECT citus_schema_move('{TENANTS[0]}', '{host}', {port})")


WORKERS = (
    "SELECT nodename, nodeport FROM pg_dist_node WHERE noderole = 'primary' AND shouldhaveshards"
    " AND groupid <> 0"
)


@pytest.mark.parametrize("event", [lambda: None, kill, move], ids=["calm", "kills", "moves"])
def test_storm(event: Callable[[], None], serve: Serve) -> None:
    """Four clients send each key of both tenants until they get a 201, while the event happens
    repeatedly."""
    views = {"plain": plain, "strict": partial(plain, isolation="serializable"), "phased": phased}
    serve(**{name: kind(work, scope=everybody) for name, kind in views.items()})
    keys = {f"{name}-{uuid.uuid4().hex}": f"/{name}/" for name in views for _ in range(8)}
    over, seen = Event(), Counter[int]()

    def happen() -> int:
        times = 0
        while not over.wait(0.2):
            event()
            times += 1
        return times

    def client(number: int) -> dict[tuple[str, str], bytes]:
        pairs = [(tenant, key) for tenant in TENANTS for key in keys]
        chance(number).shuffle(pairs)

        def answered(tenant: str, key: str) -> Any:
            answer = send(tenant, key, keys[key])
            seen[answer.status_code] += 1
            return answer if answer.status_code == 201 else None

        return {pair: eventually(partial(answered, *pair), 60).content for pair in pairs}

    events = in_background(happen)
    try:
        answers = all_at_once(client, 4)
    finally:
        over.set()
    assert events.result(120) > 0
    assert seen.keys() <= {201, 409, 503}, seen
    assert all(of_client == answers[0] for of_client in answers)
    for tenant in TENANTS:
        assert effects(tenant, {*keys}) == dict.fromkeys(keys, 1)


def test_the_processes_work_in_each_schema(serve: Serve) -> None:
    serve(view=phased(work, scope=everybody))
    for tenant in TENANTS:
        with schema(tenant):
            IdempotencyKey.objects.all().delete()
            expired_keys(3)
            with transaction.atomic():
                stage_job("rides_demo.jobs.send_ride_receipt", {})
            assert backlog().due_jobs >= 1
            assert reap_once().deleted == 3
            abandon()
            assert complete_once().stuck == 0
            with process_once("stripe", uuid.uuid4().hex) as first:
                assert first


def test_the_reaper_keeps_a_key_that_a_deferred_constraint_protects() -> None:
    """The workers check the constraint at COMMIT only."""
    with schema(TENANTS[0]):
        IdempotencyKey.objects.all().delete()
        kept, *_ = sorted(expired_keys(8), key=lambda key: key.pk)
        with connection.cursor() as cursor:
            cursor.execute(
                f"CREATE TABLE {TENANTS[0]}.of_project (id int PRIMARY KEY, key_id bigint"
                f" REFERENCES {TENANTS[0]}.idempotency_idempotencykey (id) DEFERRABLE INITIALLY"
                " DEFERRED)"
            )
            cursor.execute("INSERT INTO of_project VALUES (1, %s)", [kept.pk])
        try:
            passed = reap_once()
            assert (passed.deleted, passed.protected) == (7, 1)
        finally:
            with connection.cursor() as cursor:
                cursor.execute(f"DROP TABLE {TENANTS[0]}.of_project")


def test_a_commit_that_a_worker_refuses_has_its_error() -> None:
    def commit() -> None:
        with durable_transaction(None, using="default"):
            Entry.objects.create(name="broken", idempotency_key_id=-1)

    with schema(TENANTS[0]), pytest.raises(IntegrityError):
        commit()


def test_a_commit_of_the_coordinator_confirms_nothing(settings: Settings) -> None:
    settings.IDEMPOTENCY = {"CONFIRM_REPLICATED": True}
    with pytest.raises(NotReplicated, match="does not confirm that the standbys"):
        replication.confirm("default")
