"""``replay_check``: before each replay, the view may refuse the stored response to this request."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.urls import path
from ninja import NinjaAPI
from ninja.decorators import decorate_view
from ninja.errors import HttpError
from pytest_django import Settings
from rest_framework.permissions import BasePermission
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency import signals
from idempotency.completer import complete_once
from idempotency.contrib import ninja
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from tests.kit.ageing import make_older
from tests.kit.serving import Sender, View, another_client, problem
from tests.kit.threads import WAIT_SECONDS, Gate, in_background
from tests.kit.views import Counted, both_kinds, create, plain, two_phases
from tests.models import Entry

Kind = Callable[..., View]
Serve = Callable[..., None]


class Team:
    """Permission to get a replay: every client has it until the team is closed."""

    def __init__(self) -> None:
        self.closed = False
        self.asked: list[Any] = []

    def check(self, request: Any, key: IdempotencyKey) -> HttpResponse | None:
        self.asked.append((request.user.pk, key.response_code))
        return JsonResponse({"detail": "You have left the team."}, status=403) if self.closed else None

    async def acheck(self, request: Any, key: IdempotencyKey) -> HttpResponse | None:
        return self.check(request, key)


def rows() -> list[Any]:
    """Return the rows of all keys."""
    return list(IdempotencyKey.objects.order_by("pk").values())


@both_kinds
@pytest.mark.parametrize("check", ["check", "acheck"])
def test_a_stored_answer_is_refused_and_nothing_changes(kind: Kind, check: str, serve: Serve, sender: Sender) -> None:
    team, replayed = Team(), []

    def note(**kwargs: Any) -> None:
        replayed.append(kwargs["key"].pk)

    serve(view=kind(work := Counted(), replay_check=getattr(team, check)))
    first = sender.send()
    assert (first.status_code, team.asked) == (201, [])
    stored, team.closed = rows(), True
    signals.key_replayed.connect(note)
    try:
        refused = sender.send()
        assert (refused.status_code, refused.json()) == (403, {"detail": "You have left the team."})
        assert "Idempotent-Replayed" not in refused
        assert team.asked == [(sender.user.pk, 201)]
        assert (rows(), replayed) == (stored, [])
        team.closed = False
        again = sender.send()
    finally:
        signals.key_replayed.disconnect(note)
    assert (again.content, again["Idempotent-Replayed"], len(replayed)) == (first.content, "true", 1)
    assert (work.runs, len(team.asked), Entry.objects.count()) == (1, 2, 1)


@both_kinds
def test_a_check_may_raise(kind: Kind, serve: Serve, sender: Sender) -> None:
    def check(request: HttpRequest, key: IdempotencyKey) -> None:
        asked.append(key.pk)
        raise PermissionDenied

    asked: list[int] = []
    serve(view=kind(work := Counted(), replay_check=check))
    sender.send()
    stored = rows()
    assert sender.send().status_code == 403
    assert (rows(), work.runs, len(asked)) == (stored, 1, 1)


def test_what_is_no_stored_answer_is_not_asked_about(serve: Serve, sender: Sender) -> None:
    team = Team()
    serve(
        view=plain(
            work := Counted(lambda request: HttpResponse(status=503 if work.runs == 1 else 201)), replay_check=team.check
        )
    )
    assert [sender.send().status_code for _ in range(2)] == [503, 201]
    assert problem(sender.send(body={"another": 1}))["code"] == "key_reused"
    assert team.asked == []


def plain_with_arguments(check: Any) -> View:
    """Return a plain view with arguments."""
    return idempotent(replay_check=check)(lambda request, account, name: HttpResponse(status=201))


def phased_with_arguments(check: Any) -> View:
    """Return a phased view with arguments."""

    @idempotent(recovery_points=["unused"], replay_check=check)
    def view(request: HttpRequest, account: int, name: str) -> HttpResponseBase:
        key = request.idempotency_key
        for _ in key.phases():
            with atomic_phase(key) as phase:
                phase.set_response(HttpResponse(status=201))
        return key.response()

    return view


@pytest.mark.parametrize("made", [plain_with_arguments, phased_with_arguments])
def test_it_gets_the_arguments_of_the_view_that_it_names(made: Callable[..., View], sender: Sender, settings: Settings) -> None:
    def named(request: HttpRequest, key: IdempotencyKey, account: int) -> HttpResponse | None:
        return HttpResponse(status=404) if account in closed else None

    def every(request: HttpRequest, key: IdempotencyKey, **kwargs: Any) -> None:
        seen.append(kwargs)

    def none(request: HttpRequest, key: IdempotencyKey) -> None:
        seen.append(request.resolver_match.kwargs)

    closed: set[int] = set()
    seen: list[Any] = []
    urls = [path(f"{check.__name__}/<int:account>/<name>/", made(check)) for check in (named, every, none)]
    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": urls})

    def send(check: str) -> int:
        status: int = sender.send(f"/{check}/7/jane/", key=check).status_code
        return status

    assert [send(check) for check in ("named", "every", "none") * 2] == [201] * 6
    assert seen == [{"account": 7, "name": "jane"}] * 2
    closed.add(7)
    assert send("named") == 404


@both_kinds
@pytest.mark.postgres
def test_it_is_asked_after_waiting(kind: Kind, serve: Serve, sender: Sender) -> None:
    gate, team = Gate(), Team()

    def work(request: HttpRequest) -> HttpResponse:
        gate.wait_here()
        team.closed = True
        return create(request)

    serve(view=kind(work, wait_seconds=30, replay_check=team.check))
    running = in_background(another_client(sender).send)
    gate.wait_until_reached()
    waiting = in_background(another_client(sender).send)
    gate.open()
    assert running.result(WAIT_SECONDS).status_code == 201
    assert waiting.result(WAIT_SECONDS).status_code == 403
    assert (len(team.asked), Entry.objects.count()) == (1, 1)


def test_it_is_asked_after_a_lost_lock(serve: Serve, sender: Sender) -> None:
    gate, team = Gate(), Team()
    serve(view=two_phases(Counted(), create_second, call=gate.wait_here, replay_check=team.check))
    late = in_background(another_client(sender).send)
    gate.wait_until_reached()
    make_older(91, "locked_at")
    assert sender.send().status_code == 201
    assert team.asked == []
    stored, team.closed = rows(), True
    gate.open()
    assert late.result(WAIT_SECONDS).status_code == 403
    assert (rows(), len(team.asked)) == (stored, 1)


def create_second(request: HttpRequest) -> HttpResponse:
    Entry.objects.create(name="second")
    return HttpResponse(status=201)


@pytest.mark.parametrize("taken_over", [True, False])
def test_the_completer_does_not_ask(taken_over: bool, serve: Serve, sender: Sender) -> None:
    gate, team, down = Gate(), Team(), [True]

    @idempotent(recovery_points=["unused"], replay_check=team.check)
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for _ in key.phases():
            if down:
                return HttpResponse(status=503)
            gate.wait_here()
            with atomic_phase(key) as phase:
                phase.set_response(HttpResponse(status=201))
        return key.response()

    serve(view=view)
    assert sender.send().status_code == 503
    team.closed = True
    down.clear()
    make_older(1000, "created_at", "last_run_at")
    completing = in_background(complete_once)
    gate.wait_until_reached()
    if taken_over:
        make_older(91, "locked_at")
        assert sender.send().status_code == 201
    gate.open()
    completing.result(WAIT_SECONDS)
    assert IdempotencyKey.objects.get().response_code == 201
    assert team.asked == []
    assert sender.send().status_code == 403


def test_a_view_of_rest_framework_checks_the_object_anew(serve: Serve, sender: Sender) -> None:
    class Members(BasePermission):
        def has_object_permission(self, request: Any, view: Any, obj: Any) -> bool:
            return bool(get_user_model().objects.get(pk=request.user.pk).is_active and open_for[0])

    def check(request: Any, key: IdempotencyKey) -> None:
        request.parser_context["view"].check_object_permissions(request, object())

    class TeamView(APIView):
        permission_classes = [Members]

        @idempotent(replay_check=check)
        def post(self, request: Any) -> Response:
            self.check_object_permissions(request, object())
            return Response({"secret": "of the team"}, status=201)

    class Refusing(APIView):
        @idempotent(replay_check=lambda request, key: Response({"detail": "gone"}, status=410))
        def post(self, request: Any) -> Response:
            return Response(status=201)

    open_for = [True]
    serve(view=TeamView.as_view(), refusing=Refusing.as_view())
    assert [sender.send().status_code for _ in range(2)] == [201, 201]
    open_for[0] = False
    refused = sender.send()
    assert (refused.status_code, b"secret" in refused.content) == (403, False)
    first, second = (sender.send("/refusing/", key="key-2") for _ in range(2))
    assert (first.status_code, second.status_code, second.json()) == (201, 410, {"detail": "gone"})


def test_an_operation_of_ninja_is_checked(sender: Sender, settings: Settings) -> None:
    def check(request: HttpRequest, key: IdempotencyKey, account: int) -> None:
        if account in closed:
            raise HttpError(403, "closed")

    api, closed = NinjaAPI(urls_namespace="replay_check"), set[int]()

    @api.post("/{account}")
    @decorate_view(ninja.idempotent(replay_check=check))
    def pay(request: HttpRequest, account: int) -> dict[str, int]:
        return {"account": account}

    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": [path("api/", api.urls)]})
    assert [sender.send("/api/7").status_code for _ in range(2)] == [200, 200]
    closed.add(7)
    assert sender.send("/api/7").status_code == 403


def test_an_async_view_is_checked(serve: Serve, sender: Sender) -> None:
    team = Team()

    @idempotent(replay_check=team.acheck)
    async def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse(status=201)

    serve(view=view)
    assert sender.send().status_code == 201
    team.closed = True
    assert sender.send().status_code == 403


@pytest.mark.parametrize("answer", [True, False, "no"])
def test_what_is_no_response_is_a_mistake(answer: Any, serve: Serve, sender: Sender, caplog: pytest.LogCaptureFixture) -> None:
    serve(view=idempotent(replay_check=lambda request, key: answer)(create))
    assert [sender.send().status_code for _ in range(2)] == [201, 500]
    assert re.search(f"TypeError: .*replay_check.* {type(answer).__name__}", caplog.text)


def test_it_must_be_a_function() -> None:
    with pytest.raises(ValueError, match="replay_check"):
        idempotent(replay_check=True)  # type: ignore[call-overload]
