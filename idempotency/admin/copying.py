"""Copies of a key for use outside the admin: the request as a curl command, and the whole key as
JSON."""

import shlex
from typing import Any

from django.conf import settings
from django.http import HttpRequest
from django.http.request import split_domain_port, validate_host
from django.utils.translation import gettext as _

from idempotency import conf
from idempotency._http.credentials import NOT_STORED
from idempotency._http.stored_request import address_of, client_headers, has_whole_query
from idempotency.admin.belongings import Linked
from idempotency.admin.history import history_of
from idempotency.admin.reading import MAX_SHOWN_CHARACTERS
from idempotency.models import IdempotencyKey

#: Columns that are never copied: downstream keys are derived from the seed, and the token allows
#: updates of the key.
SECRET = ("seed", "claim_token")
_BODIES = ("request_body", "response_body")


def curl(key: IdempotencyKey, request: HttpRequest) -> str:
    """Return a command that sends the stored request again, with comments on the parts that it
    omits.

    The host is that of the client if it is in ALLOWED_HOSTS, else that of ``request``, the request
    of the page. A client may send any host if ALLOWED_HOSTS contains "*", and the person adds
    credentials to the command.
    """
    headers = {conf.get().HEADER_NAMES[0]: key.idempotency_key} | client_headers(key)
    if key.request_content_type:
        headers["Content-Type"] = key.request_content_type
    notes = [
        _("Left out: credentials, cookies, and each header that is not stored."),
        _(
            "If you use the credentials of another user, the request is a new one and takes effect"
            " again."
        ),
    ]
    scheme, host, path = address_of(key)
    if not _is_of_this_site(host):
        scheme, host = request.scheme or "http", request.get_host()
        notes.append(
            _(
                "The host is that of this page, because ALLOWED_HOSTS does not name the host of the"
                " client."
            )
        )
    parts = [
        f"curl --globoff -X {_quoted(key.request_method)} {_quoted(f'{scheme}://{host}{path}')}"
    ]
    parts += [f"-H {_quoted(f'{name}: {value}')}" for name, value in headers.items()]
    body = _text(key.request_body)
    if key.request_body is None:
        notes.append(_("Left out: the body, which is not stored."))
    elif body is None or "\0" in body or len(body) > MAX_SHOWN_CHARACTERS:
        notes.append(_("Left out: the body, which is too long or no text."))
    elif body:
        parts.append(f"--data-raw {_quoted(body)}")
    if not has_whole_query(key):
        notes.append(_("Credentials in the query are %(mark)s.") % {"mark": NOT_STORED})
    return "\n".join([*(f"# {note}" for note in notes), " \\\n  ".join(parts)])


def _is_of_this_site(host: str) -> bool:
    """Return whether ALLOWED_HOSTS names the host, other than by "*"."""
    local = [".localhost", "127.0.0.1", "[::1]"] if settings.DEBUG else []  # as in Django
    allowed = [name for name in settings.ALLOWED_HOSTS or local if name != "*"]
    domain, _port = split_domain_port(host)
    return bool(domain) and validate_host(domain, allowed)


def _quoted(text: str) -> str:
    """Return ``text`` as one word of bash, zsh or ksh. A terminal acts on a pasted control
    character even between quotes, so each character that is not printable is escaped."""
    if text.isprintable():
        return shlex.quote(text)
    plain = {"'": r"\'", "\\": r"\\"}
    escaped = (plain.get(sign) or (sign if sign.isprintable() else _octal(sign)) for sign in text)
    return f"$'{''.join(escaped)}'"


def _octal(sign: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in sign.encode("utf-8", "replace"))


def as_json(key: Any, linked: list[Linked]) -> dict[str, Any]:
    """Return the key for a ticket or a script: its columns except SECRET, the bodies as text, and
    the rows that belong to it.

    A body that is not stored, or is not UTF-8, is null. The field ``..._bytes`` is the length of
    the stored body.
    """
    skipped = (*SECRET, *_BODIES, "history", "user")
    columns = {
        field.name: field.value_from_object(key)
        for field in key._meta.concrete_fields
        if field.name not in skipped
    }
    for name in _BODIES:
        body = getattr(key, name)
        columns |= {name: _text(body), f"{name}_bytes": None if body is None else len(bytes(body))}
    return columns | {
        "state": str(key.state),
        "as_of": key.read_at,
        "user": None if key.user_id is None else str(key.user_id),
        "history": [
            {"at": event.at, "event": event.name, "detail": event.detail}
            for event in history_of(key)
        ],
        "linked": [
            {"kind": kind.name, "name": row.name, "state": row.state}
            for kind in linked
            for row in kind.rows
        ],
    }


def _text(body: Any) -> str | None:
    try:
        return None if body is None else bytes(body).decode()
    except UnicodeDecodeError:
        return None
