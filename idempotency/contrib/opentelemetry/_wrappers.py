"""The functions of this app that traces replace, each by a function that calls it in a span."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import TracerProvider

from idempotency import (
    _abandonment,
    _key_completion,
    backends,
    completer,
    enqueuer,
    interventions,
    operations,
    signals,
)
from idempotency._async import EitherContext
from idempotency._engine import attempts, calls, claims, events, phase, phased_run, replays
from idempotency._engine.claims import ClaimOutcome
from idempotency._http import entry
from idempotency.contrib.opentelemetry import _jobs, _metrics
from idempotency.contrib.opentelemetry._spans import (
    RunSpan,
    Span,
    current_run,
    harmless,
    link_to_key,
    set_provider,
    traceparent,
)
from idempotency.monitoring.metrics import Counting
from idempotency.signals import RequestOutcome

_Function = Callable[..., Any]

#: The recovery point at which the next transaction of this context begins.
_point: ContextVar[str] = ContextVar("idempotency_traced_point", default="")


def _request(original: _Function) -> _Function:
    def respond(call: Any, options: Any, key: Any) -> Any:
        with RunSpan("idempotency.request", {"kind": "view"}):
            return original(call, options, key)

    return respond


def _operation(original: _Function) -> _Function:
    def run(definition: Any, *given: Any, **options: Any) -> Any:
        with RunSpan(definition.name, {"kind": "operation"}):
            return original(definition, *given, **options)

    return run


def _first_of_plain(original: _Function) -> _Function:
    def first(*given: Any) -> Any:
        if (run := current_run()) is not None:
            run.claim_start = time.time_ns()
        return original(*given)

    return first


def _claim(original: _Function) -> _Function:
    """The claim of a plain run begins with the BEGIN of its transaction."""

    def claim(*given: Any, **options: Any) -> Any:
        run = current_run()
        start = run.claim_start if run is not None else None
        with Span("idempotency.claim", start=start) as span:
            if run is not None:
                run.claim, run.claim_start = span, None
            claimed = original(*given, **options)
            _note_claim(span, claimed)
            return claimed

    return claim


@harmless
def _note_claim(span: Span, claimed: claims.Claim) -> None:
    span.set({"outcome": claimed.outcome.value})
    if (key := claimed.key) is not None:
        span.set_key(key)
        if claimed.outcome is not ClaimOutcome.CLAIMED or vars(key)["attempts"] > 1:
            link_to_key(key)


def _claim_by_id(original: _Function) -> _Function:
    def claim(*given: Any, **options: Any) -> Any:
        if (run := current_run()) is None:  # The reaper claims many keys that it does not run.
            return original(*given, **options)
        with Span("idempotency.claim") as span:
            key = original(*given, **options)
            span.set({"outcome": "claimed" if key is not None else "not due"})
            if key is not None:
                for each in (span, run.span):
                    each.set_key(key)
                link_to_key(key)
            return key

    return claim


def _parameters(original: _Function) -> _Function:
    def parameters(*given: Any) -> Any:
        hidden = original(*given)
        hidden.value["traceparent"] = traceparent()
        return hidden

    return parameters


def _begin_phase(original: _Function) -> _Function:
    def begin(run: Any, isolation: Any) -> Any:
        _point.set(run.key.recovery_point)
        return original(run, isolation)

    return begin


def _transaction(original: _Function) -> _Function:
    @contextmanager
    def transaction(*given: Any, **options: Any) -> Iterator[Any]:
        name = f"idempotency.phase {(point := _point.get())}"
        with Span(name, {"recovery_point": point}), original(*given, **options) as own:
            yield own

    return transaction


def _call(original: _Function) -> _Function:
    def call(self: Any, name: str, *given: Any) -> EitherContext[Any]:
        inner = original(self, name, *given)
        return EitherContext(_in_span(f"idempotency.call {name}", inner), holds_transaction=False)

    return call


@contextmanager
def _in_span(name: str, inner: AbstractContextManager[Any]) -> Iterator[Any]:
    with Span(name), inner as call:
        yield call


def _replay(original: _Function) -> _Function:
    def replay(key: Any, work: Any) -> Any:
        with Span("idempotency.replay") as span:
            span.set_key(key)
            link_to_key(key)
            return original(key, work)

    return replay


def _pause(original: _Function) -> _Function:
    def pause(self: Any) -> bool:
        start = time.monotonic()
        try:
            return bool(original(self))
        finally:
            if (run := current_run()) is not None:
                run.waited += time.monotonic() - start

    return pause


def _retry(original: _Function) -> _Function:
    def leave(self: Any, kind: type[BaseException] | None, *raised: Any) -> bool:
        again = bool(original(self, kind, *raised))
        if again and kind is not None:
            _note_retry(kind)
        return again

    return leave


@harmless
def _note_retry(kind: type[BaseException]) -> None:
    if (run := current_run()) is not None:
        attributes = {"error.type": kind.__qualname__}
        run.span.value.add_event("idempotency.retry", attributes)


def _signal(original: _Function) -> _Function:
    """Set the attributes that signals have. The signal may be sent later."""

    def emit(signal: Any, key: Any, request: Any, **more: Any) -> None:
        _note_signal(signal, key, **more)
        original(signal, key, request, **more)

    return emit


@harmless
def _note_signal(signal: Any, key: Any, **more: Any) -> None:
    if (run := current_run()) is None:
        return
    if key is not None:
        run.span.set_key(key)
    run.span.set({"code": more.get("code")})
    if signal is signals.request_answered:
        run.failed = more["outcome"] is RequestOutcome.FAILED
        run.span.set({"outcome": str(more["outcome"])})


def _complete(original: _Function) -> _Function:
    def complete(*given: Any) -> str | None:
        with RunSpan("idempotency.complete") as span:
            result: str | None = original(*given)
            span.set({"outcome": result or "not claimed"})
            span.run.failed = result == "failed"
            return result

    return complete


def _abandon(original: _Function) -> _Function:
    def abandon(work: Any, key: Any, using: str) -> bool:
        with RunSpan("idempotency.abandon") as span:
            span.set_key(key)
            link_to_key(key)
            return bool(original(work, key, using))

    return abandon


_WRAPPERS: list[tuple[Any, str, Callable[[_Function], _Function]]] = [
    (entry, "_run_with_signal", _request),
    (operations, "run", _operation),
    (claims, "first_of_plain", _first_of_plain),
    (claims, "claim_plain", _claim),
    (claims, "claim_phased", _claim),
    (claims, "claim_by_id", _claim_by_id),
    (claims, "_parameters", _parameters),
    (phased_run.PhasedRun, "begin_phase", _begin_phase),
    (phase, "durable_transaction", _transaction),
    (calls.Calls, "keyed", _call),
    (calls.Calls, "at_most_once", _call),
    (replays, "replay", _replay),
    (attempts.Wait, "pause", _pause),
    (attempts.Attempts, "__exit__", _retry),
    (events, "emit", _signal),
    (events, "emit_uncommitted", _signal),
    (_key_completion, "complete_by_id", _complete),
    (completer, "complete_by_id", _complete),
    (interventions, "complete_by_id", _complete),
    (_abandonment, "_run", _abandon),
    (enqueuer, "_hand_over", _jobs.enqueue),
    (backends.OneByOne, "_hand_over", _jobs.hand_over_one),
]
#: The functions that were replaced.
_replaced: list[tuple[Any, str, _Function]] = []
_counting: list[Counting] = []


def install(provider: TracerProvider | None, meters: MeterProvider | None) -> None:
    """Replace the functions and count, once."""
    if _replaced:
        return
    set_provider(provider)
    _counting.append(counting := _metrics.counting(meters))
    counting.connect()
    for owner, name, wrapper in _WRAPPERS:
        _replaced.append((owner, name, original := getattr(owner, name)))
        setattr(owner, name, wrapper(original))
    _jobs.install()


def remove() -> None:
    """Restore the functions."""
    if _replaced:
        _jobs.remove()
        _counting.pop().disconnect()
    while _replaced:
        setattr(*_replaced.pop())
