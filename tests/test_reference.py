"""The reference says what the code does; what is made from the code is made anew by ``python -m tests.reference``."""

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

from idempotency import checks, client, completer, conf, doctor, enqueuer, heartbeats, http, inbox, problems, prompt, signals
from idempotency.conf import Settings
from idempotency.contrib import prometheus
from idempotency.contrib.celery import CeleryBackend
from idempotency.contrib.tasks import TasksBackend
from idempotency.decorators import idempotent
from idempotency.heartbeats import SILENT_SECONDS
from idempotency.jobs import stage_job
from idempotency.management import passes
from idempotency.management.commands import enqueue_jobs
from idempotency.models import IdempotencyKey
from idempotency.reaper import MESSAGE_RETENTION
from rides_demo import simulated_clock
from tests import reference

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(reference.PAGES.glob("*.md"))
OVERVIEW = (DOCS / "reference.md").read_text()
DEFAULTS = Settings()
ARGUMENTS = inspect.signature(idempotent).parameters
LOOPS = doctor.LOOPS
SCALE_FACTOR = r"autovacuum_vacuum_scale_factor = ([\d.]+)\)"
#: Numbers that are said in words.
WORDS = {"half a": 0.5, "a": 1, "an": 1, "once": 1, "two": 2, "twice": 2, "three": 3, "ten": 10}

#: Imports a module as a project does that has Django, psycopg and this app, and no package that patches Django for its types.
IMPORT = """
import sys, django
from django.conf import settings
sys.modules["django_stubs_ext"] = None
settings.configure(INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "idempotency"], SECRET_KEY="-")
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
    rows = re.findall(r"^\| `([A-Z0-9_]+)` \| `(.+?)` \| (.+?) \| (.+) \|$", (DOCS / "reference/settings.md").read_text(), re.M)
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


def test_every_error_code_is_documented_with_its_status_and_no_other() -> None:
    documented = {code: int(status) for status, code in re.findall(r"^\| (\d+) \| `(\w+)` \|", OVERVIEW, re.M)}
    arguments = {"key_invalid": ["-"], "key_stuck": ["view_gave_up"]}
    made = [getattr(problems, code)(*arguments.get(code, [])) for code in problems._TITLES if hasattr(problems, code)]
    made.append(problems.key_stuck("unknown_recovery_point"))
    assert documented == {problem.code: problem.status for problem in made}


def test_every_argument_of_the_decorator_is_documented() -> None:
    section = OVERVIEW.partition("## Scopes")[0]
    parameters = [name for name in inspect.signature(idempotent).parameters if name != "view"]
    assert re.findall(r"^\| `(\w+)` \|", section, re.M) == parameters


def test_every_signal_is_documented() -> None:
    page = (DOCS / "reference/signals-and-metrics.md").read_text().partition("## Metrics")[0]
    made = {name for name, value in vars(signals).items() if isinstance(value, Signal)}
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.M)) == made


def prose(page: str) -> str:
    """Return the text of a page with its lines as one."""
    return " ".join((DOCS / page).read_text().split())


def number(said: str) -> float:
    """Return the number that is said, in digits or in a word."""
    return WORDS[said] if said in WORDS else float(said.replace(",", ""))


def derived() -> str:
    """Return a key for another system."""
    key = IdempotencyKey(seed=b"-")
    key.born_monotonic = time.monotonic()
    return key.derive("charge")


def advised(module: ModuleType, advice: str) -> float:
    """Return the number that a check or the doctor tells to set."""
    (found,) = re.findall(advice, inspect.getsource(module))
    return float(found)


def width(field: str) -> int:
    """Return how many characters a field of a key holds."""
    return int(IdempotencyKey._meta.get_field(field).max_length or 0)


@pytest.mark.parametrize(
    ("page", "said", "value"),
    [
        ("../README.md", r"runs all (\w+) in one process", len(LOOPS)),
        ("explanation/at-least-once.md", r"After (\d+) s it gives up", inbox.WAIT_SECONDS),
        ("explanation/at-least-once.md", r"`INBOX_IDLE_SECONDS` \((\d+)\)", DEFAULTS.INBOX_IDLE_SECONDS),
        ("explanation/at-least-once.md", r"A duplicate after (\d+) days", MESSAGE_RETENTION.days),
        ("explanation/comparison-with-peers.md", r"(\w+) commands must run", len(LOOPS)),
        ("explanation/comparison-with-peers.md", r"this app .*? one runs \| (\d+) \|", DEFAULTS.MISMATCH_STATUS),
        ("explanation/how-a-request-runs.md", r"fingerprint is answered (\d+)", DEFAULTS.MISMATCH_STATUS),
        ("explanation/how-a-request-runs.md", r"waits that double up to (\d+) hours", completer._MAX_DELAY_SECONDS / 3600),
        ("explanation/scaling.md", SCALE_FACTOR, advised(doctor, SCALE_FACTOR)),
        ("how-to/a-key-is-stuck.md", r"stays on the list for (\w+) day", heartbeats.KEPT_DAYS),
        ("how-to/a-key-is-stuck.md", r"refused them (\w+) times", enqueuer.MAX_ATTEMPTS),
        ("how-to/call-from-a-client.md", r"retention \((\d+) hours by default", DEFAULTS.RETENTION_HOURS),
        ("how-to/call-from-a-client.md", r"are refused with (\d+)", DEFAULTS.MISMATCH_STATUS),
        ("how-to/choose-a-queue.md", r"staged for (\w+) minutes after", (CeleryBackend.follow_up_seconds or 0) / 60),
        ("how-to/choose-a-queue.md", r"took effect: (half a) minute", (TasksBackend.follow_up_seconds or 0) / 60),
        ("how-to/choose-a-queue.md", r"After (\w+) hand-overs without", enqueuer.MAX_ATTEMPTS),
        ("how-to/choose-a-queue.md", r"slower than its timeout \((\d+) s\)", enqueuer.BROKER_TIMEOUT_SECONDS),
        ("how-to/choose-a-queue.md", r"a timeout of (\w+) seconds or less", enqueuer.BROKER_TIMEOUT_SECONDS),
        ("how-to/choose-a-queue.md", r"looks (\w+) a second", enqueue_jobs.Command.default_interval),
        ("how-to/choose-a-queue.md", r"`visibility_timeout`, (\w+) hour", Channel.visibility_timeout / 3600),
        ("how-to/consume-messages.md", r"the inbox remembers for (\d+) days", MESSAGE_RETENTION.days),
        ("how-to/hand-the-key-on.md", r"(\d+) hexadecimal digits", len(derived())),
        ("how-to/hand-the-key-on.md", r"`RETENTION_HOURS` of that service, (\d+) by default", DEFAULTS.RETENTION_HOURS),
        ("how-to/hand-the-key-on.md", r"\| `(\d+) \* 3600` \| \| one that", DEFAULTS.RETENTION_HOURS - 1),
        ("how-to/hand-the-key-on.md", r"this app answers (\d+)", DEFAULTS.MISMATCH_STATUS),
        ("how-to/metrics-and-alerts.md", r"in the (\w+) loops", len(LOOPS)),
        ("how-to/metrics-and-alerts.md", r"at most ([\d,]+) rows", prometheus.COUNT_LIMIT),
        ("how-to/metrics-and-alerts.md", r"lag_seconds\) > (\d+)", heartbeats.SILENT_SECONDS),
        ("how-to/metrics-and-alerts.md", r"_bucket\[10m\]\)\)\) > (\d+)", DEFAULTS.LOCK_TIMEOUT_SECONDS / 2),
        ("how-to/move-from-django-idempotency-key.md", r"`LOCK_TIMEOUT_SECONDS` \((\d+)\)", DEFAULTS.LOCK_TIMEOUT_SECONDS),
        ("how-to/move-from-django-idempotency-key.md", r"`RETENTION_HOURS` \((\d+)\)", DEFAULTS.RETENTION_HOURS),
        ("how-to/move-from-django-idempotency-key.md", r"`wait_seconds=` .*? \((\d+)\)", ARGUMENTS["wait_seconds"].default),
        ("how-to/move-from-django-idempotency-key.md", r"Keys of (\d+) characters and more", DEFAULTS.KEY_MAX_LENGTH + 1),
        ("how-to/move-from-django-idempotency-key.md", r"is refused\*\* with (\d+)", DEFAULTS.MISMATCH_STATUS),
        ("how-to/receive-webhooks.md", r"waits up to (\d+) s", inbox.WAIT_SECONDS),
        ("how-to/receive-webhooks.md", r"forgets messages after (\d+) days", MESSAGE_RETENTION.days),
        ("how-to/run-a-soak.md", r"lives (\w+) hour ahead", simulated_clock.HOUR_SECONDS / 3600),
        ("how-to/run-the-processes.md", r"(\w+) loops are at work", len(LOOPS)),
        ("how-to/run-the-processes.md", r"runs the (\w+) loops", len(LOOPS)),
        ("how-to/run-the-processes.md", r"all (\w+) files", len(LOOPS)),
        ("how-to/run-the-processes.md", r"every (\d+) seconds while it waits", passes.BEAT_SECONDS),
        ("how-to/run-the-processes.md", r"`--max-age` \((\d+) seconds\)", SILENT_SECONDS),
        ("how-to/run-the-processes.md", r"to (\w+) your LOCK_TIMEOUT", SILENT_SECONDS / DEFAULTS.LOCK_TIMEOUT_SECONDS),
        ("how-to/run-the-processes.md", r"if that is above (\d+)", DEFAULTS.LOCK_TIMEOUT_SECONDS),
        ("how-to/run-the-processes.md", r"after (\d+) refusals", enqueuer.MAX_ATTEMPTS),
        ("how-to/run-the-processes.md", r"at least every (\d+) s", passes.MAX_PAUSE_SECONDS),
        ("how-to/run-the-processes.md", r"after COMMIT for (\d+) s", prompt.PAUSE_SECONDS),
        ("production-checklist.md", r"The (\w+) loops run", len(LOOPS)),
        ("reference.md", r"whose key it is, at most (\d+) characters", width("scope")),
        ("reference/models.md", r"deletes a key (\d+) hours after", DEFAULTS.RETENTION_HOURS),
        ("reference/settings.md", r"`KEY_MAX_LENGTH`, and that one is at most (\d+)", width("idempotency_key")),
        (
            "reference/settings.md",
            r"prepare_threshold\"\]` \| (\d+) lets",
            advised(checks, r"Set it to (\d+)"),
        ),
        ("troubleshooting.md", r"refused with (\d+)", DEFAULTS.MISMATCH_STATUS),
    ],
)
def test_a_number_in_prose_is_that_of_the_code(page: str, said: str, value: float) -> None:
    assert {number(found.lower()) for found in re.findall(said, prose(page))} == {value}


@pytest.mark.parametrize(
    ("page", "said", "value"),
    [
        ("how-to/metrics-and-alerts.md", r"oldest_unfinished_seconds\) > (\d+)", DEFAULTS.COMPLETER_MIN_AGE_SECONDS),
        ("how-to/run-the-processes.md", r"TimeoutStopSec=(\d+)", DEFAULTS.LOCK_TIMEOUT_SECONDS),
        ("how-to/test-your-views.md", r"age\(key, seconds=(\d+)\)", DEFAULTS.LOCK_TIMEOUT_SECONDS),
    ],
)
def test_a_number_of_an_example_is_above_that_of_the_code(page: str, said: str, value: float) -> None:
    assert [number(found) > value for found in re.findall(said, prose(page))] == [True]


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("../README.md", r"5xx, (.*?), which are not stored"),
        ("explanation/how-a-request-runs.md", r"Never (.*?), nor 5xx"),
        ("how-to/a-key-is-stuck.md", r"a 5xx, or a (\d+), would only"),
        ("how-to/django-ninja.md", r"answer; (.*?) and 5xx are not"),
        ("how-to/django-rest-framework.md", r"answer; (.*?) and 5xx are not"),
        ("how-to/do-without-a-key.md", r"never stores (.*?):"),
        ("troubleshooting.md", r"the first answer was a 5xx, (.*?) \|"),
    ],
)
def test_statuses_that_are_said_not_to_be_stored_are_not(page: str, said: str) -> None:
    (listed,) = re.findall(said, prose(page))
    statuses = {int(status) for status in re.findall(r"\b\d{3}\b(?!-)", listed)}
    assert statuses
    assert statuses <= DEFAULTS.NEVER_STORED_STATUSES
    assert (page != "explanation/how-a-request-runs.md") or statuses == DEFAULTS.NEVER_STORED_STATUSES
    assert not DEFAULTS.STORE_5XX


def test_statuses_that_the_client_is_said_to_send_again_are_those() -> None:
    (listed,) = re.findall(
        r"\| ([\d, ]+), 5xx; 409 with `Retry-After` \| sends it again", prose("how-to/call-from-a-client.md")
    )
    assert {int(status) for status in listed.split(", ")} == client._COME_BACK


def test_the_limits_of_settings_are_those_of_the_code() -> None:
    text = prose("reference/settings.md")
    (least,) = map(int, re.findall(r"`RETENTION_HOURS` is at least (\d+)", text))
    (whole,) = map(int, re.findall(r"Whole numbers are (\d+) or more", text))
    (mismatch,) = re.findall(r"`MISMATCH_STATUS` is (\d+), (\d+) or (\d+)\.", text)
    assert conf.problems({"RETENTION_HOURS": least, "COMPLETER_MAX_ATTEMPTS": whole}) == []
    assert conf.problems({"RETENTION_HOURS": least - 1})
    assert conf.problems({"COMPLETER_MAX_ATTEMPTS": whole - 1})
    assert [status for status in range(400, 500) if not conf.problems({"MISMATCH_STATUS": status})] == sorted(
        map(int, mismatch)
    )


def test_the_defaults_that_are_said_in_words_are_those_of_the_code() -> None:
    assert "RQ is the default." in prose("how-to/stage-a-job.md")
    assert DEFAULTS.ENQUEUERS == {"*": "idempotency.contrib.rq.RQBackend"}
    assert "Phases run SERIALIZABLE by default, plain views at the connection's own level" in prose("explanation/the-fence.md")
    assert (DEFAULTS.PHASE_ISOLATION, DEFAULTS.PLAIN_ISOLATION) == ("serializable", None)
    assert f"`HEADER_NAMES` (`{json.dumps(DEFAULTS.HEADER_NAMES)}`" in prose("how-to/move-from-django-idempotency-key.md")


def test_every_default_of_the_decorator_is_the_one_of_the_code() -> None:
    section = OVERVIEW.partition("## Scopes")[0]
    in_words = {
        "none": None,
        "user, else session": None,
        "the router's choice": None,
        "nothing": (),
        "`PLAIN_ISOLATION`": "from settings",
    }
    for name, said in re.findall(r"^\| `(\w+)` \| (.+?) \|", section, re.M):
        default = in_words[said] if said in in_words else ast.literal_eval(said.strip("`"))
        assert (ARGUMENTS[name].default or None) == (default or None), name


@pytest.mark.parametrize("function", [stage_job, inbox.process_once, IdempotencyKey.derive])
def test_a_signature_in_prose_is_that_of_the_code(function: Callable[..., object]) -> None:
    signature = inspect.signature(function)
    plain = [given.replace(annotation=given.empty) for name, given in signature.parameters.items() if name != "self"]
    written = str(inspect.Signature(plain)).replace("'", '"')
    assert f"{function.__name__}{written}" in OVERVIEW


@pytest.mark.processes
def test_what_the_page_names_can_be_imported_with_django_alone() -> None:
    page = (DOCS / "reference/python.md").read_text()
    named = re.findall(r"^\.\. auto(?:function|class|exception|module|method):: (idempotency\.[a-z_]+)", page, re.M)
    subprocess.run([sys.executable, "-c", IMPORT, *sorted(set(named))], check=True, timeout=60)


@pytest.mark.parametrize("page", ["explanation/how-a-request-runs.md", "how-to/shard-by-tenant.md"])
def test_the_headers_that_the_completer_has_are_those_that_are_kept(page: str) -> None:
    text = (DOCS / page).read_text()
    listed = re.search(r"`Accept`,[\s\S]*?`Stripe-Version`", text)
    assert listed is not None
    assert tuple(re.findall(r"`([\w-]+)`", listed[0])) == http._KEPT_REQUEST_HEADERS
