"""All project code that a loop runs for a key runs in the environment of its request, and leaves
nothing to the next key."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db import connection, connections
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.urls import path, register_converter
from django.utils import translation
from pytest_django import Settings

from idempotency import interventions, signals
from idempotency.completer import CompletePass, complete_once
from idempotency.decorators import idempotent
from idempotency.exceptions import KeyStuck
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from idempotency.reaper import ReapPass, reap_once
from tests.factories import IdempotencyKeyFactory, UserFactory
from tests.kit.ageing import abandon, past_the_retention
from tests.kit.examples import file_of
from tests.kit.serving import Sender
from tests.kit.shards import GUIDE, SHARDS, end_sessions, routed, shard_of_request
from tests.kit.threads import elsewhere
from tests.models import Entry

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.django_db(transaction=True, databases=["default", "shard_b"]),
]


class OrderInPath:
    """A path converter that finds an order with the router."""

    regex = "[0-9]+"

    def to_python(self, value: str) -> Entry:
        order = Entry.objects.filter(pk=value).first()
        if order is None:
            raise ValueError
        return order

    def to_url(self, value: Entry) -> str:
        return str(value.pk)


register_converter(OrderInPath, "order_of_test")


class Shop:
    """A phased view that fails while ``broken``. Neither the view nor its ``on_abandon`` names a
    database."""

    def __init__(self) -> None:
        self.broken = True
        self.seen: list[str] = []
        self.view = idempotent(recovery_points=["ordered"], on_abandon=self._on_abandon)(self._view)

    def _view(self, request: HttpRequest, order: Entry | None = None) -> HttpResponseBase:
        key = request.idempotency_key
        for recovery_point in key.phases():
            with atomic_phase(key) as phase:
                if recovery_point == "started":
                    Entry.objects.create(name=f"order of {request.get_host()}", idempotency_key=key)
                    phase.set_recovery_point("ordered")
                else:
                    if self.broken:
                        raise OSError("the bank is down")
                    self.seen.append((order or Entry.objects.get(idempotency_key=key)).name)
                    phase.set_response(JsonResponse({}, status=201))
        return key.response()

    def _on_abandon(self, key: IdempotencyKey) -> HttpResponseBase:
        self.seen.append(Entry.objects.get(idempotency_key=key).name)
        return JsonResponse({}, status=410)


@pytest.fixture
def shop(settings: Settings) -> Shop:
    """Return the shop of the guide, at /view/ and at /orders/<order>/."""
    routed(settings)
    shop = Shop()
    urls = [path("view/", shop.view), path("orders/<order_of_test:order>/", shop.view)]
    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": urls})
    return shop


def send_for_each_tenant(sender: Sender, url: str = "/view/") -> None:
    """Leave an unfinished key in each shard; both have the same id."""
    for host, alias in SHARDS.items():
        with connections[alias].cursor() as cursor:
            cursor.execute(
                "SELECT setval(pg_get_serial_sequence('idempotency_idempotencykey', 'id'), 4711)"
            )
        assert sender.send(url, headers={"Host": host}).status_code == 500
    assert len({IdempotencyKey.objects.using(alias).get().pk for alias in SHARDS.values()}) == 1


def in_shard_b() -> IdempotencyKey:
    return IdempotencyKey.objects.using("shard_b").get()


def test_on_abandon_finds_the_rows_of_its_own_tenant(shop: Shop, sender: Sender) -> None:
    send_for_each_tenant(sender)
    past_the_retention(using="shard_b")
    assert reap_once(using="shard_b") == ReapPass(settled=1)
    assert shop.seen == ["order of b.example"]
    assert shard_of_request.get() == "default"


@pytest.fixture
def orders() -> int:
    """Create an order with the same id in each shard; return the id."""
    for host, alias in SHARDS.items():
        Entry.objects.using(alias).create(pk=4711, name=f"former order of {host}")
    return 4711


def test_a_path_converter_finds_the_rows_of_its_own_tenant(
    shop: Shop, sender: Sender, orders: int
) -> None:
    send_for_each_tenant(sender, f"/orders/{orders}/")
    abandon(using="shard_b")
    shop.broken = False
    assert complete_once(using="shard_b") == CompletePass(finished=1)
    assert shop.seen == ["former order of b.example"]
    assert shard_of_request.get() == "default"


@pytest.mark.parametrize("by", ["completer", "reaper", "operator"])
def test_a_path_that_resolves_in_its_own_shard_only_is_not_missing(
    by: str, shop: Shop, sender: Sender, orders: int
) -> None:
    send_for_each_tenant(sender, f"/orders/{orders}/")
    Entry.objects.using("default").all().delete()
    abandon(using="shard_b")
    shop.broken = False
    match by:
        case "completer":
            assert complete_once(using="shard_b") == CompletePass(finished=1)
        case "reaper":
            past_the_retention(using="shard_b")
            assert reap_once(using="shard_b") == ReapPass(settled=1)
        case "operator":
            key = in_shard_b()
            assert (
                interventions.complete_now(key.pk, key.claim_token, by="ann", using="shard_b")
                == "finished"
            )
    assert (in_shard_b().stuck_code, shard_of_request.get()) == ("", "default")


@pytest.mark.parametrize("attempts", [25, 24], ids=["before a run", "after a run"])
def test_a_key_after_its_last_attempt_is_left_to_on_abandon_of_its_own_shard(
    attempts: int, shop: Shop, sender: Sender, orders: int
) -> None:
    send_for_each_tenant(sender, f"/orders/{orders}/")
    Entry.objects.using("default").all().delete()
    abandon(using="shard_b")
    IdempotencyKey.objects.using("shard_b").update(completer_attempts=attempts)
    assert complete_once(using="shard_b") == CompletePass(failed=1)
    assert in_shard_b().stuck_code == ""


def test_receivers_of_signals_run_in_the_shard_of_the_key(shop: Shop, sender: Sender) -> None:
    heard: list[tuple[str, str]] = []
    receivers = {
        name: lambda key, request, name=name, **kwargs: heard.append((name, shard_of_request.get()))
        for name in ("key_claimed", "key_finished", "key_stuck")
    }
    send_for_each_tenant(sender)
    for name, receiver in receivers.items():
        getattr(signals, name).connect(receiver)
    abandon(using="shard_b")
    shop.broken = False
    assert complete_once(using="shard_b") == CompletePass(finished=1)
    for path_, code in (("/nowhere/", "retention_passed"), ("/view/", "on_abandon")):
        IdempotencyKeyFactory._meta.model.objects.using("shard_b").create(
            **IdempotencyKeyFactory.stub(scope=code, request_path=path_, user_id=None).__dict__
        )
    past_the_retention(using="shard_b")
    Entry.objects.using("shard_b").all().delete()
    reap_once(using="shard_b")
    assert set(heard) == {(name, "shard_b") for name in receivers}


def test_the_sender_is_read_where_the_router_finds_users_then(
    shop: Shop, settings: Settings, serve: Any
) -> None:
    """Ids of users repeat between shards whose users are in them."""

    class UsersInShards(GUIDE["TenantRouter"]):  # type: ignore[misc]
        def db_for_read(self, model: Any, **hints: Any) -> str:
            alias: str = shard_of_request.get()
            return alias

        db_for_write = db_for_read

    names: list[str] = []

    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponseBase:
        names.append(request.user.get_username())
        return HttpResponse(status=503)

    for alias in SHARDS.values():
        user = UserFactory.stub(username=f"user of {alias}").__dict__
        get_user_model()._default_manager.using(alias).create(pk=4711, **user)
    settings.DATABASE_ROUTERS = [UsersInShards()]
    serve(view=view)
    IdempotencyKey.objects.using("shard_b").create(
        **IdempotencyKeyFactory.stub(
            request_path="/view/", user_id=4711, recovery_point="started"
        ).__dict__
    )
    abandon(using="shard_b")
    complete_once(using="shard_b")
    assert names == ["user of shard_b"]


plan: ContextVar[str] = ContextVar("plan", default="none")
opened: list[str] = []


def set_plan_of_some(request: HttpRequest, key: IdempotencyKey) -> None:
    if key.idempotency_key == "first":
        plan.set("gold")


@contextmanager
def with_plan(request: HttpRequest, key: IdempotencyKey) -> Iterator[None]:
    opened.append(key.idempotency_key)
    plan.set("gold")
    try:
        yield
    finally:
        opened.remove(key.idempotency_key)


def forgotten_decorator(request: HttpRequest, key: IdempotencyKey) -> Iterator[None]:
    yield


@contextmanager
def fails_at_its_end(request: HttpRequest, key: IdempotencyKey) -> Iterator[None]:
    yield
    raise LookupError("on purpose")


class Recorder:
    """A phased view and its ``on_abandon``, which record what is set around them."""

    def __init__(self) -> None:
        self.broken = True
        self.seen: list[tuple[str, str, bool]] = []
        self.view = idempotent(recovery_points=[], on_abandon=self._on_abandon)(self._view)

    def _record(self, key: IdempotencyKey) -> None:
        self.seen.append((key.idempotency_key, plan.get(), key.idempotency_key in opened))

    def _view(self, request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        if self.broken:
            return HttpResponse(status=503)
        self._record(key)
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse(status=201))
        self._record(key)
        return key.response()

    def _on_abandon(self, key: IdempotencyKey) -> HttpResponseBase:
        self._record(key)
        return HttpResponse(status=410)


@pytest.fixture
def recorder(serve: Any, sender: Sender) -> Recorder:
    """Return the recorder, which has left two unfinished keys."""
    recorder = Recorder()
    serve(view=recorder.view)
    for key in ("first", "second"):
        assert sender.send(key=key).status_code == 503
    recorder.broken = False
    opened.clear()
    return recorder


@pytest.mark.parametrize("concurrency", [1, 2])
def test_what_is_set_for_one_key_is_not_set_for_the_next(
    recorder: Recorder, settings: Settings, concurrency: int
) -> None:
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": set_plan_of_some}
    abandon()
    assert complete_once(concurrency=concurrency) == CompletePass(finished=2)
    assert set(recorder.seen) == {("first", "gold", False), ("second", "none", False)}
    assert plan.get() == "none"


def test_a_context_manager_stays_open_for_the_run(recorder: Recorder, settings: Settings) -> None:
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": with_plan}
    abandon()
    assert complete_once() == CompletePass(finished=2)
    assert set(recorder.seen) == {("first", "gold", True), ("second", "gold", True)}
    assert (plan.get(), opened) == ("none", [])


def test_a_context_manager_stays_open_for_on_abandon(
    recorder: Recorder, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": with_plan}
    past_the_retention()
    assert reap_once() == ReapPass(settled=2)
    assert set(recorder.seen) == {("first", "gold", True), ("second", "gold", True)}
    assert (plan.get(), opened) == ("none", [])


def test_a_context_manager_is_closed_after_a_run_that_fails(
    recorder: Recorder, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": with_plan}
    recorder.broken = True
    abandon()
    assert complete_once() == CompletePass(failed=2)
    assert opened == []


def test_a_context_manager_that_fails_at_its_end_changes_no_result(
    recorder: Recorder, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": fails_at_its_end}
    abandon()
    assert complete_once() == CompletePass(finished=2)
    errors = [
        record
        for record in caplog.records
        if record.name == "idempotency" and record.levelname == "ERROR"
    ]
    assert len(errors) == 2


@pytest.mark.parametrize("prepare", [forgotten_decorator], ids=["a generator"])
def test_a_function_that_is_no_context_manager_yet_runs_nothing(
    recorder: Recorder, settings: Settings, prepare: Any
) -> None:
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": prepare}
    abandon()
    assert complete_once() == CompletePass(failed=2)
    assert recorder.seen == []
    assert all(
        "contextmanager" in error
        for error in IdempotencyKey.objects.values_list("last_error", flat=True)
    )


def test_the_context_manager_of_the_guide_sets_the_language_of_the_user(
    recorder: Recorder, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide: dict[str, Any] = {}
    exec(file_of("prepare-a-request.md", "shop/languages.py"), guide)
    monkeypatch.setattr(get_user_model(), "language", "de", raising=False)
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": guide["in_language_of_user"]}
    languages: list[str | None] = []
    monkeypatch.setattr(
        Recorder, "_record", lambda *args: languages.append(translation.get_language())
    )
    abandon()
    assert complete_once() == CompletePass(finished=2)
    assert set(languages) == {"de"}
    assert translation.get_language() != "de"


def raises(error: Exception) -> Any:
    def prepare(request: HttpRequest, key: IdempotencyKey) -> None:
        raise error

    return prepare


def test_the_reaper_waits_for_what_prepare_request_cannot_set_now(
    recorder: Recorder, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {
        "PREPARE_REQUEST": raises(ConnectionError("the directory of tenants is down"))
    }
    past_the_retention()
    assert reap_once() == ReapPass()
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": set_plan_of_some}
    assert reap_once() == ReapPass(settled=2)


def test_the_reaper_marks_what_prepare_request_gives_up(
    recorder: Recorder, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": raises(KeyStuck("the tenant is gone"))}
    past_the_retention()
    assert reap_once() == ReapPass(stuck=2)
    assert recorder.seen == []
    assert set(IdempotencyKey.objects.values_list("stuck_reason", flat=True)) == {
        "the tenant is gone"
    }


def test_on_abandon_of_a_request_without_its_body_has_the_environment_too(
    recorder: Recorder, settings: Settings
) -> None:
    bodies: list[bytes] = []

    def prepare(request: HttpRequest, key: IdempotencyKey) -> None:
        bodies.append(request.body)
        plan.set("gold")

    settings.IDEMPOTENCY = {"PREPARE_REQUEST": prepare}
    IdempotencyKey.objects.update(request_body=None)
    past_the_retention()
    assert reap_once() == ReapPass(settled=2)
    assert (bodies, {seen[1] for seen in recorder.seen}) == ([b"", b""], {"gold"})


def test_a_request_without_its_body_waits_for_on_abandon_while_its_environment_fails(
    recorder: Recorder, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {
        "PREPARE_REQUEST": raises(ConnectionError("the directory of tenants is down"))
    }
    IdempotencyKey.objects.update(request_body=None)
    abandon()
    assert complete_once() == CompletePass(failed=2)


def test_an_async_function_can_read_the_user(
    recorder: Recorder, settings: Settings, sender: Sender
) -> None:
    users: list[Any] = []

    async def prepare(request: HttpRequest, key: IdempotencyKey) -> None:
        users.append((await request.auser()).pk)

    settings.IDEMPOTENCY = {"PREPARE_REQUEST": prepare}
    abandon()
    assert complete_once() == CompletePass(finished=2)
    assert users == [sender.user.pk] * 2


def test_a_user_who_is_gone_is_not_replaced_by_prepare_request(
    recorder: Recorder, settings: Settings
) -> None:
    def prepare(request: HttpRequest, key: IdempotencyKey) -> None:
        request.user = UserFactory()

    settings.IDEMPOTENCY = {"PREPARE_REQUEST": prepare}
    get_user_model()._default_manager.all().update(is_active=False)
    abandon()
    assert complete_once() == CompletePass(stuck=2)
    assert recorder.seen == []


def lose_connection() -> None:
    end_sessions("shard_b")
    Entry.objects.using("shard_b").count()


def leave_autocommit_off() -> None:
    connections["shard_b"].set_autocommit(False)


def begin() -> None:
    with connections["shard_b"].cursor() as cursor:
        cursor.execute("BEGIN")


ACTIONS = {action.__name__: action for action in (lose_connection, leave_autocommit_off, begin)}


class TwoDatabases:
    """A phased view and its ``on_abandon``, which also write to another database. The key may name
    an action before that."""

    def __init__(self) -> None:
        self.broken = True
        self.view = idempotent(recovery_points=[], on_abandon=self._on_abandon)(self._view)

    def _write(self, key: IdempotencyKey) -> None:
        Entry.objects.using("shard_b").exists()  # Opens the connection, if it is closed.
        ACTIONS.get(key.idempotency_key, lambda: None)()
        Entry.objects.using("shard_b").create(name=key.idempotency_key)

    def _view(self, request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        if self.broken:
            return HttpResponse(status=503)
        self._write(key)
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse(status=201))
        return key.response()

    def _on_abandon(self, key: IdempotencyKey) -> HttpResponseBase:
        self._write(key)
        return HttpResponse(status=410)


@pytest.fixture
def leave_keys(serve: Any, sender: Sender, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that leaves unfinished keys with these values, in a project with persistent
    connections."""
    monkeypatch.setitem(connections["shard_b"].settings_dict, "CONN_MAX_AGE", None)

    def leave(*keys: str) -> None:
        shop = TwoDatabases()
        serve(view=shop.view)
        for key in keys:
            assert sender.send(key=key).status_code == 503
        shop.broken = False
        abandon()

    yield leave
    connections["shard_b"].close()


def written() -> set[str]:
    """Return the rows that are committed in the other database."""
    return elsewhere(lambda: set(Entry.objects.using("shard_b").values_list("name", flat=True)))


@pytest.mark.parametrize("action", ACTIONS)
def test_what_one_run_does_to_a_connection_fails_no_other_run(action: str, leave_keys: Any) -> None:
    leave_keys(action, "second", "third")
    done = complete_once()
    assert done.finished + done.failed == 3
    assert {"second", "third"} <= written()
    assert {"second", "third"} <= set(
        IdempotencyKey.objects.finished().values_list("idempotency_key", flat=True)
    )


@pytest.mark.parametrize("action", ACTIONS)
def test_what_one_on_abandon_does_to_a_connection_fails_no_other(
    action: str, leave_keys: Any
) -> None:
    """The function runs once: each key whose ``on_abandon`` fails needs a person."""
    leave_keys(action, "second", "third")
    past_the_retention()
    done = reap_once()
    assert done.settled + done.stuck == 3
    assert {"second", "third"} <= written()
    assert not {"second", "third"} & set(
        IdempotencyKey.objects.stuck().values_list("idempotency_key", flat=True)
    )


def test_a_connection_that_is_lost_between_two_keys_fails_neither(leave_keys: Any) -> None:
    leave_keys("first", "second", "third", "fourth")

    def lose() -> bool:
        end_sessions("shard_b")
        return False

    assert complete_once(stop=lose) == CompletePass(finished=4)
    leave_keys("fifth", "sixth")
    IdempotencyKey.objects.finished().delete()
    past_the_retention()
    assert reap_once(stop=lose) == ReapPass(settled=2)
    assert written() == {"first", "second", "third", "fourth", "fifth", "sixth"}


def test_autocommit_that_a_view_leaves_off_is_on_for_the_next_key(
    serve: Any, sender: Sender
) -> None:
    """The view leaves it off on the connection of its key."""

    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        if key.attempts == 1:
            return HttpResponse(status=503)
        if key.idempotency_key == "first":
            connection.set_autocommit(False)
            raise RuntimeError("on purpose")
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse(status=201))
        return key.response()

    serve(view=view)
    for key in ("first", "second"):
        assert sender.send(key=key).status_code == 503
    abandon()
    assert complete_once() == CompletePass(finished=1, failed=1)
    assert connection.get_autocommit()
    assert IdempotencyKey.objects.finished().get().idempotency_key == "second"


def test_the_response_of_on_abandon_is_stored_although_it_lost_the_connection_of_the_key(
    serve: Any, sender: Sender
) -> None:
    def refund(key: IdempotencyKey) -> HttpResponseBase:
        end_sessions("default")
        return HttpResponse(status=410)

    serve(
        view=idempotent(recovery_points=[], on_abandon=refund)(
            lambda request: HttpResponse(status=503)
        )
    )
    sender.send()
    past_the_retention()
    assert reap_once() == ReapPass(settled=1)
