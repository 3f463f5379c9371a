"""What a protected view promises, written into an operation of an OpenAPI document; for the modules that make such documents.

Source: OpenAPI 3.1; draft-07 of the header's specification, section 2.5.2, asks for the policy to be published.
"""

from dataclasses import asdict
from typing import Any

from idempotency import conf
from idempotency.policy import Policy

PROBLEM = "IdempotencyProblem"
PROBLEM_TYPE = "application/problem+json"
#: The schema of this app's own answers.
PROBLEM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "An error about the idempotency key (RFC 9457).",
    "required": ["type", "title", "status", "detail", "code", "retryable"],
    "properties": {
        "type": {"type": "string", "format": "uri"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"type": "string", "description": "Stable: what a program goes by."},
        "retryable": {"type": "boolean", "description": "Whether the same request, with the same key, may succeed later."},
    },
}

#: What a client has to know, published as ``x-idempotency``; the rest of a policy is the service's own business.
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
    """Add to an operation the header of the key, the answers about it, the mark of a replay, and ``x-idempotency``: the policy.

    What the operation says itself is kept: a parameter or a header of the same name, the description of a status.
    """
    _describe_key(operation, policy)
    responses: dict[Any, dict[str, Any]] = operation.setdefault("responses", {})
    replayed = {
        "description": "Stands on a replay of the first answer, and on nothing else.",
        "schema": {"type": "string", "enum": ["true"]},
    }
    for status, response in responses.items():
        if _is_stored(str(status), policy):
            response.setdefault("headers", {}).setdefault(policy.replayed_header, replayed)
    for status, description, waits in _refusals(policy):
        # Documents differ in whether a status is a string or a number.
        known = {str(key): key for key in responses}
        kind = type(next(iter(responses), ""))
        response = responses.setdefault(known.get(str(status), kind(status)), {})
        response.setdefault("description", description)
        if conf.get().ERROR_RENDERER is None:
            schema = {"$ref": f"#/components/schemas/{PROBLEM}"}
            response.setdefault("content", {}).setdefault(PROBLEM_TYPE, {"schema": schema})
        if waits:
            seconds = {"description": "Seconds to wait, if a retry is of use.", "schema": {"type": "integer", "minimum": 1}}
            response.setdefault("headers", {}).setdefault("Retry-After", seconds)
    published = asdict(policy)
    operation["x-idempotency"] = {
        name: list(value) if isinstance(value, tuple) else value for name in _PUBLISHED for value in [published[name]]
    }


def _describe_key(operation: dict[str, Any], policy: Policy) -> None:
    parameters: list[dict[str, Any]] = operation.setdefault("parameters", [])
    name, *other_names = policy.headers
    if any(given.get("in") == "header" and given.get("name", "").lower() == name.lower() for given in parameters):
        return
    said = [
        f"A key of the client's choice, the same with each retry of the request: {policy.key_format}.",
        f"It has {policy.key_min_length} to {policy.key_max_length} characters.",
        f"The answer is kept for {policy.retention_hours} hours, and replayed.",
    ]
    if other_names:
        said.append(f"It may stand in {' or '.join(other_names)} instead.")
    if policy.key_from:
        said.append(f"It may come from {policy.key_from} instead.")
    parameters.append(
        {
            "name": name,
            "in": "header",
            # One that may come from elsewhere cannot be demanded here.
            "required": policy.required and not (other_names or policy.key_from),
            "description": " ".join(said),
            "schema": {"type": "string", "minLength": policy.key_min_length},
        }
    )


def _refusals(policy: Policy) -> list[tuple[int, str, bool]]:
    """Return the statuses of this app's own answers, what they mean, and whether they say how long to wait."""
    meanings = {
        400: "The idempotency key is missing or not valid, or the body ended too early.",
        409: "A request with this idempotency key is in progress, or needs a person.",
        503: "The database cannot be reached, or this version of the service cannot continue the request.",
    }
    reused = "The idempotency key belongs to another request: choose a new one."
    meanings[policy.mismatch_status] = " ".join(filter(None, [meanings.get(policy.mismatch_status), reused]))
    return [(status, meaning, status in (409, 503)) for status, meaning in sorted(meanings.items())]


def _is_stored(status: str, policy: Policy) -> bool:
    return f"{status[:1]}xx" in policy.stored_statuses and status not in map(str, policy.never_stored_statuses)
