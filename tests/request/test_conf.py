"""An invalid setting is reported with its valid values before the first request."""

from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.validators import RegexValidator
from pytest_django import Settings

from idempotency import conf


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], "IDEMPOTENCY must be a dict."),
        (
            {"KEY_MIN": 1},
            (
                "IDEMPOTENCY['KEY_MIN'] is not a setting. Did you mean 'KEY_MIN_LENGTH'? The"
                " settings are: HEADER_NAMES"
            ),
        ),
        (
            {"RETENTION_HOURS": 0},
            "IDEMPOTENCY['RETENTION_HOURS'] must be a positive whole number, not 0.",
        ),
        (
            {"RETENTION_HOURS": True},
            "IDEMPOTENCY['RETENTION_HOURS'] must be a positive whole number, not True.",
        ),
        (
            {"HEADER_NAMES": "Idempotency-Key"},
            "IDEMPOTENCY['HEADER_NAMES'] must be a list of strings, not 'Idempotency-Key'.",
        ),
        ({"HEADER_NAMES": []}, "IDEMPOTENCY['HEADER_NAMES'] must be a list of strings, not []."),
        ({"NEVER_STORED_STATUSES": ["429"]}, "must be a collection of status codes, not ['429']."),
        (
            {"ENQUEUERS": {}},
            (
                "must be a dict of one or more queue names, each with the dotted path of its"
                " backend, not {}."
            ),
        ),
        (
            {"ENQUEUERS": {"*": len}},
            "each with the dotted path of its backend, not {'*': <built-in function len>}.",
        ),
        (
            {"ENQUEUERS": {1: "shop.jobs.take"}},
            "each with the dotted path of its backend, not {1: 'shop.jobs.take'}.",
        ),
        (
            {"PHASE_ISOLATION": "snapshot"},
            "must be None or one of 'read committed', 'repeatable read', 'serializable'",
        ),
        (
            {"KEY_MIN_LENGTH": 20, "KEY_MAX_LENGTH": 10},
            "IDEMPOTENCY['KEY_MIN_LENGTH'] must not be above KEY_MAX_LENGTH.",
        ),
        (
            {"KEY_MAX_LENGTH": 256},
            "IDEMPOTENCY['KEY_MAX_LENGTH'] must be at most 255, the width of the column.",
        ),
        ({"KEY_VALIDATOR": RegexValidator}, "must be a validator, not a validator class"),
        ({"MISMATCH_STATUS": 423}, "IDEMPOTENCY['MISMATCH_STATUS'] must be 422, 400 or 409."),
        ({"RETENTION_HOURS": 23}, "IDEMPOTENCY['RETENTION_HOURS'] must be at least 24"),
        (
            {"RETENTION_HOURS": 24, "LOCK_TIMEOUT_SECONDS": 24 * 3600},
            "IDEMPOTENCY['LOCK_TIMEOUT_SECONDS'] must be shorter than RETENTION_HOURS.",
        ),
    ],
)
def test_a_mistake_is_named_with_what_is_right(settings: Settings, values: Any, said: str) -> None:
    (problem,) = conf.mistakes(values)
    assert said in problem
    settings.IDEMPOTENCY = values
    with pytest.raises(ImproperlyConfigured) as raised:
        conf.get()
    assert str(raised.value) == problem


def test_limits_that_just_fit_are_allowed() -> None:
    assert (
        conf.mistakes(
            {
                "KEY_MIN_LENGTH": 255,
                "KEY_MAX_LENGTH": 255,
                "RETENTION_HOURS": 24,
                "MISMATCH_STATUS": 409,
            }
        )
        == []
    )
    assert conf.mistakes({"RETENTION_HOURS": 24, "LOCK_TIMEOUT_SECONDS": 24 * 3600 - 1}) == []
