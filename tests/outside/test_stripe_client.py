"""Stripe's own client, with its own retries, against a protected view over connections that break:
one charge, one answer."""

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import requests
import stripe
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from pytest_django import Settings
from pytest_django.live_server_helper import LiveServer

from tests.kit.chance import chance
from tests.kit.threads import Gate, all_at_once
from tests.kit.views import Counted, both_kinds
from tests.models import Entry

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.postgres, pytest.mark.processes]

CHARGE = {"amount": 2000, "currency": "usd", "source": "tok_visa"}
#: What happens to a request on its way.
PASS, CONFLICT, ERROR, ERROR_AFTER, CUT_BEFORE, CUT_AFTER, CUT_IN_BODY = (
    *("pass", "409", "500", "500 after", "cut before", "cut after", "cut in the body"),
)
#: The first loses its client while the server is at work; the second waits for the end of that.
LEAVE, REJOIN = "leave", "rejoin"


class FaultyWire(ThreadingHTTPServer):
    """A proxy to ``server_url`` with one fault for each request to come; without any left it is a
    good one."""

    daemon_threads = True

    def __init__(self, server_url: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.server_address_behind = server_url.removeprefix("http://")
        self.faults: list[str] = []
        #: Those of single keys, which come before the others.
        self.faults_of: dict[str, list[str]] = {}
        #: What the server itself answered, in the order of its answers.
        self.answers: list[int] = []
        self.on_answer: Callable[[int], None] = lambda status: None
        self.left_run_ended = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyWire

    def do_POST(self) -> None:
        wire = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        faults = wire.faults_of.get(self.headers["Idempotency-Key"]) or wire.faults
        fault = faults.pop(0) if faults else PASS
        self.close_connection = True
        if fault in (CONFLICT, ERROR):
            self.answer(int(fault), {}, b"{}")
        if fault in (CONFLICT, ERROR, CUT_BEFORE):
            return
        if fault == REJOIN:
            assert wire.left_run_ended.wait(60)
        behind = http.client.HTTPConnection(wire.server_address_behind, timeout=60)
        behind.request("POST", self.path, body, dict(self.headers))
        if fault == LEAVE:
            self.connection.shutdown(2)
        answer = behind.getresponse()
        content = answer.read()
        behind.close()
        wire.answers.append(answer.status)
        wire.on_answer(answer.status)
        if fault == LEAVE:
            wire.left_run_ended.set()
        elif fault == ERROR_AFTER:
            self.answer(500, {}, b"{}")
        elif fault != CUT_AFTER:
            self.answer(answer.status, dict(answer.getheaders()), content, cut=fault == CUT_IN_BODY)

    def answer(
        self, status: int, headers: dict[str, str], body: bytes, *, cut: bool = False
    ) -> None:
        self.send_response_only(status)
        for name, value in (
            headers | {"Content-Length": str(len(body)), "Connection": "close"}
        ).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def wire(live_server: LiveServer) -> Iterator[FaultyWire]:
    with FaultyWire(live_server.url) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


@contextmanager
def pointed_at(wire: FaultyWire) -> Iterator[stripe.StripeClient]:
    """Give the official client, with two retries, pointed at the wire."""
    with requests.Session() as session:
        session.trust_env = False
        own = stripe.RequestsClient(timeout=60, session=session)
        yield stripe.StripeClient(
            "sk_test_1", base_addresses={"api": wire.url}, http_client=own, max_network_retries=2
        )


@pytest.fixture
def client(wire: FaultyWire) -> Iterator[stripe.StripeClient]:
    with pointed_at(wire) as client:
        yield client


def account(request: HttpRequest) -> str:
    """Return whose keys these are."""
    return f"account:{request.headers['Authorization']}"


def charge(request: HttpRequest) -> HttpResponseBase:
    """Take the money, and answer as ``POST /v1/charges`` does."""
    made = Entry.objects.create(
        name=request.POST["amount"], idempotency_key=request.idempotency_key
    )
    amount, currency = int(request.POST["amount"]), request.POST["currency"]
    return JsonResponse(
        {
            "id": f"ch_{made.pk}",
            "object": "charge",
            "amount": amount,
            "currency": currency,
            "paid": True,
        }
    )


@pytest.fixture
def serve_charges(settings: Settings) -> Callable[..., Counted]:
    """Return a function that puts a protected view of a kind at ``/v1/charges``, and returns its
    work."""

    def serve(kind: Any, work: Callable[[HttpRequest], HttpResponseBase] = charge) -> Counted:
        # As Stripe does it: its client knows an idempotency_error by the status 400.
        settings.IDEMPOTENCY = {
            "ERROR_RENDERER": "idempotency.contrib.stripe_errors.render",
            "MISMATCH_STATUS": 400,
        }
        counted = Counted(work)
        patterns = [path("v1/charges", csrf_exempt(kind(counted, scope=account)))]
        settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": patterns})
        return counted

    return serve


def assert_charged_once(made: stripe.Charge) -> None:
    """The money was taken once, and the client knows by which charge."""
    assert [f"ch_{entry.pk}" for entry in Entry.objects.all()] == [made.id]
    assert (made.amount, made.currency, made.paid) == (2000, "usd", True)


@both_kinds
@pytest.mark.parametrize(
    "faults",
    [
        [],
        [CONFLICT, ERROR],
        [CUT_BEFORE, CUT_AFTER],
        [CUT_AFTER, CONFLICT],
        [ERROR_AFTER, CUT_AFTER],
        [CUT_AFTER, ERROR],
    ],
    ids=lambda faults: ", ".join(faults) or "none",
)
def test_43_the_stripe_client_gets_one_charge_over_faults(
    serve_charges: Any, wire: FaultyWire, client: stripe.StripeClient, kind: Any, faults: list[str]
) -> None:
    work = serve_charges(kind)
    wire.faults = list(faults)

    made = client.v1.charges.create(CHARGE)

    assert_charged_once(made)
    assert work.runs == 1
    assert wire.faults == []


@both_kinds
def test_43_the_stripe_client_gets_the_charge_of_a_first_try_that_is_still_at_work(
    serve_charges: Any, wire: FaultyWire, client: stripe.StripeClient, kind: Any
) -> None:
    gate = Gate()

    def slowly(request: HttpRequest) -> HttpResponseBase:
        gate.wait_here()
        return charge(request)

    work = serve_charges(kind, slowly)
    wire.faults = [LEAVE, PASS, REJOIN]
    wire.on_answer = lambda status: gate.open() if status == 409 else None

    made = client.v1.charges.create(CHARGE)

    assert_charged_once(made)
    assert work.runs == 1
    assert wire.answers == [409, 200, 200]


@both_kinds
def test_43_the_stripe_client_gets_a_charge_after_errors_of_the_view(
    serve_charges: Any, wire: FaultyWire, client: stripe.StripeClient, kind: Any
) -> None:
    failures = [ConnectionError("on purpose"), ConnectionError("on purpose")]

    def stumbling(request: HttpRequest) -> HttpResponseBase:
        answer = charge(request)
        if failures:
            raise failures.pop()
        return answer

    serve_charges(kind, stumbling)

    made = client.v1.charges.create(CHARGE)

    assert_charged_once(made)
    assert wire.answers == [500, 500, 200]


@both_kinds
def test_43_the_stripe_client_that_gave_up_gets_the_charge_when_it_asks_with_the_key(
    serve_charges: Any, wire: FaultyWire, client: stripe.StripeClient, kind: Any
) -> None:
    """It does not retry an answer that was cut in its body."""
    serve_charges(kind)
    wire.faults = [CUT_IN_BODY]

    with pytest.raises(stripe.APIConnectionError):
        client.v1.charges.create(CHARGE, {"idempotency_key": "order-17"})
    made = client.v1.charges.create(CHARGE, {"idempotency_key": "order-17"})

    assert_charged_once(made)
    assert made.last_response.headers["Idempotent-Replayed"] == "true"


@both_kinds
def test_43_the_stripe_client_knows_the_error_of_a_key_with_another_charge(
    serve_charges: Any, wire: FaultyWire, client: stripe.StripeClient, kind: Any
) -> None:
    serve_charges(kind)
    made = client.v1.charges.create(CHARGE, {"idempotency_key": "order-17"})

    with pytest.raises(stripe.IdempotencyError, match="used for another request"):
        client.v1.charges.create(CHARGE | {"amount": 9999}, {"idempotency_key": "order-17"})

    assert_charged_once(made)
    assert wire.answers == [200, 400]


@both_kinds
def test_43_the_stripe_client_gets_each_charge_once_in_a_storm_of_faults(
    serve_charges: Any, wire: FaultyWire, kind: Any, record_property: Callable[[str, object], None]
) -> None:
    serve_charges(kind)
    drawing = chance(kind.__name__)
    drawn = {
        f"order-{n}": drawing.choices(
            [CONFLICT, ERROR, ERROR_AFTER, CUT_BEFORE, CUT_AFTER], k=n % 3
        )
        for n in range(40)
    }
    wire.faults_of = {key: list(faults) for key, faults in drawn.items()}

    def buy(number: int) -> list[stripe.Charge]:
        with pointed_at(wire) as client:
            orders = list(drawn)[number::8]
            return [
                client.v1.charges.create(CHARGE, {"idempotency_key": order}) for order in orders
            ]

    charges = [charge for bought in all_at_once(buy, 8) for charge in bought]

    assert len({charge.id for charge in charges}) == len(charges) == len(drawn)
    executions, faults = Entry.objects.count(), sum(map(len, drawn.values()))
    assert executions == len(drawn)
    assert not any(wire.faults_of.values())
    record_property(
        "counts",
        f"stripe ({kind.__name__}): {len(drawn)} charges over {faults} faults, {executions}"
        " executions",
    )
