"""Copies of a key for use outside the admin: the request as a curl command, and the whole key as JSON."""

import shlex
from typing import Any

from django.utils.translation import gettext as _

from idempotency import conf
from idempotency._request.credentials import NOT_STORED
from idempotency._request.stored_request import address_of, client_headers, has_whole_query
from idempotency.admin.belongings import Linked
from idempotency.admin.history import history_of
from idempotency.admin.reading import MAX_SHOWN_CHARACTERS
from idempotency.models import IdempotencyKey

#: Columns that are never copied: downstream keys are derived from the seed, and the token allows updates of the key.
SECRET = ("seed", "claim_token")
_BODIES = ("request_body", "response_body")


def curl(key: IdempotencyKey) -> str:
    """Return a command that sends the stored request again, with comments on the parts that it omits."""
    headers = {conf.get().HEADER_NAMES[0]: key.idempotency_key} | client_headers(key)
    if key.request_content_type:
        headers["Content-Type"] = key.request_content_type
    parts = [f"curl -X {shlex.quote(key.request_method)} {shlex.quote(address_of(key))}"]
    parts += [f"-H {shlex.quote(f'{name}: {value}')}" for name, value in headers.items()]
    notes = [
        _("Left out: credentials, cookies, and each header that is not stored."),
        _("If you use the credentials of another user, the request is a new one and takes effect again."),
    ]
    body = _text(key.request_body)
    if key.request_body is None:
        notes.append(_("Left out: the body, which is not stored."))
    elif body is None or len(body) > MAX_SHOWN_CHARACTERS:
        notes.append(_("Left out: the body, which is too long or no text."))
    elif body:
        parts.append(f"--data-raw {shlex.quote(body)}")
    if not has_whole_query(key):
        notes.append(_("Credentials in the query are %(mark)s.") % {"mark": NOT_STORED})
    return "\n".join([*(f"# {note}" for note in notes), " \\\n  ".join(parts)])


def as_json(key: Any, linked: list[Linked]) -> dict[str, Any]:
    """Return the key for a ticket or a script: its columns except SECRET, the bodies as text, and the rows that belong to it.

    A body that is not stored, or is not UTF-8, is null. The field ``..._bytes`` is the length of the stored body.
    """
    skipped = (*SECRET, *_BODIES, "history", "user")
    columns = {field.name: field.value_from_object(key) for field in key._meta.concrete_fields if field.name not in skipped}
    for name in _BODIES:
        body = getattr(key, name)
        columns |= {name: _text(body), f"{name}_bytes": None if body is None else len(bytes(body))}
    return columns | {
        "state": str(key.state),
        "as_of": key.read_at,
        "user": None if key.user_id is None else str(key.user_id),
        "history": [{"at": event.at, "event": event.name, "detail": event.detail} for event in history_of(key)],
        "linked": [{"kind": kind.name, "name": row.name, "state": row.state} for kind in linked for row in kind.rows],
    }


def _text(body: Any) -> str | None:
    try:
        return None if body is None else bytes(body).decode()
    except UnicodeDecodeError:
        return None
