"""The events of the lab: changes of the nodes, and the configurations in which an event must lose
nothing."""

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tests.failover.configurations import CONFIGURATIONS, CONFIRMED, SYNCHRONOUS, Configuration
from tests.failover.lab import Lab
from tests.failover.pair import ask, vanish
from tests.kit.waiting import eventually

#: The time for which clients send requests in a state of the nodes before the next step of an
#: event.
WATCH_SECONDS = 1.5
#: The number of sessions that must wait for an unavailable standby before an event continues.
WAITING = 6


@dataclass(frozen=True)
class Event:
    """An event. Nothing may be lost in the configurations ``kept_in``; in the others of
    ``played_in`` a loss must occur."""

    name: str
    happen: Callable[[Lab], None]
    kept_in: tuple[Configuration, ...]
    played_in: tuple[Configuration, ...] = CONFIGURATIONS
    #: Whether the service connects to both nodes (``target_session_attrs=read-write``) instead of
    #: an address that moves.
    both_hosts: bool = False


def watch(seconds: float) -> None:
    """Let the traffic continue for a time, without waiting for a state."""
    threading.Event().wait(seconds)


def _kill(lab: Lab) -> None:
    lab.pair.lose_primary()
    lab.pair.promote()
    lab.move_address()


def _stop(lab: Lab) -> None:
    """Stop the primary with a fast shutdown: it ends its sessions, and ends itself after the
    standby has all WAL."""
    lab.pair.primary.stop()
    lab.pair.promote()
    lab.move_address()


def _promote_beside_the_primary(lab: Lab) -> None:
    """Promote the standby without stopping the old primary, which accepts writes until the address
    has moved."""
    lab.pair.promote()
    watch(0.3)
    lab.move_address()
    vanish(lab.pair.standby)


def _cancel_waits(lab: Lab) -> None:
    """Make the standby unavailable, cancel the commits that wait for it, then lose the primary."""
    _take_the_standby_away(lab)
    for _ in range(10):
        for pid in lab.pair.waiting():
            ask(lab.pair.primary, f"SELECT pg_cancel_backend({pid})")
        watch(WATCH_SECONDS / 10)
    _kill(lab)


def _restart_alone(lab: Lab) -> None:
    """Make the standby unavailable, and restart the primary while commits wait: they are visible
    after recovery."""
    _take_the_standby_away(lab)
    lab.pair.primary.crash()
    lab.pair.primary.start()
    watch(2 * WATCH_SECONDS)
    _kill(lab)


def _crash_alone(lab: Lab) -> None:
    """Like ``_restart_alone``, but kill one session, as the kernel does without memory: PostgreSQL
    restarts and recovers."""
    _take_the_standby_away(lab)
    os.kill(lab.pair.waiting()[0], signal.SIGKILL)
    watch(2 * WATCH_SECONDS)
    _kill(lab)


def _show_the_standby(lab: Lab) -> None:
    """Point the address to the standby for some time, then back to the primary. Sessions on the
    standby stay open."""
    lab.address.target = lab.pair.standby.sockets
    lab.address.cut()
    watch(WATCH_SECONDS)
    lab.address.target = lab.pair.primary.sockets


def _take_the_standby_away(lab: Lab) -> None:
    lab.pair.link.held = True
    eventually(lambda: len(lab.pair.waiting()) >= WAITING)


EVENTS = (
    Event("primary killed", _kill, kept_in=(SYNCHRONOUS, CONFIRMED)),
    Event(
        "primary killed, both nodes in HOST",
        _kill,
        kept_in=(SYNCHRONOUS, CONFIRMED),
        both_hosts=True,
    ),
    Event("primary stopped", _stop, kept_in=CONFIGURATIONS),
    Event(
        "standby promoted beside the primary",
        _promote_beside_the_primary,
        kept_in=(SYNCHRONOUS, CONFIRMED),
    ),
    Event(
        "standby away, waits cancelled, primary killed",
        _cancel_waits,
        (CONFIRMED,),
        (SYNCHRONOUS, CONFIRMED),
    ),
    Event(
        "standby away, primary restarted, then killed",
        _restart_alone,
        (CONFIRMED,),
        (SYNCHRONOUS, CONFIRMED),
    ),
    Event(
        "standby away, session crashed, primary killed",
        _crash_alone,
        (CONFIRMED,),
        (SYNCHRONOUS, CONFIRMED),
    ),
    Event("address points to the standby", _show_the_standby, kept_in=CONFIGURATIONS),
)
