"""Read the idempotency key of a request, from a header or from the place that ``key_from`` names.

Source: RFC 9651 (structured fields) and draft-07 of the header's specification.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from inspect import iscoroutinefunction
from typing import Any

from django.core.exceptions import ValidationError
from django.http import HttpRequest

from idempotency import conf
from idempotency._hidden import Hidden
from idempotency._http import problems

#: "body:NAME", "form:NAME", or a function of the request.
KeyFrom = str | Callable[[Any], str | None]

# RFC 9651: a quoted string, then parameters, which draft-07 ignores.
_QUOTED = re.compile(
    r'"(?P<text>(?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"'
    r"(?:[ ]*;["
    r' ]*[a-z*][a-z0-9_.*-]*(?:=(?:"(?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*"|[^\s;,"]+))?)*'
)
# The form that most SDKs send. A comma would mean two header lines joined by a server.
_BARE = re.compile(r"[\x21\x23-\x2b\x2d-\x7e]+")


def key_of(request: HttpRequest, view_request: Any, key_from: KeyFrom | None) -> Hidden[str] | None:
    """Return the key of the request, or None. A ``key_from`` function gets ``view_request``, the
    request of the view. Raises Problem ``key_invalid`` for an invalid key or two different ones."""
    limits = conf.get()
    found = Hidden(_in_headers(request))
    if key_from is not None:
        found.value |= _elsewhere(request, view_request, key_from)
    if not found.value:
        return None
    if len(found.value) > 1:
        raise problems.key_invalid("The request carries two different keys. Send one.")
    key = Hidden(found.value.pop())
    length = len(key.value)
    if not limits.KEY_MIN_LENGTH <= length <= limits.KEY_MAX_LENGTH:
        raise problems.key_invalid(
            f"The key has {length} characters; it must have {limits.KEY_MIN_LENGTH} to"
            f" {limits.KEY_MAX_LENGTH}."
        )
    if (validator := limits.KEY_VALIDATOR) is not None:
        try:
            conf.named(validator)(key.value)
        except ValidationError as error:
            raise problems.key_invalid(" ".join(error.messages)) from None
    return key


def _in_headers(request: HttpRequest) -> set[str]:
    limits = conf.get()
    return {
        _parse(value, strict=limits.STRICT_KEY_SYNTAX)
        for name in limits.HEADER_NAMES
        if (value := request.META.get(in_meta(name))) is not None
    }


@cache
def in_meta(name: str) -> str:
    """Return the name of a header in META. Reading ``request.headers`` would parse all of them."""
    return f"HTTP_{name.upper().replace('-', '_')}"


def _parse(value: str, *, strict: bool) -> str:
    value = value.strip(" \t")
    if quoted := _QUOTED.fullmatch(value):
        return re.sub(r'\\(["\\])', r"\1", quoted["text"])
    if not strict and _BARE.fullmatch(value):
        return value
    form = 'a quoted string, like "8e03978e-40d5-43e8-bc93-6894a57f9324"'
    if not strict:
        form += ", or the same without quotes, in visible ASCII characters without a comma"
    raise problems.key_invalid(f"The header must carry one key: {form}.")


def refuse_key_from(key_from: object) -> None:
    named = isinstance(key_from, str) and re.fullmatch(r"(body|form):.+", key_from)
    if not named and (not callable(key_from) or iscoroutinefunction(key_from)):
        raise ValueError(
            'The option key_from must be "body:NAME", "form:NAME" or a function of the request,'
            f" not {key_from!r}."
        )


def _elsewhere(request: HttpRequest, view_request: Any, key_from: KeyFrom) -> set[str]:
    if callable(key_from):
        value = key_from(view_request)
        return _checked([value], "The key") if value is not None else set()
    place, _, name = key_from.partition(":")
    if place == "form":
        return _checked(list(filter(None, request.POST.getlist(name))), f"The key in {name}")
    try:
        body = json.loads(request.body)
    except (ValueError, RecursionError):
        return set()  # The view handles an invalid body.
    value = body.get(name) if isinstance(body, dict) else None
    return _checked([value], f"The key in {name}") if value is not None else set()


def _checked(values: list[Any], called: str) -> set[str]:
    for value in values:
        if not isinstance(value, str) or not value or not (value.isascii() and value.isprintable()):
            raise problems.key_invalid(f"{called} must be a string of printable ASCII characters.")
    return set(values)
