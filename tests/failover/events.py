"""The events of the lab: what happens to the nodes, and in which configurations nothing may be lost by it."""

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tests.failover.configurations import CONFIGURATIONS, CONFIRMED, SYNCHRONOUS, Configuration
from tests.failover.lab import Lab
from tests.failover.pair import ask, vanish
from tests.kit.waiting import eventually

#: How long clients meet a state of the nodes before the next step of an event.
WATCH_SECONDS = 1.5
#: Sessions that wait for a standby that is away, before the waits are ended.
WAITING = 6


@dataclass(frozen=True)
class Event:
    """An event. Nothing may be lost in the configurations ``kept_in``; in the others of ``played_in`` the loss must show."""

    name: str
    happen: Callable[[Lab], None]
    kept_in: tuple[Configuration, ...]
    played_in: tuple[Configuration, ...] = CONFIGURATIONS
    #: The service knows both nodes (``target_session_attrs=read-write``), instead of an address that is moved.
    both_hosts: bool = False


def watch(seconds: float) -> None:
    """Let the traffic go on; no state is waited for."""
    threading.Event().wait(seconds)


def _kill(lab: Lab) -> None:
    lab.pair.lose_primary()
    lab.pair.promote()
    lab.move_address()


def _stop(lab: Lab) -> None:
    """A fast shutdown: the primary ends sessions, and ends itself once the standby has all."""
    lab.pair.primary.stop()
    lab.pair.promote()
    lab.move_address()


def _promote_beside_the_primary(lab: Lab) -> None:
    """Nobody stops the old primary: it takes writes until the address has moved."""
    lab.pair.promote()
    watch(0.3)
    lab.move_address()
    vanish(lab.pair.standby)


def _cancel_waits(lab: Lab) -> None:
    """The standby is away, commits wait for it, and somebody cancels them. Then the primary is lost."""
    _take_the_standby_away(lab)
    for _ in range(10):
        for pid in lab.pair.waiting():
            ask(lab.pair.primary, f"SELECT pg_cancel_backend({pid})")
        watch(WATCH_SECONDS / 10)
    _kill(lab)


def _restart_alone(lab: Lab) -> None:
    """The standby is away, commits wait for it, and the primary is restarted: after recovery they are visible."""
    _take_the_standby_away(lab)
    lab.pair.primary.crash()
    lab.pair.primary.start()
    watch(2 * WATCH_SECONDS)
    _kill(lab)


def _crash_alone(lab: Lab) -> None:
    """As above, but one session is killed, as the kernel does without memory: PostgreSQL restarts all and recovers."""
    _take_the_standby_away(lab)
    os.kill(lab.pair.waiting()[0], signal.SIGKILL)
    watch(2 * WATCH_SECONDS)
    _kill(lab)


def _show_the_standby(lab: Lab) -> None:
    """The address leads to the standby for a while. Sessions there are not closed when it leads to the primary again."""
    lab.address.target = lab.pair.standby.sockets
    lab.address.cut()
    watch(WATCH_SECONDS)
    lab.address.target = lab.pair.primary.sockets


def _take_the_standby_away(lab: Lab) -> None:
    lab.pair.link.held = True
    eventually(lambda: len(lab.pair.waiting()) >= WAITING)


EVENTS = (
    Event("primary killed", _kill, kept_in=(SYNCHRONOUS, CONFIRMED)),
    Event("primary killed, both nodes in HOST", _kill, kept_in=(SYNCHRONOUS, CONFIRMED), both_hosts=True),
    Event("primary stopped", _stop, kept_in=CONFIGURATIONS),
    Event("standby promoted beside the primary", _promote_beside_the_primary, kept_in=(SYNCHRONOUS, CONFIRMED)),
    Event("standby away, waits cancelled, primary killed", _cancel_waits, (CONFIRMED,), (SYNCHRONOUS, CONFIRMED)),
    Event("standby away, primary restarted, then killed", _restart_alone, (CONFIRMED,), (SYNCHRONOUS, CONFIRMED)),
    Event("standby away, session crashed, primary killed", _crash_alone, (CONFIRMED,), (SYNCHRONOUS, CONFIRMED)),
    Event("address points to the standby", _show_the_standby, kept_in=CONFIGURATIONS),
)
