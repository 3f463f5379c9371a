"""The Stripe sandbox keeps Stripe's contract, as the official client sees it."""

# ruff: noqa: F811 (a fixture is imported, and named by the tests that use it)

import http.server
import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import httpx
import pytest
import requests
import stripe

from rides_demo.processes.ports import free_port
from rides_demo.sandbox import account
from rides_demo.sandbox.server import Sandbox
from tests.kit.rides import slowness  # noqa: F401
from tests.kit.waiting import eventually

SECRET = "whsec_test"
numbers = count()


class Listener(http.server.ThreadingHTTPServer):
    """Takes webhooks: refuses the first ``refuse`` of them, keeps what it verified."""

    daemon_threads = True

    def __init__(self, refuse: int) -> None:
        self.refuse, self.refused, self.taken, self.hosts = refuse, [], [], Counter()
        super().__init__(("127.0.0.1", 0), self.Handler)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            event = stripe.Webhook.construct_event(body, self.headers["Stripe-Signature"], SECRET)
            refused = len(self.server.refused) < self.server.refuse
            (self.server.refused if refused else self.server.taken).append(event)
            self.server.hosts[self.headers["Host"]] += 1
            self.send_response(503 if refused else 200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass


@pytest.fixture
def sandbox():
    with Sandbox() as server:
        yield server


def client_of(
    sandbox: Sandbox, api_key: str = "sk_test_one", timeout: float = 60
) -> stripe.StripeClient:
    session = requests.Session()
    session.trust_env = False
    return stripe.StripeClient(
        api_key,
        base_addresses={"api": sandbox.url},
        http_client=stripe.RequestsClient(timeout=timeout, session=session),
        max_network_retries=0,
    )


@pytest.fixture
def client(sandbox):
    return client_of(sandbox)


@pytest.fixture
def customer(client):
    return client.v1.customers.create({"email": "jane@example.com", "source": "tok_visa"}).id


def charge(client, customer, key=None, amount=2000, **metadata):
    params = {"amount": amount, "currency": "usd", "customer": customer, "metadata": metadata}
    return client.v1.charges.create(params, {"idempotency_key": key or f"key-{next(numbers)}"})


def replayed(answer_or_error) -> bool:
    headers = getattr(answer_or_error, "headers", None) or answer_or_error.last_response.headers
    return {name.lower(): value for name, value in headers.items()}.get(
        "idempotent-replayed"
    ) == "true"


def put_faults(sandbox, *faults):
    request = urllib.request.Request(f"{sandbox.url}/_faults", json.dumps(faults).encode())
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def state(sandbox):
    with urllib.request.urlopen(f"{sandbox.url}/_state") as answer:
        return json.load(answer)


def test_a_charge_is_made_retrieved_and_listed_with_its_metadata(client, customer):
    made = charge(client, customer, ride_id="7")
    assert (made.amount, made.currency, made.status, made.paid) == (2000, "usd", "succeeded", True)
    assert client.v1.charges.retrieve(made.id).metadata["ride_id"] == "7"
    assert [found.id for found in client.v1.charges.list().data] == [made.id]


def test_a_list_is_paged_newest_first_and_filtered_by_customer(client, customer):
    other = client.v1.customers.create({"source": "tok_visa"}).id
    made = [charge(client, who).id for _ in range(13) for who in (customer, other)]
    assert [found.id for found in client.v1.charges.list({"limit": 3}).auto_paging_iter()] == made[
        ::-1
    ]
    assert [
        found.id for found in client.v1.charges.list({"customer": other}).auto_paging_iter()
    ] == made[::-2]
    with pytest.raises(stripe.InvalidRequestError, match="No such customer"):
        client.v1.charges.list({"customer": "cus_unknown"})


def test_a_transfer_is_made_once_for_a_key_and_listed_by_its_account_and_group(client):
    def transfer(account, group, key):
        params = {"amount": 900, "currency": "usd", "destination": account, "transfer_group": group}
        return client.v1.transfers.create(params, {"idempotency_key": key}).id

    made = [transfer(f"acct_{account}", "monday", f"key {account}") for account in "aba"]
    tuesday = transfer("acct_a", "tuesday", "key tuesday")
    assert made[2] == made[0]

    def listed(**filters):
        return [
            one.id for one in client.v1.transfers.list(filters | {"limit": 1}).auto_paging_iter()
        ]

    assert listed() == [tuesday, made[1], made[0]]
    assert listed(destination="acct_a") == [tuesday, made[0]]
    assert listed(destination="acct_a", transfer_group="monday") == [made[0]]
    with pytest.raises(stripe.InvalidRequestError, match="No such destination"):
        transfer("cus_a", "monday", "key of no account")


def test_refunds_add_up_to_the_charge_and_no_further(client, customer):
    made = charge(client, customer)
    client.v1.refunds.create({"charge": made.id, "amount": 500})
    client.v1.refunds.create({"charge": made.id})
    assert (
        client.v1.charges.retrieve(made.id).amount_refunded,
        client.v1.charges.retrieve(made.id).refunded,
    ) == (2000, True)
    with pytest.raises(stripe.InvalidRequestError) as refused:
        client.v1.refunds.create({"charge": made.id})
    assert refused.value.code == "charge_already_refunded"


def test_the_same_key_and_parameters_get_the_same_answer(client, customer, sandbox):
    first, again = charge(client, customer, "k"), charge(client, customer, "k")
    assert first.last_response.body == again.last_response.body
    assert (replayed(first), replayed(again)) == (False, True)
    assert len(state(sandbox)["charges"]) == 1


def test_the_same_key_with_other_parameters_is_refused(client, customer, sandbox):
    charge(client, customer, "k")
    with pytest.raises(stripe.IdempotencyError) as refused:
        charge(client, customer, "k", amount=2001)
    assert refused.value.http_status == 400
    assert len(state(sandbox)["charges"]) == 1


def test_keys_belong_to_an_api_key(sandbox, client, customer):
    assert (
        charge(client, customer, "k").id
        != charge(client_of(sandbox, "sk_test_two"), customer, "k").id
    )


def test_a_decline_is_stored_and_charges_nothing(client, sandbox):
    poor = client.v1.customers.create({"source": "tok_chargeCustomerFail"}).id
    for again in (False, True):
        with pytest.raises(stripe.CardError) as declined:
            charge(client, poor, "k")
        assert (declined.value.code, declined.value.user_message) == (
            "card_declined",
            "Your card was declined.",
        )
        assert (declined.value.http_status, replayed(declined.value)) == (402, again)
    assert state(sandbox)["charges"] == []


def test_what_was_refused_before_the_execution_began_spends_no_key(client, customer):
    with pytest.raises(stripe.InvalidRequestError, match="No such customer"):
        charge(client, "cus_unknown", "k")
    assert not replayed(charge(client, customer, "k"))


def test_a_key_in_flight_is_refused_until_the_first_has_its_answer(
    client, customer, sandbox, slowness
):
    put_faults(sandbox, {"fault": "slow", "count": 1})
    with ThreadPoolExecutor() as pool:
        first = pool.submit(charge, client, customer, "k")
        eventually(lambda: any(execution["key"] == "k" for execution in state(sandbox)["keys"]))
        with pytest.raises(stripe.APIError) as refused:
            charge(client_of(sandbox), customer, "k")
        assert (refused.value.http_status, refused.value.error.code) == (
            409,
            "idempotency_key_in_use",
        )
        other = charge(client, customer, "other")
        slowness.set()
        assert other.id != first.result().id
    assert charge(client, customer, "k").id == first.result().id


@pytest.mark.parametrize(
    ("fault", "status", "stored", "charges"),
    [
        ("500_before", 500, False, 0),
        ("500_begun", 500, True, 0),
        ("500_after", 500, True, 1),
        ("429", 429, False, 0),
    ],
)
def test_an_error_is_stored_once_the_execution_began(
    client, customer, sandbox, fault, status, stored, charges
):
    put_faults(sandbox, {"fault": fault, "count": 1})
    with pytest.raises(stripe.StripeError) as failed:
        charge(client, customer, "k")
    assert (failed.value.http_status, replayed(failed.value)) == (status, False)
    assert len(state(sandbox)["charges"]) == charges
    if stored:
        with pytest.raises(stripe.StripeError) as again:
            charge(client, customer, "k")
        assert (again.value.http_status, replayed(again.value)) == (status, True)
    else:
        assert not replayed(charge(client, customer, "k"))


@pytest.mark.parametrize(("fault", "charges"), [("cut_before", 0), ("cut_after", 1)])
def test_a_cut_connection_leaves_the_charge_made_or_not(client, customer, sandbox, fault, charges):
    put_faults(sandbox, {"fault": fault, "count": 1})
    with pytest.raises(stripe.APIConnectionError):
        charge(client, customer, "k")
    assert len(state(sandbox)["charges"]) == charges
    assert replayed(charge(client, customer, "k")) is bool(charges)
    assert len(state(sandbox)["charges"]) == 1


def test_a_charge_whose_client_gave_up_waiting_is_made_all_the_same(customer, sandbox, slowness):
    put_faults(sandbox, {"fault": "slow", "count": 1})
    with pytest.raises(stripe.APIConnectionError):
        charge(client_of(sandbox, timeout=0.2), customer, "k")
    slowness.set()
    eventually(lambda: state(sandbox)["charges"])


def test_a_late_response_is_that_of_a_charge_which_was_made_at_once(
    client, customer, sandbox, slowness
):
    put_faults(sandbox, {"fault": "slow_after"})
    with ThreadPoolExecutor() as pool:
        first = pool.submit(charge, client, customer, "k")
        eventually(lambda: state(sandbox)["charges"])
        again = charge(client_of(sandbox), customer, "k")
        assert not first.done()
        slowness.set()
        assert (replayed(again), again.id) == (True, first.result().id)


def test_down_answers_nobody_until_it_is_up_again(client, customer, sandbox):
    put_faults(sandbox, {"fault": "down", "path": "/v1"})
    for call in (lambda: charge(client, customer, "k"), client.v1.charges.list):
        with pytest.raises(stripe.APIConnectionError):
            call()
    put_faults(sandbox)
    assert not replayed(charge(client, customer, "k"))


def test_the_schedule_of_faults_is_repeatable():
    def schedule(seed: int) -> list[int]:
        with Sandbox(seed=seed) as sandbox:
            client = client_of(sandbox)
            put_faults(
                sandbox, {"fault": "500_before", "path": "/v1/customers", "probability": 0.5}
            )
            answers = []
            for _ in range(20):
                try:
                    answers.append(client.v1.customers.create().last_response.code)
                except stripe.StripeError as error:
                    answers.append(error.http_status)
            return answers

    assert schedule(1) == schedule(1) != schedule(2)
    assert set(schedule(1)) == {200, 500}


@pytest.mark.parametrize(
    "body", [b"", b"7", b"[1]", b'[{"fault": "no"}]', b'[{"fault": "429", "x": 1}]', b"\xff"]
)
def test_a_fault_that_is_not_understood_changes_nothing(sandbox, body):
    put_faults(sandbox, {"fault": "429"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(f"{sandbox.url}/_faults", body))
    with refused.value:
        assert refused.value.code == 400
    assert len(sandbox.faults.state()["faults"]) == 1


def test_without_an_api_key_nobody_is_served(sandbox):
    with pytest.raises(stripe.AuthenticationError):
        client_of(sandbox, "nonsense").v1.charges.list()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"amount": "x"},
        {"amount": "-1"},
        {"amount": "²"},
        {"amount": "1" * 5000},
        {"amount": "2000"},
        {"amount": {"a": "b"}},
        {"amount": "2000", "currency": "usd", "customer": "\x00"},
        {"amount": "2000", "currency": "usd", "customer": {"x": "y"}},
    ],
)
def test_nonsense_gets_400(client, params):
    with pytest.raises(stripe.InvalidRequestError) as refused:
        client.v1.charges.create(params)
    assert refused.value.http_status == 400


def test_twenty_connections_at_once_are_served(sandbox, customer):
    def one(number: int) -> str:
        return charge(client_of(sandbox), customer, f"k{number % 50}").id

    def until_answered(number: int) -> str:
        while True:
            try:
                return one(number)
            except stripe.APIError as error:
                assert error.http_status == 409  # noqa: PT017

    with ThreadPoolExecutor(20) as pool:
        made = list(pool.map(until_answered, range(400)))
    assert len(set(made)) == len(state(sandbox)["charges"]) == 50


def test_each_endpoint_receives_each_event():
    with Listener(refuse=0) as listener:
        threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True).start()
        url, hosts = f"http://127.0.0.1:{listener.server_address[1]}/", ("a.example", "b.example")
        with Sandbox(webhook_url=url, webhook_secret=SECRET, webhook_hosts=hosts) as sandbox:
            client = client_of(sandbox)
            customer = client.v1.customers.create({"source": "tok_visa"}).id
            for n in range(5):
                charge(client, customer, ride_id=str(n))
            times = 5 + state(sandbox)["webhooks"]["sent_twice"]
            eventually(lambda: listener.hosts == dict.fromkeys(hosts, times))
        listener.shutdown()


def test_a_stalled_charge_outlasts_the_timeout_of_the_client_and_is_made_once(monkeypatch, sandbox):
    monkeypatch.setattr(account, "STALL_SECONDS", 2.5)
    client = client_of(sandbox, timeout=1.5)
    customer = client.v1.customers.create({"source": "tok_stall"}).id
    began = time.monotonic()
    first = charge(client, customer, key="one").id
    assert time.monotonic() - began > 2.5
    assert charge(client, customer, key="one").id == first
    assert len(state(sandbox)["charges"]) == 1


def test_a_webhook_is_signed_and_comes_again_until_it_is_taken():
    with Listener(refuse=2) as listener:
        threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://127.0.0.1:{listener.server_address[1]}/"
        with Sandbox(webhook_url=url, webhook_secret=SECRET, seed=1) as sandbox:
            client = client_of(sandbox)
            customer = client.v1.customers.create({"source": "tok_visa"}).id
            made = [charge(client, customer, ride_id=str(n)).id for n in range(20)]
            eventually(lambda: {event.data.object.id for event in listener.taken} == set(made))
            # some come twice, with the same id of the event
            eventually(lambda: len(listener.taken) > len(made))
            twice = state(sandbox)["webhooks"]["sent_twice"]
            eventually(lambda: state(sandbox)["webhooks"]["taken"] == len(made) + twice)
            assert state(sandbox)["webhooks"] == {
                "sent_twice": twice, "taken": len(made) + twice, "refused": 2, "given_up": 0
            }  # fmt: skip
        listener.shutdown()
    assert len(listener.refused) == 2
    assert {event.type for event in listener.taken} == {"charge.succeeded"}
    assert len({event.id for event in listener.taken}) == len(made)
    assert {event.data.object.metadata["ride_id"] for event in listener.taken} == {
        str(n) for n in range(20)
    }


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:18671"},
    ],
    ids=str,
)
def test_pages_of_other_origins_cannot_reach_its_switches(sandbox, headers):
    url = f"{sandbox.url}/_faults"
    with httpx.Client(trust_env=False, headers=headers) as page:
        answers = [
            page.post(url, content='[{"fault": "down"}]'),
            page.get(url),
            page.get(f"{sandbox.url}/_state"),
        ]
    assert [answer.status_code for answer in answers] == [403] * 3
    assert sandbox.faults.state()["faults"] == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_its_own_origin_may_switch_it(sandbox, host):
    own = f"{host}:{sandbox.server_address[1]}"
    headers = {"Origin": f"http://{own}", "Host": own}
    with httpx.Client(trust_env=False, headers=headers) as page:
        assert page.post(f"{sandbox.url}/_faults", content="[]").status_code == 200


def test_a_port_that_is_taken_is_named():
    with Sandbox() as sandbox:
        port = sandbox.server_address[1]
        command = [sys.executable, "-m", "rides_demo.sandbox", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"cannot listen on port {port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_as_a_process_of_its_own_it_says_where_it_listens():
    port = free_port()
    command = [sys.executable, "-m", "rides_demo.sandbox", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == f"listening on http://127.0.0.1:{port}\n"
        process.terminate()
