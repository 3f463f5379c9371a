"""The other routes of Rocket Rides: reading and changing rides, Stripe's events, the web page,
health."""

# ruff: noqa: F811 (fixtures are imported, and named by the tests that use them)

import hashlib
import hmac
import json
import time
import uuid

import pytest
from django.conf import settings
from django.test import Client
from django.utils import timezone

from idempotency.models import IdempotencyKey, ProcessedMessage
from rides_demo.models import AuditRecord, Receipt, Ride
from rides_demo.sandbox.switch import BEHAVIOURS
from tests.factories import ReceiptFactory, RideFactory
from tests.kit.ageing import lock_end
from tests.kit.rides import RIDE, jane, joe, max_, sandbox  # noqa: F401

pytestmark = pytest.mark.django_db
TARGET = {"target_lat": 1.5, "target_lon": -2.5}


def error_code(response):
    return response.json()["error"]["code"]


class TestReading:
    def test_a_rider_sees_a_ride_of_their_own(self, jane):
        booked = jane.book()

        response = jane.send("GET", booked["Location"])

        assert (response.status_code, response.json()["ride"]) == (200, booked.json()["ride"])
        assert response["ETag"] == booked["ETag"]

    @pytest.mark.parametrize(
        "path",
        ["/rides/1000000", "/rides/99999999999999999999", "/rides/0", "/rides/" + "9" * 5000],
    )
    def test_there_is_no_other_ride(self, jane, path):
        assert jane.send("GET", path).status_code == 404

    def test_the_ride_of_another_rider_looks_like_none(self, jane, max_):
        location = jane.book()["Location"]

        other, none = max_.send("GET", location), max_.send("GET", "/rides/123456")

        assert (other.status_code, other.content) == (404, none.content)

    def test_a_ride_that_the_client_has_seen_already_is_not_sent_again(self, jane):
        booked = jane.book()

        assert jane.send("GET", booked["Location"], If_None_Match=booked["ETag"]).status_code == 304

    def test_reading_with_a_key_stores_nothing(self, jane):
        ride = RideFactory(user=jane.user)

        assert jane.send("GET", f"/rides/{ride.pk}", key="k").status_code == 200
        assert not IdempotencyKey.objects.exists()


class TestCreationByReference:
    def test_the_same_body_again_is_the_same_ride(self, jane, sandbox):
        path = f"/rides/by-ref/{uuid.uuid4()}"

        first = jane.send("PUT", path, RIDE)
        second = jane.send("PUT", path.upper().replace("/RIDES/BY-REF/", "/rides/by-ref/"), RIDE)

        assert (first.status_code, second.status_code) == (201, 200)
        assert first.json() == second.json()
        assert first["Location"] == f"/rides/{Ride.objects.get().pk}"
        assert Ride.objects.get().stripe_charge_id is None
        assert AuditRecord.objects.count() == 1

    def test_another_body_is_a_conflict(self, jane):
        path = f"/rides/by-ref/{uuid.uuid4()}"
        jane.send("PUT", path, RIDE)

        response = jane.send("PUT", path, RIDE | {"target_lat": 0})

        assert (response.status_code, error_code(response)) == (409, "ride_differs")
        assert Ride.objects.count() == 1

    def test_the_reference_of_another_rider_is_free(self, jane, max_):
        path = f"/rides/by-ref/{uuid.uuid4()}"

        assert (
            jane.send("PUT", path, RIDE).status_code,
            max_.send("PUT", path, RIDE).status_code,
        ) == (201, 201)

    def test_the_body_is_checked(self, jane):
        response = jane.send("PUT", f"/rides/by-ref/{uuid.uuid4()}", {})

        assert (response.status_code, error_code(response)) == (422, "param_missing")

    def test_a_token_is_needed(self, jane):
        jane.token = "nobody"

        assert jane.send("PUT", f"/rides/by-ref/{uuid.uuid4()}", RIDE).status_code == 401


class TestChangingTheTarget:
    @pytest.fixture
    def path(self, jane):
        return f"/rides/{RideFactory(user=jane.user).pk}"

    @pytest.fixture
    def etag(self, jane, path):
        return jane.send("GET", path)["ETag"]

    def test_the_target_changes_and_the_retry_is_a_replay(self, jane, path, etag):
        first = jane.send("PATCH", path, TARGET, key="k", If_Match=etag)
        second = jane.send("PATCH", path, TARGET, key="k", If_Match=etag)

        assert (first.status_code, first.json()["ride"]["target"]) == (200, [1.5, -2.5])
        # The ETag is stale by now, but the answer is older than the question.
        assert (second.status_code, second.content, second["Idempotent-Replayed"]) == (
            200,
            first.content,
            "true",
        )
        assert first["ETag"] == jane.send("GET", path)["ETag"] != etag
        assert AuditRecord.objects.get().action == "ride.target_changed"

    def test_a_stale_ride_is_not_changed_and_spends_no_key(self, jane, path, etag):
        jane.send("PATCH", path, TARGET, key="first", If_Match=etag)

        response = jane.send(
            "PATCH", path, {"target_lat": 3, "target_lon": 3}, key="second", If_Match=etag
        )

        assert (response.status_code, error_code(response)) == (412, "precondition_failed")
        assert not IdempotencyKey.objects.filter(idempotency_key="second").exists()

    @pytest.mark.parametrize("etag", ['W/"{}"', '"other"', "nonsense", ""])
    def test_only_a_strong_match_counts(self, jane, path, etag):
        current = jane.send("GET", path)["ETag"].strip('"')

        assert (
            jane.send("PATCH", path, TARGET, key="k", If_Match=etag.format(current)).status_code
            == 412
        )

    def test_any_state_will_do_when_the_client_says_so(self, jane, path):
        assert jane.send("PATCH", path, TARGET, key="k", If_Match="*").status_code == 200

    def test_the_client_must_say_what_it_has_seen(self, jane, path):
        response = jane.send("PATCH", path, TARGET, key="k")

        assert (response.status_code, error_code(response)) == (428, "precondition_required")
        assert not IdempotencyKey.objects.exists()

    def test_after_the_pick_up_the_target_stays(self, jane, path, etag):
        Ride.objects.update(picked_up_at=timezone.now())

        response = jane.send("PATCH", path, TARGET, key="k", If_Match=etag)

        assert (response.status_code, error_code(response)) == (409, "ride_picked_up")

    def test_the_ride_of_another_rider_is_not_found(self, path, max_):
        assert max_.send("PATCH", path, TARGET, key="k", If_Match="*").status_code == 404

    @pytest.mark.parametrize("body", [{}, {"target_lat": 1}, {"target_lat": 91, "target_lon": 0}])
    def test_the_body_is_checked_before_a_key_is_spent(self, jane, path, body):
        assert jane.send("PATCH", path, body, key="k", If_Match="*").status_code == 422
        assert not IdempotencyKey.objects.exists()

    def test_a_key_is_required(self, jane, path, etag):
        assert jane.send("PATCH", path, TARGET, If_Match=etag).json()["code"] == "key_missing"


def event(ride, *, event_id="evt_1", charge="ch_1", kind="charge.succeeded", **fields):
    subject = {"id": charge, "object": "charge", "metadata": {"ride_id": str(ride)}} | fields
    return json.dumps(
        {"id": event_id, "object": "event", "type": kind, "data": {"object": subject}}
    ).encode()


def deliver(body, *, seconds_ago=0, secret=None, signature=None):
    at = str(int(time.time()) - seconds_ago)
    secret = settings.STRIPE_WEBHOOK_SECRET if secret is None else secret
    proof = hmac.new(secret.encode(), at.encode() + b"." + body, hashlib.sha256).hexdigest()
    headers = {"Stripe-Signature": f"t={at},v1={proof}" if signature is None else signature}
    return Client(raise_request_exception=False).post(
        "/webhooks/stripe", body, "application/json", headers=headers
    )


class TestStripeEvents:
    @pytest.fixture
    def ride(self):
        return RideFactory(stripe_charge_id="ch_1")

    def test_an_event_marks_its_ride_as_paid_once(self, ride):
        assert deliver(event(ride.pk)).status_code == 200
        ride.refresh_from_db()
        paid_at = ride.paid_at

        assert deliver(event(ride.pk)).status_code == 200

        ride.refresh_from_db()
        assert ride.paid_at == paid_at is not None
        assert ProcessedMessage.objects.count() == 1

    def test_an_event_that_is_ahead_of_the_charge_is_taken_at_its_next_delivery(self, ride):
        Ride.objects.update(stripe_charge_id=None)
        response = deliver(event(ride.pk))
        assert (response.status_code, error_code(response)) == (503, "event_too_early")
        assert not ProcessedMessage.objects.exists()

        Ride.objects.update(stripe_charge_id="ch_1")

        assert deliver(event(ride.pk)).status_code == 200
        ride.refresh_from_db()
        assert ride.paid_at is not None

    def test_an_event_for_the_customer_of_another_tenant_is_taken_and_does_nothing(self, ride):
        Ride.objects.update(stripe_charge_id=None)
        assert deliver(event(ride.pk, customer="cus_of_another_tenant")).status_code == 200
        response = deliver(event(ride.pk, event_id="evt_2", customer=ride.user.stripe_customer_id))
        assert (response.status_code, error_code(response)) == (503, "event_too_early")

    @pytest.mark.parametrize(
        ("age", "secret", "signature"),
        [
            (301, None, None),
            (0, "whsec_other", None),
            (0, None, ""),
            (0, None, "nonsense"),
            (0, None, "t=x,v1=y"),
            (0, None, "t=1,v1=\u00fc"),
        ],
    )
    def test_what_stripe_has_not_signed_just_now_is_refused(self, ride, age, secret, signature):
        response = deliver(event(ride.pk), seconds_ago=age, secret=secret, signature=signature)

        assert (response.status_code, error_code(response)) == (400, "signature_invalid")
        assert Ride.objects.get().paid_at is None

    def test_a_body_that_was_changed_after_it_was_signed_is_refused(self, ride):
        at, body = str(int(time.time())), event(ride.pk)
        proof = hmac.new(
            settings.STRIPE_WEBHOOK_SECRET.encode(), f"{at}.".encode() + body, hashlib.sha256
        ).hexdigest()

        assert deliver(body + b" ", signature=f"t={at},v1={proof}").status_code == 400
        assert deliver(body, signature=f"t={at},v1={proof}").status_code == 200

    @pytest.mark.parametrize(
        "body", [b"", b"{", b"\xff\xfe", b"[" * 10000, b"{}", b"[]", b"null", b"1"]
    )
    def test_a_signed_body_that_is_no_event_is_refused(self, db, body):
        assert deliver(body).status_code == 400

    @pytest.mark.parametrize("event_id", ["evt_\0", "evt_\ud800", "e" * 256, "", 7, None, {"a": 1}])
    def test_an_event_whose_id_cannot_be_kept_is_refused(self, ride, event_id):
        assert deliver(event(ride.pk, event_id=event_id)).status_code == 400
        assert not ProcessedMessage.objects.exists()

    @pytest.mark.parametrize("charge", ["ch_\0", "ch_\ud800", None])
    def test_a_charge_whose_id_is_none_of_stripe_s_pays_nothing(self, ride, charge):
        assert deliver(event(ride.pk, charge=charge)).status_code == 400
        assert Ride.objects.get().paid_at is None

    @pytest.mark.parametrize(
        "subject", [{}, {"id": "ch_1"}, {"id": "ch_1", "metadata": "x"}, [], "x"]
    )
    def test_a_charge_without_its_parts_pays_nothing(self, ride, subject):
        body = {
            "id": "evt_1",
            "object": "event",
            "type": "charge.succeeded",
            "data": {"object": subject},
        }
        assert deliver(json.dumps(body).encode()).status_code in (200, 400)
        assert Ride.objects.get().paid_at is None

    @pytest.mark.parametrize("named", ["", "x", "0", "9" * 30, "\u0663"])
    def test_an_event_of_no_ride_is_taken_and_does_nothing(self, ride, named):
        assert deliver(event(named)).status_code == 200
        assert Ride.objects.get().paid_at is None

    def test_another_charge_does_not_pay_the_ride(self, ride):
        assert deliver(event(ride.pk, charge="ch_other")).status_code == 200
        assert Ride.objects.get().paid_at is None


class TestPage:
    def test_a_stranger_may_sign_in(self, jane):
        assert "demo-jane" in Client().get("/").content.decode()

    def test_a_rider_sees_a_form_with_a_new_key_each_time_and_rides_with_receipts(self, jane):
        ride = RideFactory(user=jane.user, stripe_charge_id="ch_shown")
        ReceiptFactory(ride=ride)
        RideFactory(stripe_charge_id="ch_hidden")
        client = Client()
        client.post("/sign-in", {"token": "demo-jane"})

        pages = [client.get("/").content.decode() for _ in range(2)]

        keys = [page.partition('name="idempotency_key" value="')[2][:36] for page in pages]
        assert uuid.UUID(keys[0]) != uuid.UUID(keys[1])
        assert "ch_shown" in pages[0]
        assert f"sent to {Receipt.objects.get().email}" in pages[0]
        assert "ch_hidden" not in pages[0]

    def test_signing_out_shows_nothing_any_more(self, jane):
        client = Client()
        client.post("/sign-in", {"token": "demo-jane"})

        client.post("/sign-out")

        assert "Book a ride" not in client.get("/").content.decode()

    def test_a_session_that_was_planted_is_not_signed_in(self, jane, max_):
        attacker, rider = Client(), Client()
        attacker.post("/sign-in", {"token": "demo-max"})
        attacker.post("/sign-out")
        rider.cookies["sessionid"] = attacker.cookies["sessionid"].value

        rider.post("/sign-in", {"token": "demo-jane"})

        rider_s, attacker_s = (client.get("/").context["rider"] for client in (rider, attacker))
        assert (rider_s, attacker_s) == (jane.user, None)

    def test_an_unknown_token_signs_nobody_in(self, jane):
        client = Client()

        client.post("/sign-in", {"token": "demo-nobody"})

        assert "Book a ride" not in client.get("/").content.decode()

    def test_another_site_signs_nobody_in(self, jane):
        client = Client(enforce_csrf_checks=True)

        assert client.post("/sign-in", {"token": "demo-jane"}).status_code == 403
        assert client.get("/").context["rider"] is None

    def test_another_host_is_not_served(self, db):
        assert Client().get("/", headers={"Host": "evil.example"}).status_code == 400
        assert (
            "evil"
            not in Client().get("/", headers={"X-Forwarded-Host": "evil.example"}).content.decode()
        )

    def test_the_session_does_not_authenticate_to_the_api(self, jane):
        client = Client()
        client.post("/sign-in", {"token": "demo-jane"})

        assert client.post("/rides", RIDE, headers={"Idempotency-Key": "k"}).status_code == 401

    def test_the_page_without_a_sandbox_has_no_switch(self, jane, settings):
        settings.STRIPE_API_BASE = None
        client = Client()
        client.post("/sign-in", {"token": "demo-jane"})

        assert 'name="behaviour"' not in client.get("/").content.decode()
        assert client.post("/switches/stripe", {"behaviour": "down"}).status_code == 404

    def test_the_page_says_when_the_completer_would_come(self, jane, settings):
        settings.IDEMPOTENCY = settings.IDEMPOTENCY | {"COMPLETER_MIN_AGE_SECONDS": 30}
        client = Client()
        client.post("/sign-in", {"token": "demo-jane"})

        assert "soon after it is 30 seconds old" in " ".join(
            client.get("/").content.decode().split()
        )


class TestPageState:
    @pytest.fixture
    def window(self, jane):
        client = Client()
        client.post("/sign-in", {"token": "demo-jane"})
        return client

    def test_a_booking_is_shown_with_what_it_made(self, jane, window):
        jane.book(key="k")

        shown = window.get("/page/booking?key=k").json()["booking"]

        assert (shown["state"], shown["response_code"], set(shown["steps"].values())) == (
            "finished",
            201,
            {"done"},
        )
        assert (shown["rides"], shown["receipts"], shown["runs"]) == (1, 0, 1)
        assert window.get("/switches/charges?key=k").json() == {"charges": 1}
        assert shown["history"][0]["event"] == "claimed"
        assert (
            shown["admin"]
            == f"/admin/idempotency/idempotencykey/{IdempotencyKey.objects.get().pk}/change/"
        )

    def test_the_steps_and_runs_of_a_key_with_many_runs_come_from_the_rows(self, jane, window):
        jane.book(key="k")
        IdempotencyKey.objects.update(attempts=40, history=[])

        shown = window.get("/page/booking?key=k").json()["booking"]

        assert (shown["runs"], set(shown["steps"].values())) == (40, {"done"})

    def test_a_declined_card_is_a_step_that_was_skipped(self, joe, sandbox):
        window = Client()
        window.post("/sign-in", {"token": "demo-joe"})
        joe.book(key="k")

        shown = window.get("/page/booking?key=k").json()["booking"]

        assert (shown["state"], shown["response_code"]) == ("finished", 402)
        assert shown["steps"] == {
            "started": "done", "ride_created": "done", "charge_created": "skipped",
            "finished": "done",
        }  # fmt: skip
        assert window.get("/switches/charges?key=k").json() == {"charges": 0}

    def test_a_lock_that_has_expired_holds_nobody_up(self, jane, window, sandbox):
        sandbox.faults.replace([{"fault": "down"}])
        jane.book(key="k")
        booking = "/page/booking?key=k"

        IdempotencyKey.objects.update(locked_until=lock_end(1))
        held = window.get(booking).json()["booking"]
        IdempotencyKey.objects.update(locked_until=lock_end(91))
        free = window.get(booking).json()["booking"]

        assert (held["state"], held["steps"]["charge_created"]) == ("running", "running")
        assert 80 < held["lock_seconds"] < 90
        assert (free["state"], free["steps"]["charge_created"], free["lock_seconds"]) == (
            "waiting",
            "waiting",
            None,
        )

    @pytest.mark.parametrize(
        ("fault", "tries", "state"), [("down", 1, "waiting"), ("500_begun", 2, "stuck")]
    )
    def test_a_booking_that_stands_still_says_how(self, jane, window, sandbox, fault, tries, state):
        sandbox.faults.replace([{"fault": fault}])
        for _ in range(tries):
            jane.book(key="k")

        shown = window.get("/page/booking?key=k").json()["booking"]

        assert (shown["state"], shown["rides"]) == (state, 1)
        assert shown["steps"] == {
            "started": "done", "ride_created": "done", "charge_created": state, "finished": "todo",
        }  # fmt: skip
        assert window.get("/switches/charges?key=k").json() == {"charges": 0}

    def test_the_booking_of_another_rider_looks_like_none(self, max_, window):
        max_.book(key="k")

        assert (
            window.get("/page/booking?key=k").json()
            == {"booking": None}
            == window.get("/page/booking?key=none").json()
        )
        assert window.get("/switches/charges?key=k").json() == {"charges": 0}

    @pytest.mark.parametrize("key", ["", "%00", "%ff"])
    def test_a_key_that_cannot_be_is_none(self, window, key):
        assert window.get(f"/page/booking?key={key}").json() == {"booking": None}

    @pytest.mark.parametrize("position", BEHAVIOURS)
    def test_the_switch_stays_where_it_was_put(self, window, sandbox, position):
        assert window.post("/switches/stripe", {"behaviour": position}).json() == {
            "behaviour": position
        }

        assert (
            f'value="{position}" aria-describedby="stripe-{position}-text" checked'
            in window.get("/").content.decode()
        )
        assert [fault["fault"] for fault in sandbox.faults.state()["faults"]] == [
            fault["fault"] for fault in BEHAVIOURS[position].faults
        ]

    def test_the_faults_of_others_are_no_position(self, window, sandbox):
        sandbox.faults.replace([{"fault": "429"}])

        assert " checked" not in window.get("/").content.decode()

    def test_an_unknown_position_changes_nothing(self, window, sandbox):
        window.post("/switches/stripe", {"behaviour": "down"})

        assert window.post("/switches/stripe", {"behaviour": "sideways"}).status_code == 400
        assert [fault["fault"] for fault in sandbox.faults.state()["faults"]] == ["down"]

    def test_a_stranger_sees_no_booking_and_moves_no_switch(self, jane, sandbox):
        jane.book(key="k")

        assert Client().get("/page/booking?key=k").status_code == 403
        assert Client().get("/switches/charges?key=k").status_code == 403
        assert Client().post("/switches/stripe", {"behaviour": "down"}).status_code == 403
        assert sandbox.faults.state()["faults"] == []

    def test_another_site_moves_no_switch(self, jane, sandbox):
        client = Client(enforce_csrf_checks=True)
        session = client.session
        session["rides_token"] = "demo-jane"
        session.save()

        assert client.post("/switches/stripe", {"behaviour": "down"}).status_code == 403
        assert sandbox.faults.state()["faults"] == []


class TestHealth:
    def test_it_is_well_while_the_database_answers(self):
        assert Client().get("/healthz").status_code == 200


class TestAdmin:
    def test_every_list_and_page_opens(self, jane, admin_client):
        ride = jane.book().json()["ride"]["id"]
        ReceiptFactory(ride_id=ride, email="jane@example.com")

        for model in ("user", "ride", "auditrecord", "receipt"):
            assert admin_client.get(f"/admin/rides_demo/{model}/").status_code == 200
        assert admin_client.get(f"/admin/rides_demo/ride/{ride}/change/").status_code == 200
        assert admin_client.get(f"/admin/rides_demo/user/{jane.user.pk}/change/").status_code == 200
        assert admin_client.get("/admin/rides_demo/ride/?q=jane").status_code == 200
