"""Actions on all rows that match, chunk by chunk: their definition, and the progress of one of them.

A chunk is bounded in time, and each row is changed by the one conditional UPDATE of its intervention. If a person closes the
page, completed changes are kept. If two people act at once, each row is changed and counted once. Rows are taken in the order
of an indexed column, so that the cost of a chunk does not depend on the number of rows.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from time import monotonic
from typing import Any, ClassVar

from django.contrib.admin.models import CHANGE
from django.core import signing
from django.db.models import QuerySet, TextField, Value
from django.db.models.functions import Cast
from django.utils.functional import Promise
from django.utils.translation import gettext, gettext_noop

#: A chunk ends with the first of these, far below the timeout of any web server.
CHUNK_ROWS = 500
CHUNK_SECONDS = 3.0
#: The reasons why a row is not changed. The work carries them in English, and pages translate them.
RUNNING, FINISHED = gettext_noop("running now"), gettext_noop("finished")
CHANGED = gettext_noop("changed after the confirmation was shown")


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that the confirmation describes together: their label, and the meaning of the action for them."""

    label: str
    meaning: str
    alarming: bool = False


class BulkAction:
    """An action: the texts of its confirmation, and the change of one row."""

    name: ClassVar[str]
    label: ClassVar[str | Promise]
    permission: ClassVar[str]
    explanation: ClassVar[str | Promise]
    #: The message about the changed rows, by their count; and the text of the admin log for each row, in English, with the
    #: kind of the entry.
    done: ClassVar[Any]
    logged: ClassVar[str]
    flag: ClassVar[int] = CHANGE
    #: The column, with an index, in whose order the rows are taken.
    column: ClassVar[str]
    #: The reason why the action does not change rows that are not ``concerned``.
    others: ClassVar[str | Promise]
    #: The template that shows single rows in the confirmation, or an empty string.
    sample_template: ClassVar[str] = ""

    def concerned(self, rows: Any) -> Any:
        """Narrow ``rows`` down to those that the action may change, by the condition of an index."""
        raise NotImplementedError

    def group(self, row: Any) -> Group:
        """Return the group of ``row`` in the confirmation."""
        raise NotImplementedError

    def why_not(self, row: Any) -> str:
        """Return why the action does not change ``row``, in English; an empty string if it changes the row."""
        return ""

    def changed_at(self, row: Any) -> Iterable[datetime | None]:
        """Return the times of the last changes of ``row``. A decision that is older than one of them is invalid."""
        raise NotImplementedError

    def act(self, row: Any, *, by: str, note: str) -> str:
        """Change ``row`` if nothing else has changed it since it was read. Return why this did not happen, or an empty
        string."""
        raise NotImplementedError


@dataclass(slots=True)
class Work:
    """A confirmation, its time, and the progress of the work. ``expected`` is the number of counted rows; ``more`` is true if
    not all matching rows were counted. The work begins behind the row ``after``, and ends with the row ``until``, the last
    counted row; each is a place and a pk."""

    as_of: str
    expected: int
    more: bool
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
        """The number of rows that the work has reached."""
        return self.done + sum(self.left.values())

    def signed(self, action: BulkAction) -> str:
        """Return the text that carries the work from one chunk to the next."""
        return signing.dumps(asdict(self), salt=f"{__name__}.{action.name}", compress=True)

    @classmethod
    def of(cls, text: str, action: BulkAction) -> "Work":
        """Return the work that ``signed`` has written. Raises BadSignature for any other text."""
        return cls(**signing.loads(text, salt=f"{__name__}.{action.name}"))

    def report(self, action: BulkAction) -> str:
        """Return the number of changed rows, and the numbers of other rows with the reasons."""
        gone = 0 if self.more else self.expected - self.visited
        return self.progress(action, {gettext_noop("no longer matched when the action reached them"): gone})

    def progress(self, action: BulkAction, missing: dict[str, int] | None = None) -> str:
        """Return the number of changed rows, and the numbers of other rows, ``missing`` ones included, with the reasons."""
        reasons = self.left | (missing or {})
        left = [f"{count} {gettext(reason)}" for reason, count in reasons.items() if count > 0]
        done = str(action.done % {"count": self.done})
        return f"{done} {gettext('Not changed: %(reasons)s.') % {'reasons': '; '.join(left)}}" if left else done


def in_order(action: BulkAction, rows: QuerySet[Any], work: Work | None = None) -> QuerySet[Any]:
    """Return the rows that the action concerns, in its order; with ``work``, only the remaining rows of that work."""
    # The place is the time as the database writes it. On SQLite, which compares texts, Django's own is longer.
    place = Cast(action.column, TextField())
    following: QuerySet[Any] = action.concerned(rows).annotate(place=place).order_by(action.column, "pk")
    for border, inner, outer in ((work.until, "lte", "gt"), (work.after, "gte", "lte")) if work else ():
        if border is not None:
            at, pk = Value(border[0], output_field=TextField()), border[1]
            following = following.filter(**{f"{action.column}__{inner}": at}).exclude(**{action.column: at, f"pk__{outer}": pk})
    return following


def work_on(action: BulkAction, rows: QuerySet[Any], work: Work, changed: list[Any], *, by: str, note: str) -> bool:
    """Work on the next rows, and add those that were changed to ``changed``; return whether none is left."""
    begun = monotonic()
    following, visited = list(in_order(action, rows, work)[: CHUNK_ROWS + 1]), work.visited
    for row in following[:CHUNK_ROWS]:
        if reason := action.why_not(row) or _changed(action, row, work) or action.act(row, by=by, note=note):
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
    return CHANGED if as_of is None or any(at is not None and at > as_of for at in action.changed_at(row)) else ""
