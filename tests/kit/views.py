"""Protected views of both kinds around one piece of work."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from django.db import transaction
from django.http import HttpRequest, HttpResponseBase, JsonResponse

from idempotency.conf import ChosenIsolation
from idempotency.decorators import idempotent
from idempotency.phases import AtMostOnceCall, atomic_phase
from tests.kit.serving import View
from tests.models import Entry

Work = Callable[[HttpRequest], HttpResponseBase]


def plain(work: Work, **options: Any) -> View:
    """Return a plain view that does the work."""
    return idempotent(**options)(work)


def storing_no_body(kind: Callable[..., View]) -> Callable[..., View]:
    """Return this kind of view without a stored body: a plain view never stores one."""
    return kind if kind is plain else partial(kind, store_body=False)


def phased(work: Work, *, isolation: ChosenIsolation = "from settings", **options: Any) -> View:
    """Return a phased view that does the work in its only phase, with ``isolation`` if it is
    given."""

    @idempotent(recovery_points=["unused"], **options)
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for _ in key.phases():
            with atomic_phase(key, isolation=isolation) as phase:
                phase.set_response(work(request))
        return key.response()

    return view


def phased_outside(work: Work, **options: Any) -> View:
    """Return a phased view that returns a response before its first phase."""
    return idempotent(recovery_points=["unused"], **options)(work)


def two_phases(
    first: Callable[[HttpRequest], object],
    second: Work,
    *,
    call: Callable[[], object] = lambda: None,
    **options: Any,
) -> View:
    """Return a phased view: ``first`` in a phase that ends at ``between``, ``second`` in one that
    stores the response.

    Between the phases the view makes ``call``, outside any transaction.
    """

    @idempotent(recovery_points=["between"], **options)
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for recovery_point in key.phases():
            match recovery_point:
                case "started":
                    with atomic_phase(key) as phase:
                        first(request)
                        phase.set_recovery_point("between")
                case "between":
                    call()
                    with atomic_phase(key) as phase:
                        phase.set_response(second(request))
        return key.response()

    return view


def in_transaction(protected: View) -> View:
    """Return a view that calls a protected view in a transaction of its own."""

    def view(request: HttpRequest) -> HttpResponseBase:
        with transaction.atomic():
            return protected(request)

    return view


both_kinds = pytest.mark.parametrize("kind", [plain, phased])


def create(request: HttpRequest) -> JsonResponse:
    """Create one entry, and return its id."""
    entry = Entry.objects.create(name="made", idempotency_key=request.idempotency_key)
    return JsonResponse({"id": entry.pk}, status=201)


class Counted:
    """Work that counts its runs; by default it creates an entry."""

    def __init__(self, work: Work = create) -> None:
        self.work = work
        self.runs = 0

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        self.runs += 1
        return self.work(request)


def texting(
    block: Callable[[AtMostOnceCall], None], after: Callable[[], None] = lambda: None
) -> Any:
    """Return a view that makes one at-most-once call with ``block``, then finishes with its
    result."""

    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for _ in key.phases():
            with key.call("sms", at_most_once=True) as call:
                block(call)
            after()
            with atomic_phase(key) as phase:
                phase.set_response(JsonResponse({"receipt": call.result}))
        return key.response()

    return view


def over_key(work: Callable[[Any], object], **options: Any) -> Any:
    """Return a phased view that passes its key to ``work`` at its only recovery point."""

    @idempotent(recovery_points=[], **options)
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for _ in key.phases():
            work(key)
        return key.response()

    return view
