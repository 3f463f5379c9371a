"""The options of a protected view: the arguments of ``@idempotent(...)``."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import get_args

from django.db import router
from django.http import HttpRequest, HttpResponseBase

from idempotency import conf
from idempotency._engine.claimed_key import ClaimedKey
from idempotency._http.kept import refuse_keep
from idempotency._http.key_header import KeyFrom, refuse_key_from
from idempotency.conf import ChosenIsolation, Isolation
from idempotency.models import FINISHED, STARTED, IdempotencyKey

OnAbandon = Callable[[ClaimedKey], HttpResponseBase | Awaitable[HttpResponseBase]]

_FUNCTIONS = {
    "applies": "a function of the request",
    "validate": "a function of the request",
    "scope": "a function of the request, such as idempotency.scopes.user",
    "using": "a database alias or a function of the request",
    "on_abandon": "a function of the key",
}
#: The least and the greatest value of the options that are whole numbers: ten years, and the
#: shortest retention.
_RANGES = {"retention_hours": (24, 87_600), "lease_seconds": (1, 86_400)}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Options:
    """The options with types and defaults; ``idempotency.decorators.idempotent`` documents them.
    Raises ValueError for an invalid value."""

    recovery_points: Sequence[str] | None = None
    required: bool = True
    applies: Callable[[HttpRequest], bool] | None = None
    validate: Callable[[HttpRequest], HttpResponseBase | None] | None = None
    scope: Callable[[HttpRequest], str] | None = None
    key_from: KeyFrom | None = None
    wait_seconds: float = 0
    isolation: ChosenIsolation = "from settings"
    using: str | Callable[[HttpRequest], str] | None = None
    #: None, until ``Options`` sets it: True in a phased view, False in a plain one.
    store_body: bool | None = None
    keep: Sequence[str] = ()
    retention_hours: int | None = None
    lease_seconds: int | None = None
    on_abandon: OnAbandon | None = None

    def __post_init__(self) -> None:
        for name in ("recovery_points", "keep"):
            if isinstance(given := getattr(self, name), str):
                raise ValueError(f"The option {name} must be a list of names, such as [{given!r}].")
            object.__setattr__(self, name, None if given is None else tuple(given))
        if self.key_from is not None:
            refuse_key_from(self.key_from)
        if self.isolation not in (None, "from settings", *get_args(Isolation)):
            levels = ", ".join(map(repr, get_args(Isolation)))
            raise ValueError(
                f"The option isolation must be None or one of {levels}, not {self.isolation!r}."
            )
        self._refuse_points()
        self._refuse_stored_parts()
        for name, expected in _FUNCTIONS.items():
            value = getattr(self, name)
            right = value is None or callable(value) or (name == "using" and isinstance(value, str))
            if not right or (iscoroutinefunction(value) and name != "on_abandon"):
                raise ValueError(f"The option {name} must be {expected}, not {value!r}.")
        if not isinstance(self.wait_seconds, int | float) or self.wait_seconds < 0:
            raise ValueError(
                f"The option wait_seconds must be a number, 0 or more, not {self.wait_seconds!r}."
            )
        for name, (least, most) in _RANGES.items():
            number = getattr(self, name)
            if number is not None and not (type(number) is int and least <= number <= most):
                raise ValueError(
                    f"The option {name} must be a whole number from {least} to {most}, not"
                    f" {number!r}."
                )

    def _refuse_points(self) -> None:
        if (points := self.recovery_points) is None:
            return
        differ = len({STARTED, FINISHED, *points}) == len(points) + 2
        if not differ or not all(0 < len(point) <= 50 for point in points):
            raise ValueError(
                "The option recovery_points must have different names of 1 to 50 characters,"
                f" without {STARTED!r} and {FINISHED!r}."
            )
        if not self.required:
            raise ValueError(
                "A phased view requires a key for each request, because the completer may finish a"
                " request that its client sends again. Remove required=False. For clients without"
                " keys, pass applies=, a function that returns False for their requests, which then"
                " run unprotected. Or pass key_from=, a function that returns a new key for each of"
                " their requests; a request that is sent again then takes effect again."
            )

    def _refuse_stored_parts(self) -> None:
        refuse_keep(self.keep)
        phased = self.recovery_points is not None
        if self.keep and not phased:
            raise ValueError(
                "The option keep needs recovery_points: the completer runs phased views only."
            )
        if self.store_body is not None and not phased:
            raise ValueError(
                "The option store_body needs recovery_points: of a request to a plain view, neither"
                " headers nor body are stored, because the completer runs phased views only."
            )
        object.__setattr__(self, "store_body", phased and self.store_body is not False)

    def every_point(self) -> tuple[str, ...]:
        """Return all recovery points in order, with the first and the last; empty for a plain
        view."""
        points = self.recovery_points
        return (STARTED, *points, FINISHED) if points is not None else ()

    def alias(self, request: HttpRequest) -> str:
        if callable(self.using):
            return self.using(request)
        return self.using or router.db_for_write(IdempotencyKey)

    def hours_kept(self) -> int:
        """Return the hours for which a finished or refused key is kept."""
        return max(conf.get().RETENTION_HOURS, self.retention_hours or 0)

    def lease(self) -> int:
        """Return the seconds for which a run holds the lock of its key without renewing it."""
        return self.lease_seconds or conf.get().LOCK_TIMEOUT_SECONDS

    def level(self) -> Isolation | None:
        return conf.get().PLAIN_ISOLATION if self.isolation == "from settings" else self.isolation
