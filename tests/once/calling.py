"""A process that calls operations, and is killed or stopped in a call: at the n-th of all points
before and after an exchange with the server, and before and after a transfer at the bank.

Run as ``python -c "from tests.once.calling import main; main()"``. For each line of JSON on
its standard input, an ``Order``, it forks children that make the call, and writes a line of JSON
with an ``Ended`` for each of them. For a line with the number of a stopped process it lets that
process go on, and writes its end. A child opens its own connection.
"""

import asyncio
import io
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from typing import IO, Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Calls of the operation ``operation``, by ``way``."""

    way: str
    operation: str
    key: str
    arguments: dict[str, Any]
    #: The number of callers that begin at once.
    callers: int = 1
    #: The signal that each caller gets at its n-th point.
    signal: int = signal.SIGKILL
    at: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a call ended: "returned", "raised", "killed" or "stopped"."""

    how: str
    #: The result; the exception, by its name; or the number of the stopped process.
    value: Any = None


def call(way: str, operation: Any, key: str, arguments: dict[str, Any]) -> Any:
    """Call an operation, and return its result. Raises the exceptions of ``once``."""
    from django.core.management import CommandError, call_command

    from idempotency.models import IdempotencyKey

    match way:
        case "once":
            return operation.once(key, **arguments)
        case "aonce":
            return asyncio.run(operation.aonce(key, **arguments))
        case "command":
            given = operation.__name__, key, json.dumps(arguments)
            try:
                return json.loads(call_command("call_operation", *given, stdout=io.StringIO()))
            except CommandError as error:
                if error.__cause__ is not None:
                    raise error.__cause__  # noqa: B904 - with the cause that it has
                raise
        case "completer":
            from idempotency.completer import complete_key

            return complete_key(IdempotencyKey.objects.get(idempotency_key=key).pk)
    raise ValueError(way)


def _call(order: Order) -> Ended:
    from tests import operations
    from tests.conformance.dying import signal_at

    point = signal_at(order.at, order.signal)
    operations.bank.before = operations.bank.after = point
    try:
        value = call(order.way, getattr(operations, order.operation), order.key, order.arguments)
    except Exception as error:
        return Ended("raised", type(error).__name__)
    return Ended("returned", value)


def _fork(order: Order, begin: tuple[int, int]) -> tuple[int, IO[str]]:
    """Return a child that makes the call as soon as all write ends of the pipe ``begin`` are
    closed, and the pipe of its end."""
    read, write = os.pipe()
    if child := os.fork():
        os.close(write)
        return child, os.fdopen(read)
    os.close(begin[1])
    os.read(begin[0], 1)
    with os.fdopen(write, "w") as pipe:
        json.dump(asdict(_call(order)), pipe)
    os._exit(0)


def _end(child: int, pipe: IO[str]) -> Ended:
    _, status = os.waitpid(child, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        return Ended("stopped", child)
    if os.WIFSIGNALED(status):
        return Ended("killed")
    return Ended(**json.load(pipe))


def main() -> None:
    """Follow the orders on standard input."""
    import django
    from django.conf import settings

    if lease := os.environ.get("TEST_LEASE_SECONDS"):
        settings.IDEMPOTENCY |= {"LOCK_TIMEOUT_SECONDS": int(lease)}
    django.setup()
    pipes: dict[int, IO[str]] = {}
    for line in sys.stdin:
        order = json.loads(line)
        if isinstance(order, int):
            os.kill(order, signal.SIGCONT)
            children = [order]
        else:
            begin = os.pipe()
            forked = [_fork(Order(**order), begin) for _ in range(order["callers"])]
            for end in begin:
                os.close(end)
            pipes |= dict(forked)
            children = [child for child, _ in forked]
        for child in children:
            sys.stdout.write(json.dumps(asdict(_end(child, pipes[child]))) + "\n")
        sys.stdout.flush()
