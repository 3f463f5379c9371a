"""Clients over HTTP: gunicorn with two workers of eight threads (gthread) on a unix socket, one
system at a time.

Each server also serves the bare view, which is measured in turn with the views of the system. A
ratio compares the responses per second of the same round. Each first request has a new key; each
client replays its own key, unless noted otherwise.
"""

import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

from benchmarks import clients
from benchmarks.ground import Ground
from rides_demo.processes.process import Process, ProcessError

WORKERS, THREADS = 2, 8
#: Rounds, and seconds of each kind of request in a round.
ROUNDS, SECONDS = 5, 1.0
QUICK_ROUNDS, QUICK_SECONDS = 2, 0.5
#: The warm-up. On each connection, a statement is prepared at its fifth use, and its plan is fixed
#: at its tenth use.
WARM_UP_SECONDS, QUICK_WARM_UP_SECONDS = 1.0, 0.3
COUNTS = (1, 4, 16)
#: The two numbers of clients for which the replays of one key are compared.
ONE_KEY_CLIENTS = (1, 8)


@dataclass(frozen=True)
class Kind:
    """The requests of the clients: the view, and ``repeat`` of ``clients.run``."""

    view: str
    repeat: str = ""


class Server(Process):
    """gunicorn with one system."""

    def __init__(self, system: str, servers: Ground) -> None:
        self.socket = servers.folder / f"{system[:12]}.sock"
        command = [
            sys.executable, "-m", "gunicorn", "benchmarks.wsgi", "--bind", f"unix:{self.socket}",
            "--worker-class", "gthread", "--workers", str(WORKERS), "--threads", str(THREADS),
            "--keep-alive", "75", "--log-level", "critical",
        ]  # fmt: skip
        environment = {**os.environ, "BENCH_SYSTEM": system}
        super().__init__(
            "gunicorn",
            command,
            environment=environment,
            output=servers.folder / f"gunicorn-{system}.log",
        )

    def is_ready(self) -> bool:
        """Return whether the bare view returns 201."""
        try:
            client = clients.Client(self.socket)
        except OSError:
            return False
        try:
            return client.post("bare", str(uuid4())) == 201
        except OSError:
            return False
        finally:
            client.close()


def measure(servers: Ground, views: dict[str, list[str]], quick: bool) -> dict[str, Any]:
    """Return for each system, number of clients and kind of request: 2xx responses a second, their
    ratio, and the statuses.

    ``views`` are the names of each system's views. The tables of the systems must exist.
    """
    found: dict[str, Any] = {
        "server": f"gunicorn, gthread, {WORKERS} workers of {THREADS} threads, unix socket"
    }
    for name, of_system in views.items():
        try:
            found[name] = _system(name, of_system, servers, quick)
        except (ProcessError, OSError) as error:
            found[name] = {
                "error": (
                    f"{type(error).__name__}:"
                    f" {error}{_last_line(servers.folder / f'gunicorn-{name}.log')}"
                )
            }
        print(f"over HTTP: {name} {found[name].get('error', 'measured')}", flush=True)
    return found


def _system(name: str, views: list[str], servers: Ground, quick: bool) -> dict[str, Any]:
    sent = {"bare": Kind("bare")}
    for view in views:
        sent |= {f"{view} first": Kind(view), f"{view} replay": Kind(view, "each")}
    rounds, seconds = (QUICK_ROUNDS, QUICK_SECONDS) if quick else (ROUNDS, SECONDS)
    if name != "ours":
        rounds = (rounds + 1) // 2
    with Server(name, servers) as server:
        for kind in sent.values():  # Every thread then has a connection with prepared statements.
            clients.run(
                server.socket,
                kind.view,
                COUNTS[-1],
                QUICK_WARM_UP_SECONDS if quick else WARM_UP_SECONDS,
                repeat=kind.repeat,
            )
        counts = COUNTS if name == "ours" or not quick else COUNTS[-1:]
        found: dict[str, Any] = {
            "clients": {
                str(count): _rounds(server, sent, count, rounds, seconds) for count in counts
            }
        }
        if name == "ours":
            found["one_key"] = _one_key(server, rounds, seconds)
            found["serializable"] = _repeated_phases(server, servers, rounds * seconds)
    return found


def _rounds(
    server: Server, sent: dict[str, Kind], count: int, rounds: int, seconds: float
) -> dict[str, Any]:
    loads: dict[str, list[clients.Load]] = {kind: [] for kind in sent}
    for _ in range(rounds):
        for name, kind in sent.items():
            loads[name].append(
                clients.run(server.socket, kind.view, count, seconds, repeat=kind.repeat)
            )
    return {name: _summary(of_kind, loads["bare"]) for name, of_kind in loads.items()}


def _summary(loads: list[clients.Load], bare: list[clients.Load]) -> dict[str, Any]:
    statuses: Counter[int] = Counter()
    for load in loads:
        statuses.update(load.statuses)
    taken = sorted(seconds for load in loads for seconds in load.taken)
    return {
        "answers_a_second": round(median(load.answers for load in loads)),
        "of_bare": round(
            median(load.answers / beside.answers for load, beside in zip(loads, bare, strict=True)),
            2,
        ),
        "p50_ms": round(1e3 * taken[len(taken) // 2], 1),
        "p99_ms": round(1e3 * taken[int(0.99 * (len(taken) - 1))], 1),
        "conflicts": statuses[409],
        "statuses": {str(status): number for status, number in sorted(statuses.items())},
    }


def _one_key(server: Server, rounds: int, seconds: float) -> dict[str, Any]:
    """Measure the replays of one finished ride, with one client and then with several."""
    one, several = ONE_KEY_CLIENTS
    key = str(uuid4())
    pairs = []
    for _ in range(rounds):
        loads = {
            count: clients.run(server.socket, "ride", count, seconds, repeat=key)
            for count in ONE_KEY_CLIENTS
        }
        pairs.append(loads)
    return {
        **{
            str(count): round(median(pair[count].answers for pair in pairs))
            for count in ONE_KEY_CLIENTS
        },
        "growth": round(median(pair[several].answers / pair[one].answers for pair in pairs), 2),
        "conflicts": sum(load.statuses[409] for pair in pairs for load in pair.values()),
    }


def _repeated_phases(server: Server, servers: Ground, seconds: float) -> dict[str, Any]:
    """Count the phases of the ride that ran twice, with 16 clients.

    Each phase inserts one row. A number of the sequence without a row belongs to a phase that was
    rolled back and run again.
    """
    import psycopg

    read = "SELECT (SELECT last_value FROM bench_row_id_seq), (SELECT count(*) FROM bench_row)"
    with psycopg.connect(servers.postgres.url, autocommit=True) as connection:
        numbers, rows = connection.execute(read).fetchone()
        load = clients.run(server.socket, "ride", COUNTS[-1], seconds)
        numbers_after, rows_after = connection.execute(read).fetchone()
    phases = rows_after - rows
    return {
        "clients": COUNTS[-1],
        "answers_a_second": round(load.answers),
        "conflicts": load.statuses[409],
        "statuses": {str(status): number for status, number in sorted(load.statuses.items())},
        "phases": phases,
        "run_again": numbers_after - numbers - phases,
        "run_again_share": round((numbers_after - numbers - phases) / phases, 4),
    }


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return f" ({lines[-1]})" if lines else ""
