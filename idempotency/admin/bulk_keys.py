"""The actions on many keys: hand back, acknowledge, undo acknowledge."""

from collections.abc import Iterable
from typing import Any, ClassVar

from django.utils.text import format_lazy
from django.utils.translation import gettext, gettext_noop, ngettext_lazy
from django.utils.translation import gettext_lazy as _

from idempotency._bulk_work import RUNNING
from idempotency._states import KeyState
from idempotency.admin.bulk import BulkAction, Group
from idempotency.admin.stuck_codes import LAST_CALL, STUCK_CODES
from idempotency.exceptions import StuckCode
from idempotency.monitoring.measures import counted

#: The states of unfinished keys that no run holds.
UNLOCKED = (KeyState.STUCK, KeyState.ACKNOWLEDGED, KeyState.ABANDONED, KeyState.WAITING)
_OWN_CODE = _("Your views raise this code. First do what the reasons of these keys say.")


class KeyAction(BulkAction):
    """An action on unfinished keys."""

    column = "created_at"
    changed: ClassVar[tuple[str, ...]] = (
        *("last_run_at", "stuck_at", "handed_back_at", "acknowledged_at"),
    )
    others = _("finished or refused")
    #: The states of the keys that the action changes, and the reason for the other keys.
    states: ClassVar[tuple[KeyState, ...]]
    other_state: ClassVar[str]

    def concerned(self, rows: Any) -> Any:
        return rows.unfinished()

    def eligible(self, rows: Any) -> Any:
        return self.concerned(rows).filter(state__in=self.states)

    def kinds(self, rows: Any) -> Iterable[tuple[Any, int]]:
        for row in counted(rows.unfinished(), "state", "stuck_code"):
            yield row, row.number

    def why_not(self, row: Any) -> str:
        if row.state == KeyState.IN_FLIGHT:
            return RUNNING
        return "" if row.state in self.states else self.other_state

    def group(self, row: Any) -> Group:
        state = str(KeyState(row.state).label)
        label = f"{state}: {row.stuck_code}" if row.stuck_code else state
        if reason := self.why_not(row):
            return Group(label, gettext("Not changed: %(reasons)s.") % {"reasons": gettext(reason)})
        return self.meant(label, row)

    def meant(self, label: str, row: Any) -> Group:
        """Return the group of a key that the action changes, with the meaning of the action: by
        default, the cure of the stuck code."""
        found = STUCK_CODES.get(row.stuck_code)
        return Group(label, str(found.cure if found else row.stuck_code and _OWN_CODE))


class HandBack(KeyAction):
    """Hand unfinished keys back to the completer."""

    name, label, permission = (
        "hand_back",
        _("Hand back to the completer"),
        "complete_idempotencykey",
    )
    explanation = format_lazy(
        "{} {}",
        _(
            "The completer runs these requests, each from its recovery point and as the user who"
            " sent it. Their attempts are counted from zero again."
        ),
        LAST_CALL,
    )
    done = ngettext_lazy(
        "%(count)s key was handed back to the completer.",
        "%(count)s keys were handed back to the completer.",
        "count",
    )
    logged = "Handed back to the completer."
    states = UNLOCKED

    def eligible(self, rows: Any) -> Any:
        return super().eligible(rows).exclude(stuck_code=StuckCode.ON_ABANDON)

    def why_not(self, row: Any) -> str:
        is_in_it = row.stuck_code == StuckCode.ON_ABANDON
        in_it = gettext_noop("stuck in on_abandon (answer them instead)") if is_in_it else ""
        return super().why_not(row) or in_it

    def meant(self, label: str, row: Any) -> Group:
        if not row.stuck_code:
            return Group(label, gettext("The completer runs them in its next pass."))
        if (found := STUCK_CODES.get(row.stuck_code)) is None:
            return super().meant(label, row)
        text = gettext("Answer these keys instead of completing them.")
        instead = text if found.needs_an_answer else ""
        return Group(label, f"{instead} {found.cure}".strip(), found.needs_an_answer)


class Acknowledge(KeyAction):
    """Remove stuck keys from the list of stuck keys."""

    name, label, permission = "acknowledge", _("Acknowledge"), "acknowledge_idempotencykey"
    explanation = _(
        "These keys leave the list of stuck keys. Nothing else changes: they have no response, a"
        " retry of their clients is treated as before, and they are kept while they are stuck."
    )
    done = ngettext_lazy(
        "%(count)s key was acknowledged.", "%(count)s keys were acknowledged.", "count"
    )
    logged = "Acknowledged."
    states, other_state = (KeyState.STUCK,), gettext_noop("not stuck")

    def why_not(self, row: Any) -> str:
        if row.state == KeyState.ACKNOWLEDGED:
            return gettext_noop("acknowledged already")
        return super().why_not(row)


class Unacknowledge(KeyAction):
    """Put acknowledged keys back on the list of stuck keys."""

    name, label = "unacknowledge", _("Undo acknowledge")
    permission = "acknowledge_idempotencykey"
    explanation = _("These keys are on the list of stuck keys again. Nothing else changes.")
    done = ngettext_lazy(
        "%(count)s key is on the list of stuck keys again.",
        "%(count)s keys are on the list of stuck keys again.",
        "count",
    )
    logged = "Unacknowledged."
    states, other_state = (KeyState.ACKNOWLEDGED,), gettext_noop("not acknowledged")

    def meant(self, label: str, row: Any) -> Group:
        return Group(label, str(self.explanation))
