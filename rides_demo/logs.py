"""How the demo's processes log: one line for what happened, and no traceback where it would say nothing more."""

import logging

#: A service that is down or restarts: where in the code that was noticed does not matter.
UNREACHABLE = (
    "django.db.utils.OperationalError",
    "django.db.utils.InterfaceError",
    "psycopg.OperationalError",
    "redis.exceptions.ConnectionError",
    "redis.exceptions.TimeoutError",
    "redis.exceptions.BusyLoadingError",
)


class LineFormatter(logging.Formatter):
    """Put a service that cannot be reached into one line; leave the traceback of anything else."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of ``record``, whether its traceback is attached to it or written into its message."""
        text = super().format(record)
        # The frames are indented; the first line that is not names the error. Of a chain of errors the last one counts.
        frames = text.rpartition("Traceback (most recent call last):\n")[2]
        error = next((line for line in frames.splitlines() if line and not line[0].isspace()), "")
        if frames == text or not error.startswith(UNREACHABLE):
            return text
        return f"{text.partition('Traceback (')[0].strip()}: {error}"
