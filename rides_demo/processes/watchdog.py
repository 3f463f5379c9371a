"""The watchdog: a script that ends the children of a process after that process was killed.

Its standard input is a pipe from the watched process. It reads lines: ``+PID SIGNAL`` adds a
process group, ``-PID`` removes a group that has ended. End of input means that the watched process
is dead: each remaining group gets its signal, and SIGKILL three seconds later. A pipe is portable.
Unlike ``prctl``, it does not depend on the thread that started the child.
"""

import os
import signal
import sys
import time
from contextlib import suppress

GRACE_SECONDS = 3.0


def main() -> None:
    """Read lines until end of input, then end the remaining groups."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: dict[int, int] = {}
    for line in sys.stdin:
        if line.startswith("+"):
            pid, number = line[1:].split()
            groups[int(pid)] = int(number)
        else:
            groups.pop(int(line[1:]), None)
    end(groups)


def end(groups: dict[int, int]) -> None:
    """Send each group its signal, wait up to ``GRACE_SECONDS``, then kill the remaining groups."""
    for pid, number in groups.items():
        with suppress(ProcessLookupError):
            os.killpg(pid, number)
    deadline = time.monotonic() + GRACE_SECONDS
    while any(map(alive, groups)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in groups:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    """Return whether the process group ``pid`` has a member."""
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main()
