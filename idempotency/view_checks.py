"""System checks of protected views: those that do not do what they seem to.

What is said of a view is certain: a decorator or a middleware that nobody can look into keeps the checks silent. What the
decorator can refuse at import is refused there.
"""

from collections.abc import Iterable, Iterator
from inspect import getclosurevars, isfunction
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.checks import CheckMessage, Error, Warning, register
from django.db import DEFAULT_DB_ALIAS, connections, router, transaction

from idempotency import conf, scopes
from idempotency.calls import access_is_checked_inside
from idempotency.models import IdempotencyKey
from idempotency.options import class_of, options_of
from idempotency.policy import Protected, View, allowed_methods, protected_views, wrapped

#: A scope of these is for users who are none of Django's, whose scope is ``scopes.user``. Others may be attributes of theirs.
_IDS_OF_USER = ("user.pk", "user.id")


@register
def check_views(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """E005, E007, E008, W004, W005, W006, W008, W009, W010, W011: protected views that do not do what they seem to."""
    if not getattr(settings, "ROOT_URLCONF", None) or conf.problems(getattr(settings, "IDEMPOTENCY", {})):
        return []
    views = list(protected_views())
    each = [
        message for view in views for message in (*_mistakes(view), *_doubts(view), *_strangers(view), *_losses(view, views))
    ]
    return [*each, *_several_databases(views)]


def _mistakes(view: Protected) -> Iterator[CheckMessage]:
    """What makes each request to the view fail."""
    using = view.options.using
    if isinstance(using, str) and using not in connections.settings:
        yield Error(
            f"{view.path}: @idempotent(using={using!r}) names no database.",
            hint=f"The databases are: {', '.join(connections.settings)}.",
            id="idempotency.E005",
        )
    owner = class_of(view.callback)
    if owner is not None and (
        access_is_checked_inside(owner) or (hasattr(owner, "initialize_request") and hasattr(owner.dispatch, "idempotency"))
    ):
        yield Error(
            f"{view.path}: @idempotent on dispatch() of {owner.__qualname__} stands outside of the check of who may call it, "
            "so each request is refused.",
            hint="Put it on the method: post(), create(), ...",
            id="idempotency.E007",
        )
    alias = router.db_for_write(IdempotencyKey) if using is None else using
    if any((block.using or DEFAULT_DB_ALIAS) == alias for block in _atomic_blocks(_handlers(view.callback, *view.methods))):
        yield Error(
            f"{view.path}: @transaction.atomic stands around @idempotent, so each request is refused: a rollback there would "
            "undo what was promised.",
            hint="Remove it: @idempotent opens the transaction of a plain view, atomic_phase those of a phased one.",
            id="idempotency.E008",
        )


def _doubts(view: Protected) -> Iterator[CheckMessage]:
    """What protects less than it seems to."""
    from django.contrib.auth.views import LoginView  # needs the models

    owner = class_of(view.callback)
    if not view.methods:
        yield Warning(
            f"{view.path}: @idempotent protects nothing here, because only safe methods reach the view.",
            hint="Remove it, or let the view take POST, PUT, PATCH or DELETE.",
            id="idempotency.W004",
        )
    if owner is not None and issubclass(owner, LoginView) and view.options.scope is None:
        yield Warning(
            f"{view.path}: {owner.__qualname__} changes who asks, and with it the default scope: the retry of a request has "
            "another one, and runs again.",
            hint="Give it a scope that stays: scope=idempotency.scopes.session, which survives a login.",
            id="idempotency.W005",
        )
    by_session = view.options.scope in (None, scopes.session, scopes.user, scopes.user_or_session)
    if owner is None and by_session and _nobody_says_who(view.callback):
        yield Warning(
            f"{view.path}: no middleware gives a request a user or a session, so each one is refused: its scope is missing.",
            hint="Add SessionMiddleware and AuthenticationMiddleware to MIDDLEWARE, or give the view a scope=.",
            id="idempotency.W006",
        )
    reads = [path for path in scopes.reads_of(view.options.scope) if path in _IDS_OF_USER or not path.startswith("user.")]
    if view.options.recovery_points is not None and reads and conf.get().PREPARE_REQUEST is None:
        yield Warning(
            f"{view.path}: its scope reads request.{', request.'.join(reads)}, which the completer's request does not have. "
            "The key of a sender who is no user of Django's becomes stuck (user_missing).",
            hint="Set IDEMPOTENCY['PREPARE_REQUEST'] to a function that sets it, request.user or request.auth, from the key.",
            id="idempotency.W009",
        )


def _strangers(view: Protected) -> Iterator[CheckMessage]:
    """What may take two users for one: the number of a user is unique in one database alone."""
    using = view.options.using or router.db_for_write(IdempotencyKey)
    users = router.db_for_write(get_user_model())
    by_user = view.options.scope in (None, scopes.user, scopes.user_or_session)
    if by_user and not callable(using) and using in connections.settings and using != users:
        yield Warning(
            f"{view.path}: its keys are kept in the database {using!r}, and users in {users!r}. If users are in several "
            "databases, two of them may have one primary key, and with it one scope.",
            hint="Give the view a scope that names the database too: scope=joined(attribute('tenant.pk'), user) of "
            "idempotency.scopes. If all users are in one database, silence this check.",
            id="idempotency.W011",
        )


def _losses(view: Protected, every: list[Protected]) -> Iterator[CheckMessage]:
    """What other methods of the view lose: Django takes a view out of ATOMIC_REQUESTS as a whole."""
    atomic_requests = any(values.get("ATOMIC_REQUESTS") for values in connections.settings.values())
    if not atomic_requests or not view.methods or class_of(view.callback) is None:
        return
    if view is not next(other for other in every if other.callback is view.callback):
        return  # said with the first of its policies
    unprotected = sorted(
        method
        for method in allowed_methods(view.callback) - {"GET"}
        if options_of(view.callback, method) is None and not any(_atomic_blocks(_handlers(view.callback, method)))
    )
    if unprotected:
        yield Warning(
            f"{view.path}: {', '.join(unprotected)} of this view runs outside of ATOMIC_REQUESTS, because another of its "
            "methods is protected.",
            hint="Put @transaction.atomic on those methods, or protect them too.",
            id="idempotency.W008",
        )


def _several_databases(views: list[Protected]) -> Iterator[CheckMessage]:
    """Tell of plain views that have a transaction in a database besides the key's, in one message for all of them."""
    found: dict[str, set[str]] = {}
    for view in views:
        if view.options.recovery_points is None and view.methods and (others := _other_databases(view)):
            found[view.path] = others
    if found:
        aliases = ", ".join(sorted(set.union(*found.values())))
        yield Warning(
            f"ATOMIC_REQUESTS is on for {aliases}, and plain views have their keys in another database: {', '.join(found)}. "
            "A write to a second database takes effect at least once per key, not exactly once.",
            hint="Put @transaction.non_atomic_requests(using=...) below @idempotent on views that do not write there. In the "
            "others guard each write there with a row that is unique by scope and key.",
            id="idempotency.W010",
        )


def _other_databases(view: Protected) -> set[str]:
    """Return the aliases with ATOMIC_REQUESTS in which a request of the view has a transaction besides the key's."""
    layers = [layer for handler in _handlers(view.callback, *view.methods) for layer in wrapped(handler)]
    protected = next((layer.__wrapped__ for layer in reversed(layers) if hasattr(layer, "idempotency")), None)  # type: ignore[attr-defined]
    left_out = getattr(protected, "_non_atomic_requests", ())
    aliases = {name for name, of in connections.settings.items() if of.get("ATOMIC_REQUESTS") and name not in left_out}
    using = view.options.using
    if callable(using):
        return aliases if len(aliases) > 1 else set()  # One of them may be the key's.
    return aliases - {using or router.db_for_write(IdempotencyKey)}


def _handlers(callback: View, *methods: str) -> Iterator[View]:
    """Yield the view and, of a class, its handlers for these methods."""
    yield callback
    actions = getattr(callback, "actions", None) or {}
    for method in methods:
        if handler := getattr(class_of(callback), actions.get(method.lower(), method.lower()), None):
            yield handler


def _outside(view: View) -> Iterator[View]:
    """Yield what stands around ``@idempotent``, or around the view when it is not protected, from the outermost inwards."""
    for layer in wrapped(view):
        inner = getattr(layer, "__wrapped__", None)
        if inner is None or (hasattr(layer, "idempotency") and not hasattr(inner, "idempotency")):
            return
        yield layer


def _atomic_blocks(views: Iterable[View]) -> Iterator[transaction.Atomic]:
    """Yield the blocks of ``@transaction.atomic`` around these views."""
    for layer in (layer for view in views for layer in _outside(view)):
        if isfunction(layer) and layer.__globals__["__name__"] == "contextlib":
            block = getclosurevars(layer).nonlocals.get("self")
            if isinstance(block, transaction.Atomic):
                yield block


def _nobody_says_who(callback: View) -> bool:
    """Whether Django alone stands around this function, and nothing of it that knows users or sessions."""
    modules = [layer.__globals__["__name__"] if isfunction(layer) else "" for layer in (callback, *_outside(callback))]
    known = all(name.partition(".")[0] in ("django", "idempotency") for name in [*modules, *settings.MIDDLEWARE])
    return known and not any("sessions" in path or "auth" in path for path in settings.MIDDLEWARE)
