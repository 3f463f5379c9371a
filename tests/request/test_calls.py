"""Order of decorators: only clients that pass authentication and permissions get a stored
response."""

from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.decorators import login_required, permission_required
from django.contrib.auth.mixins import LoginRequiredMixin
from django.http import Http404, HttpRequest, HttpResponse
from django.test import RequestFactory
from django.utils.decorators import method_decorator
from django.views import View
from rest_framework.decorators import api_view
from rest_framework.exceptions import NotAuthenticated, PermissionDenied
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency._engine import claims
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from tests.kit.serving import Sender

Serve = Callable[..., None]


def view(request: HttpRequest) -> HttpResponse:
    return HttpResponse("done")


@pytest.mark.parametrize(
    "access", [login_required, permission_required("tests.view_entry"), api_view(["POST"])]
)
def test_decorator_outside_of_the_access_check_is_refused_at_once(access: Any) -> None:
    with pytest.raises(TypeError, match="outside authentication"):
        idempotent(access(view))


def test_a_view_with_a_login_url_of_its_own_is_no_access_check() -> None:
    def shows_a_link(request: HttpRequest) -> HttpResponse:
        return HttpResponse("done")

    shows_a_link.login_url = "/login/"  # type: ignore[attr-defined]
    idempotent(shows_a_link)


class Rest(APIView):
    @method_decorator(idempotent)
    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        return super().dispatch(*args, **kwargs)


class Mixed(LoginRequiredMixin, View):
    def post(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("done")


@pytest.mark.parametrize("outside", [Rest, method_decorator(idempotent, name="dispatch")(Mixed)])
def test_decorator_on_a_dispatch_that_checks_access_is_refused(
    outside: Any, serve: Serve, sender: Sender
) -> None:
    serve(view=outside.as_view())
    sender.client.raise_request_exception = True
    with pytest.raises(RuntimeError, match="outside authentication"):
        sender.send()
    assert not IdempotencyKey.objects.exists()


def test_a_class_may_keep_a_request_of_its_own(serve: Serve, sender: Sender) -> None:
    class Keeps(View):
        def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            self._request = request
            return super().dispatch(request, *args, **kwargs)

        @idempotent
        def post(self, request: HttpRequest) -> HttpResponse:
            return HttpResponse("done")

    serve(view=Keeps.as_view())
    assert [sender.send().content for _ in range(2)] == [b"done", b"done"]
    assert IdempotencyKey.objects.count() == 1


def test_a_method_of_a_django_view_that_is_named_like_one_of_drf_is_not_called(
    serve: Serve, sender: Sender
) -> None:
    class Missing(View):
        def handle_exception(self, error: Exception) -> HttpResponse:
            return HttpResponse(status=418)

        @idempotent
        def post(self, request: HttpRequest) -> HttpResponse:
            raise Http404

    serve(view=Missing.as_view())
    assert sender.send().status_code == 404


def test_what_is_no_view_is_an_error() -> None:
    with pytest.raises(TypeError, match="found no request"):
        idempotent(lambda first: first)("not a request")
    with pytest.raises(TypeError, match="found no request"):
        idempotent(lambda *args: args)("not a view", "not a request", RequestFactory().post("/"))


def test_a_list_of_recovery_points_can_be_changed_after_the_decoration() -> None:
    points = ["charged"]
    view = idempotent(recovery_points=points)(lambda request: HttpResponse())
    points.append("booked")
    assert view.idempotency.recovery_points == ("charged",)  # type: ignore[attr-defined]


@pytest.mark.parametrize("options", [{"isolated": True}, {"isolated": True, "retries": 3}])
def test_an_unknown_option_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(
        TypeError, match=r"has no option 'isolated'\. Did you mean 'isolation'\? The options are"
    ):
        idempotent(**options)


def test_an_exception_is_put_before_the_handler_of_the_framework_once(
    serve: Serve, sender: Sender
) -> None:
    asked: list[Exception] = []

    class Refuses(APIView):
        authentication_classes = ()

        def get_exception_handler(self) -> Any:
            def handler(error: Exception, context: Any) -> Response:
                asked.append(error)
                return Response({"detail": "no"}, status=403)

            return handler

        @idempotent
        def post(self, request: Any) -> Response:
            raise PermissionDenied

    serve(view=Refuses.as_view())
    assert sender.send().status_code == 403
    assert len(asked) == 1
    assert not IdempotencyKey.objects.exists()


def test_a_500_of_the_framework_after_a_phase_is_the_error_of_the_view(
    serve: Serve, sender: Sender
) -> None:
    class Fails(APIView):
        authentication_classes = ()

        def get_exception_handler(self) -> Any:
            return lambda error, context: Response({"detail": "no"}, status=500)

        @idempotent(recovery_points=["paid"])
        def post(self, request: Any) -> Any:
            key = request.idempotency_key
            for _ in key.phases():
                with atomic_phase(key) as phase:
                    phase.set_recovery_point("paid")
                raise OSError("The bank is down.")

    serve(view=Fails.as_view())
    assert sender.send().status_code == 500
    assert IdempotencyKey.objects.get().last_error == "OSError: The bank is down."


def test_a_refusal_that_is_not_stored_claims_the_key_once(
    serve: Serve, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed: list[Any] = []
    real = claims.claim_plain
    monkeypatch.setattr(
        claims, "claim_plain", lambda *args, **options: claimed.append(1) or real(*args, **options)
    )

    class Refuses(APIView):
        authentication_classes = ()

        @idempotent
        def post(self, request: Any) -> Any:
            raise NotAuthenticated

    serve(view=Refuses.as_view())
    assert sender.send().status_code in (401, 403)
    assert len(claimed) == 1


@method_decorator(idempotent, name="dispatch")
class DecoratedBelow(View):
    def post(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("done")


class ChecksAccessAbove(LoginRequiredMixin, DecoratedBelow):
    pass


def test_decorator_below_the_access_check_of_a_mixin_is_right(serve: Serve, sender: Sender) -> None:
    serve(view=ChecksAccessAbove.as_view())
    assert [sender.send().content for _ in range(2)] == [b"done", b"done"]
    assert IdempotencyKey.objects.count() == 1
    sender.client.logout()
    assert sender.send().status_code == 302


def test_dispatch_of_async_handlers_can_be_decorated(serve: Serve, sender: Sender) -> None:
    @method_decorator(idempotent, name="dispatch")
    class Async(View):
        async def post(self, request: HttpRequest) -> HttpResponse:
            await sync_to_async(request.idempotency_key.refresh_from_db)()
            return HttpResponse("done")

    serve(view=Async.as_view())
    assert [sender.send().content for _ in range(2)] == [b"done", b"done"]
    assert IdempotencyKey.objects.count() == 1
