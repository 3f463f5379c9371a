"""Proxies that close connections within a reply: only the first part of the reply arrives.

The proxies are between the clients and the web server, and between the processes and PostgreSQL and
Redis. A lost reply may be the reply to a COMMIT or to the enqueueing of a job. The proxies forward
all data until the simulator enables cuts (``cut_replies``), and count the cuts in a file of the run
folder (``cuts``).
"""

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

#: The interval between two checks whether cuts are enabled.
LOOK_SECONDS = 0.2
CHUNK_BYTES = 65536


@dataclass(frozen=True)
class Route:
    """One proxy: its two addresses, which are loopback ports or paths of unix sockets.

    ``probability`` is the probability of a cut for each chunk of a reply.
    """

    name: str
    listen: int | Path
    to: int | Path
    probability: float


class Proxies:
    """The proxies of one run; a context manager that serves all routes in a thread."""

    def __init__(self, folder: Path, routes: list[Route], seed: int) -> None:
        self._folder, self._routes, self._chance = folder, routes, random.Random(seed)
        self._counts: Counter[str] = Counter()
        self._cutting = False
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="proxies", daemon=True)

    def __enter__(self) -> Self:
        """Listen on all routes; raise OSError if that fails."""
        self._thread.start()
        self._ready.wait()
        if self._error:
            raise self._error
        return self

    def __exit__(self, *error: object) -> None:
        """Close all connections."""
        with suppress(RuntimeError):  # the loop has already ended
            self._loop.call_soon_threadsafe(self._watching.cancel)
        self._thread.join()

    def _run(self) -> None:
        with (
            asyncio.Runner(loop_factory=lambda: self._loop) as runner,
            suppress(asyncio.CancelledError),
        ):
            runner.run(self._serve_all())

    async def _serve_all(self) -> None:
        self._watching = asyncio.current_task()
        servers = []
        try:
            for route in self._routes:
                servers.append(await self._listen(route))
        except OSError as error:
            self._error = error
            return
        finally:
            self._ready.set()
        try:
            while True:
                self._cutting = _flag(self._folder).exists()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            for server in servers:
                server.close()

    async def _listen(self, route: Route) -> asyncio.Server:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._serve(route, reader, writer)

        if isinstance(route.listen, Path):
            return await asyncio.start_unix_server(serve, route.listen, backlog=128)
        return await asyncio.start_server(serve, "127.0.0.1", route.listen, backlog=128)

    async def _serve(
        self, route: Route, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Forward data in both directions until one side closes or a reply is cut."""
        try:
            if isinstance(route.to, Path):
                far_reader, far_writer = await asyncio.open_unix_connection(route.to)
            else:
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", route.to)
        except OSError:
            writer.transport.abort()
            return
        pumps = {
            asyncio.create_task(self._pump(reader, far_writer)),
            asyncio.create_task(self._pump(far_reader, writer, route)),
        }
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            # close() sends the data that is still buffered; after a cut, the connection is already
            # closed.
            writer.close()
            far_writer.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, route: Route | None = None
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if (
                    route
                    and self._cutting
                    and len(data) > 1
                    and self._chance.random() < route.probability
                ):
                    writer.write(data[: self._chance.randrange(1, len(data))])
                    writer.transport.abort()
                    self._count(route)
                    return
                writer.write(data)
                await writer.drain()

    def _count(self, route: Route) -> None:
        self._counts[route.name] += 1
        new = _counts_file(self._folder).with_suffix(".new")
        with suppress(OSError):  # for example a full disk
            new.write_text(json.dumps(self._counts))
            new.replace(_counts_file(self._folder))


@contextmanager
def cut_replies(folder: Path) -> Iterator[None]:
    """Enable cuts in the proxies of this run folder for the duration of the block."""
    _flag(folder).touch()
    try:
        yield
    finally:
        _flag(folder).unlink(missing_ok=True)


def cuts(folder: Path) -> dict[str, int]:
    """Return the number of cut replies by name of the route."""
    with suppress(OSError, ValueError):
        return dict(json.loads(_counts_file(folder).read_text()))
    return {}


def _flag(folder: Path) -> Path:
    return folder / "cut-replies"


def _counts_file(folder: Path) -> Path:
    return folder / "cuts.json"
