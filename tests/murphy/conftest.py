"""The service that Murphy's list is played on: started once, put in order before each test."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.conf import settings

from tests.murphy.rider import Rider
from tests.murphy.service import Service


@pytest.fixture(scope="module")
def processes() -> Iterator[Service]:
    folder = Path(settings.RUN_FOLDER) / "murphy"
    folder.mkdir(parents=True)
    with Service(folder) as service:
        yield service
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def service(processes: Service) -> Service:
    """Return the service with all in order and nothing booked yet."""
    processes.begin()
    return processes


@pytest.fixture
def rider(service: Service) -> Iterator[Callable[..., Rider]]:
    """Return a function that makes a rider, of the first web server unless told otherwise."""
    riders: list[Rider] = []

    def make(url: str = "", key: str | None = None) -> Rider:
        riders.append(Rider(url or service.url, key))
        return riders[-1]

    yield make
    for one in riders:
        one.close()
