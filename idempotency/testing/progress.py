"""The expected duration and the progress of a proof: log lines of ``idempotency.testing``, shown
while the test runs."""

import logging
import sys
import time

logger = logging.getLogger("idempotency.testing")

#: If a proof is expected to take less time than this, no line is logged before it begins.
QUIET_SECONDS = 3
#: The time between two lines.
EVERY_SECONDS = 5


class Progress:
    """The progress of one proof. The numbers ``courses`` and ``seconds`` are estimates."""

    def __init__(self, courses: int, seconds: float) -> None:
        self._courses, self._done = courses, 0
        self._began = self._said = time.monotonic()
        if seconds >= QUIET_SECONDS:
            _say(f"crash kit: about {courses} courses of events, which take about {seconds:.0f} s")

    def one_done(self) -> None:
        """Count a course, and log a line if the last line is EVERY_SECONDS old."""
        self._done += 1
        now = time.monotonic()
        if now - self._said >= EVERY_SECONDS:
            self._said = now
            courses = max(self._courses, self._done + 1)
            left = (now - self._began) / self._done * (courses - self._done)
            _say(
                f"crash kit: {self._done} of about {courses} courses of events, about {left:.0f} s"
                " left"
            )


def _say(line: str) -> None:
    """Log a line. If the level INFO is off, as in most tests of unittest, write the line to the
    terminal, if there is one."""
    if logger.isEnabledFor(logging.INFO):
        logger.info(line)
    elif sys.stderr.isatty():
        sys.stderr.write(f"{line}\n")
