"""The writes follow the rules of Citus for functions; PostgreSQL itself can check these rules.

Citus refuses a write with a volatile function. It evaluates a stable function before it sends the
write to a worker, so the function must not use a column. It refuses a stable function in CASE,
COALESCE, ON CONFLICT and RETURNING.
Source: Citus 13.2, ``multi_router_planner.c`` (``ModifyPartialQuerySupported``,
``ErrorIfOnConflictNotSupported``).
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from django.db import Error, connection, transaction
from django.db.backends.utils import CursorWrapper
from django.http import HttpResponse
from pytest_django import Settings

from idempotency import enqueuer, interventions, reaper
from idempotency._engine import decisions
from idempotency._engine.advisory_locks import HOLDER
from idempotency._engine.dialects import POSTGRESQL
from idempotency._engine.statements import Statements
from idempotency._engine.updates import AT_CTID, RETURNING_CTID, TABLE
from idempotency.admin import traffic
from idempotency.inbox import process_once
from idempotency.models import IdempotencyKey
from tests.factories import StagedJobFactory
from tests.kit.ageing import past_the_retention
from tests.kit.claims import claim, finish

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

STATEMENTS = Statements("postgresql")
#: Statements that run only on SQLite.
OTHERS = {"upsert", "upsert_with_call", "insert_plain"}
NAMES = sorted(name for name in dir(Statements) if not name.startswith("_") and name not in OTHERS)
#: Locks that the SELECT parts of a claim take. The coordinator of Citus runs these parts.
LOCKS = {"pg_try_advisory_xact_lock"}
#: An expression that the coordinator evaluates once, before the write, so that it is a constant.
_EVENT = re.sub(
    r"%\\\(\w+\\\)s", lambda named: r"(?:%\(\w+\)s|%s|\$\d+)", re.escape(POSTGRESQL.event)
)
ONCE = re.compile(
    _EVENT
    + r"|\((?i:statement_timestamp)\(\) [-+] (?:[^()]|\([^()]*\))*\)|(?i:statement_timestamp)\(\)",
)


def functions(text: str) -> set[str]:
    """Return the names of functions in a text, which are lower case; keywords are upper case."""
    return set(re.findall(r"\b([a-z_][a-z0-9_]*)\(", text))


def end_of(text: str, start: int) -> int:
    """Return the end of the clause that begins at ``start``: the closing parenthesis around it, or
    the end of the text."""
    depth = 0
    for position, character in enumerate(text[start:], start):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth < 0:
            return position
    return len(text)


def split(text: str, separator: str) -> list[str]:
    """Split at a separator outside parentheses and CASE."""
    found, depth, last = [], 0, 0
    for match in re.finditer(rf"[()]|\bCASE\b|\bEND\b|{separator}", text):
        depth += {"(": 1, "CASE": 1, ")": -1, "END": -1}.get(match[0], 0)
        if depth == 0 and re.fullmatch(separator, match[0]):
            found.append(text[last : match.start()])
            last = match.end()
    return [*found, text[last:]]


def expressions(clause: str) -> Iterator[str]:
    """Yield the values of SET, the condition of WHERE and the columns of RETURNING."""
    body, *returning = split(clause, r"\bRETURNING\b")
    body, *where = split(body, r"\bWHERE\b")
    for assignment in (
        split(split(body, r"\bSET\b")[-1], ",") if re.search(r"\bSET\b", body) else ()
    ):
        yield assignment.partition("=")[2]
    yield from where
    yield from immediate(returning)


def immediate(returning: list[str]) -> Iterator[str]:
    """Yield the columns of a RETURNING clause."""
    for columns in returning:
        yield from (split(column, r"\bAS\b")[0] for column in split(columns, ","))


def lazy(text: str) -> Iterator[str]:
    """Yield each outermost CASE and COALESCE of a text."""
    position = 0
    while match := re.compile(r"\bCASE\b|\bCOALESCE\(").search(text, position):
        if match[0] == "CASE":
            depth = 0
            for word in re.finditer(r"\bCASE\b|\bEND\b", text[match.start() :]):
                depth += 1 if word[0] == "CASE" else -1
                if depth == 0:
                    break
            position = match.start() + word.end()
        else:
            position = end_of(text, match.end()) + 1
        yield text[match.start() : position]


def must_be_immutable(text: str) -> Iterator[str]:
    """Yield the expressions of a write in which Citus accepts only immutable functions."""
    if (
        match := re.search(r"\bON CONFLICT\b[^)]*\)? DO (?:NOTHING|UPDATE)", text)
    ) or "INSERT INTO" in text:
        start = match.end() if match else text.index("INSERT INTO")
        yield from expressions(text[start : end_of(text, start)])
    elif (match := re.search(r"\bUPDATE\b", text)) or "DELETE FROM" in text:
        write = text[match.start() if match else 0 :]
        yield from lazy(write)
        yield from immediate(split(write, r"\bRETURNING\b")[1:])
        yield from expressions(ONCE.sub("NULL", write))


def probed(expression: str) -> str:
    """Return the expression in a form for an index: columns without a table, no system column, no
    parameter."""
    bare = re.sub(
        r"\bmax\([\w.]+\)", "NULL", re.sub(r'(?:\b(?:k|excluded)|"\w+")\.', "", expression)
    )
    while (start := bare.find("(SELECT ")) >= 0:
        bare = f"{bare[:start]}NULL{bare[end_of(bare, start + 1) + 1 :]}"
    return re.sub(r"%\(\w+\)s|%s|\$\d+", "NULL", re.sub(r"\bctid\b", "NULL::tid", bare)).strip()


def refusals(texts: dict[str, str], table: str = TABLE) -> dict[str, str]:
    """Return the expressions of ``texts`` that are not immutable: PostgreSQL refuses an index on
    them."""
    refused = {}
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"CREATE TEMPORARY TABLE probe (LIKE {table}) ON COMMIT DROP")
        for name, text in texts.items():
            for expression in {probed(found) for found in must_be_immutable(text)}:
                try:
                    with transaction.atomic():
                        cursor.execute(f"CREATE INDEX ON probe ((({expression}) IS NULL))")
                except Error as error:
                    refused[f"{name}: {expression}"] = str(error)
    return refused


def volatile(texts: dict[str, str]) -> dict[str, set[str]]:
    """Return the volatile functions of each text, by ``pg_proc``."""
    called = {name: functions(text) for name, text in texts.items()}
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT proname, max(CASE provolatile WHEN 'v' THEN 1 ELSE 0 END) FROM pg_proc WHERE"
            " proname = ANY(%s) GROUP BY 1",
            [[*set().union(*called.values())]],
        )
        known: dict[str, int] = dict(cursor.fetchall())
    return {
        name: found
        for name, names in called.items()
        if (found := {each for each in names if known.get(each)})
    }


def texts_of_statements() -> dict[str, str]:
    texts = {name: value for name in NAMES if isinstance(value := getattr(STATEMENTS, name), str)}
    fenced = {
        f"{name}{end}": texts[name] + end
        for name in ("advance", "renew", "finish")
        for end in (AT_CTID, RETURNING_CTID)
    }
    return texts | fenced | {"HOLDER": HOLDER}


def test_the_statements_are_found() -> None:
    assert texts_of_statements().keys() >= {
        "claim_phased",
        "claim_plain",
        "claim_by_id",
        "finish_plain",
        "give_up",
        "read",
    }


def test_no_statement_calls_a_volatile_function_except_for_the_locks_of_a_claim() -> None:
    found = volatile(texts_of_statements())
    assert found == dict.fromkeys(("claim_phased", "claim_phased_with_call", "claim_plain"), LOCKS)


def test_no_statement_calls_a_function_that_citus_refuses() -> None:
    assert refusals(texts_of_statements()) == {}


@pytest.mark.parametrize(
    "text",
    [
        "UPDATE t AS k SET locked_until = clock_timestamp() WHERE k.id = 1",
        "UPDATE t AS k SET locked_until = k.locked_until + interval '1 second' WHERE k.id = 1",
        (
            "UPDATE t AS k SET finished_at = COALESCE(k.finished_at, statement_timestamp()) WHERE"
            " k.id = 1"
        ),
        (
            "UPDATE t AS k SET locked_until = CASE WHEN k.locked_until IS NULL THEN"
            " statement_timestamp() END WHERE k.id = 1"
        ),
        (
            "UPDATE t AS k SET locked_until = NULL WHERE k.id = 1 RETURNING statement_timestamp() -"
            " created_at"
        ),
        (
            "INSERT INTO t (id) SELECT 1 ON CONFLICT (id) DO UPDATE SET locked_until ="
            " statement_timestamp()"
        ),
        (
            "INSERT INTO t (id) SELECT 1 ON CONFLICT (id) DO UPDATE SET id = 2 WHERE k.locked_until"
            " < statement_timestamp()"
        ),
        (
            "INSERT INTO t (id) SELECT 1 ON CONFLICT (id) DO NOTHING RETURNING extract(epoch FROM"
            " statement_timestamp())"
        ),
    ],
)
def test_such_a_function_would_be_found(text: str) -> None:
    assert len(refusals({"text": text})) == 1


@pytest.fixture
def written() -> Callable[[Callable[[], Any]], dict[str, str]]:
    """Return a function that calls ``work`` and returns the texts of its writes."""

    def writes_of(work: Callable[[], Any]) -> dict[str, str]:
        texts: dict[str, str] = {}

        def note(
            execute: Any, sql: str, params: Any, many: bool, context: dict[str, CursorWrapper]
        ) -> Any:
            if re.match(r"(?:INSERT|UPDATE|DELETE)\b", sql):
                texts[sql] = sql
            return execute(sql, params, many, context)

        with connection.execute_wrapper(note):
            work()
        assert texts
        return texts

    return writes_of


def decide() -> None:
    """Make each decision of an operator."""
    claim()
    answer = partial(interventions.answer, response=HttpResponse("done"))
    for decision in (
        interventions.release_lock,
        interventions.acknowledge,
        interventions.hand_back,
        answer,
    ):
        key = IdempotencyKey.objects.get()
        known: dict[str, Any] = (
            {"calls": interventions.calls_of(key.pk)} if decision is answer else {}
        )
        assert decision(key.pk, key.claim_token, by="jane", **known)
        decisions.give_up(key.pk, "code", "reason", using="default")


def reap() -> None:
    """Delete a key that has expired."""
    finish(claim().key)
    past_the_retention()
    assert reaper.reap_once().deleted == 1


def move_jobs() -> None:
    """Let the enqueuer refuse a job, which has no broker."""
    StagedJobFactory(queue="unknown")
    assert enqueuer.enqueue_once().refused == 1


def receive() -> None:
    """Process a message."""
    with process_once("stripe", "evt_1") as first:
        assert first


def count() -> None:
    """Write the counts of requests."""
    traffic.count_request(outcome=traffic.RequestOutcome.REPLAYED, seconds=0.1)
    traffic.write()


@pytest.mark.parametrize("work", [decide, reap, move_jobs, receive, count])
def test_no_other_write_on_the_tables_calls_a_function_that_citus_refuses(
    work: Callable[[], None],
    written: Callable[[Callable[[], Any]], dict[str, str]],
    settings: Settings,
) -> None:
    settings.IDEMPOTENCY = {"ENQUEUERS": {"known": "idempotency.contrib.rq.RQBackend"}}
    texts = written(work)
    assert volatile(texts) == {}
    for text in texts.values():
        match = re.search(r'(?:INTO|UPDATE|FROM) "?(\w+)', text)
        assert match is not None
        assert refusals({"text": text}, match[1]) == {}


def test_the_time_of_a_lost_run_is_the_text_that_json_has() -> None:
    key = claim().key
    with connection.cursor() as cursor:
        for at in (
            "2026-01-02 03:04:05.6+00",
            "2025-12-31 23:59:30+00",
            "2024-02-29 00:00:00.000001+00",
        ):
            IdempotencyKey.objects.update(locked_until=at, last_run_at=at)
            assert claim().key.pk == key.pk
            cursor.execute("SELECT to_jsonb(%s::timestamptz), to_jsonb(%s::timestamptz)", [at, at])
            begun, expired = cursor.fetchone()
            lost = IdempotencyKey.objects.get().history[-2]
            assert (lost["event"], lost["claimed_at"], lost["at"]) == (
                "run lost",
                begun.strip('"'),
                expired.strip('"'),
            )
