"""``manage.py serve``: run all processes of Rocket Rides until Ctrl-C."""

import os
import signal
import sys
import threading
from contextlib import suppress

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser

from rides_demo.processes import web_workers
from rides_demo.processes.process import ProcessError
from rides_demo.processes.supervisor import SHORT_LIMITS, Supervisor

#: A browser repeats a request automatically if a reused connection is lost. Without keep-alive,
#: each request has a new connection, so the browser does not repeat the request and the page shows
#: the error.
NO_KEEP_ALIVE = "--keep-alive 0"


class Command(BaseCommand):
    help = (
        "Run all processes of Rocket Rides, including PostgreSQL, Redis and the Stripe sandbox,"
        " until Ctrl-C."
    )
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        ports = {
            "type": int,
            "choices": range(1, 65536),
            "metavar": "PORT",
            "default": settings.PORT,
        }
        parser.add_argument(
            "--port", **ports, help="loopback port of the web server (default: PORT)"
        )

    def handle(self, *args: object, port: int, **options: object) -> None:
        stopped = stop_on_signals()
        supervisor = Supervisor(settings.RUN_FOLDER, port, say=self._say, environment=environment())
        try:
            with supervisor:
                self._say(f"web page  {supervisor.url}/")
                self._say(f"API       {supervisor.url}/rides  (Authorization: Bearer demo-jane)")
                self._say(f"admin     {supervisor.url}/admin/  (admin / admin)")
                limits = " ".join(f"{name}={value}" for name, value in SHORT_LIMITS.items())
                self._say(f"limits    {limits}  (set them for commands in another terminal)")
                self._say(f"ready: {supervisor.url}/")
                stopped.wait()
        except (ProcessError, OSError) as error:
            self.stderr.write(str(error))
            self._say("serve: FAILED 1")
            sys.exit(1)
        except KeyboardInterrupt:
            pass
        self._say("serve: ok")

    def _say(self, line: str) -> None:
        # The reader may have closed the pipe (`| head`); this must not stop the processes.
        with suppress(OSError):
            self.stdout.write(line)
            self.stdout.flush()


def environment() -> dict[str, str]:
    """Return the environment of ``make serve``: short limits, and the button that kills a web
    worker."""
    return (
        SHORT_LIMITS
        | {"GUNICORN_CMD_ARGS": NO_KEEP_ALIVE}
        | os.environ
        | {web_workers.SUPERVISOR: str(os.getpid())}
    )


def stop_on_signals() -> threading.Event:
    """Return an event that SIGINT, SIGTERM and SIGHUP set.

    The first signal also raises KeyboardInterrupt; later signals do nothing.
    """
    stopped = threading.Event()

    def stop(number: int, frame: object) -> None:
        if stopped.is_set():
            return
        stopped.set()
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    return stopped
