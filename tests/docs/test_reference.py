"""The reference says what the code does; what is made from the code is made anew by ``python -m
tests.reference``."""

import ast
import inspect
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
from django.dispatch import Signal
from kombu.transport.redis import Channel

from idempotency import _prompt, _states, backends, conf, inbox, signals
from idempotency._engine.history import HistoryEvent
from idempotency._http import stored_request
from idempotency._operations.definition import Definition
from idempotency.admin.export import MAX_CHARACTERS
from idempotency.checks import databases as database_checks
from idempotency.client import _rules
from idempotency.conf import Settings
from idempotency.contrib.celery import CeleryBackend
from idempotency.contrib.tasks import TasksBackend
from idempotency.decorators import idempotent
from idempotency.jobs import stage_job
from idempotency.management import loop
from idempotency.models import IdempotencyKey
from idempotency.monitoring import doctor, heartbeats
from idempotency.operations import Operation, operation
from idempotency.phases import ClaimedKey
from idempotency.reaper import MESSAGE_RETENTION
from rides_demo.sandbox import account
from rides_demo.simulator import wrong_clock
from tests import reference
from tests.kit.pages import DOCS, prose, says, says_time

PAGES = sorted(reference.PAGES.glob("*.md"))
#: The fields of a definition that are no options of the decorator.
NO_OPTIONS = ("name", "steps", "path")
OVERVIEW = (DOCS / "reference.md").read_text()
DEFAULTS = Settings()
ARGUMENTS = inspect.signature(idempotent).parameters
LOOPS = heartbeats.LOOPS
PAGES_OF_PROSE = ["../README.md", *(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))]
SCALE_FACTOR = r"autovacuum_vacuum_scale_factor = ([\d.]+)\)"
#: Imports a module as a project does that has Django, psycopg and this app, and no package that
#: patches Django for its types.
IMPORT = """
import sys, django
from django.conf import settings
sys.modules["django_stubs_ext"] = None
apps = ["django.contrib.auth", "django.contrib.contenttypes", "idempotency"]
settings.configure(INSTALLED_APPS=apps, SECRET_KEY="-")
django.setup()
for name in sys.argv[1:]:
    __import__(name)
"""


@pytest.mark.django_db
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_page_is_what_the_code_makes_of_it(path: Path) -> None:
    assert path.read_text() == reference.filled(path.read_text()), "run: python -m tests.reference"


def test_every_part_is_on_a_page() -> None:
    """And each has its end: without one the page is what anybody makes of it."""
    pages = "".join(path.read_text() for path in PAGES)
    marks = re.findall(f"{reference.BEGINNING}|({reference.END})", pages)
    assert sorted(name for name, _ in marks[::2]) == sorted(reference.PARTS)
    assert [end for _, end in marks[1::2]] == [reference.END] * len(reference.PARTS)


def test_every_setting_has_a_default_a_unit_and_a_meaning() -> None:
    rows = re.findall(
        r"^\| `([A-Z0-9_]+)` \| `(.+?)` \| (.+?) \| (.+) \|$",
        (DOCS / "reference/settings.md").read_text(),
        re.M,
    )
    assert [name for name, *_ in rows] == [field.name for field in fields(Settings)]
    assert {name: default for name, default, *_ in rows} == {
        field.name: reference.written(getattr(Settings(), field.name)) for field in fields(Settings)
    }
    assert all(unit.strip() and len(meaning) > 20 for _, _, unit, meaning in rows)


def test_no_note_and_no_unit_is_left_of_what_the_code_does_not_have() -> None:
    named = {kind for kind in reference.KINDS if isinstance(kind, str)}
    assert named <= {field.name for field in fields(Settings)}
    models = (DOCS / "reference/models.md").read_text()
    assert [note for note in reference.NOTES.values() if f" | {note} |" not in models] == []


def test_every_argument_of_the_decorator_is_documented() -> None:
    section = OVERVIEW.partition("## Scopes")[0]
    parameters = [name for name in inspect.signature(idempotent).parameters if name != "view"]
    assert re.findall(r"^\| `(\w+)` \|", section, re.M) == parameters


def test_every_argument_of_an_operation_is_documented() -> None:
    page = (DOCS / "reference/operations.md").read_text().partition("## Calls of an operation")[0]
    taken = [name for name in inspect.signature(operation).parameters if name != "options"]
    options = [each.name for each in fields(Definition) if each.name not in NO_OPTIONS]
    assert re.findall(r"^\| `(\w+)` \|", page, re.M) == [*taken, *options]


def test_everything_that_once_raises_is_documented() -> None:
    section = (DOCS / "reference/operations.md").read_text().partition("| `once` raises")[2]
    told = re.findall(r"^\| `(\w+)` \|", section.partition("\n## ")[0], re.M)
    raised = re.findall(r"Raises (\w+)", inspect.getdoc(Operation.once) or "")
    assert sorted(told) == sorted(raised)


def test_every_signal_is_documented() -> None:
    page = (DOCS / "reference/signals-and-metrics.md").read_text().partition("## Metrics")[0]
    made = {name for name, value in vars(signals).items() if isinstance(value, Signal)}
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.M)) == made


def test_every_event_of_the_history_is_documented() -> None:
    section = (
        (DOCS / "reference/models.md")
        .read_text()
        .partition("## The history of a key")[2]
        .partition("\n## ")[0]
    )
    assert re.findall(r"^\| `([a-z ]+)` \|", section, re.M) == [
        event.value for event in HistoryEvent
    ]


def derived() -> str:
    """Return a key for another system."""
    key = ClaimedKey(seed=b"-")
    key.created_monotonic = time.monotonic()
    return key.derive("charge")


def advised(module: ModuleType, advice: str) -> float:
    """Return the number that a check or the doctor tells to set."""
    (found,) = re.findall(advice, inspect.getsource(module))
    return float(found)


def width(field: str) -> int:
    """Return how many characters a field of a key holds."""
    return int(IdempotencyKey._meta.get_field(field).max_length or 0)


@pytest.mark.parametrize(
    ("page", "seconds"),
    [
        ("explanation/at-least-once.md", inbox.WAIT_SECONDS),
        ("explanation/at-least-once.md", DEFAULTS.INBOX_IDLE_SECONDS),
        ("explanation/at-least-once.md", MESSAGE_RETENTION.total_seconds()),
        ("explanation/how-a-request-runs.md", _states.MAX_DELAY_SECONDS),
        ("how-to/a-key-is-stuck.md", heartbeats.KEPT_DAYS * 86400),
        ("how-to/call-from-a-client.md", DEFAULTS.RETENTION_HOURS * 3600),
        ("how-to/choose-a-queue.md", CeleryBackend.follow_up_seconds),
        ("how-to/choose-a-queue.md", TasksBackend.follow_up_seconds),
        ("how-to/choose-a-queue.md", backends.BROKER_TIMEOUT_SECONDS),
        ("how-to/choose-a-queue.md", Channel.visibility_timeout),
        ("how-to/consume-messages.md", MESSAGE_RETENTION.total_seconds()),
        ("how-to/receive-webhooks.md", inbox.WAIT_SECONDS),
        ("how-to/receive-webhooks.md", MESSAGE_RETENTION.total_seconds()),
        ("contributing/soak.md", wrong_clock.HOUR_SECONDS),
        ("contributing/soak.md", account.STALL_SECONDS),
        ("how-to/run-the-processes.md", heartbeats.WRITE_SECONDS),
        ("how-to/run-the-processes.md", heartbeats.SILENT_SECONDS),
        ("reference/operations.md", MESSAGE_RETENTION.total_seconds()),
        ("reference/log-lines.md", loop.MAX_PAUSE_SECONDS),
        ("reference/log-lines.md", _prompt.PAUSE_SECONDS),
        ("reference/models.md", DEFAULTS.RETENTION_HOURS * 3600),
    ],
)
def test_a_time_of_the_code_is_on_the_page(page: str, seconds: float) -> None:
    text = prose(page)
    assert says_time(text, seconds) or re.search(rf"\(({seconds:g})\)", text)


@pytest.mark.parametrize(
    ("page", "value", "unit"),
    [
        ("explanation/comparison-with-peers.md", DEFAULTS.MISMATCH_STATUS, ""),
        ("explanation/how-a-request-runs.md", DEFAULTS.MISMATCH_STATUS, ""),
        ("how-to/a-key-is-stuck.md", backends.MAX_ATTEMPTS, "times|attempts|refusals"),
        ("how-to/call-from-a-client.md", DEFAULTS.MISMATCH_STATUS, ""),
        ("how-to/choose-a-queue.md", backends.MAX_ATTEMPTS, "hand-overs|times|attempts"),
        ("how-to/hand-the-key-on.md", len(derived()), "hexadecimal digits|characters"),
        ("how-to/hand-the-key-on.md", DEFAULTS.RETENTION_HOURS, ""),
        ("how-to/hand-the-key-on.md", DEFAULTS.MISMATCH_STATUS, ""),
        ("how-to/move-from-another-middleware.md", DEFAULTS.KEY_MAX_LENGTH + 1, "characters"),
        ("how-to/move-from-another-middleware.md", DEFAULTS.MISMATCH_STATUS, ""),
        ("how-to/prepare-a-request.md", stored_request.MAX_KEPT_BYTES, "bytes"),
        ("how-to/run-the-processes.md", DEFAULTS.LOCK_TIMEOUT_SECONDS, ""),
        ("reference/admin.md", MAX_CHARACTERS, "characters"),
        ("reference/log-lines.md", backends.MAX_ATTEMPTS, "times|attempts|refusals"),
        ("reference.md", width("scope"), "characters"),
        ("reference/settings.md", width("idempotency_key"), ""),
        ("troubleshooting.md", DEFAULTS.MISMATCH_STATUS, ""),
    ],
)
def test_a_number_of_the_code_is_on_the_page(page: str, value: float, unit: str) -> None:
    assert says(prose(page), value, unit)


def test_the_number_beside_a_setting_is_its_default() -> None:
    found = {
        (name, float(said))
        for page in PAGES_OF_PROSE
        for name, said in re.findall(r"`([A-Z_]+)` \((\d+)\)", prose(page))
    }
    ours = {(name, said) for name, said in found if hasattr(DEFAULTS, name)}
    assert len(ours) >= 3
    assert ours == {(name, getattr(DEFAULTS, name)) for name, _ in ours}


def test_the_pages_count_the_loops() -> None:
    said = {
        number.lower()
        for page in PAGES_OF_PROSE
        for number in re.findall(r"\b(\w+) loops\b", prose(page))
    }
    numbers = {"two", "three", "four", "five", *map(str, range(10))}
    assert said & numbers == {"three"}
    assert len(LOOPS) == 3


@pytest.mark.parametrize(
    ("page", "said", "value"),
    [
        ("explanation/scaling.md", SCALE_FACTOR, advised(doctor, SCALE_FACTOR)),
        ("how-to/hand-the-key-on.md", r"`(\d+) \* 3600`", DEFAULTS.RETENTION_HOURS - 1),
        ("../examples/prometheus/alerts.yml", r"lag_seconds\) > (\d+)", heartbeats.SILENT_SECONDS),
        (
            "../examples/prometheus/alerts.yml",
            r"_bucket\[10m\]\)\)\) > (\d+)",
            DEFAULTS.LOCK_TIMEOUT_SECONDS / 2,
        ),
        (
            "reference/settings.md",
            r"prepare_threshold\"\]` \| (\d+)",
            advised(database_checks, r"Set it to (\d+)"),
        ),
    ],
)
def test_a_number_of_an_example_is_that_of_the_code(page: str, said: str, value: float) -> None:
    assert value in {float(found) for found in re.findall(said, prose(page))}


@pytest.mark.parametrize(
    ("page", "said", "value"),
    [
        (
            "../examples/prometheus/alerts.yml",
            r"oldest_unfinished_seconds\) > (\d+)",
            DEFAULTS.COMPLETER_MIN_AGE_SECONDS,
        ),
        ("how-to/run-the-processes.md", r"TimeoutStopSec=(\d+)", DEFAULTS.LOCK_TIMEOUT_SECONDS),
        ("how-to/test-your-views.md", r"age\(key, seconds=(\d+)\)", DEFAULTS.LOCK_TIMEOUT_SECONDS),
    ],
)
def test_a_number_of_an_example_is_above_that_of_the_code(
    page: str, said: str, value: float
) -> None:
    assert [float(found) > value for found in re.findall(said, prose(page))] == [True]


def test_every_status_that_is_never_stored_is_on_the_page() -> None:
    page = prose("explanation/how-a-request-runs.md")
    assert not [status for status in DEFAULTS.NEVER_STORED_STATUSES if not says(page, status)]
    assert not DEFAULTS.STORE_5XX


def test_statuses_that_the_client_is_said_to_send_again_are_those() -> None:
    (listed,) = re.findall(
        r"^\| ((?:\d{3}, )+)5xx", (DOCS / "how-to" / "call-from-a-client.md").read_text(), re.M
    )
    assert {int(status) for status in re.findall(r"\d+", listed)} == _rules.RETRIED_STATUSES


def test_the_limits_of_settings_are_those_of_the_code() -> None:
    text = (DOCS / "reference/settings.md").read_text()
    lines = re.findall(r"^- .*?(?=^- |^$|\Z)", text, re.M | re.S)
    least = next(hours for hours in range(1000) if not conf.mistakes({"RETENTION_HOURS": hours}))
    allowed = [
        status for status in range(400, 500) if not conf.mistakes({"MISMATCH_STATUS": status})
    ]
    assert any(says(line, least) for line in lines if "`RETENTION_HOURS`" in line)
    assert any(
        all(says(line, status) for status in allowed)
        for line in lines
        if "`MISMATCH_STATUS`" in line
    )


def test_the_header_beside_its_setting_is_the_default() -> None:
    assert f"`HEADER_NAMES` (`{json.dumps(DEFAULTS.HEADER_NAMES)}`" in prose(
        "how-to/move-from-another-middleware.md"
    )


def test_every_default_of_the_decorator_is_the_one_of_the_code() -> None:
    section = OVERVIEW.partition("## Scopes")[0]
    for name, said in re.findall(r"^\| `(\w+)` \| (.+?) \|", section, re.M):
        default = ARGUMENTS[name].default
        if code := re.fullmatch("`(.*)`", said):
            expected = "from settings" if hasattr(DEFAULTS, code[1]) else ast.literal_eval(code[1])
            assert (default or None) == (expected or None), name
        else:
            assert not default, f"{name}: its default is not in code"


@pytest.mark.parametrize("function", [stage_job, inbox.process_once, ClaimedKey.derive])
def test_a_signature_in_prose_is_that_of_the_code(function: Callable[..., object]) -> None:
    signature = inspect.signature(function)
    plain = [
        given.replace(annotation=given.empty)
        for name, given in signature.parameters.items()
        if name != "self"
    ]
    written = str(inspect.Signature(plain)).replace("'", '"')
    assert f"{function.__name__}{written}" in OVERVIEW


@pytest.mark.processes
def test_what_the_page_names_can_be_imported_with_django_alone() -> None:
    page = (DOCS / "reference/python.md").read_text()
    named = re.findall(
        r"^\.\. auto(?:function|class|exception|module|method):: (idempotency\.[a-z_]+)", page, re.M
    )
    subprocess.run([sys.executable, "-c", IMPORT, *sorted(set(named))], check=True, timeout=60)


def test_the_headers_that_the_completer_has_are_those_that_are_kept() -> None:
    text = (DOCS / "explanation/how-a-request-runs.md").read_text()
    assert set(stored_request._KEPT_HEADERS) <= set(re.findall(r"`([\w-]+)`", text))
