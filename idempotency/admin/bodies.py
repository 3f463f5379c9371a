"""The right to view bodies, and the log of each look at a body.

Bodies are the bodies and headers of requests and responses, values of keys, arguments of operations
and of staged jobs, and results of calls. An export contains values of keys.
"""

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from typing import Any, cast

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.options import get_content_type_for_model
from django.core import signing
from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext, gettext_noop

from idempotency import conf
from idempotency._text import escaped
from idempotency.admin.reading import preformatted

logger = logging.getLogger("idempotency.audit")

PERMISSION = "view_bodies"
#: Replaces a text for which the person lacks a permission.
NOT_VISIBLE = gettext_noop("(not visible to you)")
#: The beginning of each entry of a look in the admin log.
VIEWED = "Viewed"
#: The header in which live.js sends the text that ``look`` returned.
_HEADER = "Idempotency-Look"
_MAX_AGE = 86400


def may_view_bodies(request: HttpRequest) -> bool:
    """Return whether the person may view bodies, and export keys."""
    return request.user.has_perm(f"idempotency.{PERMISSION}")


def body(show: Callable[[Any, Any], SafeString]) -> Callable[[Any, Any], SafeString]:
    """Decorate a method of a page that shows a part of a body: without the permission, it shows
    NOT_VISIBLE. The row has ``with_bodies``."""

    @wraps(show)
    def shown(self: Any, row: Any) -> SafeString:
        text = show(self, row)
        hidden = preformatted(gettext(NOT_VISIBLE))
        return text if row.with_bodies or text in ("", preformatted("")) else hidden

    return shown


def look(request: HttpRequest, key: Any) -> str:
    """Log that the person views the bodies of a key on its page. Return a text for the refreshes of
    this page, which are not logged again."""
    seen, logged = [str(request.user.pk), str(key.pk)], None
    with suppress(signing.BadSignature):
        sent = request.headers.get(_HEADER, "")
        logged = signing.loads(sent, salt=__name__, max_age=_MAX_AGE)
    if logged != seen:
        log_looks(request, [key])
    return signing.dumps(seen, salt=__name__)


def log_looks(request: HttpRequest, rows: Iterable[Any], what: str = "bodies") -> None:
    """Log that the person views ``what`` of these rows, or exports it."""
    shown, name = list(rows), escaped(request.user.get_username())
    if not shown:
        return
    pks = ", ".join(str(row.pk) for row in shown)
    logger.info("%s viewed %s of %s: %s", name, what, shown[0]._meta.label, pks)
    if conf.get().LOG_VIEWS_IN_ADMIN:
        LogEntry.objects.log_actions(cast(int, request.user.pk), shown, CHANGE, f"{VIEWED} {what}.")


def log_export(request: HttpRequest, model: Any) -> None:
    """Log that the person exports the rows of ``model`` that the filters select. The search term is
    not logged, because it may be the value of a key."""
    filters = request.GET.copy()
    filters.pop("q", None)
    name, chosen = escaped(request.user.get_username()), filters.urlencode()
    logger.info("%s exported rows of %s: ?%s", name, model._meta.label, chosen)
    if conf.get().LOG_VIEWS_IN_ADMIN:
        LogEntry.objects.create(
            user_id=cast(int, request.user.pk),
            content_type=get_content_type_for_model(model),
            object_repr="CSV",
            action_flag=CHANGE,
            change_message=f"{VIEWED} as CSV: ?{chosen}",
        )
