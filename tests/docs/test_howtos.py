"""What the how-to guides claim, with their own code: each page is executed as it stands, and then
used."""

import hashlib
import hmac
import json
import pickle
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from threading import Event
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth import SESSION_KEY, get_user_model
from django.contrib.auth.models import Permission
from django.contrib.contenttypes.models import ContentType
from django.core import mail
from django.core.cache import caches
from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client, RequestFactory
from django.urls import path
from django.utils import timezone
from pytest_django import Settings

from idempotency import inbox
from idempotency.completer import complete_once
from idempotency.decorators import idempotent
from idempotency.enqueuer import enqueue_once
from idempotency.exceptions import NoOpenTransaction
from idempotency.inbox import STAGED_JOBS, process_once
from idempotency.jobs import call_job
from idempotency.models import IdempotencyKey, ProcessedMessage, StagedJob
from idempotency.phases import atomic_phase
from idempotency.testing import Downstream, age, assert_survives
from rides_demo.models import Ride
from tests.factories import RideFactory, UserFactory
from tests.kit.examples import file_of, serve_code, serve_page, shop_modules
from tests.kit.printed import GUIDES
from tests.kit.threads import background
from tests.models import Account, Entry

pytestmark = pytest.mark.django_db(transaction=True)

KEY = {"Idempotency-Key": "key-1"}
ORDER = {"name": "one"}


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """Return a function that makes the modules of the shop that the pages import, with these models
    and functions."""
    return shop_modules(monkeypatch)


@pytest.fixture
def page(shop: Callable[..., SimpleNamespace], settings: Settings) -> Callable[..., ModuleType]:
    """Return a function that executes the Python blocks of a guide, one after the other, and serves
    their URLs."""
    return partial(serve_page, settings)


@pytest.fixture
def client() -> Client:
    """Return a client that is signed in, and gets a 500 instead of an exception."""
    client = Client(raise_request_exception=False)
    client.force_login(UserFactory())
    return client


def fails(*given: Any, **named: Any) -> None:
    """Write, then fail."""
    Entry.objects.create(name="of a run that failed")
    raise ZeroDivisionError


# protect-a-view.md


def test_a_protected_view_answers_as_the_table_says(
    page: Callable[..., ModuleType], client: Client
) -> None:
    page("protect-a-view.md")
    first, again = (client.post("/orders/", ORDER, headers=KEY) for _ in range(2))
    assert (first.status_code, again.content, again["Idempotent-Replayed"]) == (
        201,
        first.content,
        "true",
    )
    other = client.post("/orders/", {"name": "two"}, headers=KEY)
    assert (other.status_code, other.json()["code"]) == (422, "key_reused")
    assert client.post("/orders/?a=1", ORDER, headers=KEY).json()["code"] == "key_reused"
    assert client.post("/orders/", ORDER).json()["code"] == "key_missing"
    assert Entry.objects.get().name == "one"


def test_a_protected_view_that_raised_runs_again(
    page: Callable[..., ModuleType], client: Client
) -> None:
    example = page("protect-a-view.md")
    example.JsonResponse = fails
    assert client.post("/orders/", ORDER, headers=KEY).status_code == 500
    assert (Entry.objects.count(), IdempotencyKey.objects.count()) == (0, 0)
    example.JsonResponse = JsonResponse
    assert client.post("/orders/", ORDER, headers=KEY).status_code == 201


def test_what_validate_refuses_spends_no_key_and_old_clients_pass(
    page: Callable[..., ModuleType], client: Client
) -> None:
    page("protect-a-view.md")
    assert client.post("/old-orders/", {}, headers=KEY).status_code == 422
    assert client.post("/old-orders/", ORDER, headers=KEY).status_code == 201
    assert [client.post("/old-orders/", ORDER).status_code for _ in range(2)] == [201, 201]
    assert Entry.objects.count() == 3


def test_wrong_pins_are_counted_and_limited(
    page: Callable[..., ModuleType], client: Client
) -> None:
    page("protect-a-view.md")
    wrong, right = ORDER | {"pin": "1"}, ORDER | {"pin": "1234"}
    answers = [
        client.post("/pin-orders/", form, headers=KEY).status_code
        for form in (wrong, wrong, right, right)
    ]
    assert answers == [403, 403, 201, 201]
    counted = f"wrong PIN of {client.session[SESSION_KEY]}"
    assert [entry.name for entry in Entry.objects.order_by("pk")] == [counted, counted, "one"]
    other = {"Idempotency-Key": "key-2"}
    assert [
        client.post("/pin-orders/", form, headers=other).status_code for form in (wrong, right)
    ] == [403, 403]


def test_who_has_lost_the_permission_gets_no_stored_response(
    page: Callable[..., ModuleType], client: Client
) -> None:
    page("protect-a-view.md")
    orders = ContentType.objects.create(app_label="shop", model="order")
    permission = Permission.objects.create(codename="add_order", content_type=orders)
    user, url = get_user_model().objects.get(), "/permitted-orders/"
    assert client.post(url, ORDER, headers=KEY).status_code == 403
    user.user_permissions.add(permission)
    first, again = (client.post(url, ORDER, headers=KEY) for _ in range(2))
    assert (first.status_code, again.content, again["Idempotent-Replayed"]) == (
        201,
        first.content,
        "true",
    )
    user.user_permissions.clear()
    assert client.post(url, ORDER, headers=KEY).status_code == 403
    user.user_permissions.add(permission)
    assert client.post(url, ORDER, headers=KEY)["Idempotent-Replayed"] == "true"
    orders.delete()  # and its permission


# add-phases.md


class CardDeclined(Exception):
    """The bank refuses."""


class BankUnreachable(Exception):
    """The bank does not answer."""


@pytest.fixture
def bank(shop: Callable[..., SimpleNamespace]) -> Any:
    """Return the bank of the shop; ``bank.error`` is raised by the next call instead of
    charging."""
    honest = Downstream("bank", {"id": "ch_1"}, key="idempotency_key")
    made = SimpleNamespace(error=None, calls=[], honest=honest)

    def charge_card(**call: Any) -> Any:
        made.calls.append(call)
        error, made.error = made.error, None
        if error is not None:
            raise error
        return honest(**call)

    shop(
        bank={
            "charge_card": charge_card,
            "CardDeclined": CardDeclined,
            "BankUnreachable": BankUnreachable,
        }
    )
    made.charge_card = charge_card
    return made


@pytest.mark.processes
def test_the_view_with_phases_survives(
    page: Callable[..., ModuleType], client: Client, bank: Any
) -> None:
    page("add-phases.md").charge_card = bank.honest
    client.raise_request_exception = True
    assert_survives(lambda key: client.post("/orders/", ORDER, headers={"Idempotency-Key": key}))


def test_a_declined_card_is_the_answer_for_good(
    page: Callable[..., ModuleType], client: Client, bank: Any
) -> None:
    page("add-phases.md")
    bank.error = CardDeclined()
    first, again = (client.post("/orders/", ORDER, headers=KEY) for _ in range(2))
    assert (first.status_code, again.content, len(bank.calls)) == (402, first.content, 1)
    assert not Entry.objects.exists()


def test_a_bank_that_was_away_is_asked_again_with_the_same_key(
    page: Callable[..., ModuleType], client: Client, bank: Any
) -> None:
    page("add-phases.md")
    bank.error = BankUnreachable()
    assert client.post("/orders/", ORDER, headers=KEY).status_code == 503
    assert client.post("/orders/", ORDER, headers=KEY).status_code == 201
    keys = [call["idempotency_key"] for call in bank.calls]
    assert len(keys) == 2
    assert len(set(keys)) == 1
    assert (Entry.objects.count(), StagedJob.objects.get().job_name) == (
        1,
        "shop.jobs.send_receipt",
    )


# prepare-a-request.md


def test_the_completer_has_the_basket_and_the_account_again(
    page: Callable[..., ModuleType], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = page("prepare-a-request.md")
    monkeypatch.setitem(sys.modules, "example", example)
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "example.account_middleware"]
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": "example.prepare_request"}
    Account.objects.create(name="testserver")
    visitor = Client(raise_request_exception=False)
    session = visitor.session
    session["basket"] = "tea"
    session.save()
    example.Order = SimpleNamespace(objects=SimpleNamespace(create=fails))
    assert visitor.post("/orders/", headers=KEY).status_code == 500
    example.Order = Entry
    age(IdempotencyKey.objects.all(), seconds=400)
    assert complete_once().finished == 1
    assert Entry.objects.get().name == "tea of testserver"
    assert visitor.session["basket"] == "tea"
    assert visitor.post("/orders/", headers=KEY)["Idempotent-Replayed"] == "true"


# stage-a-job.md

HANDED_OVER: list[StagedJob] = []


def hand_over(job: StagedJob) -> None:
    """Take a job, as a queue does."""
    HANDED_OVER.append(job)


def test_a_staged_job_commits_with_the_work_and_takes_effect_once(
    page: Callable[..., ModuleType],
    client: Client,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.hand_over"}}
    monkeypatch.setitem(globals(), "HANDED_OVER", handed_over := [])
    example = page("stage-a-job.md")
    sys.modules["shop.jobs"].send_receipt = example.send_receipt  # type: ignore[attr-defined]
    for _ in range(2):
        assert client.post("/orders/", ORDER, headers=KEY).status_code == 201
    assert StagedJob.objects.get().job_name == "shop.jobs.send_receipt"
    assert enqueue_once().handed_over == 1
    (job,) = handed_over
    for _ in range(2):  # a broker delivers it twice
        with process_once(STAGED_JOBS, str(job.pk)) as first:
            if first:
                call_job(job.job_name, job.job_args)
    assert [message.body for message in mail.outbox] == ["We have one."]


def test_a_job_goes_with_its_transaction_and_a_late_one_waits(
    page: Callable[..., ModuleType], settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.hand_over"}}
    example = page("stage-a-job.md")
    with transaction.atomic():
        example.import_order("one")
        transaction.set_rollback(True)
    assert not StagedJob.objects.exists()
    example.import_order("two", queue="reports", run_at=timezone.now() + timedelta(days=1))
    assert StagedJob.objects.get().queue == "reports"
    assert enqueue_once().handed_over == 0
    with pytest.raises(NoOpenTransaction):
        example.stage_job("shop.jobs.send_receipt", [1])


# receive-webhooks.md


@pytest.fixture
def deliver(
    shop: Callable[..., SimpleNamespace], page: Callable[..., ModuleType], settings: Settings
) -> Callable[..., int]:
    """Return a function that delivers a signed event of Stripe, and returns the status that it
    gets."""
    shop(models={"Order": Ride})
    settings.STRIPE_WEBHOOK_SECRET = "whsec_of_the_page"
    page("receive-webhooks.md")

    def send(event_id: str, charge_id: str, *, secret: str = settings.STRIPE_WEBHOOK_SECRET) -> int:
        charge = {"object": "charge", "id": charge_id}
        event = {
            "object": "event",
            "id": event_id,
            "type": "charge.succeeded",
            "data": {"object": charge},
        }
        body, at = json.dumps(event), int(time.time())
        proof = hmac.new(secret.encode(), f"{at}.{body}".encode(), hashlib.sha256).hexdigest()
        headers = {"Stripe-Signature": f"t={at},v1={proof}"}
        return (
            Client()
            .post("/stripe/", body, content_type="application/json", headers=headers)
            .status_code
        )

    return send


def test_an_event_that_comes_twice_takes_effect_once(deliver: Callable[..., int]) -> None:
    ride = RideFactory(stripe_charge_id="ch_1")
    assert deliver("evt_1", "ch_1") == 200
    ride.refresh_from_db()
    assert ride.paid_at is not None
    Ride.objects.update(paid_at=None)
    assert deliver("evt_1", "ch_1") == 200
    ride.refresh_from_db()
    assert ride.paid_at is None


def test_an_event_that_is_too_early_leaves_nothing_and_is_taken_later(
    deliver: Callable[..., int],
) -> None:
    assert deliver("evt_1", "ch_1") == 503
    assert not ProcessedMessage.objects.exists()
    ride = RideFactory(stripe_charge_id="ch_1")
    assert deliver("evt_1", "ch_1") == 200
    ride.refresh_from_db()
    assert ride.paid_at is not None


def test_a_forged_event_leaves_nothing(deliver: Callable[..., int]) -> None:
    assert deliver("evt_1", "ch_1", secret="whsec_other") == 400
    assert not ProcessedMessage.objects.exists()


def test_the_page_names_the_client_that_signs_here() -> None:
    assert f"(`stripe` {version('stripe')})" in (GUIDES / "receive-webhooks.md").read_text()


# consume-messages.md


@pytest.fixture
def consumers(shop: Callable[..., SimpleNamespace], page: Callable[..., ModuleType]) -> ModuleType:
    """Return the functions of the guide to consumers."""
    return page("consume-messages.md")


class KafkaRecord:
    """A Message of confluent_kafka 2.16: its parts are methods."""

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def topic(self) -> str:
        return "orders"

    def partition(self) -> int:
        return 3

    def offset(self) -> int:
        return self._offset

    def value(self) -> bytes:
        return json.dumps({"name": f"order {self._offset}"}).encode()

    def error(self) -> None:
        return None


class KafkaConsumer:
    """Gives the records from the committed offset on, as a Consumer of confluent_kafka does after a
    restart."""

    def __init__(self) -> None:
        self.committed = 0
        self.records = [KafkaRecord(0), KafkaRecord(1)]
        self.loses_commits = False

    def consume(self, consumers: ModuleType) -> None:
        """Run the loop over what is left, as a process does that has just been started."""
        left = iter(self.records[self.committed :])
        ended = False

        def poll(timeout: float) -> KafkaRecord | None:
            nonlocal ended
            record = next(left, None)
            ended = record is None
            return record

        def commit(*, message: KafkaRecord, asynchronous: bool) -> None:
            assert not asynchronous
            if not self.loses_commits:
                self.committed = message.offset() + 1

        consumers.consume_kafka(SimpleNamespace(poll=poll, commit=commit), lambda: ended)


def test_a_record_of_kafka_takes_effect_once(consumers: ModuleType) -> None:
    kafka = KafkaConsumer()
    kafka.loses_commits = True
    kafka.consume(consumers)
    kafka.loses_commits = False
    kafka.consume(consumers)
    assert kafka.committed == 2
    assert sorted(Entry.objects.values_list("name", flat=True)) == ["order 0", "order 1"]


def test_a_record_of_kafka_that_fails_is_not_committed(consumers: ModuleType) -> None:
    kafka, book = KafkaConsumer(), consumers.book
    consumers.book = fails
    with pytest.raises(ZeroDivisionError):
        kafka.consume(consumers)
    assert (kafka.committed, ProcessedMessage.objects.count()) == (0, 0)
    consumers.book = book
    kafka.consume(consumers)
    assert (kafka.committed, Entry.objects.count()) == (2, 2)


class RabbitChannel:
    """A channel of pika 1.4, as far as a callback uses it."""

    def __init__(self) -> None:
        self.said: list[tuple[str, bool | None]] = []

    def basic_ack(self, delivery_tag: int) -> None:
        self.said.append(("ack", None))

    def basic_nack(self, delivery_tag: int, requeue: bool) -> None:
        self.said.append(("nack", requeue))

    def basic_reject(self, delivery_tag: int, requeue: bool) -> None:
        self.said.append(("reject", requeue))

    def deliver(self, consumers: ModuleType, message_id: str | None) -> None:
        """Deliver a message, under another delivery tag each time."""
        method = SimpleNamespace(delivery_tag=len(self.said) + 1)
        consumers.on_message(
            self, method, SimpleNamespace(message_id=message_id), b'{"name": "one"}'
        )


def test_a_message_of_rabbitmq_takes_effect_once(consumers: ModuleType) -> None:
    channel = RabbitChannel()
    for message_id in ("m1", "m1", None):
        channel.deliver(consumers, message_id)
    assert channel.said == [("ack", None), ("ack", None), ("reject", False)]
    assert Entry.objects.get().name == "one"


def test_a_message_of_rabbitmq_that_fails_is_not_acknowledged(consumers: ModuleType) -> None:
    channel, book = RabbitChannel(), consumers.book
    consumers.book = fails
    with pytest.raises(ZeroDivisionError):
        channel.deliver(consumers, "m1")
    assert channel.said == []
    assert not Entry.objects.exists()
    consumers.book = book
    channel.deliver(consumers, "m1")
    assert (channel.said, Entry.objects.count()) == ([("ack", None)], 1)


@pytest.mark.processes
def test_a_message_of_rabbitmq_that_another_consumer_has_goes_back(
    consumers: ModuleType, monkeypatch: Any
) -> None:
    monkeypatch.setattr(inbox, "WAIT_SECONDS", 1)
    channel, done = RabbitChannel(), Event()

    def first_delivery() -> None:
        with process_once("rabbitmq:billing", "m1"):
            begun.set()
            assert done.wait(60)

    begun = Event()
    with background(first_delivery):
        assert begun.wait(60)
        channel.deliver(consumers, "m1")
        done.set()
    assert channel.said == [("nack", True)]


class SqsQueue:
    """A client of SQS (boto3 1.44) that delivers these messages, one a call."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self._messages, self.deleted = list(messages), 0

    def receive_message(self, **asked: Any) -> dict[str, Any]:
        message = self._messages[self.deleted]
        return {"Messages": [{"ReceiptHandle": f"receipt-{self.deleted}", **message}]}

    def delete_message(self, *, QueueUrl: str, ReceiptHandle: str) -> None:
        assert ReceiptHandle == f"receipt-{self.deleted}"
        self.deleted += 1


def sqs_message(message_id: str, event_id: str) -> dict[str, Any]:
    """Return a message as SQS delivers it: with what a producer sends, and with an equal
    deduplication id."""
    body = json.dumps({"event_id": event_id, "name": "jane pays 5"})
    return {
        "MessageId": message_id,
        "Body": body,
        "Attributes": {"MessageDeduplicationId": "hash of the payment"},
    }


@pytest.mark.parametrize(
    "ids", [("id-1", "id-1"), ("id-1", "id-2")], ids=["delivered twice", "sent twice"]
)
def test_an_event_of_sqs_takes_effect_once(consumers: ModuleType, ids: tuple[str, str]) -> None:
    sqs, book = (
        SqsQueue(*(sqs_message(message_id, "payment-1") for message_id in ids)),
        consumers.book,
    )
    consumers.book = fails
    with pytest.raises(ZeroDivisionError):
        consumers.receive_sqs(sqs, "url")
    assert sqs.deleted == 0
    consumers.book = book
    for _ in range(2):
        consumers.receive_sqs(sqs, "url")
    assert sqs.deleted == 2
    assert Entry.objects.get().name == "jane pays 5"


def test_two_equal_payments_of_sqs_are_two(consumers: ModuleType) -> None:
    """Weeks apart, with one deduplication id: SQS has forgotten the first, and the inbox has
    not."""
    sqs = SqsQueue(sqs_message("id-1", "payment-1"), sqs_message("id-2", "payment-2"))
    for _ in range(2):
        consumers.receive_sqs(sqs, "url")
    assert Entry.objects.count() == 2


# hand-the-key-on.md


@idempotent(recovery_points=["ordered"])
def hands_the_key_on(request: Any) -> Any:
    """Call every system of the page between two phases, then die in the first run."""
    key = request.idempotency_key
    for recovery_point in key.phases():
        if recovery_point == "started":
            with atomic_phase(key) as phase:
                Entry.objects.create(name="order", idempotency_key=key)
                phase.set_recovery_point("ordered")
        else:
            request.others(key, Entry.objects.get(idempotency_key=key))
            with atomic_phase(key) as phase:
                phase.set_response(JsonResponse({}, status=201))
    return key.response()


@idempotent(scope=lambda request: "another service")
def rooms(request: Any) -> JsonResponse:
    """Book a room, in the other service that uses this app."""
    return JsonResponse(
        {"id": Account.objects.create(name=json.loads(request.body)["guest"]).pk}, status=201
    )


@pytest.fixture
def hand_on(shop: Any, settings: Settings, monkeypatch: Any) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that sends a request which hands its key on, and returns what the others
    got."""
    example = serve_code(settings, file_of("hand-the-key-on.md", "shop/calls.py"))
    settings.ROOT_URLCONF = type(
        "Urls", (), {"urlpatterns": [path("orders/", hands_the_key_on), path("rooms/", rooms)]}
    )
    client = Client(raise_request_exception=False)
    client.force_login(UserFactory())
    seen: dict[str, list[Any]] = {name: [] for name in ("stripe", "s3", "sqs", "room", "sms")}

    def create(parameters: Any, options: Any) -> None:
        seen["stripe"].append(options["idempotency_key"])

    def post(url: str, *, json: Any, headers: Any) -> Any:
        answer = Client().post("/rooms/", json, content_type="application/json", headers=headers)
        answer.raise_for_status = lambda: None  # type: ignore[attr-defined]
        return answer

    def others(key: IdempotencyKey, order: Entry) -> None:
        stripe_client = SimpleNamespace(v1=SimpleNamespace(charges=SimpleNamespace(create=create)))
        s3 = SimpleNamespace(put_object=lambda **call: None)
        sqs = SimpleNamespace(
            send_message=lambda **call: seen["sqs"].append(call["MessageDeduplicationId"])
        )
        example.charge(stripe_client, key, order)
        seen["s3"].append(example.upload_receipt(s3, key, b""))
        example.announce(sqs, key, order)
        seen["room"].append(
            example.book_room(SimpleNamespace(post=post), key, f"guest of {order.pk}")
        )
        example.send_sms(SimpleNamespace(send=lambda *call: seen["sms"].append(call)), key, "+1")

    def send(name: str, *, die: bool = False) -> int:
        def last(key: IdempotencyKey, order: Entry) -> None:
            others(key, order)
            if die:
                raise ZeroDivisionError

        monkeypatch.setattr(HttpRequest, "others", staticmethod(last), raising=False)
        return client.post("/orders/", headers={"Idempotency-Key": name}).status_code

    send.seen = seen  # type: ignore[attr-defined]
    return send  # type: ignore[return-value]


def test_each_run_hands_the_same_keys_on_and_another_request_other_ones(hand_on: Any) -> None:
    assert [hand_on("key-1", die=True), hand_on("key-1"), hand_on("key-2")] == [500, 201, 201]
    for name in ("stripe", "s3", "sqs", "room"):
        first, again, other = hand_on.seen[name]
        assert first == again != other, name
    assert len({hand_on.seen["stripe"][0], hand_on.seen["sqs"][0]}) == 2
    assert Account.objects.count() == 2  # the other service booked each guest once
    assert len(hand_on.seen["sms"]) == 2  # the one without keys was called once for each


def test_a_key_that_the_other_system_has_forgotten_is_handed_to_a_person(hand_on: Any) -> None:
    assert hand_on("key-1", die=True) == 500
    age(IdempotencyKey.objects.filter(idempotency_key="key-1"), seconds=24 * 3600)
    assert hand_on("key-1") == 409
    assert (
        IdempotencyKey.objects.get(idempotency_key="key-1").stuck_code == "downstream_key_expired"
    )
    assert len(hand_on.seen["stripe"]) == 1


# deploy-a-change.md


@pytest.fixture
def deploy(
    shop: Callable[..., SimpleNamespace], settings: Settings, client: Client
) -> Callable[[str], SimpleNamespace]:
    """Return a function that puts the old or the new code of the page into service."""
    bank = Downstream("bank", {"id": "ch_1"}, key="idempotency_key")
    carrier = SimpleNamespace(fails=False, keys=[])

    def book_delivery(idempotency_key: str) -> None:
        carrier.keys.append(idempotency_key)
        if carrier.fails:
            raise ZeroDivisionError

    errors = {"CardDeclined": CardDeclined, "BankUnreachable": BankUnreachable}
    shop(bank={"charge_card": bank, "book_delivery": book_delivery, **errors})

    def put_into_service(which: str) -> SimpleNamespace:
        view = file_of("deploy-a-change.md", "shop/views.py", {"old": 0, "new": 1}[which])
        module = serve_code(settings, view, file_of("deploy-a-change.md", "shop/urls.py"))
        return SimpleNamespace(
            module=module,
            carrier=carrier,
            bank=bank,
            send=lambda: client.post("/orders/", ORDER, headers=KEY),
        )

    return put_into_service


def left_at_the_recovery_point() -> int:
    """Return the number that the command of the page prints."""
    page = (GUIDES / "deploy-a-change.md").read_text()
    (counted,) = re.findall(r'--command "print\((.*)\)"$', page, re.M)
    return int(eval(counted, {"IdempotencyKey": IdempotencyKey}))


def test_a_key_that_the_old_code_does_not_know_waits_for_the_new_code(deploy: Any) -> None:
    new = deploy("new")
    new.carrier.fails = True
    assert new.send().status_code == 500
    assert left_at_the_recovery_point() == 1
    refused = deploy("old").send()
    assert (refused.status_code, refused.json()["code"], "Retry-After" in refused) == (
        503,
        "unknown_recovery_point",
        True,
    )
    assert IdempotencyKey.objects.get().stuck_code == "unknown_recovery_point"
    new = deploy("new")
    new.carrier.fails = False
    assert new.send().status_code == 201
    assert IdempotencyKey.objects.get().stuck_at is None
    assert len(set(new.carrier.keys)) == 1
    assert left_at_the_recovery_point() == 0


def test_the_completer_of_the_new_code_takes_such_a_key_up_and_counts_no_try(deploy: Any) -> None:
    new = deploy("new")
    new.carrier.fails = True
    new.send()
    deploy("old").send()
    age(IdempotencyKey.objects.all(), seconds=400)
    complete_once()
    key = IdempotencyKey.objects.get()
    assert (key.stuck_code, key.completer_attempts) == ("unknown_recovery_point", 0)
    new = deploy("new")
    new.carrier.fails = False
    age(IdempotencyKey.objects.all(), seconds=400)
    assert complete_once().finished == 1


def test_a_key_that_the_old_code_began_goes_on_under_the_new(
    deploy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = deploy("old")
    old.module.charge_card = lambda **call: 1 / 0
    assert old.send().status_code == 500
    new = deploy("new")
    assert new.send().status_code == 201
    assert Entry.objects.count() == len(new.carrier.keys) == 1


# do-without-a-key.md


def test_what_needs_no_key_can_be_repeated(page: Callable[..., ModuleType], client: Client) -> None:
    page("do-without-a-key.md")

    def send(method: str, url: str, body: Any, **headers: str) -> int:
        return getattr(client, method)(
            url, body, content_type="application/json", headers=headers
        ).status_code

    assert [send("put", "/accounts/jane/", {"balance": 90}) for _ in range(2)] == [201, 200]
    assert Account.objects.get().balance == 90
    url = "/accounts/jane/balance/"
    assert send("patch", url, {"balance": 80}) == 428
    assert [send("patch", url, {"balance": 80}, **{"If-Match": '"90"'}) for _ in range(2)] == [
        200,
        412,
    ]
    assert Account.objects.get(name="jane").balance == 80


# move-from-another-middleware.md


@pytest.fixture
def other_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for what the page uses of django-idempotency-key 1.3.0: the name of an entry in the
    cache, and its pickle."""

    class BasicKeyEncoder:
        def encode_key(self, request: HttpRequest, key: str) -> str:
            parts = (
                key.encode(),
                request.path_info.encode(),
                (request.method or "").encode(),
                request.body,
            )
            return hashlib.sha256(
                b"".join(parts) + request.META.get("HTTP_AUTHORIZATION", "").encode()
            ).hexdigest()

    class CacheKeyStorage:
        def store_data(self, cache_name: str, encoded_key: str, response: HttpResponse) -> None:
            caches[cache_name].set(encoded_key, pickle.dumps(response))

        def retrieve_data(self, cache_name: str, encoded_key: str) -> tuple[bool, Any]:
            stored = caches[cache_name].get(encoded_key)
            return (True, pickle.loads(stored)) if stored is not None else (False, None)

    contents = {
        "encoders": {"BasicKeyEncoder": BasicKeyEncoder},
        "storage": {"CacheKeyStorage": CacheKeyStorage},
    }
    monkeypatch.setitem(sys.modules, "idempotency_key", ModuleType("idempotency_key"))
    for name, content in contents.items():
        module = ModuleType(f"idempotency_key.{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("other_package")
def test_a_retry_across_the_move_gets_the_answer_of_the_other_package(
    shop: Callable[..., SimpleNamespace], settings: Settings, client: Client, rf: RequestFactory
) -> None:
    urls = 'from django.urls import path\nurlpatterns = [path("orders/", create_order)]'
    view = file_of("move-from-another-middleware.md", "shop/views.py")
    example = serve_code(settings, view, urls)
    before = rf.post("/orders/", ORDER, headers=KEY)
    name = example.BasicKeyEncoder().encode_key(before, "key-1")
    example.CacheKeyStorage().store_data("default", name, JsonResponse({"id": 7}, status=201))
    boundary = {
        "data": before.body,
        "content_type": before.content_type + "; boundary=BoUnDaRyStRiNg",
    }
    answer = client.post("/orders/", headers=KEY, **boundary)
    assert (answer.status_code, answer.json()) == (201, {"id": 7})
    assert not Entry.objects.exists()
    new = {"Idempotency-Key": "key-2"}
    first, again = (client.post("/orders/", headers=new, **boundary) for _ in range(2))
    assert (first.status_code, again["Idempotent-Replayed"], Entry.objects.count()) == (
        201,
        "true",
        1,
    )
