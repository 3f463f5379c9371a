"""Actions on all rows that match, chunk by chunk: what they are, and how far one of them is.

A chunk is bounded in time, and each row is changed by the one conditional UPDATE of its intervention: whoever closes the page
keeps what was done, and of two people who act at once each row is changed, and counted, by one. Rows are taken in the order
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
#: Why a row is left alone: the work carries these reasons in English, and pages translate them.
RUNNING, FINISHED = gettext_noop("running now"), gettext_noop("finished")
CHANGED = gettext_noop("changed since the question")


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that the question describes together: what they are, and what the action means for them."""

    label: str
    meaning: str
    alarming: bool = False


class BulkAction:
    """An action as the question describes it, and as it is done to one row."""

    name: ClassVar[str]
    label: ClassVar[str | Promise]
    permission: ClassVar[str]
    explanation: ClassVar[str | Promise]
    #: What a person is told of the rows that were changed, by their count, and what the admin log keeps of each, in English,
    #: with the kind of its entry.
    done: ClassVar[Any]
    logged: ClassVar[str]
    flag: ClassVar[int] = CHANGE
    #: The column, with an index, in whose order the rows are taken.
    column: ClassVar[str]
    #: Why the action leaves alone what is not ``concerned``.
    others: ClassVar[str | Promise]
    #: Shows single rows in the question, if it is not empty.
    sample_template: ClassVar[str] = ""

    def concerned(self, rows: Any) -> Any:
        """Narrow ``rows`` down to those that the action may change, by the condition of an index."""
        raise NotImplementedError

    def group(self, row: Any) -> Group:
        """Return what the question says of ``row``."""
        raise NotImplementedError

    def why_not(self, row: Any) -> str:
        """Return why the action leaves ``row`` alone, in English; an empty string if it does not."""
        return ""

    def changed_at(self, row: Any) -> Iterable[datetime | None]:
        """Return the times of the last changes of ``row``. A decision from before does not hold."""
        raise NotImplementedError

    def act(self, row: Any, *, by: str, note: str) -> str:
        """Change ``row`` if nothing else has changed it since it was read. Return why this did not happen, or an empty
        string."""
        raise NotImplementedError


@dataclass(slots=True)
class Work:
    """A question, its time, and how far the work is. ``expected`` rows matched; ``more``: they were not all counted. The work
    begins behind the row ``after``, and ends with the row ``until``, the last that was counted; each is a place and a pk."""

    as_of: str
    expected: int
    more: bool
    done: int = 0
    left: dict[str, int] = field(default_factory=dict)
    after: tuple[str, str] | None = None
    until: tuple[str, str] | None = None

    @property
    def read_at(self) -> datetime | None:
        """The time of the question; None if no row matched."""
        return datetime.fromisoformat(self.as_of) if self.as_of else None

    @property
    def visited(self) -> int:
        """The number of rows whose turn has come."""
        return self.done + sum(self.left.values())

    def signed(self, action: BulkAction) -> str:
        """Return the text that carries the work from one chunk to the next."""
        return signing.dumps(asdict(self), salt=f"{__name__}.{action.name}", compress=True)

    @classmethod
    def of(cls, text: str, action: BulkAction) -> "Work":
        """Return the work that ``signed`` has written. Raises BadSignature for any other text."""
        return cls(**signing.loads(text, salt=f"{__name__}.{action.name}"))

    def report(self, action: BulkAction) -> str:
        """Return what was done, what was not, and why."""
        gone = 0 if self.more else self.expected - self.visited
        return self.progress(action, {gettext_noop("not among them any more when their turn came"): gone})

    def progress(self, action: BulkAction, missing: dict[str, int] | None = None) -> str:
        """Return what was done so far, and what was left alone, and why, ``missing`` rows among it."""
        reasons = self.left | (missing or {})
        left = [f"{count} {gettext(reason)}" for reason, count in reasons.items() if count > 0]
        done = str(action.done % {"count": self.done})
        return f"{done} {gettext('Left alone: %(reasons)s.') % {'reasons': '; '.join(left)}}" if left else done


def in_order(action: BulkAction, rows: QuerySet[Any], work: Work | None = None) -> QuerySet[Any]:
    """Return the rows that the action concerns, in its order: those that are left of ``work``."""
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
