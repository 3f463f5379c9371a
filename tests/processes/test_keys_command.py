"""``manage.py idempotency_keys``: what an operator without the admin sees and does."""

import json
import os
import pty
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.http import HttpResponse
from django.utils import timezone

from idempotency.exceptions import InterventionRequired, Rejected
from idempotency.models import DownstreamCall, IdempotencyKey
from tests.factories import IdempotencyKeyFactory, UserFactory
from tests.kit.ageing import lock_end
from tests.kit.commands import environment
from tests.kit.serving import Sender
from tests.kit.views import two_phases
from tests.models import Entry
from tests.operations import pay_without_undo

pytestmark = pytest.mark.django_db(transaction=True)

SECRETS = {
    "idempotency_key": "raw-key-of-the-client",
    "request_body": b"body-of-the-client",
    "request_headers": {"X-Api": "header-of-the-client"},
    "response_body": b"answer-to-the-client",
}


def stuck(code: str = "view_gave_up", **fields: Any) -> IdempotencyKey:
    """Return a key that waits for manual review."""
    return IdempotencyKeyFactory(
        stuck_at=timezone.now(), stuck_code=code, stuck_reason="it gave up", **fields
    )


def run(*words: Any) -> None:
    call_command("idempotency_keys", *map(str, words))


def test_the_list_has_the_keys_for_review_first(capsys: Any) -> None:
    waiting, waits_for_review = IdempotencyKeyFactory(), stuck()
    run("list")
    assert capsys.readouterr().out.splitlines() == [
        f"{waits_for_review.pk}  stuck  view_gave_up  POST  /rides  it gave up",
        f"{waiting.pk}  waiting for a retry  POST  /rides",
    ]


@pytest.mark.parametrize(
    "words",
    [
        ("--state", "stuck", "--code", "view_gave_up"),
        ("--path", "pay"),
        ("--user", "jane"),
        ("--min-age", "3600"),
        ("--limit", "1"),
    ],
)
def test_filters_select_keys(words: tuple[str, ...], capsys: Any) -> None:
    user = UserFactory(username="jane", email="jane@example.com")
    key = stuck(request_path="/pay/?n=1", user=user, created_at=timezone.now() - timedelta(hours=2))
    IdempotencyKeyFactory(user=UserFactory())
    words = tuple(
        "jane@example.com" if word == "jane" and type(user).USERNAME_FIELD == "email" else word
        for word in words
    )
    run("list", "--json", *words)
    assert [row["id"] for row in json.loads(capsys.readouterr().out)] == [key.pk]


def test_no_output_has_a_secret_of_the_client(capsys: Any) -> None:
    fields = SECRETS | {
        "response_code": 201,
        "response_headers": {},
        "finished_at": timezone.now(),
        "recovery_point": "finished",
    }
    key = IdempotencyKeyFactory(**fields)
    DownstreamCall.objects.create(
        key=key, name="bank", token=key.seed and "0" * 32, result={"card": "result-of-the-bank"}
    )
    for words in (("list",), ("list", "--json"), ("show", key.pk), ("show", key.pk, "--json")):
        run(*words)
        said = capsys.readouterr().out
        assert str(key.pk) in said
        assert not [
            word
            for word in ("-of-the-client", "answer-to", "result-of", bytes(key.seed).hex())
            if word in said
        ]


def test_show_names_the_calls_of_a_key(capsys: Any) -> None:
    key = stuck("call_in_doubt")
    DownstreamCall.objects.create(key=key, name="bank", token="0" * 32)
    run("show", key.pk, "--json")
    described = json.loads(capsys.readouterr().out)
    assert (described["state"], described["stuck_code"]) == ("stuck", "call_in_doubt")
    assert [call["name"] for call in described["calls"]] == ["bank"]


def test_an_answer_is_what_each_retry_gets(serve: Any, sender: Sender, capsys: Any) -> None:
    def fail() -> None:
        raise OSError("The supplier is down")

    serve(
        view=two_phases(
            lambda request: Entry.objects.create(name="ordered"), lambda request: None, call=fail
        )
    )
    assert sender.send().status_code == 500
    key = IdempotencyKey.objects.get()
    run(
        "answer",
        key.pk,
        "--status",
        422,
        "--body",
        '{"sold": "out"}',
        "--by",
        "ann",
        "--note",
        "T-7",
        "--yes",
    )
    assert capsys.readouterr().out == "idempotency_keys: 1 answered\n"
    retry = sender.send()
    assert (retry.status_code, retry.json(), retry["Content-Type"]) == (
        422,
        {"sold": "out"},
        "application/json",
    )
    key.refresh_from_db()
    assert "ann" in json.dumps(key.history)
    assert "T-7" in json.dumps(key.history)


def test_a_request_is_completed_in_the_process_of_the_command(
    serve: Any, sender: Sender, capsys: Any
) -> None:
    outcomes = [OSError("The supplier is down")]

    def call() -> None:
        if outcomes:
            raise outcomes.pop()

    serve(
        view=two_phases(
            lambda request: Entry.objects.create(name="ordered"),
            lambda request: HttpResponse("ok"),
            call=call,
        )
    )
    assert sender.send().status_code == 500
    key = IdempotencyKey.objects.get()
    run("complete", key.pk, "--yes")
    assert capsys.readouterr().out == f"{key.pk}: finished\nidempotency_keys: 1 completed\n"
    assert (sender.send().content, Entry.objects.count()) == (b"ok", 1)


@pytest.mark.parametrize(
    ("action", "changed"),
    [
        ("release", {"locked_until": None}),
        ("hand-back", {"stuck_code": ""}),
        ("acknowledge", {"stuck_code": "view_gave_up"}),
        ("unacknowledge", {"stuck_code": "view_gave_up"}),
    ],
)
def test_each_action_changes_what_the_button_changes(
    action: str, changed: dict[str, Any], capsys: Any
) -> None:
    acknowledged = timezone.now() + timedelta(hours=1) if action == "unacknowledge" else None
    key = (
        stuck(acknowledged_at=acknowledged)
        if action != "release"
        else IdempotencyKeyFactory(claim_token="0" * 32, locked_until=lock_end())
    )
    run(action, key.pk, "--yes")
    key.refresh_from_db()
    assert {name: getattr(key, name) for name in changed} == changed
    assert (key.acknowledged_at is not None) == (action == "acknowledge")


def test_all_takes_the_keys_of_the_filters_only(capsys: Any) -> None:
    taken, left = [stuck() for _ in range(3)], stuck("user_missing")
    run("acknowledge", "--all", "--code", "view_gave_up", "--yes")
    assert capsys.readouterr().out == "idempotency_keys: 3 acknowledged\n"
    assert list(IdempotencyKey.objects.acknowledged().order_by("pk")) == taken
    assert list(IdempotencyKey.objects.stuck()) == [left]


def test_a_key_whose_state_does_not_permit_the_action_is_counted_and_exits_1(capsys: Any) -> None:
    key, finished = stuck(), IdempotencyKeyFactory(finished=True)
    with pytest.raises(CommandError) as caught:
        run("acknowledge", key.pk, finished.pk, "--yes")
    assert caught.value.returncode == 1
    assert capsys.readouterr().out == "idempotency_keys: 1 acknowledged\n"


def stuck_operation() -> IdempotencyKey:
    with pytest.raises(InterventionRequired):
        pay_without_undo.once("key", name="one", cents=402)
    return IdempotencyKey.objects.stuck().get()


def test_the_list_names_the_operation_of_a_key(capsys: Any) -> None:
    key = stuck_operation()
    run("list", "--path", "pay_without")
    line = f"{key.pk}  stuck  view_gave_up  operation  tests.pay_without_undo  "
    assert capsys.readouterr().out.startswith(line)


@pytest.mark.parametrize("result", [{"transfer": 17}, None, "text"])
def test_an_operation_is_answered_with_its_result(result: Any, tmp_path: Path, capsys: Any) -> None:
    key, file = stuck_operation(), tmp_path / "result.json"
    file.write_text(json.dumps(result))
    run("answer", key.pk, "--result", f"@{file}", "--yes")
    assert capsys.readouterr().out == "idempotency_keys: 1 answered\n"
    assert pay_without_undo.once("key", name="one", cents=402) == result


def test_an_operation_is_answered_with_a_refusal() -> None:
    key = stuck_operation()
    run("answer", key.pk, "--rejected", "returned", "--message", "The bank returned it.", "--yes")
    with pytest.raises(Rejected) as caught:
        pay_without_undo.once("key", name="one", cents=402)
    assert caught.value.args == ("returned", "The bank returned it.", None)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--status", "422"), "the key of an operation: give --result or --rejected"),
        (("--result", "{"), "--result is no JSON"),
        (("--result", "{}", "--rejected", "declined"), "give one of"),
        ((), "give one of"),
    ],
)
def test_the_wrong_answer_to_an_operation_changes_nothing(words: Any, text: str) -> None:
    key = stuck_operation()
    with pytest.raises(CommandError, match=text) as caught:
        run("answer", key.pk, *words, "--yes")
    assert caught.value.returncode == 2
    assert list(IdempotencyKey.objects.stuck()) == [key]


@pytest.mark.parametrize("words", [("--result", "{}"), ("--rejected", "declined")])
def test_a_request_is_not_answered_with_a_result(words: tuple[str, ...]) -> None:
    key = stuck()
    with pytest.raises(CommandError, match="the key of a request: give --status") as caught:
        run("answer", key.pk, *words, "--yes")
    assert caught.value.returncode == 2


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("acknowledge",), 2),
        (("acknowledge", "PK", "--all"), 2),
        (("acknowledge", "PK", "--code", "view_gave_up", "--yes"), 2),
        (("acknowledge", "PK"), 2),  # It asks, and the tests have no terminal.
        (("acknowledge", "999999999", "--yes"), 1),
        (("show", "999999999"), 1),
        (("answer", "PK", "--status", "503", "--yes"), 2),
        (("list", "--user", "nobody"), 1),
    ],
)
def test_mistakes_change_nothing(words: tuple[str, ...], status: int, capsys: Any) -> None:
    key = stuck()
    with pytest.raises(CommandError) as caught:
        run(*(key.pk if word == "PK" else word for word in words))
    assert caught.value.returncode == status
    assert list(IdempotencyKey.objects.stuck()) == [key]


@pytest.mark.processes
@pytest.mark.parametrize(("typed", "left"), [(b"y\n", 0), (b"\n", 1)])
def test_it_asks_on_a_terminal_before_it_acts(typed: bytes, left: int) -> None:
    stuck()
    leader, terminal = pty.openpty()
    command = [sys.executable, "-m", "django", "idempotency_keys", "acknowledge", "--all"]
    with subprocess.Popen(
        command, stdin=terminal, stdout=subprocess.PIPE, env=environment()
    ) as process:
        os.write(leader, typed)
        process.communicate(timeout=60)
    os.close(leader)
    os.close(terminal)
    assert (process.returncode, IdempotencyKey.objects.stuck().count()) == (1 if left else 0, left)


@pytest.mark.processes
def test_a_call_that_begins_while_it_asks_prevents_an_answer() -> None:
    key = stuck()
    leader, terminal = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "django",
        "idempotency_keys",
        "answer",
        str(key.pk),
        "--status",
        "422",
    ]
    with subprocess.Popen(
        command, stdin=terminal, stdout=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout is not None
        asked = b""
        while not asked.endswith(b"[y/N] ") and (read := process.stdout.read(1)):
            asked += read
        DownstreamCall.objects.create(key=key, name="bank", token="0" * 32)
        os.write(leader, b"y\n")
        process.communicate(timeout=60)
    os.close(leader)
    os.close(terminal)
    assert process.returncode == 1
    assert list(IdempotencyKey.objects.stuck()) == [key]
