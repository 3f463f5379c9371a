"""One system in a separate process that executes commands: measure a round, or send a number of
requests of one kind.

Each system has a separate process, because some systems start threads, and a broken system must not
affect the others. Each process also measures the bare view, in the same rounds. A ratio is relative
to the bare view of the same process.
"""

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module, metadata
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, NamedTuple
from uuid import uuid4

from benchmarks.ground import server_nanoseconds

#: The modules in ``benchmarks.peers``.
PEERS = (
    "idemkit",
    "django_idempotency_key",
    "djangorestframework_idempotency_key",
    "drf_idempotencykey",
    "dbos",
)
#: The modules of this app; those of other systems are in ``benchmarks.peers``.
OURS = {
    "ours": "benchmarks.ours",
    "operations": "benchmarks.our_operations",
    "traces": "benchmarks.our_traces",
}
#: The longest wait for an answer. A round, or a start with its migrations, takes seconds.
PATIENCE_SECONDS = 120


class Failed(Exception):
    """A system cannot run; the message gives the reason."""


@dataclass(frozen=True)
class Case:
    """One kind of request: the view, the function that creates the request, and the expected
    status."""

    view: Callable[[Any], Any]
    make: Callable[[], Any]
    status: int


class Taken(NamedTuple):
    """The times of the requests of one kind in a round."""

    #: The time of each request.
    microseconds: list[float]
    #: The processor time of one request, in the process of the system and in the processes of
    #: PostgreSQL.
    client_us: float
    server_us: float


class Contestant:
    """The process of a system, controlled from the process that started it."""

    def __init__(self, name: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.name = name
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(name, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, *command: Any) -> Any:
        """Send a command and return the answer; raise Failed if the command fails, or the process
        does not answer."""
        try:
            self._pipe.send(command)
            if not self._pipe.poll(PATIENCE_SECONDS):
                raise Failed(f"no answer to {command[0]!r} within {PATIENCE_SECONDS} s")
            kind, answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise Failed(f"its process ended: {error!r}") from None
        if kind == "error":
            raise Failed(answer)
        return answer

    def stop(self) -> None:
        """Ask the process to end; terminate it if it does not."""
        try:
            self.ask("stop")
        except Failed:
            self._process.terminate()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def load(name: str) -> ModuleType:
    """Prepare a system in this process and return its module; Django must be set up."""
    module = import_module(OURS.get(name) or f"benchmarks.peers.{name}")
    getattr(module, "prepare", lambda: None)()
    return module


def serve(name: str, pipe: Connection) -> None:
    """Execute commands until the command ``stop``."""
    import logging

    import django

    django.setup()
    logging.disable(logging.CRITICAL)
    system: ModuleType | None = None
    with ExitStack() as kept:
        while True:
            command, *arguments = pipe.recv()
            if command == "stop":
                break
            try:
                if system is None:
                    system = load(name)
                answer = COMMANDS[command](system, kept, *arguments)
            except BaseException as error:  # The table shows the error, whatever it is.
                where = traceback.extract_tb(error.__traceback__)[-1]
                text = f"{type(error).__name__}: {error}"[:500]
                pipe.send(
                    (
                        "error",
                        f"{text} ({where.filename.rpartition('site-packages/')[2]}:{where.lineno})",
                    )
                )
            else:
                pipe.send(("answer", answer))
    getattr(system, "close", lambda: None)()
    from django.db import connections

    connections.close_all()
    pipe.send(("answer", None))


@contextmanager
def cases(system: ModuleType) -> Iterator[dict[str, Case]]:
    """Yield each kind of request that the system supports, with new keys."""
    from benchmarks import views

    found = {"bare": Case(views.bare, views.request, 201)}
    if bare := getattr(system, "BARE", None):
        found["bare in its framework"] = Case(bare, views.request, 201)
    with ExitStack() as held:
        for name, view in system.VIEWS.items():
            known = str(uuid4())
            answered(view, views.request(known), 201)
            found[f"{name} first"] = Case(view, views.request, 201)
            found[f"{name} replay"] = Case(view, lambda known=known: views.request(known), 201)
            if mismatch := getattr(system, "MISMATCH", None):
                found[f"{name} mismatch"] = Case(
                    view, lambda known=known: views.request(known, "{}"), mismatch
                )
            if hold := getattr(system, "HELD", {}).get(name):
                key = str(uuid4())
                held.enter_context(hold(key))
                found[f"{name} conflict"] = Case(
                    view, lambda key=key: views.request(key), getattr(system, "CONFLICT", 409)
                )
        yield found


def answered(view: Callable[[Any], Any], request: Any, status: int) -> float:
    """Send the request and return its microseconds; raise RuntimeError if the response has another
    status."""
    start = time.perf_counter()
    response = view(request)
    taken = 1e6 * (time.perf_counter() - start)
    if response.status_code != status:
        raise RuntimeError(
            f"answered {response.status_code} instead of {status}: {response.content[:200]!r}"
        )
    return taken


def _versions(system: ModuleType, kept: ExitStack) -> dict[str, str]:
    from idempotency import __version__

    ours = system.DISTRIBUTION == "django-idempotency"
    return {
        "distribution": system.DISTRIBUTION,
        "version": __version__ if ours else metadata.version(system.DISTRIBUTION),
    }


def _round(system: ModuleType, kept: ExitStack, count: int) -> dict[str, Taken]:
    """Send ``count`` requests of each kind, kind by kind; return their times."""
    with cases(system) as known:
        taken = {}
        for name, case in known.items():
            requests = [case.make() for _ in range(count)]
            server, client = server_nanoseconds(), time.process_time_ns()
            microseconds = [answered(case.view, request, case.status) for request in requests]
            client = time.process_time_ns() - client
            servers = sum(
                now - server.get(process, 0) for process, now in server_nanoseconds().items()
            )
            taken[name] = Taken(microseconds, client / 1000 / count, servers / 1000 / count)
    return taken


def _kinds(system: ModuleType, kept: ExitStack) -> list[str]:
    with cases(system) as known:
        return list(known)


def _get_set(system: ModuleType, kept: ExitStack, kind: str, count: int) -> None:
    """Prepare requests of one kind for "go". Send some requests before, so that "go" does no work
    of a first request."""
    kept.close()
    case = kept.enter_context(cases(system))[kind]
    for _ in range(20):
        answered(case.view, case.make(), case.status)
    system.get_set = (case, [case.make() for _ in range(count)])


def _go(system: ModuleType, kept: ExitStack) -> None:
    case, requests = system.get_set
    for request in requests:
        answered(case.view, request, case.status)


COMMANDS: dict[str, Callable[..., Any]] = {
    "versions": _versions,
    "round": _round,
    "kinds": _kinds,
    "get set": _get_set,
    "go": _go,
}
