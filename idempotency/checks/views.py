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
from django.core.checks import CheckMessage, Tags, register
from django.db import DEFAULT_DB_ALIAS, InterfaceError, OperationalError, connections, router
from django.db.transaction import Atomic

from idempotency import conf, scopes
from idempotency._engine.aliases import share_tables
from idempotency._http.routes import class_of, options_of
from idempotency._http.view import View, access_is_checked_inside, atomic_aliases
from idempotency._http.wrappers import decorators_outside, dispatches_of_project, handlers, wrapped
from idempotency.checks import error, unknown_database, warning
from idempotency.models import IdempotencyKey
from idempotency.policy import Protected, allowed_methods, views_to_check

#: Scopes that read one of these attributes are meant for senders other than Django users, who have
#: ``scopes.user``.
_IDS_OF_USER = ("user.pk", "user.id")


@register
def check_views(app_configs: Any, **kwargs: Any) -> Iterator[CheckMessage]:
    """E005, E007, E008, W004, W005, W006, W008, W009, W010, W011, W012, W016: views with such a
    mistake."""
    views = list(views_to_check())
    for view in views:
        yield from _errors(view)
        yield from _decorator_warnings(view)
        yield from _scope_warnings(view)
        yield from _atomic_requests_warnings(view, views)
    yield from _second_database_warnings(views)


@register(Tags.database)
def check_aliases(
    app_configs: Any, databases: Sequence[str] | None = None, **kwargs: Any
) -> Iterator[CheckMessage]:
    """W018: a view with ``using=`` that names a second alias of the database to which the router
    writes.

    ``manage.py check --database default --database ALIAS`` asks the servers of both.
    """
    routed, checked = router.db_for_write(IdempotencyKey), databases or ()
    if routed not in checked:
        return
    paths_by_alias: dict[str, list[str]] = {}
    for view in views_to_check():
        using = view.options.using
        if isinstance(using, str) and using in checked and using != routed:
            paths_by_alias.setdefault(using, []).append(view.path)
    for alias, paths in paths_by_alias.items():
        if _are_one(alias, routed):
            yield warning(
                "idempotency.W018",
                f"The databases {alias!r} and {routed!r} are the same one. Views with"
                f" using={alias!r} are not in one transaction with the queries that the router"
                f" sends to {routed!r}: {', '.join(paths)}.",
                f"Remove using= from these views. Use the alias {alias!r} to migrate only.",
            )


def _are_one(alias: str, other: str) -> bool:
    try:
        return share_tables(alias, other)
    except (OperationalError, InterfaceError):
        return False  # E013 reports a database that cannot be reached.


def _errors(view: Protected) -> Iterator[CheckMessage]:
    using = view.options.using
    yield from unknown_database(f"The view {view.path}", using)
    owner = class_of(view.callback)
    if owner is not None and (
        access_is_checked_inside(owner)
        or (hasattr(owner, "initialize_request") and hasattr(owner.dispatch, "idempotency"))
    ):
        yield error(
            "idempotency.E007",
            f"The view {view.path} has @idempotent on dispatch() of {owner.__qualname__}, outside"
            " its access check, so each request is refused.",
            "Apply it to the method: post(), create(), ...",
        )
    alias = router.db_for_write(IdempotencyKey) if using is None else using
    apart = view.options.recovery_points is not None or conf.get().CONFIRM_REPLICATED
    blocks = _atomic_blocks(handlers(view.callback, *view.methods))
    if apart and any((block.using or DEFAULT_DB_ALIAS) == alias for block in blocks):
        yield error(
            "idempotency.E008",
            f"The view {view.path} has @transaction.atomic around @idempotent. A rollback there"
            " would undo committed work, so each request is refused.",
            "Remove it. @idempotent opens the transaction of a plain view, and atomic_phase"
            " opens those of a phased view.",
        )


def _decorator_warnings(view: Protected) -> Iterator[CheckMessage]:
    """Yield warnings for views whose decorator, or an option of it, has less effect than expected.
    A ``dispatch()`` that runs before the protected handler of its class may refuse the retry."""
    from django.contrib.auth.views import LoginView  # needs the models

    owner = class_of(view.callback)
    if not view.methods:
        yield warning(
            "idempotency.W004",
            f"The view {view.path} has @idempotent, but only safe methods, which are not"
            " protected.",
            "Remove it, or let the view accept POST, PUT, PATCH or DELETE.",
        )
    by_default = view.options.scope in (None, scopes.user_or_session)
    if owner is not None and issubclass(owner, LoginView) and by_default:
        yield warning(
            "idempotency.W005",
            f"The view {view.path} ({owner.__qualname__}) changes the user, and with it the default"
            " scope. A retry has another scope and runs again.",
            "Give it a scope that does not change: scope=idempotency.scopes.session survives a"
            " login.",
        )
    least, hours = conf.get().RETENTION_HOURS, view.options.retention_hours
    if hours is not None and hours < least:
        yield warning(
            "idempotency.W016",
            f"The view {view.path} has @idempotent(retention_hours={hours}), without effect:"
            f" RETENTION_HOURS is {least}.",
            "Remove the option. Or lower RETENTION_HOURS, and set retention_hours for each view"
            " that needs a longer time. Existing keys keep their retention.",
        )
    if view.methods and (found := dispatches_of_project(view.callback)):
        yield warning(
            "idempotency.W012",
            f"The view {view.path} has @idempotent on {', '.join(view.methods)}, and"
            f" {', '.join(found)} runs before it. If that method refuses requests because of data"
            " that the view changes, such as an empty basket, it refuses the retry too.",
            "Decorate dispatch() of the class instead, or check such data inside the method. If"
            " dispatch() checks only the request and its sender, silence this check.",
        )


def _scope_warnings(view: Protected) -> Iterator[CheckMessage]:
    """Yield warnings for a scope that is always empty, or that the completer cannot read, or that
    two users may share, because their primary keys are unique only within a database."""
    by_user = view.options.scope in (None, scopes.user, scopes.user_or_session)
    by_session = by_user or view.options.scope is scopes.session
    if class_of(view.callback) is None and by_session and _has_no_sender(view.callback):
        yield warning(
            "idempotency.W006",
            f"The view {view.path} has no middleware that sets a user or a session. Each request"
            " has no scope and is refused.",
            "Add SessionMiddleware and AuthenticationMiddleware to MIDDLEWARE, or give the view"
            " a scope=.",
        )
    reads = [
        path
        for path in scopes.reads_of(view.options.scope)
        if (path in _IDS_OF_USER or not path.startswith("user."))
        and ("." in path or path not in view.options.keep)
    ]
    if view.options.recovery_points is not None and reads and conf.get().PREPARE_REQUEST is None:
        yield warning(
            "idempotency.W009",
            f"The scope of the view {view.path} reads request.{', request.'.join(reads)}, which the"
            " completer's request does not have. The key of a sender that is not a Django user"
            " becomes stuck (user_missing).",
            "Name the attribute in keep=. Or set IDEMPOTENCY['PREPARE_REQUEST'] to a function"
            " that reads the key and sets one of: this attribute, request.user, request.auth.",
        )
    using = view.options.using or router.db_for_write(IdempotencyKey)
    users = router.db_for_write(get_user_model())
    if by_user and not callable(using) and using in connections.settings and using != users:
        yield warning(
            "idempotency.W011",
            f"The view {view.path} stores its keys in the database {using!r}, and users are in"
            f" {users!r}. If users are in several databases, two of them may have the same primary"
            " key, and so the same scope.",
            "Give the view a scope that includes the database:"
            " scope=joined(attribute('tenant.pk'), user) of idempotency.scopes. If all users"
            " are in one database, silence this check.",
        )


def _atomic_requests_warnings(view: Protected, every: list[Protected]) -> Iterator[CheckMessage]:
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
        yield warning(
            "idempotency.W008",
            f"The view {view.path} runs {', '.join(unprotected)} outside ATOMIC_REQUESTS, because"
            " another of its methods is protected.",
            "Apply @transaction.atomic to those methods, or protect them too.",
        )


def _second_database_warnings(views: list[Protected]) -> Iterator[CheckMessage]:
    """Yield one warning for all plain views that also have a transaction in another database than
    that of the key."""
    found: dict[str, set[str]] = {}
    for view in views:
        is_plain = view.options.recovery_points is None
        if is_plain and view.methods and (others := _other_databases(view)):
            found[view.path] = others
    if found:
        aliases = ", ".join(sorted(set.union(*found.values())))
        yield warning(
            "idempotency.W010",
            f"The databases {aliases} have ATOMIC_REQUESTS, and plain views have their keys"
            f" elsewhere: {', '.join(found)}. A write to a second database takes effect at least"
            " once per key, not exactly once.",
            "Apply @transaction.non_atomic_requests(using=...) inside @idempotent to views that"
            " do not write there. In the other views, guard each write there with a row that is"
            " unique by scope and key.",
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


def _atomic_blocks(views: Iterable[View]) -> Iterator[Atomic]:
    for layer in (layer for view in views for layer in decorators_outside(view)):
        if isfunction(layer) and layer.__globals__["__name__"] == "contextlib":
            block = getclosurevars(layer).nonlocals.get("self")
            if isinstance(block, Atomic):
                yield block


def _has_no_sender(callback: View) -> bool:
    """Return whether all decorators and middleware belong to Django or this app, and no middleware
    sets users or sessions."""
    layers = (callback, *decorators_outside(callback))
    names = [layer.__globals__["__name__"] if isfunction(layer) else "" for layer in layers]
    roots = {name.partition(".")[0] for name in [*names, *settings.MIDDLEWARE]}
    known = roots <= {"django", "idempotency"}
    return known and not any("sessions" in path or "auth" in path for path in settings.MIDDLEWARE)
