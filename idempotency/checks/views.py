"""System checks of protected views: mistakes that refuse requests, and mistakes that weaken the
protection.

A check reports only definite mistakes. If it cannot analyse a decorator or a middleware, it reports
nothing. For mistakes that are visible at import, the decorator itself raises an error.
"""

from collections.abc import Iterable, Iterator, Sequence
from inspect import getclosurevars, isfunction
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.db import (
    DEFAULT_DB_ALIAS,
    InterfaceError,
    OperationalError,
    connections,
    router,
    transaction,
)

from idempotency import conf, scopes
from idempotency._engine.aliases import share_tables
from idempotency._engine.several_databases import atomic_aliases
from idempotency._http.outside import foreign_dispatches, handlers, outside, wrapped
from idempotency._http.routes import class_of, options_of
from idempotency._http.view import View, access_is_checked_inside
from idempotency.models import IdempotencyKey
from idempotency.policy import Protected, allowed_methods, views_to_check

#: Scopes that read one of these attributes are meant for senders other than Django users, who have
#: ``scopes.user``.
_IDS_OF_USER = ("user.pk", "user.id")


@register
def check_views(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """E005, E007, E008, W004, W005, W006, W008, W009, W010, W011, W012, W016: views with such a
    mistake."""
    views = list(views_to_check())
    each = [
        message
        for view in views
        for message in (
            *_mistakes(view),
            *_doubts(view),
            *_refusals(view),
            *_strangers(view),
            *_losses(view, views),
        )
    ]
    return [*each, *_several_databases(views)]


@register(Tags.database)
def check_aliases(
    app_configs: Any, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """W018: a view with ``using=`` that names a second alias of the database to which the router
    writes.

    ``manage.py check --database default --database ALIAS`` asks the servers of both.
    """
    routed = router.db_for_write(IdempotencyKey)
    if routed not in (databases or ()):
        return []
    of_alias: dict[str, list[str]] = {}
    for view in views_to_check():
        if (
            isinstance(using := view.options.using, str)
            and using in (databases or ())
            and using != routed
        ):
            of_alias.setdefault(using, []).append(view.path)
    return [
        Warning(
            f"The databases {using!r} and {routed!r} are the same one. Views with using={using!r}"
            f" are not in one transaction with the queries that the router sends to {routed!r}:"
            f" {', '.join(paths)}.",
            hint=f"Remove using= from these views. Use the alias {using!r} to migrate only.",
            id="idempotency.W018",
        )
        for using, paths in of_alias.items()
        if _are_one(using, routed)
    ]


def _are_one(alias: str, other: str) -> bool:
    try:
        return share_tables(alias, other)
    except (OperationalError, InterfaceError):
        return False  # E013 reports a database that cannot be reached.


def _mistakes(view: Protected) -> Iterator[CheckMessage]:
    using = view.options.using
    if isinstance(using, str) and using not in connections.settings:
        yield Error(
            f"The view {view.path} has @idempotent(using={using!r}), which is not a database.",
            hint=f"The databases are: {', '.join(connections.settings)}.",
            id="idempotency.E005",
        )
    owner = class_of(view.callback)
    if owner is not None and (
        access_is_checked_inside(owner)
        or (hasattr(owner, "initialize_request") and hasattr(owner.dispatch, "idempotency"))
    ):
        yield Error(
            f"The view {view.path} has @idempotent on dispatch() of {owner.__qualname__}, outside"
            " its access check, so each request is refused.",
            hint="Apply it to the method: post(), create(), ...",
            id="idempotency.E007",
        )
    alias = router.db_for_write(IdempotencyKey) if using is None else using
    apart = view.options.recovery_points is not None or conf.get().CONFIRM_REPLICATED
    if apart and any(
        (block.using or DEFAULT_DB_ALIAS) == alias
        for block in _atomic_blocks(handlers(view.callback, *view.methods))
    ):
        yield Error(
            f"The view {view.path} has @transaction.atomic around @idempotent. A rollback there"
            " would undo committed work, so each request is refused.",
            hint=(
                "Remove it. @idempotent opens the transaction of a plain view, and atomic_phase"
                " opens those of a phased view."
            ),
            id="idempotency.E008",
        )


def _doubts(view: Protected) -> Iterator[CheckMessage]:
    """Yield warnings for views whose decorator, or an option of it, has less effect than
    expected."""
    from django.contrib.auth.views import LoginView  # needs the models

    owner = class_of(view.callback)
    if not view.methods:
        yield Warning(
            f"The view {view.path} has @idempotent, but only safe methods, which are not"
            " protected.",
            hint="Remove it, or let the view accept POST, PUT, PATCH or DELETE.",
            id="idempotency.W004",
        )
    if (
        owner is not None
        and issubclass(owner, LoginView)
        and view.options.scope in (None, scopes.user_or_session)
    ):
        yield Warning(
            f"The view {view.path} ({owner.__qualname__}) changes the user, and with it the default"
            " scope. A retry has another scope and runs again.",
            hint=(
                "Give it a scope that does not change: scope=idempotency.scopes.session survives a"
                " login."
            ),
            id="idempotency.W005",
        )
    least, hours = conf.get().RETENTION_HOURS, view.options.retention_hours
    if hours is not None and hours < least:
        yield Warning(
            f"The view {view.path} has @idempotent(retention_hours={hours}), without effect:"
            f" RETENTION_HOURS is {least}.",
            hint=(
                "Remove it. Or lower RETENTION_HOURS, and set retention_hours for each view that"
                " needs a longer time. Existing keys keep their retention."
            ),
            id="idempotency.W016",
        )
    yield from _doubts_of_scope(view)


def _doubts_of_scope(view: Protected) -> Iterator[CheckMessage]:
    by_session = view.options.scope in (None, scopes.session, scopes.user, scopes.user_or_session)
    if class_of(view.callback) is None and by_session and _nobody_says_who(view.callback):
        yield Warning(
            f"The view {view.path} has no middleware that sets a user or a session. Each request"
            " has no scope and is refused.",
            hint=(
                "Add SessionMiddleware and AuthenticationMiddleware to MIDDLEWARE, or give the view"
                " a scope=."
            ),
            id="idempotency.W006",
        )
    reads = [
        path
        for path in scopes.reads_of(view.options.scope)
        if path in _IDS_OF_USER or not path.startswith("user.")
    ]
    reads = [path for path in reads if "." in path or path not in view.options.keep]
    if view.options.recovery_points is not None and reads and conf.get().PREPARE_REQUEST is None:
        yield Warning(
            f"The scope of the view {view.path} reads request.{', request.'.join(reads)}, which the"
            " completer's request does not have. The key of a sender that is not a Django user"
            " becomes stuck (user_missing).",
            hint=(
                "Name the attribute in keep=. Or set IDEMPOTENCY['PREPARE_REQUEST'] to a function"
                " that reads the key and sets one of: this attribute, request.user, request.auth."
            ),
            id="idempotency.W009",
        )


def _refusals(view: Protected) -> Iterator[CheckMessage]:
    """Yield a warning if a ``dispatch()`` runs before the protected handler of its class, because
    it may refuse the retry."""
    if view.methods and (found := foreign_dispatches(view.callback)):
        yield Warning(
            f"The view {view.path} has @idempotent on {', '.join(view.methods)}, and"
            f" {', '.join(found)} runs before it. If that method refuses requests because of data"
            " that the view changes, such as an empty basket, it refuses the retry too.",
            hint=(
                "Decorate dispatch() of the class instead, or check such data inside the method. If"
                " dispatch() checks only the request and its sender, silence this check."
            ),
            id="idempotency.W012",
        )


def _strangers(view: Protected) -> Iterator[CheckMessage]:
    """Yield a warning if two users may have the same scope: primary keys of users are unique only
    within a database."""
    using = view.options.using or router.db_for_write(IdempotencyKey)
    users = router.db_for_write(get_user_model())
    by_user = view.options.scope in (None, scopes.user, scopes.user_or_session)
    if by_user and not callable(using) and using in connections.settings and using != users:
        yield Warning(
            f"The view {view.path} stores its keys in the database {using!r}, and users are in"
            f" {users!r}. If users are in several databases, two of them may have the same primary"
            " key, and so the same scope.",
            hint=(
                "Give the view a scope that includes the database:"
                " scope=joined(attribute('tenant.pk'), user) of idempotency.scopes. If all users"
                " are in one database, silence this check."
            ),
            id="idempotency.W011",
        )


def _losses(view: Protected, every: list[Protected]) -> Iterator[CheckMessage]:
    """Yield a warning if unprotected methods run outside ATOMIC_REQUESTS, because Django excludes a
    view as a whole."""
    if not atomic_aliases() or not view.methods or class_of(view.callback) is None:
        return
    if view is not next(other for other in every if other.callback is view.callback):
        return  # reported for its first policy
    unprotected = sorted(
        method
        for method in allowed_methods(view.callback) - {"GET"}
        if options_of(view.callback, method) is None
        and not any(_atomic_blocks(handlers(view.callback, method)))
    )
    if unprotected:
        yield Warning(
            f"The view {view.path} runs {', '.join(unprotected)} outside ATOMIC_REQUESTS, because"
            " another of its methods is protected.",
            hint="Apply @transaction.atomic to those methods, or protect them too.",
            id="idempotency.W008",
        )


def _several_databases(views: list[Protected]) -> Iterator[CheckMessage]:
    """Yield one warning for all plain views that also have a transaction in another database than
    that of the key."""
    found: dict[str, set[str]] = {}
    for view in views:
        if (
            view.options.recovery_points is None
            and view.methods
            and (others := _other_databases(view))
        ):
            found[view.path] = others
    if found:
        aliases = ", ".join(sorted(set.union(*found.values())))
        yield Warning(
            f"The databases {aliases} have ATOMIC_REQUESTS, and plain views have their keys"
            f" elsewhere: {', '.join(found)}. A write to a second database takes effect at least"
            " once per key, not exactly once.",
            hint=(
                "Apply @transaction.non_atomic_requests(using=...) inside @idempotent to views that"
                " do not write there. In the other views, guard each write there with a row that is"
                " unique by scope and key."
            ),
            id="idempotency.W010",
        )


def _other_databases(view: Protected) -> set[str]:
    """Return the databases, other than that of the key, that have a transaction of ATOMIC_REQUESTS
    in this view."""
    methods = handlers(view.callback, *view.methods)
    layers: list[Any] = [layer for handler in methods for layer in wrapped(handler)]
    ours = (layer.__wrapped__ for layer in reversed(layers) if hasattr(layer, "idempotency"))
    protected = next(ours, None)
    aliases = set(atomic_aliases(protected))
    using = view.options.using
    if callable(using):
        return aliases if len(aliases) > 1 else set()  # One of them may be the database of the key.
    return aliases - {using or router.db_for_write(IdempotencyKey)}


def _atomic_blocks(views: Iterable[View]) -> Iterator[transaction.Atomic]:
    for layer in (layer for view in views for layer in outside(view)):
        if isfunction(layer) and layer.__globals__["__name__"] == "contextlib":
            block = getclosurevars(layer).nonlocals.get("self")
            if isinstance(block, transaction.Atomic):
                yield block


def _nobody_says_who(callback: View) -> bool:
    """Return whether all decorators and middleware belong to Django or this app, and no middleware
    sets users or sessions."""
    modules = [
        layer.__globals__["__name__"] if isfunction(layer) else ""
        for layer in (callback, *outside(callback))
    ]
    known = all(
        name.partition(".")[0] in ("django", "idempotency")
        for name in [*modules, *settings.MIDDLEWARE]
    )
    return known and not any("sessions" in path or "auth" in path for path in settings.MIDDLEWARE)
