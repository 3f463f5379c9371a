"""The interface between the engine and its adapters: the work of a run, its outcome, and the work
of a stored key.

The adapter of HTTP is ``idempotency._http``: its work is a view with a request. The adapter of
operations is ``idempotency._operations``: its work is the functions of an operation.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from idempotency._engine.claimed_key import ClaimedKey
from idempotency._engine.fence import StoredResponse
from idempotency._engine.sessions import Sessions
from idempotency._engine.transactions import OwnTransaction
from idempotency.conf import Isolation

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, repr=False)
class ClaimedRequest:
    """The columns of a key that a claim stores. They serve to compare a retry with the request, and
    to run the request again."""

    scope: str
    idempotency_key: str
    user_id: Any
    request_method: str
    request_path: str
    request_body: bytes | None
    request_content_type: str
    request_headers: dict[str, str]
    remote_addr: str
    request_fingerprint: str
    #: Returns the fingerprint of this request in the version of a stored fingerprint; None if that
    #: version is unknown.
    fingerprint_as: Callable[[str], str | None]
    #: Returns the fingerprint of this request for a plain run.
    plain_fingerprint: Callable[[], str]
    retention_hours: int | None
    lease_seconds: int
    #: The keyed call with which the work begins. The claim of a new key also begins this call.
    first_call: str = ""
    #: The reason why the request cannot be stored. A claim that would store it raises this.
    unstorable: Exception | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Outcome:
    """The result of the work, or the result that the adapter has made of an exception."""

    #: The value for the caller.
    value: Any
    #: The status of the outcome: an error from 400, a failure of the server from 500.
    code: int
    #: Whether the outcome is stored, and finishes the key.
    is_stored: bool
    #: Whether a plain run commits its writes although it stores nothing.
    keeps_writes: bool = False
    #: The exception from which the adapter has made this outcome.
    cause: Exception | None = None
    #: Whether the caller gets the ``cause`` itself.
    is_raised: bool = False

    @property
    def is_refusal(self) -> bool:
        return 400 <= self.code < 500


class Work(Protocol):
    """The work of one run. The engine calls it once in each attempt."""

    #: The kind of work, such as "view", for messages.
    kind: str
    #: Code that may mark a transaction for rollback unnoticed, for messages; ends with a comma.
    rollback_causes: str
    #: The request for signals; None in a run of the completer.
    request: Any
    by_completer: bool
    #: The time for which a duplicate waits for another run.
    wait_seconds: float
    #: Whether a plain run may be a part of the transaction of another run.
    nests: bool
    #: All recovery points in order, with the first and the last; empty for a plain run.
    points: tuple[str, ...]
    #: Whether messages of errors must not be stored, because they may quote values that are not
    #: stored.
    hides_errors: bool

    @property
    def name(self) -> str:
        """The path of the view or the name of the operation, for messages."""

    @property
    def is_committed(self) -> bool:
        """Whether the work of the last attempt is committed."""

    def level(self) -> Isolation | None:
        """Return the isolation level of a plain run."""

    def other_databases(self, using: str) -> list[str]:
        """Return the other databases, in which a plain run opens and commits transactions too."""

    def check_outer_transaction(self, using: str) -> None:
        """Raise RuntimeError if a plain run must not be a savepoint of the open transaction."""

    def bind(self, run: "Run") -> AbstractContextManager[None]:
        """Bind the run to the work for the duration of the block."""

    def call(self) -> Outcome:
        """Do the work once. Raises the exceptions of the work."""

    def outcome(self, value: Any) -> Outcome:
        """Return the outcome for a value that the work returns, or that a phase stores."""

    def outcome_of(self, error: Exception) -> Outcome | None:
        """Return the outcome for an exception of the work, which the framework of the work may
        handle. None means that the engine raises the exception."""

    def refusal_of(self, error: Exception) -> Outcome | None:
        """Return the outcome for an exception that the caller gets, and that refuses the caller as
        a 4xx does. Return None for other exceptions."""

    def require_storable(self, value: Any) -> None:
        """Raise ResponseNotCommitted for a value that a phase must not store."""

    def stored(self, value: Any) -> StoredResponse:
        """Return the part of a value that is stored."""

    def restored(self, key: ClaimedKey) -> Any:
        """Return the stored value of a finished key."""

    def replayed(self, key: ClaimedKey) -> Any:
        """Return the stored value of a finished key for a repeat of its caller."""

    def described(self, value: Any) -> str:
        """Return a sentence about a value that is not stored, for the last error of a key."""

    def restore(self) -> bool:
        """Restore the state before the first attempt. Return False if that is not possible."""

    def note_committed(self) -> None:
        """Record that the work is committed. Afterwards ``is_committed`` is True, and ``put_back``
        does nothing."""

    def put_back(self) -> None:
        """Restore the state in memory after a rollback, unless the work is committed."""


class Run(Protocol):
    """The run of a key, as its attempts and its work use it."""

    work: Work
    using: str
    #: The last transaction of the run.
    transaction: OwnTransaction | None
    sessions: Sessions
    #: Whether the last attempt stored a result. After the COMMIT a repeat returns this result.
    has_stored_result: bool

    @property
    def key(self) -> Any:
        """The claimed key; None before the claim of a plain run."""

    @property
    def level(self) -> Isolation | None:
        """The isolation level of the last transaction."""


@dataclass(slots=True, repr=False)
class RerunResult:
    """The result of a run that an adapter has made from a stored key."""

    #: How the run ended, for the last error of the key.
    description: str
    #: The run of the key; None if the work was not called, and the key is still locked.
    run: Any = None
    #: Whether the sender was refused.
    is_refused: bool = False
    #: The exception that ended the run.
    error: BaseException | None = None
    #: The stuck code and the reason if the work cannot be run.
    stuck: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Abandoned:
    """The result of ``on_abandon``: the response to store, or the reason why there is none."""

    stored: StoredResponse | None
    failure: str = ""


class StoredWork(Protocol):
    """The work of a stored key, made from the row of the key. The methods run in the environment of
    the key."""

    #: Whether all parts of the work are stored. If not, only the client can send the work again.
    is_whole: bool
    #: Whether messages of errors must not be stored.
    hides_errors: bool

    def declares(self, recovery_point: str) -> bool:
        """Return whether the running code declares the recovery point."""

    def run(self) -> RerunResult:
        """Run the work of the claimed key. Exceptions are part of the result."""

    def has_on_abandon(self) -> bool | None:
        """Return whether ``on_abandon`` settles the key; None if that is unknown now."""

    def require_on_abandon(self) -> bool:
        """Return whether ``on_abandon`` settles the key. Raises the reason if that is unknown."""

    def abandon(self, key: ClaimedKey) -> Abandoned:
        """Call ``on_abandon`` with the claimed key. Raises its exceptions."""


class Adapter(Protocol):
    """A kind of work, for processes that know only the row of a key."""

    def with_stored_work(self, key: ClaimedKey, use: Callable[[StoredWork], Any]) -> Any:
        """Call ``use`` with the stored work of a key, in the environment of the key, and return its
        result."""

    def answer(self, value: Any) -> StoredResponse:
        """Return the response to store for the value with which an operator answers a key. Raises
        ValueError with the reason if the value cannot finish a key."""


#: The adapters by the request method of their keys. The adapter of HTTP has all methods that no
#: other adapter has. The method of another adapter contains a space, so that no client can send it.
_adapters: dict[str, Adapter] = {}
HTTP = "HTTP"


def register(method: str, adapter: Adapter) -> None:
    """Register an adapter when the app starts."""
    _adapters[method] = adapter


def adapter_of(method: str) -> Adapter:
    """Return the adapter of the keys with this request method."""
    return _adapters.get(method) or _adapters[HTTP]


def with_stored_work(key: ClaimedKey, use: Callable[[StoredWork], Result]) -> Result:
    """Call ``use`` with the stored work of a key, in the environment of the key, and return its
    result."""
    result: Result = adapter_of(key.request_method).with_stored_work(key, use)
    return result
