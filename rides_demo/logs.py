"""The log format of the demo: connection errors take one line, without a traceback."""

import logging

#: The errors of a database or Redis that cannot be reached; their tracebacks do not help.
UNREACHABLE = (
    "django.db.utils.OperationalError",
    "django.db.utils.InterfaceError",
    "psycopg.OperationalError",
    "redis.exceptions.ConnectionError",
    "redis.exceptions.TimeoutError",
    "redis.exceptions.BusyLoadingError",
)


class LineFormatter(logging.Formatter):
    """Format connection errors in one line; keep the traceback of other errors."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of ``record``; its traceback may be attached or part of its message."""
        text = super().format(record)
        # Frames are indented, so the first line without indent names the error. The last error of a
        # chain counts.
        frames = text.rpartition("Traceback (most recent call last):\n")[2]
        error = next((line for line in frames.splitlines() if line and not line[0].isspace()), "")
        if frames == text or not error.startswith(UNREACHABLE):
            return text
        return f"{text.partition('Traceback (')[0].strip()}: {error}"
