"""A proxy between unix sockets of PostgreSQL: an address that can be moved, or a link that is slow,
held or cut."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from rides_demo.processes.embedded import socket_folder

SOCKET = ".s.PGSQL.5432"
CHUNK_BYTES = 65536
HELD_LOOK_SECONDS = 0.01
ANSWER_SECONDS = 10


class Relay:
    """Forward each connection to the socket in the folder ``target``; a context manager that serves
    in a thread.

    ``target``, ``delay_seconds`` (one way), ``held`` and ``refusing`` may be set at any time. A
    held relay buffers all data, and a refusing relay closes each new connection immediately.
    """

    def __init__(self, folder: Path, target: Path, *, owner: int | None = None) -> None:
        self.folder, self.target = socket_folder(folder), target
        self.delay_seconds, self.held, self.refusing = 0.0, False, False
        self._owner = owner
        self._open: set[asyncio.BaseTransport] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"relay {folder.name}", daemon=True)

    def __enter__(self) -> Self:
        """Listen in ``folder``, which only its owner can enter."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._thread.start()
        if not self._ready.wait(ANSWER_SECONDS):
            raise OSError(f"Nobody listens on {self.folder / SOCKET}.")
        (self.folder / SOCKET).chmod(0o777)  # The permissions of the folder restrict the access.
        if self._owner is not None:
            os.chown(self.folder, self._owner, -1)
        return self

    def __exit__(self, *error: object) -> None:
        """Close all connections and stop."""
        self.cut()
        self._loop.call_soon_threadsafe(self._listening.cancel)
        self._thread.join()

    def cut(self) -> None:
        """Close all connections; data in transit is lost."""
        self._wait_for(self._cut())

    def lose(self) -> None:
        """Close all connections, and refuse new connections."""
        self.refusing = True
        self.cut()

    def restore(self, target: Path) -> None:
        """Close all connections, then forward new connections to ``target`` without a delay."""
        self.cut()
        self.target, self.delay_seconds, self.held, self.refusing = target, 0.0, False, False

    def _run(self) -> None:
        with (
            asyncio.Runner(loop_factory=lambda: self._loop) as runner,
            suppress(asyncio.CancelledError),
        ):
            runner.run(self._listen())

    def _wait_for(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(ANSWER_SECONDS)

    async def _listen(self) -> None:
        self._listening = asyncio.current_task()
        await asyncio.start_unix_server(self._serve, self.folder / SOCKET, backlog=128)
        self._ready.set()
        await asyncio.Event().wait()

    async def _cut(self) -> None:
        for transport in list(self._open):
            transport.abort()  # type: ignore[attr-defined]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(self.target / SOCKET)
        except OSError:
            writer.transport.abort()
            return
        both = {writer.transport, far_writer.transport}
        self._open |= both
        try:
            await asyncio.gather(
                self._forward(reader, far_writer), self._forward(far_reader, writer)
            )
        finally:
            self._open -= both
            for transport in both:
                transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one direction. A later chunk does not wait for the delay of an earlier one."""
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sending = asyncio.create_task(self._send(late, writer))
        with suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                late.put_nowait((self._loop.time() + self.delay_seconds, data))
        late.put_nowait((0.0, b""))
        await sending

    async def _send(
        self, late: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while True:
                due, data = await late.get()
                if (left := due - self._loop.time()) > 0:
                    await asyncio.sleep(left)
                while self.held and not writer.transport.is_closing():
                    await asyncio.sleep(HELD_LOOK_SECONDS)
                if not data or writer.transport.is_closing():
                    writer.close()
                    return
                writer.write(data)
                await writer.drain()
