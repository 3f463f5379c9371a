"""The demo's log lines: a service that is down is one line, a bug keeps its traceback."""

import logging
import sys
import traceback

import pytest
from django.db import OperationalError
from redis.exceptions import ConnectionError as RedisConnectionError

from rides_demo.logs import LineFormatter


def formatted(error: Exception, *, written_into_the_message: bool = False) -> str:
    try:
        raise error
    except Exception:
        text = traceback.format_exc()
        attached = None if written_into_the_message else sys.exc_info()
    message = f"job 7 failed\n{text}" if written_into_the_message else "job 7 failed"
    record = logging.LogRecord("rides_demo", logging.ERROR, __file__, 1, message, (), attached)
    return LineFormatter(fmt="%(levelname)s %(message)s").format(record)


@pytest.mark.parametrize("written_into_the_message", [False, True])
@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            OperationalError("refused\n\tIs it running?"),
            "django.db.utils.OperationalError: refused",
        ),
        (RedisConnectionError("refused"), "redis.exceptions.ConnectionError: refused"),
    ],
)
def test_a_service_that_is_down_is_one_line(error, line, written_into_the_message):
    assert (
        formatted(error, written_into_the_message=written_into_the_message)
        == f"ERROR job 7 failed: {line}"
    )


def test_the_error_behind_another_one_does_not_hide_a_bug():
    error = ValueError("a bug")
    error.__cause__ = OperationalError("refused")
    try:
        raise error.__cause__
    except OperationalError:
        assert "Traceback" in formatted(error)
        assert "ValueError: a bug" in formatted(error)


def test_what_has_no_traceback_is_as_it_was():
    record = logging.LogRecord("rides_demo", logging.INFO, __file__, 1, "ride %s", (7,), None)

    assert LineFormatter(fmt="%(message)s").format(record) == "ride 7"
