"""Stop what a process started, when that process is gone without having done so itself (``kill -9``, a crash).

Run as a script, with a pipe as standard input whose other end only the guarded process holds. It reads lines:
``+PID SIGNAL`` is a process group to look after, ``-PID`` one that has ended. At the end of input the guarded process is no
more: each group gets its signal, and three seconds later SIGKILL. Portable (no prctl), and
it does not care which thread started what.
"""

import os
import signal
import sys
import time
from contextlib import suppress

GRACE_SECONDS = 3.0


def main() -> None:
    """Read until the end of input, then end every group that is left."""
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
    """Send each group its signal, wait at most ``GRACE_SECONDS``, then kill what is left."""
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
    """Whether the process group ``pid`` still has a member."""
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main()
