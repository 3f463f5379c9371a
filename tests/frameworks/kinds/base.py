"""What a view is to do, and the bodies that all kinds of view share."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from asgiref.sync import sync_to_async
from django.http import HttpResponseBase
from django.urls import URLPattern, URLResolver, path

from idempotency.decorators import idempotent
from idempotency.phases import atomic_phase
from tests.frameworks.work import Refusal, Reply, Work

Patterns = list[URLPattern | URLResolver]
Answer = Callable[[Any, Reply], HttpResponseBase]
Body = Callable[[Any], HttpResponseBase]
AsyncBody = Callable[[Any], Awaitable[HttpResponseBase]]
#: What a framework raises for each refusal.
Errors = dict[type[Refusal], Callable[[], Exception]]


@dataclass(frozen=True)
class Job:
    """What a view is to do: its work in one go, or in phases with a downstream call between the
    first and the last."""

    work: Work
    options: dict[str, Any]
    phased: bool = False
    first: Callable[[Any], object] = lambda request: None
    call: Callable[[], object] = lambda: None

    def protect(self, decorate: Any = idempotent, **options: Any) -> Any:
        """Return the decorator with the options of this view."""
        return decorate(
            **self.options,
            **options,
            **({"recovery_points": ["made", "called"]} if self.phased else {}),
        )


@dataclass(frozen=True)
class Kind:
    """A kind of view, and how a client speaks to it."""

    name: str
    patterns: Callable[[Job], Patterns]
    #: How it refuses who is not signed in.
    refusal: int
    by_token: bool = False
    by_form: bool = False

    def __str__(self) -> str:
        return self.name


def at_both(view: Callable[..., Any]) -> Patterns:
    """Return two addresses of one view."""
    return [path("view/", view), path("other/", view)]


def body_of(job: Job, answer: Answer, errors: Errors) -> Body:
    """Return the body of a view."""

    def work(request: Any) -> HttpResponseBase:
        try:
            return answer(request, job.work(request))
        except Refusal as refusal:
            raise errors[type(refusal)]() from None

    def in_phases(request: Any) -> HttpResponseBase:
        if request.method == "GET" or request.idempotency_key is None:
            return work(request)
        key = request.idempotency_key
        for recovery_point in key.phases():
            match recovery_point:
                case "started":
                    with atomic_phase(key) as phase:
                        job.first(request)
                        phase.set_recovery_point("made")
                case "made":
                    job.call()
                    with atomic_phase(key) as phase:
                        phase.set_recovery_point("called")
                case "called":
                    with atomic_phase(key) as phase:
                        phase.set_response(work(request))
        return key.response()

    return in_phases if job.phased else work


def async_body_of(job: Job, answer: Answer, errors: Errors) -> AsyncBody:
    """Return the body of an async view."""

    async def work(request: Any) -> HttpResponseBase:
        try:
            return answer(request, await sync_to_async(job.work)(request))
        except Refusal as refusal:
            raise errors[type(refusal)]() from None

    async def in_phases(request: Any) -> HttpResponseBase:
        if request.method == "GET" or request.idempotency_key is None:
            return await work(request)
        key = request.idempotency_key
        async for recovery_point in key.aphases():
            match recovery_point:
                case "started":
                    async with atomic_phase(key) as phase:
                        await sync_to_async(job.first)(request)
                        phase.set_recovery_point("made")
                case "made":
                    job.call()
                    async with atomic_phase(key) as phase:
                        phase.set_recovery_point("called")
                case "called":
                    async with atomic_phase(key) as phase:
                        phase.set_response(await work(request))
        return key.response()

    return in_phases if job.phased else work


def dressed(response: Any, reply: Reply) -> Any:
    """Return the response with the headers and cookies of the reply."""
    for name, value in reply.headers.items():
        response[name] = value
    for name, value in reply.cookies.items():
        response.set_cookie(name, value)
    return response
