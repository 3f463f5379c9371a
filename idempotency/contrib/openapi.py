"""Write the policy of a protected view into an operation of an OpenAPI document.

Source: OpenAPI 3.1, and draft-07 of the specification of the header Idempotency-Key, section 2.5.2.
"""

from dataclasses import asdict
from typing import Any

from idempotency import conf
from idempotency.policy import Policy

PROBLEM = "IdempotencyProblem"
PROBLEM_TYPE = "application/problem+json"
PROBLEM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "An error about the idempotency key (RFC 9457).",
    "required": ["type", "title", "status", "detail", "code", "retryable"],
    "properties": {
        "type": {"type": "string", "format": "uri"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"type": "string", "description": "A stable code for programs."},
        "retryable": {
            "type": "boolean",
            "description": "Whether the same request, with the same key, may succeed later.",
        },
    },
}

#: The parts of a policy that are published as ``x-idempotency``, because clients need them.
_PUBLISHED = (
    "headers",
    "key_format",
    "key_min_length",
    "key_max_length",
    "required",
    "retention_hours",
    "wait_seconds",
    "stored_statuses",
    "never_stored_statuses",
    "mismatch_status",
    "replayed_header",
)


def describe(operation: dict[str, Any], policy: Policy) -> None:
    """Add the policy to an operation: the header of the key, the error responses, the header of a
    replay, and ``x-idempotency``.

    Existing parameters, headers and descriptions of statuses are kept.
    """
    _describe_key(operation, policy)
    responses: dict[Any, dict[str, Any]] = operation.setdefault("responses", {})
    replayed = {
        "description": "Present only on a replay of the first response.",
        "schema": {"type": "string", "enum": ["true"]},
    }
    for status, response in responses.items():
        if _is_stored(str(status), policy):
            response.setdefault("headers", {}).setdefault(policy.replayed_header, replayed)
    for status, description, waits in _refusals(policy):
        # A status is a string in some documents, a number in others.
        known = {str(key): key for key in responses}
        kind = type(next(iter(responses), ""))
        response = responses.setdefault(known.get(str(status), kind(status)), {})
        response.setdefault("description", description)
        if conf.get().ERROR_RENDERER is None:
            schema = {"$ref": f"#/components/schemas/{PROBLEM}"}
            response.setdefault("content", {}).setdefault(PROBLEM_TYPE, {"schema": schema})
        if waits:
            seconds = {
                "description": "Seconds to wait before a retry.",
                "schema": {"type": "integer", "minimum": 1},
            }
            response.setdefault("headers", {}).setdefault("Retry-After", seconds)
    published = asdict(policy)
    operation["x-idempotency"] = {
        name: list(value) if isinstance(value, tuple) else value
        for name in _PUBLISHED
        for value in [published[name]]
    }


def _describe_key(operation: dict[str, Any], policy: Policy) -> None:
    parameters: list[dict[str, Any]] = operation.setdefault("parameters", [])
    name, *other_names = policy.headers
    if any(
        given.get("in") == "header" and given.get("name", "").lower() == name.lower()
        for given in parameters
    ):
        return
    said = [
        (
            "A key that the client chooses, the same for each retry of the request:"
            f" {policy.key_format}."
        ),
        f"It has {policy.key_min_length} to {policy.key_max_length} characters.",
        f"The response is stored for {policy.retention_hours} hours and replayed.",
    ]
    if other_names:
        said.append(f"The header {' or '.join(other_names)} may carry it instead.")
    if policy.key_from:
        said.append(f"It may come from {policy.key_from} instead.")
    parameters.append(
        {
            "name": name,
            "in": "header",
            # The header is optional if the key may be in another place, or if some requests need no
            # key.
            "required": policy.required and not (other_names or policy.key_from or policy.applies),
            "description": " ".join(said),
            "schema": {"type": "string", "minLength": policy.key_min_length},
        }
    )


def _refusals(policy: Policy) -> list[tuple[int, str, bool]]:
    """Return the status and the description of each error response, and whether it has
    Retry-After."""
    meanings = {
        400: "The idempotency key is missing or not valid, or the body is incomplete.",
        409: "A request with this idempotency key is in progress, or requires manual intervention.",
        503: (
            "The database cannot be reached, or this version of the service cannot continue the"
            " request."
        ),
    }
    reused = "The idempotency key was used for a different request: use a new one."
    meanings[policy.mismatch_status] = " ".join(
        filter(None, [meanings.get(policy.mismatch_status), reused])
    )
    return [(status, meaning, status in (409, 503)) for status, meaning in sorted(meanings.items())]


def _is_stored(status: str, policy: Policy) -> bool:
    return f"{status[:1]}xx" in policy.stored_statuses and status not in map(
        str, policy.never_stored_statuses
    )
