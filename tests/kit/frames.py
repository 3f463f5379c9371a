"""What reports of an error show of this app's frames: local variables, as Django's debug page and
sentry-sdk print them.

Secrets are planted, foreign code raises an error, and ``Planted.refuse_shown`` looks for each
secret in each frame of a module of this app, and in the errors that caused it.
"""

import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import pytest
import sentry_sdk
from django.views.debug import ExceptionReporter
from pytest_django import Settings
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport

from idempotency.models import IdempotencyKey


class OutOfLuck(RuntimeError):
    """An error of foreign code, whose text has no secret."""


class Value(NamedTuple):
    """A local variable of a frame, as a report prints it."""

    place: str
    text: str


def values_shown(error: BaseException) -> list[Value]:
    """Return what three reports show of the frames of this app: ``repr()``, Django's debug page and
    an event of sentry-sdk."""
    return [*_by_repr(error), *_by_django(error), *_by_sentry(error)]


def _is_ours(module: object) -> bool:
    return f"{module}.".startswith("idempotency.")


def _by_repr(error: BaseException) -> Iterator[Value]:
    """Yield each local variable, and each item of a collection in one."""
    for each in _causes(error):
        for frame, _ in traceback.walk_tb(each.__traceback__):
            module = frame.f_globals.get("__name__")
            for name, value in frame.f_locals.items() if _is_ours(module) else ():
                place = f"repr: {module}.{frame.f_code.co_name}: {name}"
                yield Value(place, _repr(value))
                yield from (Value(f"{place}[...]", _repr(item)) for item in _items(value))


def _repr(value: object) -> str:
    try:
        return repr(value)
    except Exception as error:  # That of a QuerySet sends its query.
        return f"not shown: {error}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    met: set[int] = set()
    while error is not None and id(error) not in met:
        met.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _items(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        yield from (*value.keys(), *value.values())
    elif isinstance(value, Sequence | AbstractSet) and not isinstance(value, str | bytes):
        yield from value


def _by_django(error: BaseException) -> Iterator[Value]:
    reporter = ExceptionReporter(None, type(error), error, error.__traceback__)
    for frame in reporter.get_traceback_data()["frames"]:
        module = frame["tb"].tb_frame.f_globals.get("__name__") if frame["tb"] is not None else None
        for name, text in frame["vars"] if _is_ours(module) else ():
            yield Value(f"Django: {module}.{frame['function']}: {name}", text)


class _Events(Transport):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        """Keep the event."""
        self.events.append(envelope.get_event())


def _by_sentry(error: BaseException) -> Iterator[Value]:
    transport = _Events()
    with sentry_sdk.new_scope() as scope:
        # The integrations would change Django in the whole process. They do not change the frames
        # of an event.
        scope.set_client(
            sentry_sdk.Client(
                "http://key@localhost/1", transport=transport, default_integrations=False
            )
        )
        sentry_sdk.capture_exception(error)
    for exception in transport.events[0]["exception"]["values"]:
        for frame in exception.get("stacktrace", {}).get("frames", ()):
            for name, value in frame["vars"].items() if _is_ours(frame["module"]) else ():
                yield Value(
                    f"sentry-sdk: {frame['module']}.{frame['function']}: {name}", str(value)
                )


@dataclass
class Planted:
    """Secrets that no frame of this app may show."""

    secrets: dict[str, str] = field(
        default_factory=lambda: {
            name: f"planted-{name.replace(' ', '-')}-{uuid4().hex}"
            for name in (
                "secret key",
                "fallback",
                "key",
                "body",
                "header",
                "argument",
                "session",
                "answer",
            )
        }
    )

    def __getitem__(self, name: str) -> str:
        return self.secrets[name]

    def of_key(self, key: IdempotencyKey, *, derived: str = "") -> None:
        """Add the secrets of a claimed key: its seed, the token of its claim, and a derived key."""
        for name, value in (
            ("seed", bytes(key.seed)),
            ("claim token", key.claim_token),
            ("derived key", derived),
        ):
            for number, form in enumerate(_forms(value)):
                self.secrets[f"{name} of {key.pk}, form {number}"] = form

    def refuse_shown(self, error: BaseException, *, at_least: int = 1) -> None:
        """Fail if a frame of this app shows a secret, and if there is no such frame."""
        values = values_shown(error)
        assert len({value.place for value in values}) >= at_least, "no frame of this app"
        found = {
            (name, place)
            for place, text in values
            for name, secret in self.secrets.items()
            if secret in text
        }
        told = "".join(traceback.format_exception(error))
        found |= {
            (name, "the text of an error")
            for name, secret in self.secrets.items()
            if secret in told
        }
        assert not found, "\n".join(f"{name} in {place}" for name, place in sorted(found))

    @contextmanager
    def logged(self, caplog: pytest.LogCaptureFixture, *, errors: int = 1) -> Iterator[None]:
        """Expect that the block logs errors with their tracebacks, in which no secret is shown."""
        caplog.clear()
        yield
        records = [record for record in caplog.records if record.name == "idempotency"]
        found = [record.exc_info[1] for record in records if record.exc_info]
        assert len(found) == errors, caplog.text
        for error in filter(None, found):
            self.refuse_shown(error)
        self.refuse_logged(records)

    def refuse_logged(self, records: list[logging.LogRecord]) -> None:
        """Fail if a log line shows a secret, or what its handlers get besides."""
        lines = [logging.Formatter().format(record) + repr(vars(record)) for record in records]
        found = {
            name for name, secret in self.secrets.items() if any(secret in line for line in lines)
        }
        assert not found, found


def _forms(value: object) -> list[str]:
    if isinstance(value, bytes):
        return [value.hex(), repr(value)[2:-1]]
    if isinstance(value, UUID):
        return [str(value), value.hex]
    return [str(value)] if value else []


def plant(settings: Settings) -> Planted:
    """Return secrets, of which those of the settings are set. The sessions of a client must begin
    after that."""
    secrets = Planted()
    settings.SECRET_KEY = secrets["secret key"]
    settings.SECRET_KEY_FALLBACKS = [secrets["fallback"]]
    return secrets
