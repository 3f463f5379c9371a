"""The steps of an operation. A step is a transaction, and the call before it, if there is one."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from idempotency._async import awaited
from idempotency._engine.claimed_key import ClaimedKey
from idempotency.exceptions import KeyStuck, Rejected
from idempotency.jobs import refuse_generator
from idempotency.models import FINISHED, STARTED

Given = ParamSpec("Given")
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, repr=False)
class ServiceCall(Generic[Given, Made]):
    """A call of a downstream service outside of any transaction. Its name is stored."""

    function: Callable[Concatenate[str, Given], Made]
    #: None: the service does not support idempotency keys, so the call is made at most once.
    valid_hours: float | None

    @property
    def name(self) -> str:
        return self.function.__name__

    def made(self, key: ClaimedKey, given: Callable[[], dict[str, Any]]) -> Any:
        """Make the call with the arguments that ``given`` returns, and return its value. Raises
        Rejected if the service refuses it."""
        function: Callable[..., Any] = self.function
        if self.valid_hours is not None:
            # The service cannot have forgotten a key that is sent for the first time.
            is_first = key.attempts == 1 or key.call_begun_at is None
            with key.call(self.name, None if is_first else int(self.valid_hours * 3600)) as call:
                return self._value(function, call.key, given)
        with key.call(self.name, at_most_once=True) as once:
            if once.due:
                try:
                    once.record({"value": self._value(function, once.key, given)})
                except Rejected as why:  # No effect, but a later attempt must not call again.
                    once.record({"rejected": why.args})
        if not isinstance(once.result, dict):  # The value was not JSON; its description is stored.
            raise KeyStuck(f"The call {self.name!r} was made, and returned {once.result}.")
        if "rejected" in once.result:
            raise Rejected(*once.result["rejected"])
        return once.result["value"]

    def _value(
        self, function: Callable[..., Any], key: str, given: Callable[[], dict[str, Any]]
    ) -> Any:
        value = awaited(function(key, **given()), to_end=True)  # The service may have acted.
        refuse_generator(self.name, value)
        if isinstance(value, Rejected):
            raise value
        return value


@dataclass(frozen=True, slots=True, repr=False)
class Step(Generic[Given]):
    """One transaction, and the call before it, whose value the function of the transaction gets."""

    function: Callable[..., Any]
    call: ServiceCall[Given, Any] | None
    after: "Step[Given] | Callable[Given, Any] | None"

    @property
    def parameters(self) -> list[Parameter]:
        """The parameters of the function that are arguments of the operation."""
        return list(signature(self.function).parameters.values())[self.call is not None :]

    def chain(self) -> "tuple[Step[Given], ...]":
        """Return all steps up to this one."""
        if self.after is None:
            return (self,)
        before = self.after if isinstance(self.after, Step) else Step(self.after, None, None)
        return (*before.chain(), self)


class Steps:
    """The steps of an operation, by the recovery point before each step."""

    def __init__(self, last: Step[Any], undo: Callable[..., Any] | None, name: str) -> None:
        chain = last.chain()
        self.last, self.undo = last, undo
        self.signature = Signature(last.parameters)
        #: Whether a run is more than one transaction.
        self.is_phased = len(chain) > 1 or last.call is not None
        self.points = (STARTED, *(each.function.__name__ for each in chain[:-1]), FINISHED)
        self.of_point = dict(zip(self.points, chain, strict=False))
        first = chain[0].call
        #: The keyed call of the first step. The claim of a new key also begins this call.
        self.first_call = first.name if first and first.valid_hours is not None else ""
        self.calls = {each.call.name: each.call for each in chain if each.call is not None}
        self._refuse(chain, name)

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments by name, as passed. Raises TypeError if they do not fit the
        parameters."""
        if not args and kwargs.keys() == self.signature.parameters.keys():
            return kwargs
        return dict(self.signature.bind(*args, **kwargs).arguments)

    def _refuse(self, chain: tuple[Step[Any], ...], name: str) -> None:
        called = [each.call.name for each in chain if each.call is not None]
        for names in (self.points, called):
            if len(set(names)) != len(names) or not all(len(each) <= 50 for each in names):
                raise TypeError(
                    f"The steps and the calls of the operation {name} must have different names of"
                    f" at most 50 characters, not {', '.join(names)}. The name of a function is"
                    " stored."
                )
        functions = [(each.function.__name__, each.parameters) for each in chain]
        for each in chain:
            if each.call is not None:
                given = list(signature(each.call.function).parameters.values())
                functions.append((each.call.name, given[1:]))
        if self.undo is not None:
            functions.append(("undo", list(signature(self.undo).parameters.values())[1:]))
        wanted = set(self.signature.parameters)
        for function, parameters in functions:
            if {each.name for each in parameters} != wanted or not all(
                each.kind in (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
                for each in parameters
            ):
                raise TypeError(
                    f"The function {function} of the operation {name} must have the same parameters"
                    f" as its other functions ({', '.join(sorted(wanted))}), each passed by name:"
                    " the arguments are stored by name, and each function gets all of them."
                )
        if self.undo is not None and len(chain) == 1:
            raise TypeError(
                f"The function undo= of the operation {name} would never run, because no earlier"
                " transaction (after=) commits something. A refusal does not undo a call."
            )
