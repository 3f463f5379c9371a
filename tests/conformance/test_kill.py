"""Number 13: ``kill -9`` at any point. Real processes, killed before and after each exchange with
the server."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.conf import settings

from idempotency.models import IdempotencyKey
from tests.conformance import dying
from tests.kit.ageing import make_older
from tests.kit.commands import environment
from tests.kit.serving import Sender
from tests.kit.waiting import eventually
from tests.models import Entry

pytestmark = pytest.mark.processes

#: The states that a killed request may leave: recovery point and entries written.
WHOLE = {
    "plain": {("no row", 0), ("finished", 2)},
    "phased": {("no row", 0), ("started", 0), ("between", 1), ("finished", 2)},
}


@pytest.fixture
def dying_process(sender: Sender) -> Iterator["subprocess.Popen[str]"]:
    """Return a process in which requests are killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from tests.conformance.dying import main; main()"],
        env=environment(),
        cwd=settings.BASE_DIR,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        process.stdin.close()
        process.wait(60)


@pytest.mark.parametrize("kind", ["plain", "phased"])
@pytest.mark.sample
def test_13_kill_at_any_point_leaves_work_and_completion_both_or_neither(
    kind: str, serve: Callable[..., None], sender: Sender, dying_process: "subprocess.Popen[str]"
) -> None:
    serve(**dying.views())
    session = sender.client.cookies[settings.SESSION_COOKIE_NAME].value
    killed = 0
    left: set[tuple[str, int]] = set()
    while True:
        key = f"killed-at-{killed + 1}"
        dying_process.stdin.write(f"{session} /{kind}/ {key} {killed + 1}\n")
        dying_process.stdin.flush()
        if (end := dying_process.stdout.readline().strip()) != "killed":
            assert end == "answered 2xx"
            break
        killed += 1

        row = IdempotencyKey.objects.filter(idempotency_key=key).first()
        state, entries = (
            row.recovery_point if row else "no row",
            Entry.objects.filter(name__endswith=f" {key}").count(),
        )
        left.add((state, entries))

        make_older(91, "locked_until")
        # The database ends the transaction of the dead as soon as it notices.
        response = _retry_until_unlocked(sender, kind, key)
        assert response.status_code == 201
        assert Entry.objects.filter(name__endswith=f" {key}").count() == 2
        again = _retry(sender, kind, key)
        assert (again.content, again["Idempotent-Replayed"]) == (response.content, "true")

    assert left == WHOLE[kind]
    assert killed >= 12


def test_13_kill_at_any_point_leaves_the_kept_writes_or_nothing(
    serve: Callable[..., None], sender: Sender, dying_process: "subprocess.Popen[str]"
) -> None:
    """The response is not stored, so a retry runs and writes again."""
    serve(**dying.views())
    session = sender.client.cookies[settings.SESSION_COOKIE_NAME].value
    killed, end, left = 0, "killed", set[int]()
    while end == "killed":
        key = f"killed-at-{killed + 1}"
        dying_process.stdin.write(f"{session} /kept/ {key} {killed + 1}\n")
        dying_process.stdin.flush()
        end = dying_process.stdout.readline().strip()
        killed += end == "killed"
        entries = Entry.objects.filter(name__endswith=f" {key}")
        left.add(before := entries.count())
        response = _retry_until_unlocked(sender, "kept", key)
        assert (response.status_code, "Idempotent-Replayed" in response) == (201, False)
        assert entries.count() == before + 2
        assert (
            not IdempotencyKey.objects.filter(idempotency_key=key)
            .exclude(scope__startswith="expired:")
            .exists()
        )
    assert (end, left) == ("answered 2xx", {0, 2})
    assert killed >= 12


def _retry_until_unlocked(sender: Sender, kind: str, key: str) -> Any:
    return eventually(
        lambda: (response := _retry(sender, kind, key)).status_code != 409 and response
    )


def _retry(sender: Sender, kind: str, key: str) -> Any:
    return sender.send(f"/{kind}/", key=key)
