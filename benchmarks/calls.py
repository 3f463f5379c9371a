"""Count the Python function calls of a request, and of an operation (``make calls``). The counts
have no noise.

Each figure is the mean of REQUESTS requests, or calls of an operation, of a signed-in user, after
as many to warm up. The profile covers the view, not the creation of the request. The file
``calls.json`` has the figures of the last change that stored them. A figure that rises by more than
2 % over them is a failure.
"""

import argparse
import cProfile
import json
import platform
import pstats
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from uuid import uuid4

import dj_database_url
import django
import psycopg
from django.conf import settings

from benchmarks.ground import stop_in_order
from rides_demo.processes.embedded import Postgres

REQUESTS = 300
#: A figure may be at most this much above the stored one.
TOLERANCE = 1.02
STORED = Path(__file__).with_name("calls.json")
BODY = json.dumps({"amount": 2000, "currency": "usd", "items": [1, 2, 3]})

Figures = dict[str, int]


def versions() -> dict[str, str]:
    """Return the versions with which two figures can be compared."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "django": django.get_version(),
        "psycopg": f"{psycopg.__version__} ({psycopg.pq.__impl__})",
    }


def measure() -> Figures:
    """Return the figures, measured on a PostgreSQL in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="calls-") as folder, Postgres(Path(folder)) as postgres:
        _set_up_django(postgres.url)
        from django.db import connection

        try:
            return _figures()
        finally:
            connection.close()


def rises(stored: Figures, measured: Figures) -> list[str]:
    """Return the names of the figures that are too far above the stored ones."""
    return [name for name, calls in measured.items() if calls > stored.get(name, calls) * TOLERANCE]


def _set_up_django(url: str) -> None:
    database = dj_database_url.parse(url) | {"OPTIONS": {"prepare_threshold": 5}}
    database["OPTIONS"] |= dj_database_url.parse(url).get("OPTIONS", {})
    settings.configure(
        SECRET_KEY="calls" * 10,
        USE_TZ=True,
        ALLOWED_HOSTS=["testserver"],
        DATABASES={"default": database},
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        INSTALLED_APPS=[
            "django.contrib.contenttypes",
            "django.contrib.auth",
            "django.contrib.sessions",
            "idempotency",
            "benchmarks",
        ],
    )
    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)


def _figures() -> Figures:
    return _of_views() | _of_operations()


def _of_views() -> Figures:
    from benchmarks.call_views import bare, phased, plain

    keys = _new_keys()
    for view in (bare, plain, phased):
        _calls(view, _requests(_new_keys()))
    _calls(plain, _requests(keys[:1] * REQUESTS))
    return {
        "bare": _calls(bare, _requests(keys)),
        "plain, first": _calls(plain, _requests(keys[1:])),
        "plain, replay": _calls(plain, _requests(keys[1:])),
        "phased, first": _calls(phased, _requests(others := _new_keys())),
        "phased, replay": _calls(phased, _requests(others)),
    }


def _of_operations() -> Figures:
    from django.contrib.auth.models import User
    from django.db import transaction

    from benchmarks import operations

    user = User(pk=1)

    def bare(key: str) -> None:
        with transaction.atomic():
            operations.bare(name=key)

    def plain(key: str) -> None:
        operations.plain.by(user).once(key, name=key)

    def call(key: str) -> None:
        operations.call.by(user).once(key, name=key)

    for work in (bare, plain, call):
        _calls(work, _new_keys())
    return {
        "bare function": _calls(bare, _new_keys()),
        "plain operation, first": _calls(plain, keys := _new_keys()),
        "plain operation, repeat": _calls(plain, keys),
        "with a call, first": _calls(call, others := _new_keys()),
        "with a call, repeat": _calls(call, others),
    }


def _new_keys() -> list[str]:
    return [uuid4().hex for _ in range(REQUESTS)]


def _calls(work: Callable[[Any], object], arguments: list[Any]) -> int:
    """Return the mean number of function calls of the work with one of the arguments."""
    profile = cProfile.Profile()
    profile.enable()
    for argument in arguments:
        work(argument)
    profile.disable()
    return round(pstats.Stats(profile).total_calls / len(arguments))  # type: ignore[attr-defined]


def _requests(keys: Iterable[str]) -> list[Any]:
    return [_request(key) for key in keys]


def _request(key: str) -> Any:
    from django.contrib.auth.models import User
    from django.test import RequestFactory

    headers = {"Idempotency-Key": key}
    request: Any = RequestFactory().post(
        "/", BODY, content_type="application/json", headers=headers
    )
    request.user = User(pk=1)
    return request


def main() -> None:
    """Print the figures beside the stored ones. Exit with status 1 if a figure rises too far."""
    parser = argparse.ArgumentParser(description="Count the function calls of requests.")
    parser.add_argument("--store", action="store_true", help="Store the figures in calls.json.")
    store = parser.parse_args().store
    stop_in_order()
    measured, stored = measure(), json.loads(STORED.read_text())
    print(f"{'':24}{'measured':>9}{'stored':>9}")
    for name, calls in measured.items():
        print(f"{name:24}{calls:9}{stored['calls'].get(name, ''):>9}")
    if store:
        content = {"versions": versions(), "calls": measured}
        STORED.write_text(json.dumps(content, indent=2) + "\n")
    elif versions() != stored["versions"]:
        print(f"Nothing is compared: these are the versions {versions()},")
        print(f"and the stored figures are of {stored['versions']}.")
    elif risen := rises(stored["calls"], measured):
        sys.exit(f"More than 2 % above the stored figure: {'; '.join(risen)}.")


if __name__ == "__main__":
    main()
