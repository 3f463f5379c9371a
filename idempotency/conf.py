"""The settings of the app: one dict, ``IDEMPOTENCY``, read lazily and typed. Each default is written here and nowhere else."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, Literal, get_args

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

Isolation = Literal["read committed", "repeatable read", "serializable"]
#: What a caller may choose: a level, None for the connection's own, or, by default, what the settings say.
ChosenIsolation = Isolation | None | Literal["from settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a project may put into ``IDEMPOTENCY``; the defaults serve a shop that takes payments."""

    #: Request headers that may carry the key. A request that carries two different ones is refused.
    HEADER_NAMES: tuple[str, ...] = ("Idempotency-Key",)
    #: Response header that marks a replay, and stands on nothing else.
    REPLAYED_HEADER: str = "Idempotent-Replayed"
    #: True refuses a key that is not a quoted structured-field string (draft-07, section 2.1).
    STRICT_KEY_SYNTAX: bool = False
    #: A shorter key gets 400 ``key_invalid``.
    KEY_MIN_LENGTH: int = 1
    #: A longer key gets 400 ``key_invalid``; 255, the width of the column, is the highest value.
    KEY_MAX_LENGTH: int = 255
    #: A validator as Django's forms take them, or its dotted path; what it refuses gets 400. None takes every key.
    KEY_VALIDATOR: str | Callable[..., Any] | None = None
    #: Lock timeout: the next request may claim the key after it. Set it above the client timeout multiplied by its attempts.
    LOCK_TIMEOUT_SECONDS: int = 90
    #: How long a finished key is replayed, from the moment it finished.
    RETENTION_HOURS: int = 72
    #: The completer leaves a key alone until it is this old: its client may still come back.
    COMPLETER_MIN_AGE_SECONDS: int = 300
    #: ... and until nobody has run it for this long; each run of the completer doubles it, up to 4 hours.
    COMPLETER_IDLE_SECONDS: int = 60
    #: After so many runs by the completer a key is stuck.
    COMPLETER_MAX_ATTEMPTS: int = 25
    #: How often a request is run again inside the process after a serialization failure or a deadlock.
    SERIALIZATION_RETRIES: int = 15
    #: Isolation of atomic phases; None is the connection's own.
    PHASE_ISOLATION: Isolation | None = "serializable"
    #: Isolation of plain views; None is the connection's own, as under ATOMIC_REQUESTS.
    PLAIN_ISOLATION: Isolation | None = None
    #: True makes another request of the same path at another host or under another mount: for sites that are several in one.
    FINGERPRINT_HOST: bool = False
    #: Status of the answer to a key that comes back with another request: 422, 400 or 409.
    MISMATCH_STATUS: int = 422
    #: Statuses that are never stored; a retry runs the view again.
    NEVER_STORED_STATUSES: frozenset[int] = frozenset({401, 403, 408, 412, 425, 428, 429})
    #: True stores 5xx answers too, as Stripe does.
    STORE_5XX: bool = False
    #: A larger body is delivered but not kept; its replay says so.
    MAX_STORED_BODY_BYTES: int = 1024 * 1024
    #: How many requests of one process wait at once for the first of their key (``wait_seconds``); further ones get 409. Set it
    #: well below the threads of a worker: each that waits holds one.
    MAX_WAITING_REQUESTS: int = 2
    #: ``callable(status, code, title, detail, retryable, headers) -> HttpResponse``, or its dotted path; None is problem+json.
    ERROR_RENDERER: str | Callable[..., Any] | None = None
    #: What stands before the code in a problem's ``type``.
    PROBLEM_TYPE_BASE: str = "urn:django-idempotency:error:"
    #: A delivery of a message that is silent towards the database for so long loses its transaction; the next one may begin.
    INBOX_IDLE_SECONDS: int = 3600
    #: Queue name to the dotted path of a backend or of a function that takes a StagedJob; "*" is every other queue.
    ENQUEUERS: Mapping[str, str] = field(default_factory=lambda: {"*": "idempotency.contrib.rq.RQBackend"})
    #: Modules that define the functions of staged jobs, with submodules; no other runs. None: all modules of installed apps.
    JOB_MODULES: tuple[str, ...] | None = None
    #: True attempts to hand staged jobs over right after COMMIT, in a thread of the process that staged them.
    HAND_OVER_AFTER_COMMIT: bool = False
    #: ``callable(request, key)``, or its dotted path: adds to the completer's request what a middleware would have.
    PREPARE_REQUEST: str | Callable[..., Any] | None = None


#: The settings that name something to call, by its dotted path or as it is.
CALLABLES = tuple(f.name for f in fields(Settings) if f.type == str | Callable[..., Any] | None)


def named(value: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return what such a setting names."""
    return import_string(value) if isinstance(value, str) else value


#: What a value of each annotation must be an instance of, and how to say it.
_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a positive whole number"),
    bool: ((bool,), "True or False"),
    str: ((str,), "a string"),
    tuple[str, ...]: ((list, tuple), "a list of strings"),
    tuple[str, ...] | None: ((list, tuple, type(None)), "None or a list of dotted names of modules"),
    frozenset[int]: ((list, tuple, set, frozenset), "a collection of status codes"),
    Mapping[str, str]: ((Mapping,), "a dict of one or more queue names, each with the dotted path of its backend"),
    Isolation | None: ((str, type(None)), "None or one of " + ", ".join(map(repr, get_args(Isolation)))),
    str | Callable[..., Any] | None: ((str, Callable, type(None)), "a callable or its dotted path"),  # type: ignore[dict-item]
}


def problems(values: object) -> list[str]:
    """Return what is wrong with the dict ``values``, a sentence each; nothing is read or changed."""
    if not isinstance(values, Mapping):
        return ["IDEMPOTENCY must be a dict."]
    known = {f.name: f.type for f in fields(Settings)}
    found = [
        f"IDEMPOTENCY[{name!r}] is not a setting. The settings are: {', '.join(known)}." for name in values if name not in known
    ]
    for name, annotation in known.items():
        if name not in values:
            continue
        value, (types, expected) = values[name], _KINDS[annotation]
        right = isinstance(value, types)
        if annotation is int:
            right = right and not isinstance(value, bool) and value >= 1
        elif annotation in (tuple[str, ...], frozenset[int]):
            right = right and bool(value) and all(isinstance(item, get_args(annotation)[0]) for item in value)
        elif annotation == tuple[str, ...] | None:
            right = value is None or (right and bool(value) and all(isinstance(item, str) and item for item in value))
        elif annotation == Mapping[str, str]:
            right = right and bool(value) and all(isinstance(text, str) for pair in value.items() for text in pair)
        elif annotation == Isolation | None:
            right = right and (value is None or value in get_args(Isolation))
        if not right:
            found.append(f"IDEMPOTENCY[{name!r}] must be {expected}, not {value!r}.")
    if not found:
        found.extend(_contradictions(Settings(**values)))
    return found


def _contradictions(values: Settings) -> list[str]:
    """Return the pairs of settings that exclude each other."""
    found = []
    if values.KEY_MIN_LENGTH > values.KEY_MAX_LENGTH:
        found.append("IDEMPOTENCY['KEY_MIN_LENGTH'] must not be above KEY_MAX_LENGTH.")
    if values.KEY_MAX_LENGTH > 255:
        found.append("IDEMPOTENCY['KEY_MAX_LENGTH'] must be at most 255, the width of the column.")
    if isinstance(values.KEY_VALIDATOR, type):
        found.append("IDEMPOTENCY['KEY_VALIDATOR'] must be a validator, not a class of them, which would take every key.")
    if values.MISMATCH_STATUS not in (400, 409, 422):
        found.append("IDEMPOTENCY['MISMATCH_STATUS'] must be 422, 400 or 409.")
    if values.RETENTION_HOURS < 24:
        found.append("IDEMPOTENCY['RETENTION_HOURS'] must be at least 24: clients come back after a night.")
    if values.LOCK_TIMEOUT_SECONDS >= values.RETENTION_HOURS * 3600:
        found.append("IDEMPOTENCY['LOCK_TIMEOUT_SECONDS'] must be shorter than RETENTION_HOURS.")
    return found


@lru_cache(maxsize=1)
def get() -> Settings:
    """Return the project's settings; raise ImproperlyConfigured, naming each mistake, rather than guess about money."""
    values = getattr(django_settings, "IDEMPOTENCY", {})
    if found := problems(values):
        raise ImproperlyConfigured(" ".join(found))
    given = dict(values)
    for name, container in (("HEADER_NAMES", tuple), ("JOB_MODULES", tuple), ("NEVER_STORED_STATUSES", frozenset)):
        if given.get(name) is not None:
            given[name] = container(given[name])
    return Settings(**given)


def _forget(*, setting: str, **kwargs: object) -> None:
    if setting == "IDEMPOTENCY":
        get.cache_clear()


setting_changed.connect(_forget)
