"""One browser and one service for all tests of pages; a window of its own, and all in order, for
each."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.conf import settings
from playwright.sync_api import Browser, BrowserContext, expect, sync_playwright

from rides_demo.management.commands.serve import NO_KEEP_ALIVE
from rides_demo.processes import debian, web_workers
from tests.browser import chromium
from tests.browser.visitor import Visitor
from tests.murphy.service import Service

SCREENSHOTS = settings.BASE_DIR / ".run" / "screenshots"
#: What a page has to show, it shows within; a busy machine is slow to hand the receipt to its
#: worker.
TIMEOUT_SECONDS = 60
VISITED = pytest.StashKey[bool]()


# Not for the whole session: Playwright's event loop runs in this thread, where Django refuses the
# database meanwhile.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Start Chromium; skip, saying why, where none can be had."""
    try:
        path = chromium.chromium()
    except debian.NotToBeHad as reason:
        pytest.skip(str(reason))
    with sync_playwright() as playwright:
        expect.set_options(timeout=TIMEOUT_SECONDS * 1000)
        running = playwright.chromium.launch(executable_path=path, args=chromium.ARGUMENTS)
        yield running
        running.close()


@pytest.fixture(scope="package")
def processes(browser: Browser) -> Iterator[Service]:
    """Start the service, after the browser: without one there is nothing to do."""
    folder = Path(settings.RUN_FOLDER) / "browser"
    folder.mkdir(parents=True)
    # As `make serve` does it, for the button that kills the web worker.
    environment = {web_workers.SUPERVISOR: str(os.getpid()), "GUNICORN_CMD_ARGS": NO_KEEP_ALIVE}
    environment |= {"TRACES": "1"}
    with Service(folder, environment) as service:
        yield service
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def service(processes: Service) -> Service:
    """Return the service with all in order and nothing booked yet."""
    processes.begin()
    return processes


@pytest.fixture
def visit(
    pytestconfig: pytest.Config, browser: Browser, service: Service
) -> Iterator[Callable[..., Visitor]]:
    """Return a function that opens a window, light and as wide as a desk has it unless told
    otherwise."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    pytestconfig.stash[VISITED] = True
    contexts: list[BrowserContext] = []

    def open_window(scheme: str = "light", width: int = 1280) -> Visitor:
        context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
        context.set_default_timeout(TIMEOUT_SECONDS * 1000)
        contexts.append(context)
        return Visitor(context, service.url, SCREENSHOTS, f"{scheme}-{width}")

    yield open_window
    for context in contexts:
        context.close()


@pytest.fixture
def visitor(visit: Callable[..., Visitor]) -> Visitor:
    return visit()


@pytest.fixture(scope="session")
def axe_script() -> str:
    """Return axe-core; skip, saying why, where it cannot be had."""
    try:
        return chromium.axe_script(settings.BASE_DIR / ".run")
    except debian.NotToBeHad as reason:
        pytest.skip(str(reason))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say where the pictures of this run are."""
    if VISITED in config.stash:
        terminalreporter.write_line(f"screenshots of the pages: {SCREENSHOTS}")
