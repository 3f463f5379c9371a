"""The simulator's clients, against the demo over real HTTP: each does what its kind says, and
notices what is wrong."""

# ruff: noqa: F811 (fixtures are imported, and named by the tests that use them)

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from django.core.management import CommandError, call_command

from idempotency.models import IdempotencyKey
from rides_demo.models import Ride
from rides_demo.processes.ports import free_port
from rides_demo.simulator.booking_clients import Booking, BookingClients, Outcome, Tally
from rides_demo.simulator.crashes import VICTIMS
from rides_demo.simulator.simulation import FAULTS, KINDS, Plan, Simulation
from tests.kit.rides import RIDE, jane, joe, sandbox  # noqa: F401
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.postgres, pytest.mark.processes]


@pytest.fixture
def clients(live_server) -> Iterator[BookingClients]:
    clients = BookingClients(live_server.url, Tally())
    yield clients
    clients.close()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("gone", "declined")])
def test_a_client_books_one_ride_whatever_happens_to_it(jane, clients, kind):
    booking = Booking("sim-1", kind, jane.token, RIDE)

    outcome = clients.run(booking)

    assert outcome.label == "201"
    assert clients.tally.wrong == []
    assert clients.resend(booking).content == outcome.answer.content
    assert [ride.pk for ride in Ride.objects.all()] == [outcome.answer.json()["ride"]["id"]]
    assert clients.tally.counts[f"fault {kind}"] == (kind != "plain")


def test_a_client_who_goes_away_gets_no_answer_but_its_ride_is_booked(jane, clients):
    outcome = clients.run(Booking("sim-1", "gone", jane.token, RIDE))

    assert outcome.label == "went away"
    assert eventually(lambda: IdempotencyKey.objects.finished().count()) == 1


def test_a_declined_card_is_what_the_client_expects(joe, clients):
    assert clients.run(Booking("sim-1", "declined", joe.token, RIDE)).label == "402"
    assert clients.tally.wrong == []


def test_a_client_waits_for_stripe(jane, sandbox, clients):
    sandbox.faults.replace([{"fault": "429", "count": 1}])

    outcome = clients.run(Booking("sim-1", "plain", jane.token, RIDE))

    assert (outcome.label, outcome.tries) == ("201", 2)


def test_a_run_under_the_weather_ends_with_every_ride_booked_and_replayed(
    jane, joe, sandbox, live_server, tmp_path
):
    plan = Plan.draw(30, ("duplicates", "cut", "mismatch", "decline", "stripe-faults"), seed=4)
    # There is only one rider with a good card here.
    bookings = tuple(
        Booking(b.key, b.kind, b.token.replace("max", "jane"), b.body) for b in plan.bookings
    )
    plan = Plan(plan.prefix, bookings, plan.events, plan.stripe_faults)
    simulation = Simulation(plan, live_server.url, stripe_url=sandbox.url, run_dir=tmp_path, seed=4)

    simulation.run(4, lambda done: None)
    simulation.replay(4)
    simulation.close()

    assert simulation.tally.wrong == []
    assert {label for _, label in simulation.table()} == {"201", "402"}
    assert simulation.booked() == dict(
        Ride.objects.filter(stripe_charge_id__isnull=False).values_list(
            "idempotency_key__idempotency_key", "pk"
        )
    )
    assert sandbox.faults.state()["faults"] == []


class Forgetful(BaseHTTPRequestHandler):
    """A server that makes every mistake the client looks for: each request books another ride."""

    protocol_version = "HTTP/1.1"
    booked = 0

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        type(self).booked += 1
        body = b'{"ride": {"id": %d}}' % self.booked
        self.send_response(201)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        """Say nothing."""


class Stumbling(Forgetful):
    """A server whose first answer is a 500."""

    def do_POST(self):
        if not type(self).booked:
            type(self).booked += 1
            self.send_error(500)
        else:
            super().do_POST()


class Limited(Forgetful):
    """A server whose database ends each transaction."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b'{"code": "time_limit_exceeded", "retryable": false}'
        self.send_response(503)
        self.send_header("Content-Type", "application/problem+json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(params=[Forgetful])
def forgetful(request) -> Iterator[str]:
    request.param.booked = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), request.param) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("kind", ["duplicates", "mismatch", "declined"])
def test_a_wrong_answer_is_noticed(forgetful, kind):
    clients = BookingClients(forgetful, Tally())

    clients.run(Booking("sim-1", kind, "demo-joe" if kind == "declined" else "demo-jane", RIDE))
    clients.close()

    assert len(clients.tally.wrong) == 1


@pytest.mark.parametrize(("limited", "label", "wrong"), [(True, "gave up", 0), (False, "503", 1)])
@pytest.mark.parametrize("forgetful", [Limited], indirect=True)
def test_a_time_limit_is_right_only_if_the_role_has_limits(forgetful, limited, label, wrong):
    clients = BookingClients(forgetful, Tally(), limited=limited)

    assert clients.run(Booking("sim-1", "plain", "demo-jane", RIDE)).label == label
    clients.close()

    assert len(clients.tally.wrong) == wrong


@pytest.mark.parametrize("forgetful", [Stumbling], indirect=True)
def test_an_internal_error_is_noticed_even_if_the_retry_succeeds(forgetful):
    clients = BookingClients(forgetful, Tally())

    assert clients.run(Booking("sim-1", "plain", "demo-jane", RIDE)).label == "201"
    clients.close()

    assert len(clients.tally.wrong) == 1


def test_a_retry_with_other_bytes_is_noticed(forgetful, tmp_path):
    simulation = Simulation(
        Plan("sim-", (), (), []), forgetful, stripe_url=None, run_dir=tmp_path, seed=1
    )
    booking = Booking("sim-1", "plain", "demo-jane", RIDE)
    simulation.outcomes.append(Outcome(booking, simulation.clients.resend(booking)))

    simulation.replay(1)
    simulation.close()

    assert len(simulation.tally.wrong) == 1


def test_without_a_service_the_command_says_so_at_once(sandbox, tmp_path):
    url = f"http://127.0.0.1:{free_port()}"

    with pytest.raises(CommandError, match="accepts no requests"):
        call_command("simulate", base_url=url, run_dir=tmp_path, faults=(), requests=5)


@pytest.mark.parametrize(
    ("fault", "victim"), [(fault, VICTIMS[fault]) for fault in FAULTS if fault in VICTIMS]
)
def test_without_the_processes_of_the_service_none_is_killed(
    sandbox, live_server, tmp_path, fault, victim
):
    with pytest.raises(CommandError, match=rf"pids\.json does not name the {victim} process"):
        call_command(
            "simulate", base_url=live_server.url, run_dir=tmp_path, faults=(fault,), requests=5
        )
