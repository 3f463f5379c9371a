"""Spans whose failures have no effect on the work that they describe.

The text of an exception may quote what a client has sent, so a span gets the type alone.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from types import MappingProxyType
from typing import Any, ParamSpec, Self, TypeVar

from django.db import Error
from django.utils.crypto import salted_hmac
from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanContext, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from idempotency import __version__
from idempotency._async import FAILURES
from idempotency._engine.errors import serialization_failed
from idempotency.exceptions import InProgress, MessageInProgress, Rejected, Unfinished
from idempotency.models import IdempotencyKey

logger = logging.getLogger("idempotency")

Given = ParamSpec("Given")
Result = TypeVar("Result")

_W3C = TraceContextTextMapPropagator()
_tracer = trace.get_tracer("idempotency", __version__)
#: The functions whose failure was logged, with the class of the exception.
_failed: set[tuple[str, type[Exception]]] = set()
#: The exceptions that ask for a retry or are an outcome of the work. They are no errors of a span.
_EXPECTED = (InProgress, MessageInProgress, Rejected, Unfinished)
#: The same of the queues, whose modules may not be in use.
_EXPECTED_OF_QUEUES = {
    "celery.exceptions": "TaskPredicate",
    "idempotency.contrib.rq": "_AskedToComeBack",
}
#: The modules of the exceptions of a job's time limit, which may be raised at any place.
_TIME_LIMITS = ("rq.timeouts", "billiard.exceptions")


def set_provider(provider: TracerProvider | None) -> None:
    """Send the spans to this provider, or to the global one."""
    global _tracer
    _tracer = trace.get_tracer("idempotency", __version__, tracer_provider=provider)


def harmless(function: Callable[Given, Result]) -> Callable[Given, Result | None]:
    """Let the function return None if the tracer raises an exception. The first one of each class
    is logged."""

    @wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result | None:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if type(error).__module__ in _TIME_LIMITS:
                raise
            if (cause := (function.__qualname__, type(error))) not in _failed:
                _failed.add(cause)
                text = "the tracer failed, and the work continues without it: %s"
                logger.warning(text, type(error).__name__)
            return None

    return call


class Span:
    """A span around a block. Its parent is the span of the context, or that of ``parent``. The
    names of attributes get the prefix ``idempotency.``."""

    def __init__(
        self,
        name: str,
        attributes: Mapping[str, Any] = MappingProxyType({}),
        *,
        links: Iterable[str | None] = (),
        parent: str | None = None,
        start: int | None = None,
    ) -> None:
        self.value: trace.Span = trace.INVALID_SPAN
        self._name, self._attributes = name, attributes
        self._links, self._parent, self._start = links, parent, start

    def __enter__(self) -> Self:
        self._former = context.get_current()
        self._begin()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._end(error)

    @harmless
    def _begin(self) -> None:
        parent = _context_of(self._parent, self._former) if self._parent else self._former
        found = map(_linked, self._links)
        self.value = _tracer.start_span(
            self._name,
            parent,
            attributes=_named(self._attributes),
            links=[Link(each) for each in found if each is not None],
            start_time=self._start,
        )
        context.attach(trace.set_span_in_context(self.value, parent))

    @harmless
    def _end(self, error: BaseException | None, *, failed: bool | None = None) -> None:
        try:
            failed = _is_failure(error) if failed is None else failed
            if failed:
                self.value.set_status(StatusCode.ERROR)
            if failed and error is not None:
                self.value.set_attribute("error.type", type(error).__qualname__)
            self.value.end()
        finally:
            # No token: a block of an async view may end in another context than it began.
            context.attach(self._former)

    @harmless
    def set(self, attributes: Mapping[str, Any]) -> None:
        """Set the attributes that have a value."""
        self.value.set_attributes(_named(attributes))

    @harmless
    def set_key(self, key: IdempotencyKey) -> None:
        """Set the attributes of a key. A deferred field is left out, because it would be read."""
        if not self.value.is_recording():
            return
        known = vars(key)
        scope = known.get("scope")
        self.set(
            {
                "key.id": known.get("id"),
                "scope_hash": _keyed_hash(scope) if scope else None,
                "recovery_point": known.get("recovery_point"),
                "attempt": known.get("attempts"),
            }
        )

    @harmless
    def link(self, traceparent: str | None) -> None:
        """Link to the span of a traceparent."""
        if (linked := _linked(traceparent)) is not None:
            self.value.add_link(linked)


@dataclass
class Run:
    """The request, the call of an operation, or the run of the completer in this context."""

    span: Span
    claim: Span | None = None
    #: The time at which the claim of a plain run was made.
    claim_start: int | None = None
    waited: float = 0.0
    failed: bool | None = None
    linked: str | None = None


_run: ContextVar[Run | None] = ContextVar("idempotency_traced_run", default=None)


def current_run() -> Run | None:
    return _run.get()


class RunSpan(Span):
    """The span of a run. An exception is an error of the span, unless the outcome of the run is
    not a failure."""

    def __enter__(self) -> Self:
        super().__enter__()
        self._outer, self.run = _run.get(), Run(self)
        _run.set(self.run)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        run = self.run
        _run.set(self._outer)
        self.set({"waited_seconds": round(run.waited, 3) or None})
        self._end(error, failed=run.failed)


@harmless
def link_to_key(key: IdempotencyKey) -> None:
    """Link the current run to the trace of the request that has inserted the key, once."""
    run, traceparent = _run.get(), vars(key).get("traceparent")
    if run is not None and traceparent and run.linked != traceparent:
        run.linked = traceparent
        run.span.link(traceparent)


@contextmanager
def in_trace(value: str | None) -> Iterator[None]:
    """Run the block in the context of a traceparent, if there is one."""
    former = context.get_current()
    if value:
        _enter(value, former)
    try:
        yield
    finally:
        context.attach(former)


@harmless
def _enter(value: str, former: Context) -> None:
    context.attach(_context_of(value, former))


@harmless
def traceparent() -> str | None:
    """Return the W3C traceparent of the running code. In a claim it is that of the request."""
    run, span = _run.get(), trace.get_current_span()
    if run is not None and run.claim is not None and span is run.claim.value:
        span = run.span.value
    found = span.get_span_context()
    if not found.is_valid:
        return None
    return f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}"


def same_trace(value: str) -> bool:
    """Return whether the running code belongs to the trace of a traceparent."""
    found, here = _linked(value), trace.get_current_span().get_span_context()
    return found is not None and found.trace_id == here.trace_id


def _is_failure(error: BaseException | None) -> bool:
    """Return whether the exception is an error of a span. A serialization failure is repeated in
    the process. If each attempt has one, the span of the run has the error."""
    loaded = [
        vars(sys.modules[module]).get(name, ())
        for module, name in _EXPECTED_OF_QUEUES.items()
        if module in sys.modules
    ]
    return (
        isinstance(error, FAILURES)
        and not isinstance(error, (*_EXPECTED, *loaded))
        and not (isinstance(error, Error) and serialization_failed(error))
    )


def _named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    known = {name: value for name, value in attributes.items() if value not in (None, "")}
    return {f"idempotency.{name}": value for name, value in known.items()}


def _keyed_hash(scope: str) -> str:
    # Without the SECRET_KEY, a scope such as "user:7" could be guessed.
    return salted_hmac(__name__, scope, algorithm="sha256").hexdigest()[:12]


def _context_of(value: str, former: Context) -> Context:
    return _W3C.extract({"traceparent": value}, former)


def _linked(value: str | None) -> SpanContext | None:
    if not value:
        return None
    found = trace.get_current_span(_context_of(value, Context())).get_span_context()
    return found if found.is_valid else None
