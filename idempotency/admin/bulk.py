"""Actions on all matching rows, in chunks: the definition of an action, and the progress of its
work.

A chunk is bounded in rows and in time, and an intervention changes a row only if nothing else has
changed it since it was read. If a person closes the page, completed changes are kept. If two people
act at once, each row is changed and counted once. Rows are read in the order of an indexed column,
so that the cost of a chunk does not depend on the number of rows.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from time import monotonic
from typing import Any, ClassVar

from django.contrib.admin.models import CHANGE, DELETION
from django.core import signing
from django.db.models import QuerySet, TextField, Value
from django.db.models.functions import Cast
from django.utils.functional import Promise
from django.utils.translation import gettext, gettext_noop

from idempotency._text import Grouped

#: A chunk ends at the first of these limits. The time is far below the timeout of any web server.
CHUNK_ROWS = 500
CHUNK_SECONDS = 3.0
#: The reasons why a row is not changed. The work contains them in English, and pages translate
#: them.
RUNNING, FINISHED = gettext_noop("running now"), gettext_noop("finished")
CHANGED = gettext_noop("changed after the confirmation was shown")


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that the confirmation describes together: their label, and the meaning of the action for
    them."""

    label: str
    meaning: str
    alarming: bool = False


class BulkAction:
    """An action: the texts of its confirmation, and the change of one row."""

    name: ClassVar[str]
    label: ClassVar[str | Promise]
    permission: ClassVar[str]
    explanation: ClassVar[str | Promise]
    #: ``done`` is the message about the changed rows, with their count. ``logged`` is the English
    #: text of the entry in the admin log for each row, ``flag`` the kind of this entry.
    done: ClassVar[Any]
    logged: ClassVar[str]
    flag: ClassVar[int] = CHANGE
    #: The indexed column that determines the order of the rows.
    column: ClassVar[str]
    #: The reason why the action does not change rows that are not ``concerned``.
    others: ClassVar[str | Promise]
    #: The template that shows single rows in the confirmation, or an empty string.
    sample_template: ClassVar[str] = ""

    @property
    def is_destructive(self) -> bool:
        """Return whether the action deletes the rows."""
        return self.flag == DELETION

    def concerned(self, rows: Any) -> Any:
        """Return those of ``rows`` that the action may change; the condition has an index."""
        raise NotImplementedError

    def kinds(self, rows: Any) -> Iterable[tuple[Any, int]]:
        """Count the ``concerned`` rows by kind. Yield for each kind an unsaved row or an equivalent
        for ``group`` and ``why_not``, and the number of its rows."""
        raise NotImplementedError

    def group(self, row: Any) -> Group:
        """Return the group of ``row`` in the confirmation."""
        raise NotImplementedError

    def why_not(self, row: Any) -> str:
        """Return why the action does not change ``row``, in English; an empty string if it changes
        the row."""
        return ""

    def changed_at(self, row: Any) -> Iterable[datetime | None]:
        """Return the times of the last changes of ``row``. If one is later than the confirmation,
        the row is skipped."""
        raise NotImplementedError

    def act(self, row: Any, *, by: str, note: str) -> str:
        """Change ``row`` if it has not changed since it was read. Return an empty string, or the
        reason why it was not changed."""
        raise NotImplementedError


@dataclass(slots=True)
class Work:
    """The time of a confirmation, and the progress of its work. ``expected`` is the number of
    matching rows. The next chunk begins behind the row ``after``. The work ends with the row
    ``until``, the last one of the confirmation. Both rows are given as a place and a pk."""

    as_of: str
    expected: int
    done: int = 0
    left: dict[str, int] = field(default_factory=dict)
    after: tuple[str, str] | None = None
    until: tuple[str, str] | None = None

    @property
    def read_at(self) -> datetime | None:
        """The time of the confirmation; None if no row matched."""
        return datetime.fromisoformat(self.as_of) if self.as_of else None

    @property
    def visited(self) -> int:
        """The number of rows that were processed, changed or not."""
        return self.done + sum(self.left.values())

    def signed(self, action: BulkAction) -> str:
        """Return the work as signed text, for the form that starts the next chunk."""
        return signing.dumps(asdict(self), salt=f"{__name__}.{action.name}", compress=True)

    @classmethod
    def of(cls, text: str, action: BulkAction) -> "Work":
        """Return the work from a text that ``signed`` returned for this action. Raises BadSignature
        for any other text."""
        return cls(**signing.loads(text, salt=f"{__name__}.{action.name}"))

    def report(self, action: BulkAction) -> str:
        """Return the final message: the number of changed rows, and the numbers of unchanged rows
        by reason. Rows that no longer match are included."""
        gone = self.expected - self.visited
        return self.progress(
            action, {gettext_noop("no longer matched when the action reached them"): gone}
        )

    def progress(self, action: BulkAction, missing: dict[str, int] | None = None) -> str:
        """Return the number of changed rows, and the numbers of unchanged rows by reason, with
        those of ``missing``."""
        reasons = self.left | (missing or {})
        left = [
            f"{Grouped(count)} {gettext(reason)}" for reason, count in reasons.items() if count > 0
        ]
        done = str(action.done % {"count": Grouped(self.done)})
        if not left:
            return done
        return f"{done} {gettext('Not changed: %(reasons)s.') % {'reasons': '; '.join(left)}}"


def in_order(action: BulkAction, rows: QuerySet[Any], work: Work | None = None) -> QuerySet[Any]:
    """Return the rows that the action concerns, in its order; with ``work``, only the remaining
    rows of that work."""
    # The place is the time as the database writes it: SQLite compares texts, and Django would write
    # a longer text.
    place = Cast(action.column, TextField())
    following: QuerySet[Any] = (
        action.concerned(rows).annotate(place=place).order_by(action.column, "pk")
    )
    for border, inner, outer in (
        ((work.until, "lte", "gt"), (work.after, "gte", "lte")) if work else ()
    ):
        if border is not None:
            at, pk = Value(border[0], output_field=TextField()), border[1]
            following = following.filter(**{f"{action.column}__{inner}": at}).exclude(
                **{action.column: at, f"pk__{outer}": pk}
            )
    return following


def work_on(
    action: BulkAction, rows: QuerySet[Any], work: Work, changed: list[Any], *, by: str, note: str
) -> bool:
    """Process the next chunk, and append the changed rows to ``changed``; return whether no row is
    left."""
    begun = monotonic()
    following, visited = list(in_order(action, rows, work)[: CHUNK_ROWS + 1]), work.visited
    for row in following[:CHUNK_ROWS]:
        if (
            reason := action.why_not(row)
            or _changed(action, row, work)
            or action.act(row, by=by, note=note)
        ):
            work.left[reason] = work.left.get(reason, 0) + 1
        else:
            work.done += 1
            changed.append(row)
        work.after = row.place, str(row.pk)
        if monotonic() - begun > CHUNK_SECONDS:
            break
    return work.visited - visited == len(following)


def _changed(action: BulkAction, row: Any, work: Work) -> str:
    as_of = work.read_at
    times = [at for at in action.changed_at(row) if at is not None]
    return CHANGED if as_of is None or any(at > as_of for at in times) else ""
