"""Names of credentials. Query parameters and response headers with such a name are not stored.

The fingerprint still covers the whole query. It is then keyed with the SECRET_KEY, so that a value
cannot be guessed from it.
"""

import re
from functools import lru_cache
from urllib.parse import unquote_plus

from idempotency import conf

#: Replaces the value of a credential in a stored query.
NOT_STORED = "not-stored"
#: The names that the app knows. Case, hyphens, underscores and a leading ``x-`` do not matter.
NAMES = (
    "access_key", "access_token", "api_key", "api_secret", "api_token", "auth", "auth_key",
    "auth_token", "authentication_info", "authorization", "bearer", "bearer_token",
    "client_secret", "credential", "credentials", "csrf_token", "csrfmiddlewaretoken", "id_token",
    "jwt", "passphrase", "passwd", "password", "private_key", "proxy_authorization",
    "refresh_token", "secret", "secret_key", "security_token", "session_id", "session_key",
    "session_token", "token",
)  # fmt: skip


def is_credential(name: str) -> bool:
    """Return whether a query parameter or a response header with this name is a credential:
    X-Api-Key, apiKey, api_key[]."""
    parts = [part for part in re.split(r"[\[\].]", name) if part.strip()]
    return bool(parts) and _plain(parts[-1]) in _names(conf.get().CREDENTIAL_NAMES)


def without_credentials(target: str) -> tuple[str, bool]:
    """Return path and query with NOT_STORED for the values of credentials, and whether there was
    one."""
    if "?" not in target:
        return target, False
    path, mark, query = target.partition("?")
    fields = [field.partition("=") for field in query.split("&")]
    taken = [bool(value) and is_credential(unquote_plus(name)) for name, _, value in fields]
    if not any(taken):
        return target, False
    pairs = zip(fields, taken, strict=True)
    kept = "&".join(
        f"{name}{equals}{NOT_STORED if is_taken else value}"
        for (name, equals, value), is_taken in pairs
    )
    return f"{path}{mark}{kept}", True


@lru_cache(maxsize=1)
def _names(added: frozenset[str]) -> frozenset[str]:
    return frozenset(map(_plain, (*NAMES, *added)))


@lru_cache(maxsize=256)
def _plain(name: str) -> str:
    return re.sub(r"^x[-_]|[-_]", "", name.strip().lower())
