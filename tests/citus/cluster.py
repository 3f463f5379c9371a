"""A coordinator and two workers of Citus on this machine, built from a source tree.

The server is Debian's PostgreSQL 15. Its files are copied, because Citus is installed among them.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from rides_demo.processes.ports import free_port
from rides_demo.processes.system_user import SYSTEM_USER, ensure_system_user, open_parents

VERSION = "15"
SERVER = Path(f"/usr/lib/postgresql/{VERSION}")
SHARED = Path(f"/usr/share/postgresql/{VERSION}")
PG_CONFIG = SERVER / "bin" / "pg_config"
SETTINGS = """
shared_preload_libraries = 'citus'
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
wal_level = logical
shared_buffers = 64MB
max_connections = 300
max_prepared_transactions = 300
max_worker_processes = 32
fsync = off
citus.enable_statistics_collection = off
citus.node_conninfo = 'sslmode=disable'
log_min_messages = warning
"""
DATABASE = "idempotency"


class NotToBeHad(Exception):
    """Citus is not available; the message gives the reason."""


def install(source: Path, target: Path) -> Path:
    """Build Citus if needed, and install it into a copy of the server; return the folder of the
    binaries."""
    binaries = target / SERVER.relative_to("/") / "bin"
    if (target / "installed").exists():
        return binaries
    if not (SERVER / "bin" / "postgres").exists() or not PG_CONFIG.exists():
        raise NotToBeHad(
            f"Install postgresql-{VERSION} and postgresql-server-dev-{VERSION}: {SERVER} has no"
            " server to build for."
        )
    if not (source / "configure").exists():
        raise NotToBeHad(f"CITUS_SOURCE is {str(source)!r}, which has no 'configure'.")
    for folder in (SERVER, SHARED):
        shutil.copytree(
            folder,
            target / folder.relative_to("/"),
            dirs_exist_ok=True,
            symlinks=False,
            ignore=_headers,
        )
    make = ["make", "-C", str(source), "COPT=-O0 -g0", "with_llvm=no", f"PG_CONFIG={PG_CONFIG}"]
    if not (source / "Makefile.global").exists():
        _run(["./configure", f"PG_CONFIG={PG_CONFIG}", "--without-libcurl"], cwd=source)
    _run([*make, "extension"], cwd=source)
    _run([*make, "install-extension", f"DESTDIR={target}"], cwd=source)
    (target / "installed").touch()
    return binaries


def _headers(folder: str, names: list[str]) -> set[str]:
    return {"pgxs", "bitcode"} & {*names}


def _run(command: list[str], cwd: Path) -> None:
    print(" ".join(command), flush=True)  # noqa: T201 - the build lasts minutes
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        sys.stderr.write(done.stdout[-5000:])
        raise NotToBeHad(f"{command[0]} failed with {done.returncode}.")


@contextmanager
def started(binaries: Path, folder: Path) -> Iterator[str]:
    """Start the cluster with new data in ``folder``; yield the URL of a database on the
    coordinator."""
    owner = _owner()
    ports = {name: free_port() for name in ("coordinator", "worker-1", "worker-2")}
    folder.mkdir(parents=True, exist_ok=True)
    if owner:
        open_parents(folder / "data")
        shutil.chown(folder, SYSTEM_USER)
    try:
        for name, port in ports.items():
            data = folder / name
            subprocess.run(
                [
                    binaries / "initdb", "-D", data, "-U", "postgres", "--auth=trust",
                    "-E", "UTF8", "--locale=C.UTF-8", "-N",
                ],
                check=True, stdout=subprocess.DEVNULL, cwd=folder, **owner,
            )  # fmt: skip
            with (data / "postgresql.conf").open("a") as configuration:
                configuration.write(f"{SETTINGS}port = {port}\n")
            log = folder / f"{name}.log"
            subprocess.run(
                [binaries / "pg_ctl", "-D", data, "-l", log, "-w", "start"],
                check=True, stdout=subprocess.DEVNULL, cwd=folder, **owner,
            )  # fmt: skip
        yield _joined(list(ports.values()))
    finally:
        for name in ports:
            if (folder / name / "postmaster.pid").exists():
                subprocess.run(
                    [binaries / "pg_ctl", "-D", folder / name, "-m", "immediate", "stop"],
                    check=False,
                    cwd=folder,
                    **owner,
                )


def _owner() -> dict[str, object]:
    """Return the arguments that set the user of a server, because PostgreSQL does not run as
    root."""
    if os.geteuid() != 0:
        return {}
    ensure_system_user()
    return {"user": SYSTEM_USER, "group": SYSTEM_USER, "extra_groups": []}


def _joined(ports: list[int]) -> str:
    """Create the database on each node, and add the workers to the coordinator; return the
    coordinator's URL."""
    for port in ports:
        with psycopg.connect(
            f"postgresql://postgres@127.0.0.1:{port}/postgres", autocommit=True
        ) as node:
            node.execute(f"CREATE DATABASE {DATABASE}")
        with psycopg.connect(
            f"postgresql://postgres@127.0.0.1:{port}/{DATABASE}", autocommit=True
        ) as node:
            node.execute("CREATE EXTENSION citus")
    url = f"postgresql://postgres@127.0.0.1:{ports[0]}/{DATABASE}"
    with psycopg.connect(url, autocommit=True) as coordinator:
        coordinator.execute("SELECT citus_set_coordinator_host('127.0.0.1', %s)", [ports[0]])
        for port in ports[1:]:
            coordinator.execute("SELECT citus_add_node('127.0.0.1', %s)", [port])
    return url


def prepare(url: str, *schemas: str) -> None:
    """Create new schemas, each of them a shard, and make the first the default of the database's
    sessions."""
    with psycopg.connect(url, autocommit=True) as coordinator:
        # Otherwise sessions would use tables in public that the project with django-tenants left.
        coordinator.execute(
            "DROP TABLE IF EXISTS public.django_migrations, public.customers_domain,"
            " public.customers_customer"
        )
        coordinator.execute("SET citus.enable_schema_based_sharding TO on")
        for schema in schemas:
            coordinator.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")
            coordinator.execute(f"CREATE SCHEMA {schema}")
        coordinator.execute(
            f"ALTER DATABASE {coordinator.info.dbname} SET search_path TO {schemas[0]}, public"
        )
