"""The handles that the block of ``key.call()`` yields."""

import json
from typing import TYPE_CHECKING, Any, NoReturn

from django.core.serializers.json import DjangoJSONEncoder

from idempotency._text import storable_json


class KeyedCall:
    """The handle of a ``key.call()`` block."""

    def __init__(self, key: str) -> None:
        #: The downstream key: pass it to the downstream service.
        self.key = key

    def __str__(self) -> NoReturn:
        """Raise TypeError. The text of this object is another one in each attempt, so a service
        that got it in place of the key would repeat its work."""
        raise TypeError("Pass call.key to the downstream service, not the call itself.")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"The call has no attribute {name!r}. The attributes due and result and the "
                "methods record() and retryable() need key.call(name, at_most_once=True).",
                name=name,
                obj=self,
            )


class AtMostOnceCall(KeyedCall):
    """The handle of a ``key.call(name, at_most_once=True)`` block. It has a ``key`` too, which may
    be passed as a reference. A person can then find the call at the downstream service."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        #: Whether to call now. If False, an earlier attempt recorded ``result``.
        self.due = True
        self.result: Any = None
        self.recorded = False
        self.may_be_repeated = False

    @property
    def took_no_effect(self) -> bool:
        """Whether the intent is deleted at the end of the block."""
        return self.may_be_repeated and not self.recorded

    def record(self, result: Any = None) -> None:
        """Record the result, a JSON value, for this run and later ones; it is committed at the end
        of the block.

        Dates, decimals and UUIDs become strings in this run too.
        Raises TypeError if the result is not JSON. Its ``repr()`` is recorded instead, because the
        call was made.
        """
        try:
            self.result = json.loads(json.dumps(result, cls=DjangoJSONEncoder))
            storable_json(self.result)
        except Exception as error:  # its methods may raise anything
            self.result, self.recorded = _described(result), True
            del result  # Reports of errors show local variables.
            raise TypeError(
                f"The result of a call cannot be stored as JSON: {error}. Record what a retry"
                " needs."
            ) from None
        self.recorded = True

    def retryable(self) -> None:
        """Declare that the call took no effect: the intent is deleted at the end of the block, and
        a retry calls again.

        After ``retryable()``, return a status that is not stored, or raise an exception. A later
        phase of this run cannot commit: it raises CallNotRecorded. If you call a second service
        instead, do not use ``retryable()``: ``record()`` the refusal of the first service, so that
        no retry calls the first service again.
        """
        self.may_be_repeated = True


def _described(result: Any) -> str:
    try:
        return repr(result).replace("\0", "").encode("utf-8", "replace").decode()
    except Exception:  # too deep, too long, or a bug of its class
        return f"a result of the type {type(result).__name__}, which cannot be described"
