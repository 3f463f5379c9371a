"""Entry points of the kit: an assertion, an iterator of courses of events, and a test case
class."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
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
    """One course of events: a crash at one place with the recovery, or two interleaved runs."""

    title: str
    find: Callable[[], Failure | None]

    def check(self) -> None:
        """Run the course. Raises DoesNotSurvive if its result differs from that of an undisturbed
        request."""
        if failure := self.find():
            raise DoesNotSurvive([failure])


def assert_survives(
    send: Send,
    *,
    again: Send | None = None,
    effects: Effects = None,
    reset: Callable[[], None] | None = None,
    state: Callable[[], Any] | None = None,
    ignore: Iterable[str] = (),
    races: bool = True,
) -> Report:
    """Run a request in each course of events, and compare each result with that of an undisturbed
    request.

    ``send(key)`` sends the request with that idempotency key through Django's test client or
    another client, and returns the response. Or it calls an operation, and returns its result:
    ``lambda key: pay.once(key, pilot=17)``. ``again(key)`` is a second caller, which sends each
    retry, and the second of two concurrent attempts; by default ``send`` does. The process dies
    before and after each statement, COMMIT and downstream call, and before the response is sent.
    Then the client retries, or the completer runs the request. A boundary is the claim, or the
    beginning or end of a phase or downstream call. With ``races``, two attempts are also
    interleaved at each pair of boundaries: once while the lock of the first attempt is valid, and
    once after it has expired, so that the first attempt resumes late. Then two requests with
    different keys run: the first request pauses at each boundary while the second request runs. The
    rows and effects must equal those of two consecutive requests.

    A call to a downstream service inside a transaction is a failure too. A call is a ``connect()``
    or ``send()`` of a Python socket. Databases, caches and brokers of the settings may be called
    there, and each address ``"host:port"`` in ``ignore``. The kit does not see calls of C
    libraries, subprocesses and other threads, and calls over unix sockets.

    The kit compares the changed rows of all installed apps (or the result of ``state()`` instead),
    staged jobs, effects in downstream services, and the answer. ``ignore`` names models
    ("shop.Visit") or columns ("shop.Order.token") that are not compared. ``effects``: the list that
    your own fake of a downstream service fills, or a function that returns the effects in that
    service. The kit finds instances of ``Downstream`` itself, so ``effects`` need not contain them.
    ``reset()`` is called before each course: empty your caches and fakes there.

    The logger ``idempotency.testing`` reports the expected duration and the progress of the test at
    level INFO.

    On return the database is as it was before.
    Raises DoesNotSurvive with each place, cause and cure.
    Raises CannotProve if the undisturbed request fails, is not protected, or leaves different data
    in two runs.
    Raises CannotProve if the replay differs from the first response, or if two runs do not reach
    the same places.
    Raises CannotProve if the test runs in a transaction, or if a run writes a table that the kit
    does not compare.
    """
    with Proof(
        send, again=again, effects=effects, reset=reset, state=state, ignore=ignore
    ) as proof:
        failures = [
            failure for course in _courses(proof, races=races) if (failure := course.find())
        ]
    if failures:
        raise DoesNotSurvive(failures)
    return proof.report


def courses(
    send: Send,
    *,
    again: Send | None = None,
    effects: Effects = None,
    reset: Callable[[], None] | None = None,
    state: Callable[[], Any] | None = None,
    ignore: Iterable[str] = (),
    races: bool = True,
) -> Iterator[Course]:
    """Yield each course of events. Check each one by itself: ``with self.subTest(course.title):
    course.check()``.

    The arguments are those of ``assert_survives``. Exhaust or close the iterator; the database is
    then as it was before.
    """
    with Proof(
        send, again=again, effects=effects, reset=reset, state=state, ignore=ignore
    ) as proof:
        yield from _courses(proof, races=races)


def _courses(proof: Proof, *, races: bool) -> Iterator[Course]:
    progress = Progress(*proof.expected(races=races))
    concurrent = chain(proof.races(), proof.two_keys()) if races else ()
    for title, find in chain(proof.calls_in_transactions(), proof.crashes(), concurrent):
        yield Course(title, partial(_failure, find, proof))
        progress.one_done()


def _failure(find: Callable[[], Failure | None], proof: Proof) -> Failure | None:
    failure = find()
    return failure.of_operation() if failure and proof.is_of_operation else failure


class CrashTestCase(TransactionTestCase):
    """A test case whose ``assert_survives(send, ...)`` is the function of that name."""

    assert_survives = staticmethod(assert_survives)
