"""Parameters of request bodies: size limits and validation, applied before a key is claimed."""

import json
import math
from decimal import Decimal
from http import HTTPStatus
from typing import Any

from django.core.exceptions import BadRequest, SuspiciousOperation
from django.http import HttpRequest, HttpResponse, QueryDict, UnreadablePostError
from django.http.multipartparser import MultiPartParserError

from rides_demo.responses import error_response

MAX_BODY_BYTES = 64 * 1024
RIDE_PARAMETERS = ("origin_lat", "origin_lon", "target_lat", "target_lon")
TARGET_PARAMETERS = ("target_lat", "target_lon")
#: The precision of the columns: NUMERIC(13,10).
_PLACES = Decimal("1e-10")


class BadParameters(Exception):
    """The request is invalid; the exception carries the error response."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def response(self) -> HttpResponse:
        """Return the error response."""
        return error_response(self.status, self.code, str(self))


def coordinates(
    request: HttpRequest, names: tuple[str, ...] = RIDE_PARAMETERS
) -> dict[str, Decimal]:
    """Return the coordinates ``names`` as the database stores them.

    Raises BadParameters for the first invalid coordinate.
    """
    given = _parameters(request)
    return {name: _coordinate(name, given.get(name)) for name in names}


def ride_parameters_problem(request: HttpRequest) -> HttpResponse | None:
    """Return the error response to an invalid ride, or None."""
    return _problem(request, RIDE_PARAMETERS)


def target_parameters_problem(request: HttpRequest) -> HttpResponse | None:
    """Return the error response to a PATCH with an invalid target, or None."""
    return _problem(request, TARGET_PARAMETERS) if request.method == "PATCH" else None


def _problem(request: HttpRequest, names: tuple[str, ...]) -> HttpResponse | None:
    try:
        coordinates(request, names)
    except BadParameters as problem:
        return problem.response()
    return None


def _parameters(request: HttpRequest) -> dict[str, Any]:
    """Return the members of a JSON object, or the fields of a form."""
    body = _body(request)
    try:
        if request.content_type == "application/x-www-form-urlencoded":
            return _spelled_out(QueryDict(body, encoding="utf-8"))
        if request.content_type == "multipart/form-data" and request.method == "POST":
            return _spelled_out(request.POST)
        # Integers are parsed as floats, which costs little for numbers of thousands of digits.
        members = json.loads(body.decode(), parse_int=float)
    except (
        ValueError,
        LookupError,
        RecursionError,
        SuspiciousOperation,
        BadRequest,
        MultiPartParserError,
    ):
        raise BadParameters(
            HTTPStatus.BAD_REQUEST, "body_invalid", "The body is neither valid JSON nor a form."
        ) from None
    if not isinstance(members, dict):
        raise BadParameters(
            HTTPStatus.BAD_REQUEST, "body_invalid", "The body must be a JSON object."
        )
    return members


def _body(request: HttpRequest) -> bytes:
    """Return the whole body.

    With a truncated body, the key would store another fingerprint, and a retry with the complete
    body would be refused.
    """
    header = request.META.get("CONTENT_LENGTH") or "0"
    length = int(header) if header.isdecimal() and len(header) < 10 else MAX_BODY_BYTES + 1
    try:
        body = request.body if length <= MAX_BODY_BYTES else b""
    except UnreadablePostError:
        body = b""
    if max(length, len(body)) > MAX_BODY_BYTES:
        message = f"The body must not be larger than {MAX_BODY_BYTES} bytes."
        raise BadParameters(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body_too_large", message)
    if len(body) < length:
        raise BadParameters(HTTPStatus.BAD_REQUEST, "body_invalid", "The body ended too early.")
    return body


def _coordinate(name: str, value: Any) -> Decimal:
    if value is None:
        raise BadParameters(
            HTTPStatus.UNPROCESSABLE_ENTITY, "param_missing", f"Please specify parameter '{name}'."
        )
    if not isinstance(value, float):
        message = f"Parameter '{name}' must be a floating-point number."
        raise BadParameters(HTTPStatus.UNPROCESSABLE_ENTITY, "param_not_float", message)
    kind, word, limit = (
        ("lat", "latitude", 90) if name.endswith("_lat") else ("lon", "longitude", 180)
    )
    if not math.isfinite(value) or abs(value) > limit:
        message = f"Parameter '{name}' must be a valid {word} coordinate."
        raise BadParameters(HTTPStatus.UNPROCESSABLE_ENTITY, f"param_not_{kind}", message)
    return Decimal(repr(value)).quantize(_PLACES) + 0  # the database has no -0


def _spelled_out(form: QueryDict) -> dict[str, Any]:
    """Return the fields of a form; numeric text becomes a number, as forms contain only text."""
    return {name: _spelled_number(value) for name, value in form.items()}


def _spelled_number(text: str) -> float | str:
    try:
        return float(text) if text.isascii() and "_" not in text else text
    except ValueError:
        return text
