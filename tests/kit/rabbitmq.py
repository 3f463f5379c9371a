"""RabbitMQ of Debian on loopback, with its own data folder, node name and port mapper."""

import os
import socket
from contextlib import suppress
from pathlib import Path

from rides_demo.processes.ports import free_port
from rides_demo.processes.process import Process
from tests.kit import debian

#: The package starts the server through a script that changes to the user ``rabbitmq``.
_SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
_MAPPER = "epmd"
_GREETING = b"AMQP\0\0\x09\x01"


class RabbitMQ(Process):
    """A broker with its data in ``folder``, which survives ``kill`` and a new start. ``url`` is its
    address."""

    def __init__(self, folder: Path) -> None:
        self.port, distribution, mapper = free_port(), free_port(), free_port()
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}/%2F"
        names = {
            "RABBITMQ_NODENAME": f"idempotency-{os.getpid()}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": self.port,
            "RABBITMQ_DIST_PORT": distribution,
            "RABBITMQ_MNESIA_BASE": folder / "data",
            "RABBITMQ_LOG_BASE": folder / "log",
            "RABBITMQ_ENABLED_PLUGINS_FILE": folder / "plugins",
            "RABBITMQ_CONFIG_FILE": folder / "rabbitmq",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "ERL_EPMD_PORT": mapper,
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "HOME": folder,
        }
        environment = os.environ | {name: str(value) for name, value in names.items()}
        super().__init__(
            "RabbitMQ", [str(_SERVER)], environment=environment, output=folder / "rabbitmq.log"
        )
        self.folder = folder
        #: Otherwise the server would start one that outlives it.
        self._mapper = Process(
            _MAPPER, [debian.program("erlang-base", _MAPPER)], environment=environment
        )

    def prepare(self) -> None:
        """Write the configuration."""
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "plugins").write_text("[].\n")
        (self.folder / "rabbitmq.conf").write_text(
            "vm_memory_high_watermark.relative = 0.9\ndisk_free_limit.absolute = 50MB\n"
        )
        self._mapper.launch()

    def is_ready(self) -> bool:
        """Return whether the broker greets a client."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as client:
            client.settimeout(1)
            client.sendall(_GREETING)
            return client.recv(1) == b"\x01"
        return False

    def start(self, ready_seconds: float = 90) -> None:
        """Start the broker; Erlang is slow on a busy machine."""
        super().start(ready_seconds)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._mapper.stop()


def rabbitmq(folder: Path) -> RabbitMQ:
    """Return a broker that is not started. Raises NotToBeHad."""
    debian.program("rabbitmq-server", "rabbitmqctl")
    return RabbitMQ(folder)
