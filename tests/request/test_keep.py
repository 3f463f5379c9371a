"""``keep=``: values of the session and of the request that the rebuilt request of the completer
also has."""

import json
import uuid
from collections.abc import Callable
from datetime import date
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.contrib.sessions.models import Session
from django.core.exceptions import PermissionDenied
from django.db import OperationalError, connection
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.utils.functional import SimpleLazyObject
from pytest_django import Settings

from idempotency import scopes
from idempotency._http.stored_request import MAX_KEPT_BYTES
from idempotency.completer import CompletePass, complete_once
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from idempotency.policy import policies
from tests.kit.ageing import abandon, lock_end
from tests.kit.database import statements
from tests.kit.serving import Sender
from tests.kit.views import phased

Serve = Callable[..., None]

#: The attributes that a middleware of the project sets.
ATTRIBUTES: dict[str, Any] = {}


def shop_middleware(get_response: Any) -> Any:
    """A middleware that sets the attributes that the shop's views read."""

    def middleware(request: HttpRequest) -> HttpResponseBase:
        vars(request).update(ATTRIBUTES)
        return get_response(request)

    return middleware


class Checkout:
    """A phased view that fails between its phases while ``broken``, and records the values that
    each run reads."""

    def __init__(self, read: Callable[[HttpRequest], Any], **options: Any) -> None:
        self.broken, self.read = True, read
        self.seen: list[Any] = []
        self.view = idempotent(recovery_points=["paid"], **options)(self._view)

    def _view(self, request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for recovery_point in key.phases():
            with atomic_phase(key) as phase:
                if recovery_point == "started":
                    phase.set_recovery_point("paid")
                    continue
                self.seen.append(self.read(request))
                if self.broken:
                    raise OSError("The process dies.")
                phase.set_response(JsonResponse({}, status=201))
        return key.response()


@pytest.fixture
def checkout(
    serve: Serve, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Checkout]:
    """Return a function that serves a checkout at /view/, behind a middleware that sets
    attributes."""
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.shop_middleware"]

    def put(
        read: Callable[[HttpRequest], Any], attributes: dict[str, Any] | None = None, **options: Any
    ) -> Checkout:
        monkeypatch.setitem(globals(), "ATTRIBUTES", attributes or {})
        made = Checkout(read, **options)
        serve(view=made.view)
        return made

    return put


def in_session(sender: Sender, **values: Any) -> None:
    session = sender.client.session
    session.update(values)
    session.save()


def complete(checkout: Checkout) -> None:
    abandon()
    checkout.broken = False
    assert complete_once() == CompletePass(finished=1)


def test_session_and_attributes_come_back_in_the_completer(checkout: Any, sender: Sender) -> None:
    basket = {"lines": [["tea", 2]], "total": 9.5, "gift": None, "text": "ü\x00\ud800"}
    shop = checkout(
        lambda request: (request.session["basket"], request.session.get("gone"), request.tenant),
        {"tenant": "north", "unused": object()},
        keep=["session.basket", "session.gone", "tenant", "absent", "absent.pk"],
    )
    in_session(sender, basket=basket)
    assert sender.send().status_code == 500
    complete(shop)
    assert shop.seen == [(basket, None, "north")] * 2


def rebuild_account(request: HttpRequest, key: IdempotencyKey) -> None:
    """Load the object that the middleware had set, by its primary key."""
    request.account = Group.objects.get(pk=request.idempotency_kept["account.pk"])


def test_a_part_of_an_object_is_for_prepare_request(
    checkout: Any, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": rebuild_account}
    group = Group.objects.create(name="north")
    lazy = SimpleLazyObject(lambda: Group.objects.get(pk=group.pk))
    shop = checkout(lambda request: request.account.name, {"account": lazy}, keep=["account.pk"])
    assert sender.send().status_code == 500
    complete(shop)
    assert shop.seen == ["north"] * 2


@pytest.mark.parametrize("value", ["1:signed", None, 7, {"lines": [1]}])
def test_a_lazy_value_is_kept_as_the_value_behind_it(
    checkout: Any, sender: Sender, value: Any
) -> None:
    lazy = {"basket_hash": SimpleLazyObject(lambda: value)}
    shop = checkout(lambda request: request.basket_hash, lazy, keep=["basket_hash"])
    assert sender.send().status_code == 500
    complete(shop)
    assert shop.seen == [value] * 2
    assert type(shop.seen[1]) is type(value)


def test_a_part_may_be_a_uuid(checkout: Any, sender: Sender, settings: Settings) -> None:
    seen: list[Any] = []
    settings.IDEMPOTENCY = {
        "PREPARE_REQUEST": lambda request, key: seen.append(request.idempotency_kept)
    }
    number = uuid.uuid4()
    shop = checkout(
        lambda request: None, {"account": Group(id=number)}, keep=["account.pk", "session.a"]
    )
    in_session(sender, a=[1])
    assert sender.send().status_code == 500
    complete(shop)
    assert seen == [{"account.pk": str(number), "session.a": [1]}]


def test_the_values_stay_once_something_is_begun_and_a_retry_may_have_others(
    checkout: Any, sender: Sender
) -> None:
    """The values are not part of the fingerprint, and the completer continues with the stored
    values."""
    shop = checkout(lambda request: request.session["basket"], keep=["session.basket"])
    in_session(sender, basket="first")
    assert sender.send().status_code == 500
    in_session(sender, basket="second")
    assert sender.send().status_code == 500
    complete(shop)
    assert shop.seen == ["first", "second", "first"]
    in_session(sender, basket="third")
    assert sender.send()["Idempotent-Replayed"] == "true"


def test_while_nothing_is_begun_a_retry_replaces_the_values(serve: Serve, sender: Sender) -> None:
    """A customer who changes the basket after a refusal pays for the new basket, even if the
    completer runs the request."""
    ends: list[Callable[[], object]] = []

    def work(request: HttpRequest) -> HttpResponseBase:
        ends.pop(0)()
        return JsonResponse(request.session["basket"], safe=False, status=201)

    serve(view=phased(work, keep=["session.basket"]))
    ends += [raising(PermissionDenied), raising(OSError), lambda: None]
    in_session(sender, basket="dear")
    assert sender.send().status_code == 403
    in_session(sender, basket="cheap")
    assert sender.send().status_code == 500
    abandon()
    assert complete_once() == CompletePass(finished=1)
    assert sender.send().json() == "cheap"


def raising(error: type[Exception]) -> Callable[[], object]:
    """Return a function that raises the error."""

    def end() -> None:
        raise error

    return end


def test_the_session_of_the_completer_can_be_written_and_is_not_saved(
    checkout: Any, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    def empty(request: HttpRequest) -> Any:
        found = request.session.pop("basket", None), request.session.get("order")
        request.session["order"] = 7
        request.session.save()
        request.session.cycle_key()
        return *found, request.session["order"], request.session.session_key

    shop = checkout(empty, keep=["session.basket"])
    shop.broken = True
    in_session(sender, basket="tea", other="kept")
    sender.send()
    stored = dict(sender.client.session)
    shop.seen.clear()
    count = Session.objects.count()
    complete(shop)
    assert shop.seen == [("tea", None, 7, None)]
    assert (dict(sender.client.session), Session.objects.count()) == (stored, count)
    [line] = [record.getMessage() for record in caplog.records if "session" in record.getMessage()]
    assert IdempotencyKey.objects.get().key_hash in line


def test_without_a_kept_session_value_the_completer_has_no_session(
    checkout: Any, sender: Sender
) -> None:
    shop = checkout(
        lambda request: hasattr(request, "session"), {"tenant": "north"}, keep=["tenant"]
    )
    assert sender.send().status_code == 500
    complete(shop)
    assert shop.seen == [True, False]


class Basket:
    """An object that is not a JSON value."""

    lines = (1, 2)


@pytest.mark.parametrize(
    ("attributes", "name", "kind"),
    [
        ({"basket": Basket()}, "basket", "Basket"),
        ({"basket": SimpleLazyObject(Basket)}, "basket", "Basket"),
        ({"basket": Basket()}, "basket.lines", "tuple"),
        ({"day": date(2026, 1, 1)}, "day", "date"),
        ({"tenant": uuid.uuid4()}, "tenant", "UUID"),
        ({"prices": {1: 2}}, "prices", "dict"),
        ({"rate": float("nan")}, "rate", "float"),
    ],
)
def test_anything_but_a_json_value_is_an_error_that_names_it(
    attributes: dict[str, Any], name: str, kind: str, checkout: Any, sender: Sender
) -> None:
    checkout(lambda request: None, attributes, keep=[name])
    sender.client.raise_request_exception = True
    with pytest.raises(TypeError, match=rf"view {__name__}\.Checkout\._view .*'{name}'.* {kind}"):
        sender.send()
    assert not IdempotencyKey.objects.exists()


def test_values_that_are_too_large_are_an_error(checkout: Any, sender: Sender) -> None:
    checkout(lambda request: None, keep=["session.basket"])
    sender.client.raise_request_exception = True
    in_session(sender, basket="x" * MAX_KEPT_BYTES)
    with pytest.raises(ValueError, match=rf"_view .* at most {MAX_KEPT_BYTES:,}"):
        sender.send()
    assert not IdempotencyKey.objects.exists()


@pytest.mark.parametrize("size", [MAX_KEPT_BYTES, MAX_KEPT_BYTES + 1])
def test_values_may_have_the_largest_size(size: int, checkout: Any, sender: Sender) -> None:
    basket = "x" * (size - len(json.dumps({"request": {"basket": ""}})))
    checkout(lambda request: None, {"basket": basket}, keep=["basket"])
    sender.send()
    assert IdempotencyKey.objects.exists() == (size == MAX_KEPT_BYTES)


class Unread:
    """A lazy value in a database that is down."""

    @property
    def pk(self) -> int:
        raise OperationalError("disk I/O error")  # a lost database on SQLite too


def test_values_whose_database_is_down_are_asked_for_again(checkout: Any, sender: Sender) -> None:
    checkout(lambda request: None, {"shop": Unread()}, keep=["shop.pk"])
    assert sender.send().status_code == 503
    assert not IdempotencyKey.objects.exists()


class Gone:
    """A lazy value whose row was deleted."""

    @property
    def pk(self) -> int:
        raise Group.DoesNotExist


def grow(sender: Sender) -> None:
    in_session(sender, basket="x" * MAX_KEPT_BYTES)


def replace(sender: Sender) -> None:
    ATTRIBUTES["tenant"] = Basket()


def delete(sender: Sender) -> None:
    ATTRIBUTES["account"] = Gone()


KEEP = ["session.basket", "tenant", "account.pk"]
CHANGES = pytest.mark.parametrize("change", [grow, replace, delete])


@CHANGES
def test_a_finished_request_is_answered_though_its_values_cannot_be_stored_any_more(
    change: Callable[[Sender], None], checkout: Any, sender: Sender
) -> None:
    shop = checkout(lambda request: None, {"tenant": "north"}, keep=KEEP)
    shop.broken = False
    in_session(sender, basket="tea")
    assert sender.send().status_code == 201
    change(sender)
    assert sender.send()["Idempotent-Replayed"] == "true"
    assert sender.send(body={"other": "body"}).json()["code"] == "key_reused"
    assert sender.send(key="new").status_code == 500
    assert IdempotencyKey.objects.count() == 1


@CHANGES
def test_a_request_that_was_begun_goes_on_though_its_values_cannot_be_stored_any_more(
    change: Callable[[Sender], None], checkout: Any, sender: Sender
) -> None:
    shop = checkout(lambda request: None, {"tenant": "north"}, keep=KEEP)
    in_session(sender, basket="tea")
    assert sender.send().status_code == 500
    before = IdempotencyKey.objects.values_list("request_headers", flat=True)[0]
    change(sender)
    shop.broken = False
    assert sender.send().status_code == 201
    assert IdempotencyKey.objects.values_list("request_headers", flat=True)[0] == before


@CHANGES
def test_while_nothing_is_begun_values_that_cannot_be_stored_are_an_error(
    change: Callable[[Sender], None], serve: Serve, checkout: Any, sender: Sender
) -> None:
    checkout(lambda request: None, {"tenant": "north"})
    serve(view=phased(raising(OSError), keep=KEEP))
    in_session(sender, basket="tea")
    assert sender.send().status_code == 500
    before = IdempotencyKey.objects.values_list("request_headers", "attempts")[0]
    change(sender)
    assert sender.send().status_code == 500
    assert IdempotencyKey.objects.values_list("request_headers", "attempts")[0] == before


def test_a_running_request_is_in_use_though_the_values_of_a_retry_cannot_be_stored(
    serve: Serve, sender: Sender
) -> None:
    serve(view=phased(raising(OSError), keep=["session.basket"]))
    assert sender.send().status_code == 500
    IdempotencyKey.objects.update(locked_until=lock_end())
    grow(sender)
    assert sender.send().json()["code"] == "key_in_use"


def test_nothing_is_kept_of_a_request_that_the_completer_cannot_run(
    checkout: Any, sender: Sender
) -> None:
    checkout(lambda request: None, keep=["session.basket"], store_body=False)
    in_session(sender, basket="secret")
    sender.send()
    assert "secret" not in json.dumps(
        IdempotencyKey.objects.values_list("request_headers", flat=True)[0]
    )


@pytest.mark.postgres
def test_it_costs_no_statement(checkout: Any, sender: Sender) -> None:
    def count(key: str) -> int:
        with statements() as made:
            sender.send(key=key)
        return len(made)

    in_session(sender, basket="tea")
    checkout(lambda request: None)
    count("first of the process")
    without = count("without")
    checkout(lambda request: None, {"tenant": "north"}, keep=["session.basket", "tenant"])
    assert count("with") == without
    assert connection.vendor == "postgresql"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "tenant"}, "must be a list"),
        ({"keep": ["session"]}, "session.NAME"),
        ({"keep": ["session."]}, "session.NAME"),
        ({"keep": [""]}, "''"),
        ({"keep": [7]}, "7"),
        ({"keep": ["a..b"]}, "'a..b'"),
        ({"keep": ["_auth"]}, "'_auth'"),
        ({"keep": ["user"]}, "'user'"),
        ({"keep": ["auth"]}, "'auth'"),
        ({"keep": ["method"]}, "'method'"),
        ({"keep": ["META"]}, "'META'"),
        ({"keep": ["headers.Accept"]}, "'headers.Accept'"),
        ({"keep": ["idempotency_key"]}, "'idempotency_key'"),
        ({"keep": ["tenant"], "recovery_points": None}, "recovery_points"),
    ],
)
def test_names_that_cannot_be_kept_are_refused_at_decoration(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        idempotent(**{"recovery_points": [], **options})
    idempotent(recovery_points=[], keep=["session.a.b", "tenant", "user.profile"])


def test_it_stands_in_the_policy(checkout: Any, settings: Settings) -> None:
    checkout(lambda request: None, keep=["tenant"])
    [policy] = policies()
    assert policy.keep == ("tenant",)


def test_a_scope_that_reads_a_kept_attribute_names_the_sender(
    checkout: Any, sender: Sender
) -> None:
    shop = checkout(
        lambda request: request.tenant,
        {"tenant": "north"},
        keep=["tenant"],
        scope=scopes.attribute("tenant"),
    )
    sender.client.logout()
    assert sender.send().status_code == 500
    complete(shop)
    assert shop.seen == ["north"] * 2


async def read_async(request: HttpRequest) -> Any:
    await request.session.aset("order", 7)
    return await request.session.aget("basket")


def test_an_async_view_reads_the_session_too(serve: Serve, sender: Sender) -> None:
    seen: list[Any] = []

    @idempotent(recovery_points=["paid"], keep=["session.basket"])
    async def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        async for recovery_point in key.aphases():
            async with atomic_phase(key) as phase:
                if recovery_point == "started":
                    phase.set_recovery_point("paid")
                    continue
                seen.append(await read_async(request))
                if len(seen) == 1:
                    raise OSError
                phase.set_response(HttpResponse(status=201))
        return key.response()

    serve(view=view)
    in_session(sender, basket="tea")
    assert sender.send().status_code == 500
    abandon()
    assert complete_once() == CompletePass(finished=1)
    assert seen == ["tea", "tea"]
