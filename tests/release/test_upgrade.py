"""The tables and rows of the last release, after the migrations of the running code."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, models
from django.db.migrations.executor import MigrationExecutor
from django.test import Client
from django.utils import timezone
from pytest_django import Settings

from idempotency.completer import complete_once
from idempotency.inbox import process_once
from idempotency.models import IdempotencyKey
from tests import operations
from tests.models import Account, Entry
from tests.release.__main__ import problems, refusal
from tests.release.frozen import SECRET_KEY, URLS, migrations, read

SCHEMA = "frozen"


def test_the_text_of_each_migration_is_that_of_its_release() -> None:
    """Renew it with ``python -m tests.release`` until the release is tagged. After the tag, write a
    new migration instead."""
    frozen = read()["migrations"]
    assert {name: migrations().get(name) for name in frozen} == frozen


def test_a_tag_needs_its_version_a_dated_section_and_its_frozen_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = tmp_path / "CHANGELOG.md"
    monkeypatch.setattr("tests.release.__main__.ROOT", tmp_path)
    monkeypatch.setattr("tests.release.__main__.migrations", lambda: read()["migrations"])
    version = read()["version"]
    changes.write_text(f"## Unreleased\n\n## {version} - 2026-11-26\n")
    assert problems(f"v{version}") == []
    assert "__version__" in problems("v9.9.9")[0]
    changes.write_text(f"## Unreleased\n\n- A change\n\n## {version} - soon\n")
    assert len(problems(f"v{version}")) == 2
    monkeypatch.setattr("tests.release.__main__.migrations", dict)
    assert "frozen.json" in problems(f"v{version}")[2]


def test_the_state_of_a_tagged_release_is_replaced_by_that_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frozen = {"version": "0.0.1", "migrations": migrations()}
    changed = {**frozen, "migrations": {"0001_initial": "of another text"}}
    assert refusal(changed) == ""
    monkeypatch.setattr("tests.release.__main__._is_tagged", lambda version: version == "0.0.1")
    assert refusal(frozen) == ""
    assert "Restore" in refusal(changed)
    monkeypatch.setattr("idempotency.__version__", "0.0.1")
    assert "__version__" in refusal(frozen)


@pytest.fixture
def upgraded(transactional_db: None, settings: Settings) -> Iterator[None]:
    """Make the tables of the release in a schema, load its rows, and migrate."""
    settings.ROOT_URLCONF, settings.SECRET_KEY = URLS, SECRET_KEY
    options, frozen = connection.settings_dict["OPTIONS"], read()
    with connection.cursor() as cursor:
        cursor.execute("""
            CREATE SCHEMA frozen;
            CREATE TABLE frozen.django_migrations (LIKE public.django_migrations INCLUDING ALL);
            INSERT INTO frozen.django_migrations (app, name, applied)
            SELECT app, name, applied FROM public.django_migrations
            WHERE app IN ('auth', 'contenttypes')
        """)
    connection.close()
    options["options"] = f"-c search_path={SCHEMA},public"
    try:
        last = ("idempotency", max(frozen["migrations"]))
        executor = MigrationExecutor(connection)
        executor.migrate([last])
        apps = executor.loader.project_state([last]).apps
        later = timezone.now() - datetime.fromisoformat(frozen["written_at"]) - timedelta(hours=1)
        for row in frozen["rows"]:
            model: Any = apps.get_model("idempotency", row["model"])
            model.objects.create(**columns_of(model, row["columns"], later))
        executor = MigrationExecutor(connection)
        executor.migrate(executor.loader.graph.leaf_nodes("idempotency"))
        yield
    finally:
        del options["options"]
        connection.close()
        with connection.cursor() as cursor:
            cursor.execute(f"DROP SCHEMA {SCHEMA} CASCADE")


def columns_of(model: Any, columns: dict[str, Any], later: timedelta) -> dict[str, Any]:
    """Return the columns of a row as they would be, had the release written it an hour ago."""
    found = {}
    for field in model._meta.concrete_fields:
        value = columns[field.attname]
        if not isinstance(field, models.JSONField):
            value = field.to_python(value)
        is_time = isinstance(value, datetime)
        found[field.attname] = value + later if is_time else value
    return found


def described(schema: str) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT table_name, column_name, data_type, is_nullable, column_default
            FROM information_schema.columns
            WHERE table_schema = %s AND table_name LIKE 'idempotency%%' ORDER BY 1, 2
            """,
            [schema],
        )
        return [[str(value).replace(f"{SCHEMA}.", "") for value in row] for row in cursor]


@pytest.mark.postgres
@pytest.mark.usefixtures("upgraded")
def test_the_tables_are_those_of_a_new_project() -> None:
    assert described(SCHEMA) == described("public") != []


@pytest.mark.postgres
@pytest.mark.usefixtures("upgraded")
@pytest.mark.parametrize(
    ("method", "key", "body", "code"),
    [
        ("/plain", "plain", b'{"made": "tea"}', 201),
        ("/phased", "phased", b'{"continued": "jam"}', 201),
    ],
)
def test_a_retry_gets_the_response_of_the_release_or_continues(
    method: str, key: str, body: bytes, code: int
) -> None:
    name = "tea" if key == "plain" else "jam"
    response = Client().post(method, {"name": name}, headers={"Idempotency-Key": key})
    assert (response.status_code, response.content) == (code, body)
    assert ("Idempotent-Replayed" in response) == (key == "plain")
    other = Client().post(method, {"name": "other"}, headers={"Idempotency-Key": key})
    assert other.status_code == 422


@pytest.mark.postgres
@pytest.mark.usefixtures("upgraded")
def test_the_completer_finishes_what_the_release_left_unfinished() -> None:
    assert complete_once().finished == 2
    assert not IdempotencyKey.objects.unfinished().exists()
    assert Account.objects.get().balance == 5
    assert not Entry.objects.exists(), "the first transaction is not repeated"
    assert operations.pay.once("unfinished", name="two", cents=5)


@pytest.mark.postgres
@pytest.mark.usefixtures("upgraded")
def test_results_jobs_and_messages_of_the_release_are_found(settings: Settings) -> None:
    assert operations.note.once("operation", name="one") == {"entry": 1, "list": [1, 2]}
    with process_once("stripe", "evt_1") as first:
        assert not first
