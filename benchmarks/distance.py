"""Measure requests with a network between the app and the database: each round trip takes 1 ms
longer.

``python -m benchmarks.distance [--quick] [--json FILE]`` starts a PostgreSQL, and a proxy that
delays data by 0.5 ms in each direction, independent of its size. Each kind of request is sent in
turn directly, through the proxy, and directly without prepared statements. The command prints a
table of the medians, their ratio to the bare view at the same distance, and the round trips. The
number of round trips is the same on every machine: each message to PostgreSQL, including BEGIN and
COMMIT.
"""

import argparse
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.proxy import proxy
from rides_demo.processes.embedded import Postgres, postgres_url

ROUNDS, QUICK_ROUNDS = 40, 10
#: Requests of one kind in a round, for each way.
IN_A_ROUND = 10


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="Fewer rounds.")
    parser.add_argument("--json", type=Path, help="Where the figures go.")
    options = parser.parse_args()
    found = measure(options.quick)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print_table(found)
    print("distance: ok")


def measure(quick: bool) -> dict[str, Any]:
    """Return the round trip in microseconds, and for each kind of request its times, its ratio to
    the bare view, and its trips.

    The function starts a process and a server, so the caller need not set up Django.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure_here, QUICK_ROUNDS if quick else ROUNDS).result()


def measure_here(rounds: int) -> dict[str, Any]:
    """Measure in this process, with a server in a temporary folder and a proxy."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        os.environ |= {
            "DATABASE_URL": postgres_url(Path(folder) / "postgres"),
            "DJANGO_SETTINGS_MODULE": "rides_demo.settings",
            "RIDES_RUN_FOLDER": folder,
        }
        with (
            Postgres(Path(folder) / "postgres", max_connections=20) as server,
            proxy(Path(folder), server.sockets) as far,
        ):
            import django

            django.setup()
            logging.disable(logging.CRITICAL)
            return in_turn(far, rounds)


def in_turn(far: Path, rounds: int) -> dict[str, Any]:
    """Send each kind of request each way in turn; return the figures."""
    from django.core.management import call_command
    from django.db import connections
    from django.test.utils import CaptureQueriesContext

    from benchmarks.counts import create_table, sent

    call_command("migrate", verbosity=0)
    create_table()
    # Three connections under one alias, which all views use.
    ways = {
        "direct": connections["default"],
        **{way: connections.create_connection("default") for way in ("far", "unprepared")},
    }
    ways["far"].settings_dict = {**ways["far"].settings_dict, "HOST": str(far)}
    of_unprepared = ways["unprepared"].settings_dict
    options = {
        name: value
        for name, value in of_unprepared["OPTIONS"].items()
        if name != "prepare_threshold"
    }
    ways["unprepared"].settings_dict = {**of_unprepared, "OPTIONS": options}
    trips = {}
    taken: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for name, (call, make, status) in cases().items():
            for _ in range(IN_A_ROUND):
                for way, connection in ways.items():
                    connections["default"] = connection
                    request = make()
                    start = time.perf_counter()
                    answer = call(request)
                    microseconds = 1e6 * (time.perf_counter() - start)
                    if answer.status_code != status:
                        raise RuntimeError(
                            f"{name}: {answer.status_code} instead of {status}: {answer.content!r}"
                        )
                    if number:  # The first round only warms up.
                        taken.setdefault((name, way), []).append(microseconds)
        if number % 10 == 0:
            print(f"distance: round {number} of {rounds}", flush=True)
    for name, (call, make, _) in cases().items():
        with CaptureQueriesContext(connections["default"]) as statements:
            call(make())
        trips[name] = len(sent(statements.captured_queries))
    for connection in ways.values():
        connection.close()
    middle = {key: median(values) for key, values in taken.items()}
    rows = []
    for name, count in trips.items():
        lower, _, upper = quantiles(taken[name, "far"], n=4)
        rows.append(
            {
                "case": name,
                "median_us": round(middle[name, "far"]),
                "q1_us": round(lower),
                "q3_us": round(upper),
                "ratio": round(middle[name, "far"] / middle["bare", "far"], 2),
                "direct_us": round(middle[name, "direct"]),
                "direct_ratio": round(middle[name, "direct"] / middle["bare", "direct"], 2),
                "unprepared_us": round(middle[name, "unprepared"]),
                "round_trips": count,
            }
        )
    return {
        "round_trip_us": round(middle["one statement", "far"] - middle["one statement", "direct"]),
        "rows": rows,
    }


def cases() -> dict[str, tuple[Callable[[Any], Any], Callable[[], Any], int]]:
    """Return each kind of request: the view, the function that creates the request, and the
    expected status."""
    from django.db import connection
    from django.http import HttpResponse

    from benchmarks import views
    from idempotency.decorators import idempotent
    from idempotency.phases import atomic_phase

    def ask(request: Any) -> Any:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        return HttpResponse()

    @idempotent(recovery_points=[], scope=views.caller)
    def one_phase(request: Any) -> Any:
        for _ in request.idempotency_key.phases():
            with atomic_phase(request.idempotency_key) as phase:
                phase.set_response(views.answer())
        return request.idempotency_key.response()

    def again() -> Any:
        return views.request("again")

    views.plain(again())
    return {
        "one statement": (ask, views.request, 200),
        "bare": (views.bare, views.request, 201),
        "plain first": (views.plain, views.request, 201),
        "plain replay": (views.plain, again, 201),
        "phased first": (one_phase, views.request, 201),
        "phased replay": (one_phase, again, 201),
        "ride": (views.ride, views.request, 201),
    }


def print_table(found: dict[str, Any]) -> None:
    """Print the figures."""
    print(f"a round trip takes {found['round_trip_us']} us more")
    for row in found["rows"]:
        spread = f"({row['q1_us']}-{row['q3_us']})"
        print(
            f"{row['case']:15} {row['median_us']:6} us {spread:15} ratio {row['ratio']:5.2f}  round"
            f" trips {row['round_trips']:3}  without distance {row['direct_us']:6} us, ratio"
            f" {row['direct_ratio']:5.2f}"
        )


if __name__ == "__main__":
    main()
