"""The setting ``IDEMPOTENCY``, a dict. It is validated and typed at first use. This module alone
defines the defaults."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, Literal, get_args

from django.apps import apps
from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from idempotency._text import did_you_mean

Isolation = Literal["read committed", "repeatable read", "serializable"]
#: A level, None for the connection's own level, or the level of the settings.
ChosenIsolation = Isolation | None | Literal["from settings"]
#: Whether commits are confirmed, and whether the standbys or the storage replicate them.
Confirmation = bool | Literal["storage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The contents of ``IDEMPOTENCY``. The defaults suit a shop that takes payments."""

    #: Request headers that may carry the key. A request with two different keys is refused.
    HEADER_NAMES: tuple[str, ...] = ("Idempotency-Key",)
    #: Response header that marks a replay; other responses do not have it.
    REPLAYED_HEADER: str = "Idempotent-Replayed"
    #: True refuses a key that is not a quoted structured-field string (draft-07, section 2.1).
    STRICT_KEY_SYNTAX: bool = False
    #: A shorter key gets 400 ``key_invalid``.
    KEY_MIN_LENGTH: int = 1
    #: A longer key gets 400 ``key_invalid``. The maximum is 255, the width of the column.
    KEY_MAX_LENGTH: int = 255
    #: A Django validator or its dotted path; a key that it rejects gets 400. None accepts every
    #: key.
    KEY_VALIDATOR: str | Callable[..., Any] | None = None
    #: Lock timeout: after this time the next request may claim the key. Set it above the client
    #: timeout multiplied by the number of attempts of the client. A view may have its own
    #: ``lease_seconds``.
    LOCK_TIMEOUT_SECONDS: int = 90
    #: The time for which a finished key is replayed. It starts when the response is stored.
    RETENTION_HOURS: int = 72
    #: The minimum age of a key for the completer. Until then the client may still retry.
    COMPLETER_MIN_AGE_SECONDS: int = 300
    #: The minimum time since the last run of the key. Each run of the completer doubles it, up to 4
    #: hours.
    COMPLETER_IDLE_SECONDS: int = 60
    #: The completer marks a key as stuck after this number of runs.
    COMPLETER_MAX_ATTEMPTS: int = 25
    #: The number of further attempts in the process after a serialization failure or a deadlock.
    SERIALIZATION_RETRIES: int = 15
    #: Isolation of atomic phases; None is the connection's own level.
    PHASE_ISOLATION: Isolation | None = None
    #: Isolation of plain views; None is the connection's own level, as under ATOMIC_REQUESTS.
    PLAIN_ISOLATION: Isolation | None = None
    #: True makes the app wait until the synchronous standbys have all earlier commits. It waits
    #: before it sends a replay, skips a repeated message, hands over a batch of jobs, or uses the
    #: recorded result of a call again. A request that is not confirmed gets 503 ``not_replicated``.
    #: "storage": the storage replicates the disk of the server, so that the server needs no
    #: standbys.
    CONFIRM_REPLICATED: Confirmation = False
    #: True sends the first statement of a transaction together with BEGIN, and the last one
    #: together with COMMIT. False sends each by itself.
    MERGE_ROUND_TRIPS: bool = True
    #: True includes host and mount point in the fingerprint. Use it if one deployment serves
    #: several sites.
    FINGERPRINT_HOST: bool = False
    #: The status for a key that was used with a different request: 422, 400 or 409.
    MISMATCH_STATUS: int = 422
    #: Statuses that are never stored; a retry runs the view again. A 409, 423, 429 or 503 with
    #: Retry-After is not stored either, unless a phase stores it.
    NEVER_STORED_STATUSES: frozenset[int] = frozenset({401, 403, 408, 412, 425, 428, 429})
    #: True also stores 5xx responses, as Stripe does.
    STORE_5XX: bool = False
    #: A larger response body is sent but not stored. Its replay has the header
    #: ``Idempotent-Body-Omitted``.
    MAX_STORED_BODY_BYTES: int = 1024 * 1024
    #: Names of query parameters and response headers that are not stored, because they are
    #: credentials. They are added to the names that the app knows, such as ``api_key`` and
    #: ``access_token``. Case, hyphens and underscores do not matter.
    CREDENTIAL_NAMES: frozenset[str] = frozenset()
    #: The number of requests of one process that may wait for the first request of their key
    #: (``wait_seconds``). Further ones get 409. Each waiting request occupies a thread and a
    #: connection, so keep the number well below the threads of a worker.
    MAX_WAITING_REQUESTS: int = 2
    #: A callable or its dotted path that returns the response for ``request, status, code, title,
    #: detail, retryable, headers``. None is problem+json, or a page for a client that prefers HTML.
    ERROR_RENDERER: str | Callable[..., Any] | None = None
    #: The prefix of the code in a problem's ``type``.
    PROBLEM_TYPE_BASE: str = "urn:django-idempotency:error:"
    #: If the processing of a message sends no statement for this time, the database ends its
    #: transaction. The message can then be delivered again.
    INBOX_IDLE_SECONDS: int = 3600
    #: Queue names with the dotted path of a backend or of a function that takes a StagedJob; "*"
    #: means every other queue.
    ENQUEUERS: Mapping[str, str] = field(
        default_factory=lambda: {"*": "idempotency.contrib.rq.RQBackend"}
    )
    #: Modules, with their submodules, that may define functions of staged jobs. None: the modules
    #: ``jobs``, ``tasks`` and ``operations`` of installed apps, except apps of Django.
    JOB_MODULES: tuple[str, ...] | None = None
    #: The maximum size of the arguments of a staged job, as JSON. Larger data belongs in a table or
    #: a file storage.
    MAX_JOB_BYTES: int = 256 * 1024
    #: True attempts to hand staged jobs over right after COMMIT, in a thread of the process that
    #: staged them.
    HAND_OVER_AFTER_COMMIT: bool = False
    #: True counts requests, calls of operations, replays, conflicts and errors per minute for the
    #: dashboard. Each process with ``django.contrib.admin`` in ``INSTALLED_APPS`` counts in memory.
    #: Every 10 seconds it writes the counts in one transaction, after the end of a request or of an
    #: operation.
    COUNT_REQUESTS: bool = True
    #: True also writes each view of a body, and each export, to the log of the admin. The logger
    #: ``idempotency.audit`` has them in any case.
    LOG_VIEWS_IN_ADMIN: bool = False
    #: The address of a trace, with ``{trace_id}``, to which the page of a key in the admin links.
    TRACE_URL: str = ""
    #: A callable or its dotted path, called with the rebuilt request and the key. It sets what a
    #: middleware would set, or returns a context manager that stays open for the run. It must not
    #: leave a transaction open on the database of the key. It is called before the view in the
    #: completer, and before ``on_abandon`` in the reaper. In a project with several databases it
    #: also chooses the shard of an operation; then the request is None.
    PREPARE_REQUEST: str | Callable[..., Any] | None = None
    #: A callable or its dotted path, called with an unfinished key. It finds the answer in the rows
    #: of the project, and returns an ``HttpResponse``, or for an operation its result or
    #: ``Rejected``. It returns None if it finds no answer. The action *Answer* of the admin offers
    #: it for many keys. ``PREPARE_REQUEST`` is not called, so nothing sets the tenant of the key:
    #: read the rows in the database ``key._state.db``.
    ANSWER_FOR_KEY: str | Callable[..., Any] | None = None


#: The settings that take a callable or its dotted path.
CALLABLES = tuple(f.name for f in fields(Settings) if f.type == str | Callable[..., Any] | None)


def named(value: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return the callable that a setting names."""
    return import_string(value) if isinstance(value, str) else value


def _filled(value: Any, containers: Any, kind: type) -> bool:
    """Return whether ``value`` is a container with one or more items of this kind."""
    return (
        isinstance(value, containers)
        and bool(value)
        and all(isinstance(item, kind) for item in value)
    )


_LEVELS, _LIST = get_args(Isolation), list | tuple
#: The condition of each annotation, and its description in messages.
_KINDS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    int: (
        lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 1,
        "a positive whole number",
    ),
    bool: (lambda v: isinstance(v, bool), "True or False"),
    Confirmation: (lambda v: isinstance(v, bool) or v == "storage", "True, False or 'storage'"),
    str: (lambda v: isinstance(v, str), "a string"),
    tuple[str, ...]: (lambda v: _filled(v, _LIST, str), "a list of strings"),
    tuple[str, ...] | None: (
        lambda v: v is None or (_filled(v, _LIST, str) and all(v)),
        "None or a list of dotted names of modules",
    ),
    frozenset[str]: (
        lambda v: (
            isinstance(v, _LIST | set | frozenset)
            and all(isinstance(name, str) and name.strip() for name in v)
        ),
        "a collection of names",
    ),
    frozenset[int]: (
        lambda v: _filled(v, _LIST | set | frozenset, int),
        "a collection of status codes",
    ),
    Mapping[str, str]: (
        lambda v: _filled(v, Mapping, str) and all(isinstance(path, str) for path in v.values()),
        "a dict of one or more queue names, each with the dotted path of its backend",
    ),
    Isolation | None: (
        lambda v: v is None or v in _LEVELS,
        "None or one of " + ", ".join(map(repr, _LEVELS)),
    ),
    str | Callable[..., Any] | None: (
        lambda v: v is None or isinstance(v, str) or callable(v),
        "a callable or its dotted path",
    ),
}


def mistakes(values: object) -> list[str]:
    """Return one sentence for each mistake in the dict ``values``."""
    if not isinstance(values, Mapping):
        return ["IDEMPOTENCY must be a dict."]
    known = {f.name: f.type for f in fields(Settings)}
    found = [
        f"IDEMPOTENCY[{name!r}] is not a setting.{did_you_mean(name, known)} The settings are:"
        f" {', '.join(known)}."
        for name in values
        if name not in known
    ]
    for name, annotation in known.items():
        accepts, expected = _KINDS[annotation]
        if name in values and not accepts(values[name]):
            found.append(f"IDEMPOTENCY[{name!r}] must be {expected}, not {values[name]!r}.")
    if not found:
        found.extend(_contradictions(Settings(**values)))
    return found


def are_valid() -> bool:
    """Return whether the project's settings are valid. The system check E001 reports the
    mistakes."""
    return not mistakes(getattr(django_settings, "IDEMPOTENCY", {}))


def _contradictions(values: Settings) -> list[str]:
    found = []
    if values.KEY_MIN_LENGTH > values.KEY_MAX_LENGTH:
        found.append("IDEMPOTENCY['KEY_MIN_LENGTH'] must not be above KEY_MAX_LENGTH.")
    if values.KEY_MAX_LENGTH > 255:
        found.append("IDEMPOTENCY['KEY_MAX_LENGTH'] must be at most 255, the width of the column.")
    if isinstance(values.KEY_VALIDATOR, type):
        found.append(
            "IDEMPOTENCY['KEY_VALIDATOR'] must be a validator, not a validator class: calling a"
            " class validates nothing."
        )
    if values.MISMATCH_STATUS not in (400, 409, 422):
        found.append("IDEMPOTENCY['MISMATCH_STATUS'] must be 422, 400 or 409.")
    if values.TRACE_URL and "{trace_id}" not in values.TRACE_URL:
        found.append("IDEMPOTENCY['TRACE_URL'] must contain {trace_id}.")
    if values.RETENTION_HOURS < 24:
        found.append(
            "IDEMPOTENCY['RETENTION_HOURS'] must be at least 24: clients may retry on the next day."
        )
    if values.LOCK_TIMEOUT_SECONDS >= values.RETENTION_HOURS * 3600:
        found.append("IDEMPOTENCY['LOCK_TIMEOUT_SECONDS'] must be shorter than RETENTION_HOURS.")
    return found


@lru_cache(maxsize=1)
def get() -> Settings:
    """Return the project's settings.

    Raises ImproperlyConfigured if one of them is invalid; the message names each mistake.
    """
    values = getattr(django_settings, "IDEMPOTENCY", {})
    if found := mistakes(values):
        raise ImproperlyConfigured(" ".join(found))
    given = dict(values)
    containers = {"HEADER_NAMES": tuple, "JOB_MODULES": tuple} | dict.fromkeys(
        ("NEVER_STORED_STATUSES", "CREDENTIAL_NAMES"), frozenset
    )
    for name, container in containers.items():
        if given.get(name) is not None:
            given[name] = container(given[name])
    return Settings(**given)


def _forget(*, setting: str, **kwargs: object) -> None:
    if setting == "IDEMPOTENCY":
        get.cache_clear()


setting_changed.connect(_forget)


def require_app() -> None:
    """Raise ImproperlyConfigured if a table is defined without the app in ``INSTALLED_APPS``."""
    if not apps.is_installed("idempotency"):
        raise ImproperlyConfigured(
            "Add 'idempotency' to INSTALLED_APPS, and run manage.py migrate."
        )
