"""The actions on many keys: hand back, acknowledge, undo acknowledge."""

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, ClassVar

from django.db import router
from django.utils.text import format_lazy
from django.utils.translation import gettext, gettext_noop, ngettext_lazy
from django.utils.translation import gettext_lazy as _

from idempotency import interventions
from idempotency._states import KeyState
from idempotency.admin.bulk import CHANGED, FINISHED, RUNNING, BulkAction, Group
from idempotency.admin.stuck_codes import LAST_CALL, STUCK_CODES
from idempotency.exceptions import StuckCode
from idempotency.models import IdempotencyKey
from idempotency.monitoring.measures import counted

_COLUMNS = (
    "pk", "claim_token", "recovery_point", "stuck_code", "created_at", "last_run_at", "stuck_at",
    "handed_back_at", "acknowledged_at",
)  # fmt: skip
_OWN_CODE = _("Your views raise this code. First do what the reasons of these keys say.")


class _OfKeys(BulkAction):
    column = "created_at"
    others = _("finished or refused")
    intervene: ClassVar[Callable[..., bool]]

    def concerned(self, rows: Any) -> Any:
        return rows.unfinished().only(*_COLUMNS)

    def kinds(self, rows: Any) -> Iterable[tuple[Any, int]]:
        for row in counted(rows.unfinished(), "state", "stuck_code"):
            yield row, row.number

    def changed_at(self, row: Any) -> Iterable[datetime | None]:
        return row.last_run_at, row.stuck_at, row.handed_back_at, row.acknowledged_at

    def act(self, row: Any, *, by: str, note: str) -> str:
        using = router.db_for_write(IdempotencyKey, instance=row)
        if type(self).intervene(
            row.pk, row.claim_token, by=by, at=row.recovery_point, note=note, using=using
        ):
            return ""
        keys: Any = IdempotencyKey.objects.using(using).filter(pk=row.pk)
        now = keys.with_state().values_list("state", flat=True).first()
        return {KeyState.IN_FLIGHT: RUNNING, KeyState.FINISHED: FINISHED}.get(now, CHANGED)

    def group(self, row: Any) -> Group:
        state = str(KeyState(row.state).label)
        label = f"{state}: {row.stuck_code}" if row.stuck_code else state
        if reason := self.why_not(row):
            return Group(label, gettext("Not changed: %(reasons)s.") % {"reasons": gettext(reason)})
        return self.meant(label, row)

    def meant(self, label: str, row: Any) -> Group:
        """Return the group of a key that the action changes, with the meaning of the action."""
        raise NotImplementedError


class HandBack(_OfKeys):
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
    intervene = staticmethod(interventions.hand_back)

    def why_not(self, row: Any) -> str:
        if row.state == KeyState.IN_FLIGHT:
            return RUNNING
        is_in_it = row.stuck_code == StuckCode.ON_ABANDON
        return gettext_noop("stuck in on_abandon (answer them instead)") if is_in_it else ""

    def meant(self, label: str, row: Any) -> Group:
        if not row.stuck_code:
            return Group(label, gettext("The completer runs them in its next pass."))
        if (found := STUCK_CODES.get(row.stuck_code)) is None:
            return Group(label, str(_OWN_CODE))
        text = gettext("Answer these keys instead of completing them.")
        instead = text if found.needs_an_answer else ""
        return Group(label, f"{instead} {found.cure}".strip(), found.needs_an_answer)


class Acknowledge(_OfKeys):
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
    intervene = staticmethod(interventions.acknowledge)

    def why_not(self, row: Any) -> str:
        if row.state == KeyState.IN_FLIGHT:
            return RUNNING
        if row.state == KeyState.ACKNOWLEDGED:
            return gettext_noop("acknowledged already")
        return "" if row.state == KeyState.STUCK else gettext_noop("not stuck")

    def meant(self, label: str, row: Any) -> Group:
        found = STUCK_CODES.get(row.stuck_code)
        return Group(label, str(found.cure if found else _OWN_CODE))


class Unacknowledge(_OfKeys):
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
    intervene = staticmethod(interventions.unacknowledge)

    def why_not(self, row: Any) -> str:
        if row.state == KeyState.IN_FLIGHT:
            return RUNNING
        return "" if row.state == KeyState.ACKNOWLEDGED else gettext_noop("not acknowledged")

    def meant(self, label: str, row: Any) -> Group:
        return Group(label, str(self.explanation))
