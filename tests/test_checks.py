"""System checks: mistakes are found before the first request."""

import pytest
from django.core.checks import run_checks
from django.db import connections

from idempotency.models import IdempotencyKey
from tests.managing import run

RIGHT = {"*": "idempotency.contrib.rq.RQBackend", "mail": "tests.jobs_for_tests.PickyBackend"}


def found(settings, **values):
    """Return the ids of what the checks say about these settings; no database is there to be asked."""
    settings.IDEMPOTENCY = values
    return [message.id for message in run_checks() if message.id.startswith("idempotency.")]


def test_the_defaults_and_right_settings_pass(settings):
    assert found(settings) == []
    assert found(settings, ENQUEUERS=RIGHT, RETENTION_HOURS=24) == []


@pytest.mark.parametrize(
    "values",
    [
        {"RETENTION_HUORS": 72},
        {"KEY_MAX_LENGTH": 256},
        {"LOCK_TIMEOUT_SECONDS": "90"},
        {"ENQUEUERS": ["rq"]},
        {"PHASE_ISOLATION": "high"},
    ],
)
def test_a_setting_that_cannot_be_right_is_an_error(settings, values):
    assert found(settings, **values) == ["idempotency.E001"]


def test_settings_that_are_no_dict_are_an_error(settings):
    settings.IDEMPOTENCY = ["RETENTION_HOURS"]
    assert "idempotency.E001" in [message.id for message in run_checks()]


@pytest.mark.parametrize(
    "path", ["nowhere.Backend", "idempotency.contrib.rq.Nothing", "idempotency.models.StagedJob", "nodots"]
)
def test_a_backend_that_is_none_is_an_error_that_names_it(settings, path):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"mail": path}}
    [message] = [message for message in run_checks() if message.id == "idempotency.E003"]
    assert repr(path) in message.msg
    assert "'mail'" in message.msg


def test_a_completer_that_may_meet_the_client_is_a_warning(settings):
    assert found(settings, COMPLETER_MIN_AGE_SECONDS=90) == ["idempotency.W001"]
    assert found(settings, COMPLETER_MIN_AGE_SECONDS=91) == []


class KeysElsewhere:
    """Route the keys to a database of a kind that the app does not know."""

    def db_for_write(self, model, **hints):
        return "elsewhere" if model is IdempotencyKey else None


def test_a_database_without_the_promises_is_an_error(settings, monkeypatch):
    dummy = connections.configure_settings({"default": {}, "elsewhere": {}})["elsewhere"]
    monkeypatch.setitem(connections.settings, "elsewhere", dummy)
    settings.DATABASE_ROUTERS = ["tests.test_checks.KeysElsewhere"]
    assert found(settings) == ["idempotency.E002"]


def test_the_checks_ask_no_database():
    done = run("check", DATABASE_URL="postgresql://postgres@127.0.0.1:1/nowhere")
    assert done.returncode == 0, done.stderr
