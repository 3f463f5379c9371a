"""The machine-independent figures of docs/explanation/scaling.md are correct for the code."""

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from django.core.management import load_command_class
from django.db import connection, transaction

from benchmarks import proxy, size_cases, views
from benchmarks.counts import Counts, count, create_table
from benchmarks.report import RESULTS
from benchmarks.sizes import BYTES, SIZES
from idempotency import _key_completion
from idempotency.conf import Settings
from idempotency.jobs import stage_job
from idempotency.management.loop import Loop
from idempotency.models import IdempotencyKey, StagedJob
from idempotency.monitoring.heartbeats import LOOPS
from tests.factories import IdempotencyKeyFactory
from tests.kit.ageing import ago
from tests.kit.pages import says
from tests.kit.tables import truncate
from tests.kit.threads import background
from tests.kit.waiting import eventually

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "explanation" / "scaling.md").read_text()
VIEWS = {"plain view": views.plain, "ride of four commits": views.ride}
#: The table of the keys grows by whole pages.
KEYS = 500

pytestmark = pytest.mark.postgres


@pytest.fixture(autouse=True)
def _table(transactional_db: None) -> Iterator[None]:
    truncate(connection, IdempotencyKey, StagedJob)
    create_table()
    yield
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE bench_row")


def documented(what: str, column: str) -> int:
    """Return a figure of the page's first table."""
    header = next(line for line in PAGE.splitlines() if line.startswith("| |"))
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {what}"))
    cells = dict(zip(re.findall(r"[^|]+", header)[1:], re.findall(r"[^|]+", row)[1:], strict=True))
    return int(cells[f" {column} "].replace(",", ""))


def counts(view: views.View, body: str = views.BODY) -> list[Counts]:
    """Return the costs of requests with new keys, after PostgreSQL has read its catalogue."""
    requests = [views.request(body=body) for _ in range(60)]
    return [count(lambda request=request: view(request)) for request in requests][20:]


@pytest.mark.parametrize("name", VIEWS)
def test_what_a_request_costs(name: str) -> None:
    found = counts(VIEWS[name])
    assert len(found[0].statements) == documented("round trips", name)
    assert found[0].commits == documented("commits", name)
    assert median(each.wal_bytes for each in found) == pytest.approx(
        documented("WAL", name), rel=0.1
    )


@pytest.mark.parametrize(("name", "cold"), [("plain view", 0), ("ride of four commits", 1)])
def test_only_the_end_of_a_phased_key_touches_an_index(name: str, cold: int) -> None:
    """A plain key is inserted with the columns of its end. Each other update stays on its page
    (HOT)."""
    found = counts(VIEWS[name])
    assert all(each.updates > cold for each in found)
    touched = sum(each.updates - each.hot_updates for each in found)
    assert touched / len(found) == pytest.approx(cold, abs=0.1), "now and then a page is full"


def bytes_on_disk(view: views.View, make_body: Callable[[], str]) -> float:
    """Return the bytes of a key in the table and its indexes, before a VACUUM."""
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE idempotency_idempotencykey CASCADE")
        cursor.execute("ALTER TABLE idempotency_idempotencykey SET (autovacuum_enabled = off)")
        for _ in range(KEYS):
            view(views.request(body=make_body()))
        cursor.execute(BYTES)
        size: int = sum(cursor.fetchone()[:2])
        cursor.execute("ALTER TABLE idempotency_idempotencykey RESET (autovacuum_enabled)")
    return size / KEYS


def body_of(size: int) -> str:
    """Return a body that does not compress."""
    return json.dumps({"a": os.urandom(size // 2).hex()})


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.full
def test_what_a_key_takes_on_disk(name: str) -> None:
    assert bytes_on_disk(VIEWS[name], lambda: views.BODY) == pytest.approx(
        documented("on disk", name), rel=0.15
    )


@pytest.mark.parametrize(
    ("name", "of_wal", "on_disk"),
    [("plain view", 0, 0), ("ride of four commits", 1, 4.1)],
)
@pytest.mark.full
def test_what_a_kilobyte_of_body_adds(name: str, of_wal: float, on_disk: float) -> None:
    assert all(says(PAGE, kilobytes, "KB") for kilobytes in (of_wal, on_disk) if kilobytes)
    view = VIEWS[name]
    small, large = (
        median(each.wal_bytes for each in counts(view, body_of(size))) for size in (20, 1020)
    )
    assert large - small == pytest.approx(of_wal * 1000, rel=0.15, abs=30)
    small, large = (bytes_on_disk(view, lambda size=size: body_of(size)) for size in (20, 1020))
    # Two pages of 8 KB, divided by the number of requests.
    assert large - small == pytest.approx(on_disk * 1000, rel=0.15, abs=70)


@pytest.mark.parametrize("name", size_cases.cases())
def test_what_is_measured_at_each_size_does_what_it_says(name: str) -> None:
    size_cases.insert("default", "fill", 60, oldest_hours=60)
    _, case = size_cases.cases()[name]
    assert case("default", 60) > 0


def test_the_proxy_adds_the_way_there_and_back(short_folder: Path) -> None:
    server = connection.settings_dict["HOST"] or connection.settings_dict["OPTIONS"].get("host", "")
    if not Path(server, proxy.POSTGRES).exists():
        pytest.skip("the server has no unix socket here")
    with proxy.proxy(short_folder, Path(server)) as far:
        login = {
            "host": str(far),
            "dbname": connection.settings_dict["NAME"],
            "user": connection.settings_dict["USER"],
        }
        with psycopg.connect(**login, autocommit=True) as way:
            start = time.monotonic()
            for number in range(20):
                assert way.execute("SELECT %s::int", [number]).fetchone() == (number,)
            assert time.monotonic() - start > 20 * 2 * proxy.ONE_WAY_SECONDS


def test_what_a_staged_job_costs() -> None:
    def stage() -> None:
        with transaction.atomic():
            stage_job(
                "rides_demo.jobs.send_ride_receipt",
                {"ride_id": 1, "amount_cents": 2000, "label": "receipt"},
            )

    found = [count(stage) for _ in range(30)][10:]
    assert len(found[0].besides_the_work) == documented("round trips", "staged job")
    assert median(each.wal_bytes for each in found) == pytest.approx(
        documented("WAL", "staged job"), rel=0.15
    )


def test_the_example_is_computed_right() -> None:
    keys = 50 * 3600 * Settings().RETENTION_HOURS
    assert f"{keys / 1e6:.0f} million" in PAGE
    assert f"{keys * documented('on disk', 'plain view') / 1e9:.0f} GB" in PAGE
    assert f"{50 * documented('WAL', 'plain view') * 86_400 / 1e9:.1f} GB" in PAGE
    assert says(PAGE, 50 * documented("commits", "plain view"), "a second")
    assert re.search(rf"^\| [^|]*processes [^|]*\|.*\| {len(LOOPS)} \|$", PAGE, re.M)


def test_the_round_trips_are_those_of_the_requests() -> None:
    def trips(view: views.View) -> int:
        for _ in range(3):
            view(views.request("again"))
        return len(count(lambda: view(views.request("again"))).statements)

    expected = documented("round trips", "plain view"), trips(views.plain), trips(views.ride)
    (row,) = re.findall(r"^\| distance .*$", PAGE, re.M)
    assert ", ".join(map(str, expected)) in ", ".join(re.findall(r"\d+", row)), (
        "a millisecond for each"
    )


def test_the_pages_of_a_look_are_those_that_were_measured() -> None:
    (row,) = re.findall(r"^\| size of the table .*$", PAGE, re.M)
    said = re.findall(r"\b\d+\b(?! thousand| million)", row)
    measured = {
        table["keys"]: table["pages_a_look"]
        for table in json.loads(RESULTS.read_text())["sizes"]["tables"]
    }
    # A quick run omits the larger table.
    assert all(str(measured[size]) in said for size in SIZES if size in measured)
    assert SIZES[0] in measured


@pytest.mark.parametrize("max_age", [0, None])
def test_a_completer_uses_a_connection_for_each_thread(
    max_age: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", max_age)
    together, seen = threading.Barrier(2), []

    def counted() -> int:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND"
                " backend_type = 'client backend'"
            )
            return int(cursor.fetchone()[0]) - 1  # without the connection of the test

    def look(*of_key: Any) -> None:
        connection.ensure_connection()
        together.wait(60)
        # The server ends a session a little later than its client closes the connection.
        seen.append(eventually(lambda: (count := counted()) == 2 and count))
        together.wait(60)

    monkeypatch.setattr(_key_completion, "complete_by_id", look)
    for _ in range(2):
        IdempotencyKeyFactory(created_at=ago(hours=1), last_run_at=ago(hours=1))
    stop: Any = SimpleNamespace(requested=lambda wait_seconds=0: bool(seen), request=list)
    given = {"using": "default", "batch_size": 100, "concurrency": 2, "dry_run": False}
    run_pass, threads = load_command_class("idempotency", "complete_keys").pass_of_loop(given)
    loop = Loop(
        "complete_keys",
        run_pass,
        interval=1,
        stop=stop,
        say=print,
        using="default",
        threads=threads,
    )
    with background(loop.run) as run:
        run.result(60)
    assert seen == [2] * 2
