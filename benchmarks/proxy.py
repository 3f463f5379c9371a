"""A proxy that delays all data by a fixed time in each direction, independent of its size: it
simulates a network."""

import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path

#: The delay in each direction.
ONE_WAY_SECONDS = 0.0005
#: The names of the sockets of the two servers.
POSTGRES, REDIS = ".s.PGSQL.5432", "redis.sock"
START_SECONDS = 30
CHUNK_BYTES = 65536


@contextmanager
def proxy(folder: Path, to: Path, name: str = POSTGRES) -> Iterator[Path]:
    """Run a proxy of the socket ``name`` in the folder ``to``, in a separate process. Yield the
    folder of the proxy's socket, which has the same name. No other user can enter this folder."""
    sockets = folder / "far"
    sockets.mkdir(mode=0o700, exist_ok=True)
    process = get_context("spawn").Process(
        target=serve, args=(sockets / name, to / name), daemon=True
    )
    process.start()
    deadline = time.monotonic() + START_SECONDS
    try:
        while not (sockets / name).exists():
            if not process.is_alive() or time.monotonic() > deadline:
                raise RuntimeError("The proxy did not start.")
            time.sleep(0.01)
        yield sockets
    finally:
        process.terminate()
        process.join()


def serve(here: Path, to: Path) -> None:
    """Forward each connection, with the delay in both directions."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(here))
        listener.listen()
        while True:
            client, _ = listener.accept()
            server = socket.socket(socket.AF_UNIX)
            server.connect(str(to))
            for source, target in ((client, server), (server, client)):
                late: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                threading.Thread(target=_receive, args=(source, late), daemon=True).start()
                threading.Thread(target=_send, args=(target, late), daemon=True).start()


def _receive(source: socket.socket, late: "queue.SimpleQueue[tuple[float, bytes]]") -> None:
    data = b"x"
    while data:
        data = b""
        with suppress(OSError):
            data = source.recv(CHUNK_BYTES)
        late.put((time.monotonic() + ONE_WAY_SECONDS, data))


def _send(target: socket.socket, late: "queue.SimpleQueue[tuple[float, bytes]]") -> None:
    with suppress(OSError):
        while True:
            due, data = late.get()
            # Each chunk has its own due time, so a chunk that arrives during the delay of another
            # one waits no longer.
            while (left := due - time.monotonic()) > 0:
                time.sleep(left)
            if not data:
                target.shutdown(socket.SHUT_WR)
                return
            target.sendall(data)
