"""The embedded services keep what they acknowledged, and say clearly why they do not start."""

import os
import shutil
import signal
from pathlib import Path

import psycopg
import pytest
import redis

from rides_demo.processes import embedded
from rides_demo.processes.embedded import EmbeddedServerError, Postgres, Redis
from rides_demo.processes.ports import free_port
from rides_demo.processes.replicated import PostgresPair
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.postgres, pytest.mark.processes]


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory):
    with Postgres(tmp_path_factory.mktemp("data") / "postgres") as server:
        yield server


def test_committed_rows_survive_every_way_to_end(postgres):
    with psycopg.connect(postgres.url) as connection:
        assert connection.execute("SHOW fsync").fetchone() == ("on",)
        connection.execute("CREATE TABLE kept (how text)")
    for how in (postgres.stop, postgres.crash, postgres.kill):
        with psycopg.connect(postgres.url) as connection:
            connection.execute("INSERT INTO kept VALUES (%s)", [how.__name__])
        how()
        assert not postgres.running
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(postgres.url)
        postgres.start()
    with psycopg.connect(postgres.url) as connection:
        assert connection.execute("SELECT array_agg(how) FROM kept").fetchone() == (
            ["stop", "crash", "kill"],
        )


def test_a_lost_primary_is_replaced_by_its_standby_at_the_same_address(short_folder):
    with PostgresPair(short_folder / "postgres") as pair:
        with psycopg.connect(pair.url) as connection:
            connection.execute("CREATE TABLE kept (number int)")
        for number, moves in (
            (signal.SIGQUIT, False),
            (signal.SIGKILL, True),
            (signal.SIGKILL, True),
        ):
            with psycopg.connect(pair.url) as connection:
                connection.execute("INSERT INTO kept VALUES (%s)", [int(number)])
            before = pair.primary.data
            os.kill(pair.pid, number)
            eventually(lambda: not pair.running)
            pair.start()
            assert (pair.primary.data != before, pair.running) == (moves, True)
        with psycopg.connect(pair.url) as connection:
            assert connection.execute("SELECT count(*) FROM kept").fetchone() == (3,)
            names = connection.execute("SHOW synchronous_standby_names").fetchone()
            standbys = connection.execute("SELECT sync_state FROM pg_stat_replication").fetchall()
        assert (names, standbys) == (("*",), [("sync",)])


def test_a_second_redis_on_the_same_data_is_refused(short_folder):
    with Redis(short_folder / "redis") as server:
        with pytest.raises(
            EmbeddedServerError, match=r"already runs.*another folder with the variable PORT"
        ):
            Redis(short_folder / "redis").start()
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()


def test_a_second_server_on_the_same_data_is_refused(postgres):
    with pytest.raises(
        EmbeddedServerError, match=r"already runs.*another folder with the variable PORT"
    ):
        Postgres(postgres.data).start()
    assert psycopg.connect(postgres.url).close() is None


def test_what_redis_acknowledged_survives_a_kill(short_folder):
    with Redis(short_folder / "redis") as server, redis.Redis.from_url(server.url) as client:
        client.set("ride", "booked")
        server.kill()
        with pytest.raises(redis.ConnectionError):
            client.get("ride")
        server.start()
        assert client.get("ride") == b"booked"
        server.restart()
        assert client.get("ride") == b"booked"


def test_a_long_path_gets_a_short_socket(tmp_path):
    folder = tmp_path / ("x" * 120) / "redis"
    with Redis(folder) as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()
    assert len(str(server.socket)) <= embedded.SOCKET_PATH_BYTES
    shutil.rmtree(server.sockets)


def test_a_missing_wheel_says_what_to_install():
    with pytest.raises(
        EmbeddedServerError,
        match=r"nothing-like-it is not installed.*requirements/demo.txt.*DATABASE_URL",
    ):
        embedded.wheel_binary("no_such_wheel", "bin/x", "nothing-like-it", "DATABASE_URL")


@pytest.mark.parametrize("service", [Postgres, Redis])
def test_a_folder_that_cannot_be_written_is_named(service, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        EmbeddedServerError, match=f"cannot use the folder .*Choose a folder.*{service.instead}"
    ):
        service(tmp_path / "file" / "data").start()


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("mount"), reason="needs root, to mount a small disk"
)
@pytest.mark.parametrize("service", [Postgres, Redis])
def test_a_full_disk_is_named(service, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.system(f"mount -t tmpfs -o size=10m rides-test {disk} 2>/dev/null"):
        pytest.skip("may not mount")
    try:
        with pytest.raises(
            EmbeddedServerError,
            match=f"The disk that holds .* is full.*Free some space.*{service.instead}",
        ):
            service(disk / "data").start()
    finally:
        os.system(f"umount {disk}")


def test_what_postgres_says_about_a_full_disk_is_translated(postgres):
    message = postgres.explain("FATAL:  could not write lock file: No space left on device")
    assert "is full" in message


def test_a_process_that_is_killed_takes_its_services_along(short_folder):
    """The guard: no PostgreSQL is left behind by ``kill -9`` of the process that started it."""
    import subprocess
    import sys

    program = (
        "import os, signal, sys; from pathlib import Path; from rides_demo.processes.embedded"
        " import Postgres, Redis;p = Postgres(Path(sys.argv[1]) / 'postgres'); p.start(); r ="
        " Redis(Path(sys.argv[1]) / 'redis'); r.start();print(p.pid, r.pid, flush=True);"
        " os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, short_folder],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_a_free_port_is_free():
    assert free_port() > 1024
