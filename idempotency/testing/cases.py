"""How a test asks for the proof: in one line, course by course, or as a method of a test case."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from django.test import TransactionTestCase

from idempotency.testing.failures import Failure
from idempotency.testing.progress import Progress
from idempotency.testing.proof import Proof
from idempotency.testing.report import DoesNotSurvive, Report
from idempotency.testing.stage import Send

Effects = Callable[[], Any] | list[Any] | None


@dataclass(frozen=True, slots=True)
class Course:
    """One course of events: a death at one place and what follows, or two attempts that get mixed up."""

    title: str
    find: Callable[[], Failure | None]

    def check(self) -> None:
        """Run it. Raises DoesNotSurvive when its end is not that of an undisturbed request."""
        if failure := self.find():
            raise DoesNotSurvive([failure])


def assert_survives(
    send: Send,
    *,
    effects: Effects = None,
    reset: Callable[[], None] | None = None,
    state: Callable[[], Any] | None = None,
    ignore: Iterable[str] = (),
    races: bool = True,
) -> Report:
    """Run a request in every course of events, and hold the end of each against that of an undisturbed request.

    ``send(key)`` sends the request with that idempotency key through Django's test client, or another, and returns the
    response. The process dies before and after each statement, COMMIT and foreign call, and before the response leaves; then
    the client retries, or the completer takes over. With ``races`` two attempts are mixed up at each pair of boundaries too:
    with the lock in force, and with an expired one and a late first attempt.

    Compared are the changed rows of all installed apps (or what ``state()`` returns instead), staged jobs, effects elsewhere,
    and the answer; ``ignore`` names models ("shop.Visit") or columns ("shop.Order.token") that do not matter. ``effects``: the
    list that your own fake of another system fills, or a function that returns what took effect there; a ``Downstream`` is
    found by itself. ``reset()`` is called before each course: empty your caches and fakes there.

    The logger ``idempotency.testing`` gets lines of level INFO: how long it will take, and how far it is.

    On return the database is as it was before. Raises DoesNotSurvive with each place, cause and cure; CannotProve when the
    undisturbed request fails, is not protected, or is not the same twice.
    """
    with Proof(send, effects=effects, reset=reset, state=state, ignore=ignore) as proof:
        failures = [failure for course in _courses(proof, races=races) if (failure := course.find())]
    if failures:
        raise DoesNotSurvive(failures)
    return proof.report


def courses(
    send: Send,
    *,
    effects: Effects = None,
    reset: Callable[[], None] | None = None,
    state: Callable[[], Any] | None = None,
    ignore: Iterable[str] = (),
    races: bool = True,
) -> Iterator[Course]:
    """Yield each course of events, to be checked one by one: ``with self.subTest(course.title): course.check()``.

    The arguments are those of ``assert_survives``. Use it up, or close it: then the database is as it was before.
    """
    with Proof(send, effects=effects, reset=reset, state=state, ignore=ignore) as proof:
        yield from _courses(proof, races=races)


def _courses(proof: Proof, *, races: bool) -> Iterator[Course]:
    progress = Progress(*proof.expected(races=races))
    for title, find in chain(proof.crashes(), proof.races() if races else ()):
        yield Course(title, find)
        progress.one_done()


class CrashTestCase(TransactionTestCase):
    """A test case whose ``assert_survives(send, ...)`` is the function of that name."""

    assert_survives = staticmethod(assert_survives)
