"""Actions on all matching rows: the definition of an action, its confirmation, and the texts about
its work. ``_bulk_work`` does the work."""

import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, ClassVar

from django.contrib.admin.models import CHANGE, DELETION
from django.core import signing
from django.db.models import Q
from django.utils.functional import Promise
from django.utils.translation import gettext

from idempotency._text import Grouped
from idempotency.models import BulkWork


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that the confirmation describes together: their label, and the meaning of the action for
    them."""

    label: str
    meaning: str
    alarming: bool = False


class BulkAction:
    """An action: the texts of its confirmation, and the rows that it changes."""

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
    #: The columns with the times of changes. If one is later than the confirmation, the row is
    #: skipped.
    changed: ClassVar[tuple[str, ...]]
    #: The reason why the action does not change rows that are not ``concerned``.
    others: ClassVar[str | Promise]
    #: The template that shows single rows in the confirmation, or an empty string.
    sample_template: ClassVar[str] = ""

    @property
    def is_destructive(self) -> bool:
        """Return whether the action deletes the rows."""
        return self.flag == DELETION

    def concerned(self, rows: Any) -> Any:
        """Return those of ``rows`` that the confirmation counts; the condition has an index."""
        raise NotImplementedError

    def eligible(self, rows: Any) -> Any:
        """Return the concerned rows for which ``why_not`` is empty."""
        return self.concerned(rows)

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

    def problem(self, rows: Any) -> str:
        """Return why the action cannot change these rows together, or an empty text."""
        return ""

    def form_for(self, rows: Any) -> Any:
        """Return the form for these rows; None for a form without fields of its own."""
        return None

    def chosen(self, rows: Any, at: datetime | None) -> Any:
        """Return the rows that the action changes, in its order, without those that have changed
        since ``at``. With None, no row matched at the confirmation."""
        if at is None:
            return rows.none()
        eligible = self.eligible(rows)
        for name in self.changed:
            unchanged = Q(**{f"{name}__isnull": True}) | Q(**{f"{name}__lte": at})
            eligible = eligible.filter(unchanged)
        return eligible.order_by(self.column, "pk")


@dataclass(slots=True)
class Confirmation:
    """What the confirmation has shown: its time, the number of matching rows, and the numbers of
    those that the action does not change, by reason. The work gets its ``id``."""

    as_of: str
    expected: int
    unchanged: dict[str, int] = field(default_factory=dict)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def read_at(self) -> datetime | None:
        """The time of the confirmation; None if no row matched."""
        return datetime.fromisoformat(self.as_of) if self.as_of else None

    def signed(self, action: BulkAction) -> str:
        """Return the confirmation as signed text, for its form."""
        return signing.dumps(asdict(self), salt=f"{__name__}.{action.name}", compress=True)

    @classmethod
    def of(cls, text: str, action: BulkAction) -> "Confirmation":
        """Return the confirmation from a text that ``signed`` returned for this action. Raises
        BadSignature for any other text."""
        return cls(**signing.loads(text, salt=f"{__name__}.{action.name}"))


def report(work: BulkWork, action: BulkAction) -> str:
    """Return the number of changed rows, and the reasons for unchanged rows, each with its
    number."""
    unchanged = [(why, count) for why, count in work.unchanged.items() if count > 0]
    reasons = [f"{gettext(why)} ({Grouped(count)})" for why, count in unchanged]
    done = str(action.done % {"count": Grouped(work.done)})
    if not reasons:
        return done
    return f"{done} {gettext('Not changed: %(reasons)s.') % {'reasons': '; '.join(reasons)}}"
