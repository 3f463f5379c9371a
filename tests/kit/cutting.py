"""A proxy to the database of the test that cuts the connection around a message, such as a
COMMIT."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from django.db import connection

SOCKET = ".s.PGSQL.5432"
CHUNK_BYTES = 65536


class Cut:
    """One cut of the connection, at the next message that contains ``word``.

    If ``before``, the message is not forwarded. Otherwise the message and ``reply_bytes`` bytes of
    the reply are forwarded; if ``garbled``, the bytes of the reply are zeros.
    """

    def __init__(
        self,
        *,
        before: bool = False,
        reply_bytes: int = 0,
        garbled: bool = False,
        word: bytes = b"COMMIT",
    ) -> None:
        self.word = word
        self.before, self.reply_bytes, self.garbled = before, reply_bytes, garbled
        #: The length of the whole reply; 0 before the cut.
        self.length = 0


class CuttingProxy:
    """A proxy that listens in the folder ``near`` and forwards connections to the socket in
    ``far``."""

    def __init__(self, near: Path, far: Path) -> None:
        self.cut: Cut | None = None
        self._far = str(far / SOCKET)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(near / SOCKET))
        self._listening.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(self._far)
                threading.Thread(target=self._serve, args=(near, far), daemon=True).start()

    def _serve(self, near: socket.socket, far: socket.socket) -> None:
        """Forward the data of the client until the cut."""
        struck: list[Cut] = []
        answering = threading.Thread(target=self._answer, args=(far, near, struck), daemon=True)
        answering.start()
        with near, far, suppress(OSError):
            while data := near.recv(CHUNK_BYTES):
                if self.cut is not None and self.cut.word in data:
                    struck.append(self.cut)
                    self.cut = None
                    if struck[0].before:
                        break
                far.sendall(data)
            _end(near, far)
            answering.join()

    def _answer(self, far: socket.socket, near: socket.socket, struck: list[Cut]) -> None:
        with suppress(OSError):
            while data := far.recv(CHUNK_BYTES):
                if struck:
                    struck[0].length = len(data)
                    passed = data[: struck[0].reply_bytes]
                    near.sendall(bytes(len(passed)) if struck[0].garbled else passed)
                    break
                near.sendall(data)
        _end(near, far)


def _end(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextmanager
def cutting_proxy(folder: Path) -> Iterator[CuttingProxy]:
    """Route the connection of this thread through a proxy during the block."""
    options: dict[str, Any] = connection.settings_dict["OPTIONS"]
    host = options["host"]
    proxy = CuttingProxy(folder, Path(host))
    connection.close()
    options["host"] = str(folder)
    try:
        yield proxy
    finally:
        connection.close()
        options["host"] = host
        proxy.close()
