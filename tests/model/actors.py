"""Those who take part: requests and completer passes, each in a thread with a connection, moved on
one stop at a time."""

import json
import threading
from collections.abc import Callable
from typing import Any

from django.db import connection, connections
from django.test import Client

#: An actor that has not stopped within this time waits for another one: it is left alone, and found
#: further on later.
SETTLE_SECONDS = 0.5
END_SECONDS = 120

_here = threading.local()


class Died(BaseException):
    """The process is gone: no handler may do anything about it, and nothing reaches the database
    any more."""


def stop_here(place: str) -> None:
    """Stop, in a view, until the test says how to go on."""
    actor: Actor | None = getattr(_here, "actor", None)
    if actor is not None:
        actor.stop(place)


class Actor:
    """A thread that runs ``work`` until its next stop, and from there as it is told: go on, fail,
    or die."""

    def __init__(self, name: str, work: Callable[[], Any]) -> None:
        self.name, self.place, self.result = name, "", None
        self.ended = self.died = False
        self._work, self._order = work, "go"
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Run up to the first stop."""
        self._thread.start()
        self._settle(SETTLE_SECONDS)

    @property
    def stopped(self) -> bool:
        """Whether the actor stands at a stop now."""
        return self._stopped and not self.ended

    def tell(self, order: str) -> None:
        """Go on from the stop: "go", "fail" (the view raises) or "die"."""
        with self._changed:
            assert self._stopped
            self._order, self._stopped = order, False
            self._changed.notify_all()
        self._settle(SETTLE_SECONDS)

    def run_out(self) -> None:
        """Go on to the end."""
        while not self.ended:
            if self.stopped:
                self.tell("go")
            else:
                self._settle(END_SECONDS)
                assert self.ended or self._stopped, f"{self.name} hangs after {self.place}"

    def stop(self, place: str) -> None:
        """Stop in this thread. Raises what the order says."""
        with self._changed:
            self.place, self._stopped = place, True
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: not self._stopped, END_SECONDS), (
                "nobody moved this actor on"
            )
            order = self._order
        if order == "fail":
            raise RuntimeError("the view fails")
        if order == "die":
            own = connection.connection
            own.close()  # the server rolls back; the locks of the row stay as they are
            # Nothing of this thread reaches the server any more, not even a cleanup.
            own.wait = connection.connect = _refuse
            raise Died

    def _run(self) -> None:
        _here.actor = self
        try:
            self.result = self._work()
        except Died:
            self.died = True
        finally:
            connections.close_all()
            with self._changed:
                self.ended = True
                self._changed.notify_all()

    def _settle(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self.ended, seconds)


def _refuse(*args: object) -> Any:
    raise Died


def send(client: Client, key: str, body: Any) -> Any:
    """Send one request to the view under test."""
    content = json.dumps(body)
    return client.post(
        "/pay/", content, content_type="application/json", headers={"Idempotency-Key": key}
    )
