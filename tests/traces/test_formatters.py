"""The attributes of log lines as JSON, by the formatters that the guide names."""

import json
import logging
from logging.config import DictConfigurator
from typing import Any

import pytest
import structlog

from idempotency._engine.events import about
from idempotency.models import IdempotencyKey

FORMATTERS: dict[str, dict[str, Any]] = {
    "python-json-logger": {"class": "pythonjsonlogger.json.JsonFormatter"},
    "structlog": {
        "()": structlog.stdlib.ProcessorFormatter,
        "foreign_pre_chain": [structlog.stdlib.ExtraAdder()],
        "processor": structlog.processors.JSONRenderer(),
    },
}


@pytest.mark.parametrize("name", FORMATTERS)
def test_a_log_line_about_a_key_has_its_attributes(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = IdempotencyKey(scope="s", idempotency_key="k", recovery_point="started", attempts=2)
    key.traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
    with caplog.at_level(logging.INFO, "idempotency"):
        logging.getLogger("idempotency").info("key %s is resumed", "hash", extra=about(key))
    formatter = DictConfigurator({}).configure_formatter(FORMATTERS[name])
    assert {
        "key_hash": key.key_hash,
        "recovery_point": "started",
        "attempt": 2,
        "trace_id": "a" * 32,
    }.items() <= json.loads(formatter.format(caplog.records[-1])).items()
