"""Advisory locks of PostgreSQL: they are visible before COMMIT, unlike the row of a plain run.

They last as long as the transaction of the claim. The lock of the key refuses a duplicate at once.
The mark of the request shows whether the duplicate is the same request.
"""

# ruff: noqa: S608 - only expressions of this module are formatted into the statement

import hashlib
import struct
from functools import lru_cache

from idempotency.models import IdempotencyKey

#: Advisory locks belong to the database, but each schema may have its own table, so each number
#: includes its identity.
_TABLE_ID = f"'{IdempotencyKey._meta.db_table}'::regclass::oid"
# In a text with literals, -2147483648::int is the negative of a number that is no int.
KEY_LOCK = f"(CAST(%(lock)s AS bigint) # {_TABLE_ID}::bigint)"
MARK_KEY = f"(CAST(%(mark_key)s AS int) # {_TABLE_ID}::int)"
MARK_REQUEST = "CAST(%(mark_request)s AS int)"

#: Whether another session holds the lock of a key, and whether it runs another request. A holder
#: without a mark is just releasing its locks and proves nothing. A mark whose first eight bits
#: differ was made in another way, and may be that of the same request.
HOLDER = f"""
WITH held AS MATERIALIZED (
    SELECT pid, classid::bigint, objid::bigint, objsubid FROM pg_locks
    WHERE locktype = 'advisory' AND granted AND pid <> pg_backend_pid()
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
), lock AS (
    SELECT pid FROM held WHERE objsubid = 1 AND (classid << 32 | objid) = {KEY_LOCK}
), mark AS (
    SELECT pid FROM held WHERE objsubid = 2 AND classid = {MARK_KEY}::bigint & 4294967295
    AND objid <> {MARK_REQUEST}::bigint & 4294967295
    AND objid >> 24 = ({MARK_REQUEST}::bigint & 4294967295) >> 24
)
SELECT EXISTS (SELECT 1 FROM lock), EXISTS (SELECT 1 FROM lock JOIN mark USING (pid))
"""


def version_of(fingerprint: str) -> str:
    return fingerprint.partition(":")[0]


@lru_cache(maxsize=32)
def _way_hash(way: str) -> bytes:
    """Return the first byte of a mark: the way of the fingerprint, because two ways cannot be
    compared."""
    return hashlib.blake2b(way.encode(), digest_size=1).digest()


def lock_parameters(scope: str, idempotency_key: str, fingerprint: str) -> dict[str, int]:
    """Return the numbers of the advisory locks: 64 bits for the key, and two of 32 bits that mark
    its request. The length prefix makes the pair of scope and key unambiguous. The first number of
    the mark identifies the key, and lets a session find the mark of another request. The second one
    combines key and request: equal requests with two keys collide only if both numbers do."""
    name = f"{len(scope)}:{scope}{idempotency_key}".encode()
    key_hash = hashlib.blake2b(name, digest_size=12).digest()
    request_hash = (
        _way_hash(version_of(fingerprint))
        + hashlib.blake2b(key_hash + fingerprint.encode(), digest_size=3).digest()
    )
    lock, mark_key, mark_request = struct.unpack(">qii", key_hash + request_hash)
    return {"lock": lock, "mark_key": mark_key, "mark_request": mark_request}
