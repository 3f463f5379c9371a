"""Each planted bug is caught, with its place and its cure; each correct view passes."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from idempotency.testing import DoesNotSurvive, assert_survives, courses, cures
from tests.crash import views
from tests.kit.serving import Sender

pytestmark = pytest.mark.processes

RIGHT = ["plain", "refusal", "patient", "asynchronous", "phased", "texting"]
#: The view, the cure that the message must name, and the line that it must name, as its text.
WRONG = [
    ("effect_outside_a_phase", cures.OUTSIDE, 'Entry.objects.create(name="outside")'),
    ("missing_recovery_point", cures.NO_RECOVERY_POINT, 'Entry.objects.create(name="made")'),
    ("missing_recovery_point_of_a_unique_row", cures.NO_RECOVERY_POINT, 'write(request, "made")'),
    ("unsafe_call", cures.UNSAFE_CALL, 'systems.text("hello")'),
    ("call_in_a_plain_view", cures.UNSAFE_CALL, 'systems.text("hello")'),
    (
        "random_downstream_key",
        cures.RANDOM_KEY,
        "systems.charge(amount=5, idempotency_key=str(uuid.uuid4()))",
    ),
    (
        "answer_from_a_variable",
        cures.OTHER_ANSWER,
        'phase.set_response(JsonResponse({"new": new}, status=201))',
    ),
    (
        "answer_from_a_random_value",
        cures.OTHER_ANSWER,
        'phase.set_response(JsonResponse({"number": number}, status=201))',
    ),
    (
        "variable_of_an_earlier_run",
        cures.GONE_WITH_THE_RUN,
        'phase.set_response(JsonResponse({"id": entry.pk}, status=201))',
    ),
    ("effect_after_commit", cures.LOST, 'systems.text("hello")'),
    (
        "charge_after_the_point",
        cures.LOST,
        'systems.charge(amount=5, idempotency_key=key.derive("charge"))',
    ),
]


def send_to(view: str, serve: Callable[..., None], sender: Sender) -> Callable[[str], Any]:
    """Put a view under a URL, and return what sends it a request with a key."""
    serve(view=getattr(views, view))
    return lambda key: sender.send(key=key)


@pytest.mark.parametrize("view", RIGHT)
def test_a_correct_view_passes(
    view: str,
    serve: Callable[..., None],
    sender: Sender,
    texts: list[str],
    line: Callable[[str, str], None],
) -> None:
    report = assert_survives(send_to(view, serve, sender), effects=texts)
    line(f"correct: {view}", f"passes: {report}")
    assert report.courses > len(report.places)
    assert bool(report.handed_over) == (view == "texting")


@pytest.mark.parametrize(("view", "cure", "culprit"), WRONG, ids=[view for view, _, _ in WRONG])
def test_a_planted_bug_is_caught_with_its_place_and_its_cure(
    view: str,
    cure: str,
    culprit: str,
    serve: Callable[..., None],
    sender: Sender,
    texts: list[str],
    line: Callable[[str, str], None],
) -> None:
    def check_each() -> None:
        for course in courses(send_to(view, serve, sender), effects=texts):
            course.check()

    with pytest.raises(DoesNotSurvive) as caught:
        check_each()
    (failure,) = caught.value.failures
    assert failure.cure == cure
    assert any(
        f"tests/crash/views.py:{number} in {view}" in failure.cause
        for number in lines_near(view, culprit)
    ), str(failure)
    assert "tests/crash/" in failure.course or "tests/kit/serving.py" in failure.course
    line(f"planted: {view.replace('_', ' ')}", f"caught: {failure.cause[:110]}")


def lines_near(view: str, culprit: str) -> range:
    """Return the lines of a view from two before the culprit to two after: a ``with`` block commits
    at its own line."""
    source, first = inspect.getsourcelines(getattr(views, view))
    (number,) = (first + offset for offset, text in enumerate(source) if culprit in text)
    return range(number - 2, number + 3)
