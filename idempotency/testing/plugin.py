"""The kit for pytest: ``pytest_plugins = ["idempotency.testing.plugin"]`` in the root
``conftest.py``."""

import logging
from collections.abc import Callable
from contextlib import nullcontext

import pytest

from idempotency.testing import Report, assert_survives
from idempotency.testing.progress import logger


class _Terminal(logging.Handler):
    """A log handler that writes the lines of the kit to the terminal, even while pytest captures
    the output."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(logging.INFO)
        self._plugins = config.pluginmanager

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line to the terminal. In a worker of pytest-xdist, which has no terminal, do
        nothing."""
        terminal, capture = map(self._plugins.getplugin, ("terminalreporter", "capturemanager"))
        if terminal is not None:
            with capture.global_and_fixture_disabled() if capture is not None else nullcontext():
                terminal.ensure_newline()
                terminal.write_line(self.format(record))


def pytest_configure(config: pytest.Config) -> None:
    """Show the progress of each proof."""
    logger.setLevel(logging.INFO)
    handler = _Terminal(config)
    logger.addHandler(handler)
    config.add_cleanup(lambda: logger.removeHandler(handler))


@pytest.fixture
def survives(transactional_db: None) -> Callable[..., Report]:
    """Return ``idempotency.testing.assert_survives``, with real transactions."""
    return assert_survives
