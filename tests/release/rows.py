"""Rows of each kind that a later release must understand, written by the running code."""

from contextlib import suppress
from typing import Any
from unittest import mock

from django.db import connection, models, transaction
from django.test import Client, override_settings
from django.test.utils import setup_test_environment

from idempotency.exceptions import Unfinished
from idempotency.inbox import process_once
from idempotency.models import IdempotencyKey, ProcessedMessage, StagedJob
from tests import operations
from tests.release import views
from tests.release.frozen import SECRET_KEY, URLS

MODELS: list[Any] = [IdempotencyKey, StagedJob, ProcessedMessage]


def made() -> list[dict[str, Any]]:
    """Return the rows of a new database as JSON."""
    setup_test_environment()
    connection.creation.create_test_db(verbosity=0)
    with override_settings(ROOT_URLCONF=URLS, SECRET_KEY=SECRET_KEY):
        _make()
    return [_row(each) for model in MODELS for each in model.objects.order_by("pk")]


def _make() -> None:
    client = Client(raise_request_exception=False)
    client.post("/plain", {"name": "tea"}, headers={"Idempotency-Key": "plain"})
    with mock.patch.object(views, "fails", True):
        client.post("/phased", {"name": "jam"}, headers={"Idempotency-Key": "phased"})
    operations.note.once("operation", name="one")
    lost = mock.patch.object(operations.bank, "before", side_effect=OSError)
    with lost, suppress(Unfinished):
        operations.pay.once("unfinished", name="two", cents=5)
    with transaction.atomic():
        operations.note.stage("staged", name="three")
    with process_once("stripe", "evt_1"):
        pass


def _row(found: models.Model) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for field in found._meta.concrete_fields:
        value = getattr(found, field.attname)
        is_binary = isinstance(field, models.BinaryField) and value is not None
        columns[field.attname] = field.value_to_string(found) if is_binary else value
    return {"model": type(found).__name__, "columns": columns}
