"""The SQL updates of a key: of a claimed key with its fence, and of a key that no run holds.

Two columns decide about times, and no setting does: a lock holds until ``locked_until``, and a key
is expired after ``expires_at``, which is NULL until the key is finished or refused. Only names of
columns and constants are formatted into a text; values of a request are parameters.
"""

# ruff: noqa: S608 - see above

from functools import cached_property

from idempotency._engine.dialects import POSTGRESQL, SQLITE
from idempotency._states import ABANDONED_AFTER_LEASES
from idempotency.models import FINISHED, RETIRED_SCOPE, IdempotencyKey

TABLE = IdempotencyKey._meta.db_table

#: The end of a fenced statement on PostgreSQL: it finds the row by its physical position (``ctid``)
#: first. Under SERIALIZABLE an index scan locks a page that all young keys share, so runs of
#: different keys would conflict.
AT_CTID = " AND k.ctid = %(position)s::tid RETURNING k.ctid"
RETURNING_CTID = " RETURNING k.ctid"

NOT_REFUSED = "refused_at = NULL, expires_at = NULL"
#: A refusal ends too: an asyncio task of the work may begin a phase or call after the work was
#: refused.
_BEGUN = f"begun = true, {NOT_REFUSED}"
_RESPONSE = "response_code = %(code)s, response_headers = %(headers)s, response_body = %(body)s"
CLEAR_STUCK = "stuck_at = NULL, stuck_code = '', stuck_reason = ''"
_FENCE = "k.id = %(id)s AND k.claim_token = %(token)s"
#: The fence of most statements. A run may not know that its last COMMIT succeeded. Its next
#: statement must not overwrite that commit.
_AT_POINT = f"{_FENCE} AND k.recovery_point = %(reached)s"
UNTOUCHED = "NOT k.begun"
#: Rows may refer to a key whose scope is renamed, so the row stays.
RETIRED = f"scope = '{RETIRED_SCOPE}' || CAST(k.id AS text)"


def one_line(text: str) -> str:
    """Return a statement as one line, for logs."""
    return " ".join(text.split())


class Updates:
    """The updates for one database vendor."""

    def __init__(self, vendor: str) -> None:
        self.dialect = dialect = POSTGRESQL if vendor == "postgresql" else SQLITE
        self.now = dialect.now
        self.unlocked = f"(k.locked_until IS NULL OR k.locked_until <= {self.now})"
        silent = dialect.seconds_between.format("k.locked_until", self.now)
        least = f"{ABANDONED_AFTER_LEASES - 1} * k.lease_seconds"
        self.abandoned = f"(k.locked_until IS NULL OR {silent} > {least})"
        #: The end of a lock that is taken or renewed now.
        self.lease_end = dialect.later_by.format("k.lease_seconds", "second")
        self.history = dialect.append.format(event=dialect.event)
        #: The new history of an unlocked key. An expired lock is that of a lost run, as each end of
        #: a run clears it.
        self.history_of_unlocked = dialect.append_after_lock.format(event=dialect.event)
        self.expired = f"k.expires_at < {self.now}"
        self.expiry = dialect.later_by.format("k.retention_hours", "hour")
        # A key that is kept forever loses its arguments, which may be personal data.
        body = "CASE WHEN k.retention_hours IS NULL THEN NULL ELSE k.request_body END"
        #: The changes of each key that is finished now.
        self.finished = (
            f"recovery_point = '{FINISHED}', finished_at = {self.now}, expires_at = {self.expiry}, "
            f"request_body = {body}, locked_until = NULL, {CLEAR_STUCK}, {_RESPONSE}"
        )

    def _update(self, changes: str, condition: str) -> str:
        return f"UPDATE {TABLE} AS k SET {changes}, history = {self.history} WHERE {condition}"

    @cached_property
    def set_free(self) -> str:
        """Rename the scope of a claimed key whose response is not stored although its writes
        are."""
        return self._update(f"{RETIRED}, response_code = %(code)s", _AT_POINT)

    @cached_property
    def advance(self) -> str:
        changes = f"recovery_point = %(recovery_point)s, locked_until = {self.lease_end}"
        return self._update(f"{changes}, {_BEGUN}, {CLEAR_STUCK}", _AT_POINT)

    @cached_property
    def renew(self) -> str:
        """Renew the lock, and mark that something is begun. A late run must begin nothing once its
        key is stuck."""
        return one_line(f"""
            UPDATE {TABLE} AS k SET locked_until = {self.lease_end}, {_BEGUN}
            WHERE {_AT_POINT} AND k.stuck_at IS NULL
        """)

    @cached_property
    def begin_call(self) -> str:
        """Renew the lock before a call to a downstream service. The key of ``on_abandon`` is stuck
        with its own code."""
        return self._update(
            f"locked_until = {self.lease_end}, {_BEGUN}, call_begun_at = {self.now}",
            f"{_AT_POINT} AND k.stuck_code = %(stuck_code)s",
        )

    @cached_property
    def finish(self) -> str:
        return self._update(self.finished, _AT_POINT)

    @cached_property
    def finish_plain(self) -> str:
        """Finish the key of a plain run, which its claim inserted with ``finished_at`` and
        ``expires_at``."""
        changes = f"recovery_point = '{FINISHED}', locked_until = NULL, {CLEAR_STUCK}, {_RESPONSE}"
        return self._update(changes, _AT_POINT)

    @cached_property
    def finish_untouched(self) -> str:
        return f"{self.finish} AND {UNTOUCHED}"

    @cached_property
    def release(self) -> str:
        return self._update(
            "locked_until = NULL, last_error = %(error)s", f"{_FENCE} AND k.finished_at IS NULL"
        )

    @cached_property
    def refuse(self) -> str:
        """Unlock a key if nothing was begun. From now on only a retry of its client runs it."""
        times = f"locked_until = NULL, refused_at = {self.now}, expires_at = {self.expiry}"
        return self._update(
            f"{times}, {CLEAR_STUCK}, last_error = %(error)s", f"{_AT_POINT} AND {UNTOUCHED}"
        )

    def _mark_stuck(self, condition: str, history: str) -> str:
        return one_line(f"""
            UPDATE {TABLE} AS k
            SET locked_until = NULL, stuck_at = {self.now}, stuck_code = %(code)s,
                completer_attempts = k.completer_attempts * %(counting)s,
                stuck_reason = %(reason)s, history = {history}
            WHERE {condition} AND k.finished_at IS NULL
        """)

    @cached_property
    def mark_stuck(self) -> str:
        return self._mark_stuck(_FENCE, self.history)

    @cached_property
    def give_up(self) -> str:
        idle = f"k.id = %(id)s AND k.stuck_at IS NULL AND k.refused_at IS NULL AND {self.unlocked}"
        return self._mark_stuck(idle, self.history_of_unlocked)
