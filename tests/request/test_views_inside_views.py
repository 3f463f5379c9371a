"""A protected view that another protected view calls: with the same key, in its transaction, it is
a part of it."""

import asyncio
import contextvars
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import Group
from django.db import connection, connections, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.test import RequestFactory
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View as DjangoView
from django.views.decorators.csrf import csrf_exempt
from pytest_django import Settings
from rest_framework import routers, serializers, viewsets

from idempotency import scopes
from idempotency.completer import complete_once
from idempotency.decorators import idempotent
from idempotency.jobs import stage_job
from idempotency.models import IdempotencyKey, StagedJob
from idempotency.phases import atomic_phase
from tests.frameworks import service
from tests.kit.ageing import abandon
from tests.kit.asgi import ask, run
from tests.kit.serving import Sender, View
from tests.kit.views import both_kinds, over_key, phased, plain
from tests.models import Entry

Serve = Callable[..., None]
Kind = Callable[..., View]


def named(name: str) -> Callable[[HttpRequest], HttpResponseBase]:
    """Return work that creates an entry with a name."""

    def work(request: HttpRequest) -> HttpResponse:
        Entry.objects.create(name=name)
        return HttpResponse(name, status=201)

    return work


def names() -> list[str]:
    return sorted(Entry.objects.values_list("name", flat=True))


def calling(*views: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], HttpResponseBase]:
    """Return work that calls views with its request, and then creates an entry."""

    def work(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for view in views:
            assert view(request).status_code == 201
            assert request.idempotency_key is key  # as it was
        return named("outer")(request)

    return work


#: The names of the views of ``named`` and of ``calling``.
INNER, OUTER = (
    f"{__name__}.named.<locals>.work",
    {
        plain: f"{__name__}.calling.<locals>.work",
        phased: "kit.views.phased",
    },
)


def refusal(sender: Sender, *expected: str) -> None:
    """Send a request, and check that it is refused with these texts, and leaves nothing."""
    sender.client.raise_request_exception = True
    for _ in range(3):
        with pytest.raises(RuntimeError) as raised:
            sender.send()
        assert [text for text in expected if text not in str(raised.value)] == []
    assert not names()
    assert not IdempotencyKey.objects.finished().exists()


# A part of the run


class GroupSerializer(serializers.ModelSerializer[Group]):
    class Meta:
        model = Group
        fields = ("id", "name")


@method_decorator(idempotent, name="create")
@method_decorator(idempotent, name="update")
@method_decorator(idempotent, name="partial_update")
class Groups(viewsets.ModelViewSet[Group]):
    """A view set whose ``partial_update()`` calls ``update()``, as in each ModelViewSet."""

    queryset = Group.objects.all()
    serializer_class = GroupSerializer


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
def test_partial_update_of_rest_framework_calls_update(
    method: str, sender: Sender, settings: Settings
) -> None:
    router = routers.SimpleRouter()
    router.register("groups", Groups)
    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": router.urls})
    group = Group.objects.create(name="before")
    answers = [
        sender.send(f"/groups/{group.pk}/", body={"name": "after"}, method=method) for _ in range(2)
    ]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert (answers[1].content, answers[1]["Idempotent-Replayed"]) == (answers[0].content, "true")
    assert (
        sender.send(
            f"/groups/{group.pk}/", body={"name": ""}, key="key-2", method=method
        ).status_code
        == 400
    )
    group.refresh_from_db()
    assert group.name == "after"


@both_kinds
def test_called_twice_it_is_one_unit(kind: Kind, serve: Serve, sender: Sender) -> None:
    inner = plain(named("inner"))
    serve(view=kind(calling(inner, inner)))
    first, second = sender.send(), sender.send()
    assert (first.content, second.content, second["Idempotent-Replayed"]) == (
        b"outer",
        b"outer",
        "true",
    )
    assert (names(), IdempotencyKey.objects.count()) == (["inner", "inner", "outer"], 1)


@both_kinds
def test_a_failure_after_it_rolls_it_back(kind: Kind, serve: Serve, sender: Sender) -> None:
    def broken(request: HttpRequest) -> HttpResponseBase:
        raise OSError("on purpose")

    serve(view=kind(calling(plain(named("inner")), plain(broken))))
    assert [sender.send().status_code for _ in range(2)] == [500, 500]
    assert not names()


def new(request: HttpRequest) -> HttpRequest:
    """Return a request that the view makes itself, with the same key."""
    made = RequestFactory().post(
        "/inner/", headers={"Idempotency-Key": request.idempotency_key.idempotency_key}
    )
    made.user = request.user
    return made


COPIES: list[Callable[[HttpRequest], HttpRequest]] = [copy.copy, new]


@pytest.mark.parametrize("copied", COPIES)
@both_kinds
def test_a_copied_request_is_a_part_too(
    kind: Kind, copied: Any, serve: Serve, sender: Sender
) -> None:
    keys = []

    def work(request: HttpRequest) -> HttpResponseBase:
        keys.append(request.idempotency_key)
        return named("inner")(request)

    inner = plain(work)
    serve(view=kind(calling(lambda request: inner(copied(request)))))
    assert [sender.send().status_code for _ in range(2)] == [201, 201]
    assert names() == ["inner", "outer"]
    assert [key.idempotency_key for key in keys] == ["key-1"]


@pytest.mark.parametrize("scope", [scopes.user, lambda request: f"account {request.user.pk}"])
def test_functions_that_return_the_same_scope_name_the_same_key(
    scope: Any, serve: Serve, sender: Sender
) -> None:
    inner = (
        plain(named("inner"), scope=lambda request: scope(request))
        if scope is not scopes.user
        else plain(named("inner"))
    )
    serve(view=plain(calling(inner), scope=scope))
    assert [sender.send().status_code for _ in range(2)] == [201, 201]


def test_a_class_that_is_decorated_as_a_whole_and_by_method(serve: Serve, sender: Sender) -> None:
    @method_decorator(idempotent, name="dispatch")
    @method_decorator(idempotent, name="post")
    class Orders(DjangoView):
        def post(self, request: HttpRequest) -> HttpResponseBase:
            return named("made")(request)

    serve(view=Orders.as_view(), twice=idempotent(idempotent(named("twice"))))
    assert [sender.send().status_code for _ in range(2)] == [201, 201]
    assert [sender.send("/twice/", key="key-2").status_code for _ in range(2)] == [201, 201]
    assert names() == ["made", "twice"]


def test_a_job_of_the_inner_view_refers_to_the_key(serve: Serve, sender: Sender) -> None:
    def staging(request: HttpRequest) -> HttpResponseBase:
        stage_job("tests.kit.jobs.anything", {})
        return named("inner")(request)

    serve(view=plain(calling(plain(staging))))
    assert sender.send().status_code == 201
    assert StagedJob.objects.get().idempotency_key_id == IdempotencyKey.objects.get().pk


def test_a_safe_request_inside_is_not_protected_and_keeps_the_key_of_the_outer_one(
    serve: Serve, sender: Sender
) -> None:
    keys = []

    def reading(request: HttpRequest) -> HttpResponse:
        keys.append(request.idempotency_key)
        return HttpResponse(status=201)

    def get(request: HttpRequest) -> HttpResponseBase:
        copied = copy.copy(request)
        copied.method = "GET"
        return plain(reading)(copied)

    serve(view=plain(calling(get)))
    assert sender.send().status_code == 201
    assert keys == [None]


def test_in_the_transaction_of_a_middleware_it_is_a_part_too(serve: Serve, sender: Sender) -> None:
    serve(view=transaction.atomic(plain(calling(plain(named("inner"))))))
    assert [sender.send().status_code for _ in range(2)] == [201, 201]
    assert names() == ["inner", "outer"]


def test_views_that_are_called_one_after_the_other_are_two_requests(
    serve: Serve, sender: Sender
) -> None:
    """Only the first one runs: they have one key."""
    first, second = plain(named("first")), plain(named("second"))

    def both(request: HttpRequest) -> HttpResponseBase:
        first(request)
        return second(copy.copy(request))

    serve(view=both)
    assert sender.send()["Idempotent-Replayed"] == "true"
    assert names() == ["first"]


def test_the_transaction_of_the_outer_view_stays_open_under_atomic_requests(
    sender: Sender, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both views share their options, and their URLconf is one of which this app does not know
    beforehand."""
    protect = idempotent()
    inner = protect(named("inner"))

    @protect
    def outer(request: HttpRequest) -> HttpResponseBase:
        inner(request)
        assert connection.in_atomic_block
        raise OSError("on purpose")

    class Outer(DjangoView):
        post = staticmethod(outer)

    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    monkeypatch.setattr(
        service,
        "urls_of_the_host",
        type("Urls", (), {"urlpatterns": [path("view/", Outer.as_view())]}),
        raising=False,
    )
    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": []})
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{service.__name__}.by_host"]
    assert sender.send().status_code == 500
    assert not names()


# Async


@pytest.mark.postgres
def test_async_views_are_parts_too(serve: Serve, sender: Sender) -> None:
    async def create(request: HttpRequest) -> HttpResponse:
        await Entry.objects.acreate(name="inner")
        return HttpResponse(status=201)

    inner = idempotent(scope=lambda request: "anybody")(create)

    @idempotent(scope=lambda request: "anybody")
    async def outer(request: HttpRequest) -> HttpResponse:
        await inner(request)
        await asyncio.gather(inner(request), inner(copy.copy(request)))
        await Entry.objects.acreate(name="outer")
        if fails.pop():
            raise OSError("on purpose")
        return HttpResponse(status=201)

    @idempotent(recovery_points=[], scope=lambda request: "anybody")
    async def in_a_phase(request: HttpRequest) -> HttpResponseBase:
        async for _ in (key := request.idempotency_key).aphases():
            async with atomic_phase(key) as phase:
                await inner(request)
                phase.set_response(HttpResponse(status=201))
        return key.response()

    fails = [False, True]
    serve(view=csrf_exempt(outer), phased=csrf_exempt(in_a_phase))

    async def scenario() -> None:
        assert [(await ask("/view/", "key-1"))[0] for _ in range(3)] == [500, 201, 201]
        assert [(await ask("/phased/", "key-2"))[0] for _ in range(2)] == [201, 201]

    run(scenario)
    assert names() == ["inner", "inner", "inner", "inner", "outer"]


# Outside its transaction


def in_a_pool(view: View, *, with_context: bool) -> Callable[[HttpRequest], HttpResponseBase]:
    """Return a call of the view in a thread of a pool, which has a connection of its own."""

    def call(request: HttpRequest) -> HttpResponseBase:
        def work() -> HttpResponseBase:
            try:
                return view(request)
            finally:
                connections.close_all()

        with ThreadPoolExecutor(1) as pool:
            context = contextvars.copy_context()
            return (pool.submit(context.run, work) if with_context else pool.submit(work)).result()

    return call


@pytest.mark.parametrize("with_context", [True, False])
@both_kinds
@pytest.mark.postgres
def test_in_another_thread_it_is_refused(
    kind: Kind, with_context: bool, serve: Serve, sender: Sender
) -> None:
    """Its work would be committed by another transaction: three failed attempts would leave three
    rows."""
    inner = plain(named("inner"))
    serve(view=kind(calling(in_a_pool(inner, with_context=with_context))))
    refusal(sender, INNER, OUTER[kind])


@pytest.mark.postgres
def test_in_another_thread_of_an_async_view_it_is_refused(serve: Serve, sender: Sender) -> None:
    inner = plain(named("inner"))

    async def outer(request: HttpRequest) -> HttpResponseBase:
        def work() -> HttpResponseBase:
            try:
                return inner(request)
            finally:
                connections.close_all()

        return await sync_to_async(work, thread_sensitive=False)()

    serve(view=idempotent(outer))
    refusal(sender, INNER)


def test_between_two_phases_it_is_refused(serve: Serve, sender: Sender) -> None:
    inner = plain(named("inner"))
    serve(view=over_key(lambda key: inner(key.run.work.request)))
    refusal(sender, INNER, "kit.views.over_key")


def test_with_another_key_in_the_transaction_it_is_refused(serve: Serve, sender: Sender) -> None:
    inner = plain(named("inner"), key_from=lambda request: "key-2")

    def other(request: HttpRequest) -> HttpResponseBase:
        made = RequestFactory().post("/")
        made.user = request.user
        return inner(made)

    serve(view=plain(calling(other)))
    refusal(sender, INNER, OUTER[plain])


def test_without_a_key_it_is_a_request_without_one(serve: Serve, sender: Sender) -> None:
    statuses = []

    def other(request: HttpRequest) -> HttpResponseBase:
        made = RequestFactory().post("/")
        made.user = request.user
        statuses.append(plain(named("required"))(made).status_code)
        return plain(named("inner"), required=False)(made)

    serve(view=plain(calling(other)))
    assert sender.send().status_code == 201
    assert (statuses, names()) == ([400], ["inner", "outer"])


def test_to_which_the_protection_does_not_apply_is_not_protected(
    serve: Serve, sender: Sender
) -> None:
    inner = plain(named("inner"), applies=lambda request: False)
    serve(view=plain(lambda request: (inner(request), named("outer")(request))[1]))
    assert [sender.send().status_code for _ in range(2)] == [201, 201]
    assert names() == ["inner", "outer"]


def test_with_another_key_between_two_phases_it_is_a_request_of_its_own(
    serve: Serve, sender: Sender
) -> None:
    inner = plain(named("inner"), key_from=lambda request: "key-2")
    fails = [True, False]

    @idempotent(recovery_points=[])
    def outer(request: HttpRequest) -> HttpResponseBase:
        for _ in (key := request.idempotency_key).phases():
            made = RequestFactory().post("/")
            made.user = request.user
            assert inner(made).status_code == 201
            assert request.idempotency_key is key
            if fails.pop(0):
                raise OSError("on purpose")
            with atomic_phase(key) as phase:
                phase.set_response(HttpResponse(status=201))
        return key.response()

    serve(view=outer)
    assert [sender.send().status_code for _ in range(2)] == [500, 201]
    assert names() == ["inner"]
    assert IdempotencyKey.objects.finished().count() == 2


# Options that differ


def validate(request: HttpRequest) -> None:
    """Refuse nothing."""


DIFFERENCES: dict[str, Any] = {
    "scope": lambda request: "somebody else",
    "validate": validate,
    "retention_hours": 1000,
    "lease_seconds": 100,
    "using": "shard_b",
}


@pytest.mark.parametrize("option", DIFFERENCES)
@both_kinds
@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
def test_an_option_of_the_key_that_differs_is_refused(
    kind: Kind, option: str, serve: Serve, sender: Sender
) -> None:
    inner = plain(named("inner"), **{option: DIFFERENCES[option]})
    serve(view=kind(calling(inner)))
    refusal(sender, f"{option}=", INNER, OUTER[kind])


@pytest.mark.postgres
@both_kinds
def test_an_isolation_that_differs_is_refused(kind: Kind, serve: Serve, sender: Sender) -> None:
    serve(
        view=kind(calling(plain(named("inner"), isolation="serializable"))),
        same=kind(
            calling(plain(named("inner"), isolation="serializable")), isolation="serializable"
        ),
    )
    refusal(sender, "isolation", INNER, OUTER[kind])
    assert sender.send("/same/", key="key-2").status_code == 201


@pytest.mark.postgres
@both_kinds
def test_the_level_of_the_connection_may_be_named_or_not(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=kind(calling(plain(named("inner"), isolation="read committed"))))
    assert sender.send().status_code == 201


@both_kinds
def test_a_phased_view_inside_is_refused(kind: Kind, serve: Serve, sender: Sender) -> None:
    serve(view=kind(calling(phased(named("inner")))))
    refusal(sender, "phased", OUTER[kind])


# The completer


class Interrupted:
    """A phased view whose second phase fails in the run of its client. It calls ``inner`` in a
    phase or between the phases."""

    def __init__(self, inner: Any, *, in_a_phase: bool = True) -> None:
        self.inner, self.in_a_phase, self.broken = inner, in_a_phase, True
        self.view = idempotent(recovery_points=["begun"])(self.run)

    def run(self, request: HttpRequest) -> HttpResponseBase:
        for recovery_point in (key := request.idempotency_key).phases():
            if recovery_point == "started":
                with atomic_phase(key) as phase:
                    phase.set_recovery_point("begun")
                continue
            if self.broken:
                raise OSError("on purpose")
            if not self.in_a_phase:
                self.inner(request)
            with atomic_phase(key) as phase:
                if self.in_a_phase:
                    self.inner(request)
                phase.set_response(JsonResponse({}, status=201))
        return key.response()

    def completed(self, serve: Serve, sender: Sender) -> IdempotencyKey:
        """Serve the view, and let the completer run the request after its client has gone."""
        serve(view=self.view)
        assert sender.send().status_code == 500
        self.broken = False
        abandon()
        complete_once()
        return IdempotencyKey.objects.get()


@pytest.mark.parametrize("copied", [lambda request: request, *COPIES])
def test_in_a_run_of_the_completer_it_is_a_part_too(
    copied: Any, serve: Serve, sender: Sender
) -> None:
    inner = plain(named("inner"))
    key = Interrupted(lambda request: inner(copied(request))).completed(serve, sender)
    assert (key.response_code, names()) == (201, ["inner"])


@pytest.mark.parametrize(
    ("inner", "in_a_phase"),
    [
        (phased(named("inner")), True),
        (plain(named("inner")), False),
        (plain(named("inner"), retention_hours=1000), True),
        (plain(named("inner"), scope=lambda request: "somebody else"), True),
    ],
    ids=["phased", "no phase", "retention_hours", "scope"],
)
def test_in_a_run_of_the_completer_it_is_refused_too(
    inner: Any, in_a_phase: bool, serve: Serve, sender: Sender
) -> None:
    key = Interrupted(inner, in_a_phase=in_a_phase).completed(serve, sender)
    assert (key.finished_at, key.recovery_point, names()) == (None, "begun", [])
    assert f"{__name__}.Interrupted.run" in key.last_error
