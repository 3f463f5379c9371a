"""The operations of the project by name. The completer runs only these."""

from dataclasses import dataclass
from typing import Any, Literal

from django.apps import apps
from django.db import router

from idempotency import conf
from idempotency._operations.steps import Steps
from idempotency.jobs import OPERATIONS
from idempotency.models import IdempotencyKey

#: The request method of the keys of operations. It contains a space, so that no HTTP client can
#: send it.
METHOD = "call operation"
Retention = int | Literal["forever"] | None

_operations: dict[str, "Definition"] = {}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Definition:
    """An operation: its name, its steps, and its options."""

    name: str
    steps: Steps
    #: The path of the last function, for messages.
    path: str
    retention_hours: Retention = None
    lease_seconds: int | None = None
    wait_seconds: float = 0
    using: str | None = None

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= 100 or not self.name.isprintable() or ":" in self.name:
            raise ValueError(
                "The name of an operation must have 1 to 100 printable characters without a colon,"
                f" such as 'shop.pay', not {self.name!r}."
            )
        for option, value, most in (
            ("retention_hours", self.retention_hours, 87_600),
            ("lease_seconds", self.lease_seconds, 86_400),
        ):
            if value is None or (option == "retention_hours" and value == "forever"):
                continue
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(
                    f"The option {option} of the operation {self.name} must be a whole number from"
                    f" 1 to {most:,}, not {value!r}."
                )

    @property
    def hours_kept(self) -> int | None:
        """The hours for which a finished or refused key is kept; None is forever."""
        if self.retention_hours == "forever":
            return None
        return max(conf.get().RETENTION_HOURS, self.retention_hours or 0)

    @property
    def lease(self) -> int:
        return self.lease_seconds or conf.get().LOCK_TIMEOUT_SECONDS

    @property
    def alias(self) -> str:
        return self.using or router.db_for_write(IdempotencyKey)

    @property
    def alias_of_jobs(self) -> str | None:
        """The database of the staged jobs of this operation. A worker runs an operation without
        ``using`` in the database of the job, because in another database the operation would have
        a second key. None is the default of ``stage_job``."""
        return None if self.using else self.alias

    def misfit(self, arguments: dict[str, Any]) -> str:
        """Return why the functions cannot be called with stored arguments, or an empty string."""
        try:
            self.steps.signature.bind(**arguments)
        except TypeError as error:
            return str(error)
        return ""


def register(definition: Definition) -> None:
    """Add an operation. Raises ValueError if another function has its name.

    A phased operation that is registered after the start of the project is not added, because the
    completer of another process could not find it.
    """
    former = _operations.get(definition.name)
    if former is not None and former.path != definition.path:
        raise ValueError(
            f"Two operations have the name {definition.name!r}: {former.path} and"
            f" {definition.path}. Their keys would be the same. Rename the new operation."
        )
    if not (apps.ready and definition.steps.is_phased):
        _operations[definition.name] = definition
    if not apps.ready:
        OPERATIONS.add(definition.name)


def scope_of(name: str, scope: str) -> str:
    """Return the stored scope of an operation's keys; ``scope`` is that of ``by()``, or empty."""
    return f"{name}:{scope}" if scope else name


def find(name: str) -> Definition | None:
    return _operations.get(name)


def registered() -> tuple[Definition, ...]:
    """Return the operations that were registered at the start of the project, for checks, pages and
    commands."""
    return tuple(each for name, each in _operations.items() if name in OPERATIONS)


def work_line(method: str, path: str) -> str:
    """Return the work of a key for lists and pages: ``operation shop.pay`` or ``POST /orders``."""
    return f"operation {path}" if method == METHOD else f"{method} {path}"
