"""Number 57, a part of it: the hooks of a framework run once for a request, as they do without
@idempotent."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.core.signals import got_request_exception
from django.db import IntegrityError, OperationalError, connection
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.urls import path
from ninja import NinjaAPI
from ninja.decorators import decorate_view
from ninja.security import django_auth
from psycopg.errors import SerializationFailure
from pytest_django import Settings
from rest_framework import exceptions
from rest_framework.authentication import SessionAuthentication
from rest_framework.response import Response
from rest_framework.views import APIView, exception_handler

from idempotency.completer import complete_once
from idempotency.contrib import ninja
from idempotency.decorators import idempotent
from idempotency.http import not_stored
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from tests.kit.ageing import abandon
from tests.kit.serving import Sender
from tests.models import Entry

Serve = Callable[..., None]
Work = Callable[[Any], Any]

PLAIN: dict[str, Any] = {}
PHASED: dict[str, Any] = {"recovery_points": ["made"]}
both = pytest.mark.parametrize("options", [PLAIN, PHASED], ids=["plain", "phased"])


class Broken(Exception):
    """A mistake in a view."""


class Translated(Exception):
    """What a handler makes of it."""


def raising(error: Exception) -> Work:
    """Return work that fails."""

    def work(request: Any) -> Any:
        if connection.in_atomic_block:
            Entry.objects.create(name="made")
        raise error

    return work


def in_phases(request: Any, work: Work) -> Any:
    """Do the work in the second phase of a phased view, or at once in a plain one."""
    key = request.idempotency_key
    if key.run is None:
        return work(request)
    for recovery_point in key.phases():
        with atomic_phase(key) as phase:
            if recovery_point == "started":
                phase.set_recovery_point("made")
            else:
                phase.set_response(work(request))
    return key.response()


# Django REST framework


class Seen:
    """What the hooks of a project have seen."""

    def __init__(self) -> None:
        self.finalized: list[int] = []
        self.errors: list[Exception] = []
        self.answer: Callable[[Exception, Any], Any] = exception_handler

    def handle(self, error: Exception, context: Any) -> Any:
        """Ring an alarm, and answer."""
        self.errors.append(error)
        return self.answer(error, context)


seen = Seen()


def handle(error: Exception, context: Any) -> Any:
    """Be named in settings."""
    return seen.handle(error, context)


class Session(SessionAuthentication):
    """Takes the user of the session."""

    def enforce_csrf(self, request: Any) -> None:
        """Accept each request."""


@pytest.fixture
def hooks(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Return the record of the hooks of this test."""
    made = Seen()
    monkeypatch.setitem(globals(), "seen", made)
    settings.REST_FRAMEWORK = {"EXCEPTION_HANDLER": f"{__name__}.handle"}
    return made


def rest(work: Work, **options: Any) -> Any:
    """Return a view of Django REST framework."""

    class Pay(APIView):
        authentication_classes = [Session]

        @idempotent(**options)
        def post(self, request: Any) -> HttpResponseBase:
            return in_phases(request, work)  # type: ignore[no-any-return]

        def finalize_response(self, request: Any, response: Any, *args: Any, **kwargs: Any) -> Any:
            seen.finalized.append(response.status_code)
            return super().finalize_response(request, response, *args, **kwargs)

    return Pay.as_view()


def server_error(error: Exception, context: Any) -> Response:
    """Answer each error as some projects do."""
    return Response({"detail": "sorry"}, status=500)


def translate(error: Exception, context: Any) -> Any:
    """Raise another error."""
    raise Translated from error


@both
@pytest.mark.parametrize("status", [200, 201, 400, 403, 409, 500])
def test_57_finalize_response_runs_once(
    status: int, options: Any, hooks: Seen, serve: Serve, sender: Sender
) -> None:
    def work(request: Any) -> Response:
        return Response({"a": 1}, status=status)

    serve(view=rest(work, **options) if status < 400 else rest_outside(work, **options))
    for count in (1, 2):
        assert sender.send().status_code == status
        assert hooks.finalized == [status] * count


def rest_outside(work: Work, **options: Any) -> Any:
    """Return a view that answers before its first phase."""
    view = rest(work, **options)
    view.cls.post = idempotent(**options)(lambda self, request: work(request))
    return view


@both
def test_57_finalize_response_runs_once_for_a_refusal_and_for_a_marked_response(
    options: Any, hooks: Seen, serve: Serve, sender: Sender
) -> None:
    serve(
        refusing=rest(
            lambda request: Response(), validate=lambda request: Response(status=422), **options
        ),
        marked=rest_outside(lambda request: not_stored(Response(status=202)), **options),
        keyless=rest(lambda request: Response(), **options),
    )
    for name, key, status in (("refusing", "1", 422), ("marked", "2", 202), ("keyless", None, 400)):
        hooks.finalized.clear()
        assert sender.send(f"/{name}/", key).status_code == status
        assert hooks.finalized == [status]


def test_57_another_response_of_an_outer_decorator_is_finalized(
    hooks: Seen, serve: Serve, sender: Sender
) -> None:
    view = rest(lambda request: Response({"a": 1}))
    protected = view.cls.post

    def wrapped(self: Any, request: Any) -> Response:
        return Response({"wrapped": protected(self, request).data}, status=202)

    view.cls.post = wrapped
    serve(view=view)
    assert (sender.send().json(), hooks.finalized) == ({"wrapped": {"a": 1}}, [200, 202])


@both
@pytest.mark.parametrize(
    ("error", "answer", "status"),
    [
        (exceptions.ValidationError(), exception_handler, 400),
        (exceptions.Throttled(), exception_handler, 429),
        (PermissionDenied(), exception_handler, 403),
        (Http404(), exception_handler, 404),
        (Broken(), exception_handler, 500),
        (Broken(), server_error, 500),
        (Broken(), translate, 500),
        (IntegrityError(), exception_handler, 500),
    ],
    ids=[
        "validation",
        "throttled",
        "forbidden",
        "missing",
        "uncaught",
        "answered",
        "translated",
        "database",
    ],
)
@pytest.mark.parametrize("make", [rest, rest_outside])
def test_57_exception_handler_of_rest_framework_runs_once(
    make: Any,
    error: Exception,
    answer: Any,
    status: int,
    options: Any,
    hooks: Seen,
    serve: Serve,
    sender: Sender,
) -> None:
    hooks.answer = answer
    serve(view=make(raising(error), **options))
    if options and make is rest and status in (400, 404):
        # The response was not stored by a phase. Its view has a mistake, which is another error.
        assert sender.send().status_code == 500
        assert [type(found).__name__ for found in hooks.errors] == [
            type(error).__name__,
            "ResponseNotCommitted",
        ]
        return
    assert sender.send().status_code == status
    assert hooks.errors == [error]
    assert len(hooks.finalized) == (status != 500 or answer is server_error)
    assert not Entry.objects.exists()
    assert not IdempotencyKey.objects.in_flight().exists()


@both
@pytest.mark.parametrize("answer", [exception_handler, server_error])
def test_57_exception_handler_gets_no_failure_that_is_retried(
    answer: Any, options: Any, hooks: Seen, serve: Serve, sender: Sender
) -> None:
    runs = []

    def work(request: Any) -> Response:
        runs.append(1)
        if len(runs) == 1:
            raise Broken from wrapped_failure()
        return Response(status=201)

    hooks.answer = answer
    serve(view=rest(work, **options), early=rest_outside(work, **options))
    assert (sender.send().status_code, hooks.errors, len(runs)) == (201, [], 2)


def wrapped_failure() -> Exception:
    """Return a serialization failure as Django raises it."""
    error = OperationalError("conflict")
    error.__cause__ = SerializationFailure()
    return error


def test_57_exception_handler_runs_once_for_the_completer(
    hooks: Seen, serve: Serve, sender: Sender
) -> None:
    hooks.answer = server_error
    serve(view=rest(raising(Broken("out of luck")), **PHASED))
    assert sender.send().status_code == 500
    abandon()
    assert complete_once().failed == 1
    assert (len(hooks.errors), hooks.finalized) == (2, [500, 500])
    assert "out of luck" in IdempotencyKey.objects.get().last_error


# Django Ninja


@pytest.fixture
def api() -> NinjaAPI:
    """Return an API for users of the session."""
    return NinjaAPI(auth=django_auth, docs_url=None, openapi_url=None)


def operation(api: NinjaAPI, work: Work, *, is_async: bool, **options: Any) -> None:
    """Add an operation that does the work."""

    def respond(request: HttpRequest) -> HttpResponseBase:
        return in_phases(request, work)  # type: ignore[no-any-return]

    if is_async:

        @api.post("/view/")
        @decorate_view(ninja.idempotent(**options))
        async def view_async(request: HttpRequest) -> Any:
            return await sync_to_async(respond)(request)

    else:

        @api.post("/view/")
        @decorate_view(ninja.idempotent(**options))
        def view(request: HttpRequest) -> Any:
            return respond(request)


def raise_again(error: Exception) -> HttpResponse:
    """Leave the error to Django."""
    raise error


def raise_another(error: Exception) -> HttpResponse:
    """Raise another error."""
    raise Translated from error


@both
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (raise_again, 500),
        (raise_another, 500),
        (lambda error: HttpResponse(status=500), 500),
        (lambda error: HttpResponse(status=503), 503),
        (lambda error: HttpResponse(status=429), 429),
    ],
    ids=["raised", "translated", "500", "503", "429"],
)
def test_57_exception_handler_of_ninja_runs_once(
    answer: Any,
    status: int,
    is_async: bool,
    options: Any,
    api: NinjaAPI,
    settings: Settings,
    sender: Sender,
) -> None:
    errors: list[Exception] = []
    uncaught: list[Any] = []

    @api.exception_handler(Exception)
    def alarm(request: HttpRequest, error: Exception) -> HttpResponse:
        errors.append(error)
        return answer(error)  # type: ignore[no-any-return]

    def note(sender: Any, **kwargs: Any) -> None:
        uncaught.append(sys.exc_info()[0])

    error = Broken()
    operation(api, raising(error), is_async=is_async, **options)
    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": [path("", api.urls)]})
    got_request_exception.connect(note)
    try:
        assert sender.send().status_code == status
    finally:
        got_request_exception.disconnect(note)
    assert errors == [error]
    assert uncaught == (
        [Broken] if answer is raise_again else [Translated] if answer is raise_another else []
    )
    assert not Entry.objects.exists()
    assert not IdempotencyKey.objects.in_flight().exists()


# Django


class Handlers:
    """A URLconf with handlers that count."""

    def __init__(self, view: Any) -> None:
        self.urlpatterns = [path("view/", view)]
        self.runs: list[int] = []
        self.handler400, self.handler403, self.handler404 = map(self._handler, (400, 403, 404))
        self.handler500 = lambda request: self._handler(500)(request, None)

    def _handler(self, status: int) -> Callable[[HttpRequest, Any], HttpResponse]:
        def handle(request: HttpRequest, exception: Any) -> HttpResponse:
            self.runs.append(status)
            return HttpResponse(status=status)

        return handle


@both
@pytest.mark.parametrize("store_5xx", [False, True])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Http404(), 404),
        (PermissionDenied(), 403),
        (BadRequest(), 400),
        (SuspiciousOperation(), 400),
        (Broken(), 500),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_57_handlers_of_django_run_once(
    late: bool,
    error: Exception,
    status: int,
    store_5xx: bool,
    options: Any,
    settings: Settings,
    sender: Sender,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if late and options and status in (400, 404):
        return  # A mistake in the view: see ResponseNotCommitted.
    uncaught: list[Any] = []

    def note(sender: Any, **kwargs: Any) -> None:
        uncaught.append(sender)

    work = raising(error)
    view = idempotent(**options)(
        lambda request: in_phases(request, work) if late else work(request)
    )
    settings.IDEMPOTENCY = {"STORE_5XX": store_5xx}
    settings.ROOT_URLCONF = Handlers(work)
    assert sender.send().status_code == status
    unprotected = logged_by_django(caplog)
    caplog.clear()
    settings.ROOT_URLCONF = urls = Handlers(view)
    got_request_exception.connect(note)
    try:
        assert sender.send().status_code == status
    finally:
        got_request_exception.disconnect(note)
    assert urls.runs == [status]
    assert len(uncaught) == (status == 500)
    assert logged_by_django(caplog) == unprotected != []


def logged_by_django(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, str]]:
    """Return what Django logged. Before 5.2.3 it logs a SuspiciousOperation twice."""
    return [
        (record.name, record.levelname, record.getMessage())
        for record in caplog.records
        if record.name.startswith("django.")
    ]
