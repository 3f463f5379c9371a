"""The environment of a stored request: its rebuilt request, its URLs and language, and what
PREPARE_REQUEST sets.

A process without clients runs no middleware. All code of a project that it runs for a key runs in
this environment.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from inspect import isasyncgen, isgenerator
from typing import Any, TypeVar

from django.conf import settings
from django.conf.urls.i18n import is_language_prefix_patterns_used
from django.http import HttpRequest
from django.middleware.locale import LocaleMiddleware
from django.urls import get_script_prefix, get_urlconf, set_script_prefix, set_urlconf
from django.utils import timezone, translation
from django.utils.module_loading import import_string

from idempotency import conf
from idempotency._async import FAILURES, awaited
from idempotency._boundary import boundary
from idempotency._engine import events
from idempotency._engine.claimed_key import ClaimedKey
from idempotency._engine.hung import watched_key
from idempotency._http.stored_request import rebuild

logger = logging.getLogger("idempotency")

Result = TypeVar("Result")

#: The attributes in which PREPARE_REQUEST may set the sender; the last two are those of Django REST
#: framework.
_SENDER = ("user", "auth", "_force_auth_user", "_force_auth_token")


@dataclass(slots=True, repr=False)
class Environment:
    """The rebuilt request, or the error that prevented the environment.

    After a ``failure`` no code of the project may run for the key: the environment could be that of
    another tenant.
    """

    #: None if the request could not be rebuilt.
    request: Any = None
    #: Whether PREPARE_REQUEST has set the sender of the request.
    sender_set: bool = False
    failure: BaseException | None = None

    def required(self) -> HttpRequest:
        """Return the rebuilt request. Raises ``failure``."""
        if self.failure is not None:
            raise self.failure
        request: HttpRequest = self.request
        return request


def in_environment(key: ClaimedKey, work: Callable[[Environment], Result]) -> Result:
    """Call ``work`` in the environment of the stored request, and return its result. On return
    nothing of the environment is left: its context variables are unset, its context manager is
    closed, and the connections are checked. An error that prevents the environment is its
    ``failure``; an error at its end is logged."""
    return copy_context().run(_in_environment, key, work)


def _in_environment(key: ClaimedKey, work: Callable[[Environment], Result]) -> Result:
    environment, raised, results = Environment(), None, []
    try:
        with watched_key(key), boundary(), ExitStack() as stack:
            try:
                _enter(stack, environment, key)
            except FAILURES as error:
                environment.failure = error
            try:
                results.append(work(environment))
            except BaseException as error:
                # The context manager of PREPARE_REQUEST might suppress it.
                raised = error
    except FAILURES:
        text = "the context manager of PREPARE_REQUEST failed after key %s"
        logger.exception(text, key.key_hash, extra=events.about(key))
    if raised is not None:
        raise raised
    return results[0]


def _enter(stack: ExitStack, environment: Environment, key: ClaimedKey) -> None:
    environment.request = request = rebuild(key)
    stack.enter_context(_urls_of(request))
    stack.enter_context(translation.override(_language_of(request)))
    stack.enter_context(timezone.override(None))
    if (prepare := conf.get().PREPARE_REQUEST) is None:
        return
    before = {name: getattr(request, name, None) for name in _SENDER}
    _enter_returned(stack, awaited(conf.named(prepare)(request, key)))
    environment.sender_set = any(
        getattr(request, name, None) is not value for name, value in before.items()
    )


def _enter_returned(stack: ExitStack, returned: Any) -> None:
    """Enter the context manager that PREPARE_REQUEST returned, if it is one."""
    if hasattr(type(returned), "__enter__"):
        stack.enter_context(returned)
    elif isgenerator(returned) or isasyncgen(returned) or hasattr(type(returned), "__aenter__"):
        raise TypeError(
            "IDEMPOTENCY['PREPARE_REQUEST'] must be a function that returns None, or a context"
            " manager for `with`: decorate a generator function with contextlib.contextmanager. It"
            f" returned {type(returned).__name__}."
        )


def _language_of(request: HttpRequest) -> str:
    """Return the language that LocaleMiddleware chose for the client, or LANGUAGE_CODE without
    it."""
    middlewares = [import_string(path) for path in settings.MIDDLEWARE]
    classes = [each for each in middlewares if isinstance(each, type)]
    if not any(issubclass(each, LocaleMiddleware) for each in classes):
        return settings.LANGUAGE_CODE
    urlconf = getattr(request, "urlconf", settings.ROOT_URLCONF)
    in_path, default_in_path = is_language_prefix_patterns_used(urlconf)
    has_language = default_in_path or translation.get_language_from_path(request.path_info)
    if in_path and not has_language:
        return settings.LANGUAGE_CODE
    return translation.get_language_from_request(request, check_path=in_path)


@contextmanager
def _urls_of(request: HttpRequest) -> Iterator[None]:
    """Set the script prefix and the URLconf of the request, so that reverse() returns the same
    URLs."""
    prefix, urlconf = get_script_prefix(), get_urlconf()
    set_script_prefix(request.META["SCRIPT_NAME"])
    set_urlconf(getattr(request, "urlconf", None))
    try:
        yield
    finally:
        set_script_prefix(prefix)
        set_urlconf(urlconf)
