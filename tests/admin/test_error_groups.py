"""Groups of errors: texts that differ only in what names one request are one group."""

import pytest

from idempotency.admin.error_groups import ERROR, group_of, in_error_group
from idempotency.models import IdempotencyKey
from tests.factories import IdempotencyKeyFactory

SAME = pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ValueError: no ride 17", "ValueError: no ride 4711"),
        (
            "LockLost: 058f7b8e-a128-4e76-aee0-eb7f30357254",
            "LockLost: eeb10940-ecf2-4a8d-af7f-390c51efb7a8",
        ),
        (
            "KeyError: 058f7b8ea1284e76aee0eb7f30357254",
            "KeyError: eeb10940ecf24a8daf7f390c51efb7a8",
        ),
        ("CardError: pi_3NabcXYZ9 is gone", "CardError: pi_9QxcdUVW1k is gone"),
        ("OSError: evt_1 was lost", "OSError: evt_27 was lost"),
        ("ValueError: 'Anna' has no card", "ValueError: 'Ben' has no card"),
        ('ValueError: "Anna" has no card', "ValueError: \"Ben 'B'\" has no card"),
        ("OSError: no route to 10.0.0.1:5432", "OSError: no route to 10.200.0.17:5433"),
        ("OSError: down\nline 7", "OSError: down\nanother line"),
        ("OSError: order 7\n'quoted'", "OSError: order 8"),
        ("at 0x7f1b2c", "at 0x7fffff"),
        ("a  b", "a b "),
    ],
)
DIFFERENT = pytest.mark.parametrize(
    ("one", "other"),
    [
        ("OSError: down", "ValueError: down"),
        ("The view responded with status 503.", "The view responded with status 500."),
        ("ValueError in shop.views:12", "ValueError in shop.views:120"),
        ("it doesn't answer, and can't", "it doesn't know, and can't"),
    ],
)


@SAME
def test_what_names_one_request_does_not_make_a_group(one: str, other: str) -> None:
    assert group_of(one) == group_of(other)


@DIFFERENT
def test_different_errors_are_different_groups(one: str, other: str) -> None:
    assert group_of(one) != group_of(other)


@pytest.mark.parametrize(
    "text",
    ["", "\n", "ValueError: no ride 17", "'" * 5000, "x1" * 5000, "1 " * 5000, "word " * 5000],
)
def test_a_group_is_its_own_group_and_short(text: str) -> None:
    assert group_of(group_of(text)) == group_of(text)
    assert len(group_of(text)) <= 200


def found(group: str) -> int:
    """Return the number of keys with this group, as the filter finds them in the database."""
    return int(in_error_group(IdempotencyKey.objects.all(), ERROR, group).count())


@SAME
@pytest.mark.django_db
def test_the_database_finds_all_texts_of_a_group(one: str, other: str) -> None:
    for text in (one, other):
        IdempotencyKeyFactory(last_error=text)
    assert found(group_of(one)) == 2


@DIFFERENT
@pytest.mark.django_db
def test_the_database_finds_no_text_of_another_group(one: str, other: str) -> None:
    for text in (one, other):
        IdempotencyKeyFactory(last_error=text)
    assert (found(group_of(one)), found(group_of(other))) == (1, 1)
