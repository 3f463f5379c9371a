"""The API of Rocket Rides, line by line of its contract: booking."""

# ruff: noqa: F811 (fixtures are imported, and named by the tests that use them)

import uuid
from datetime import timedelta
from functools import partial

import pytest
from django.db import connection
from django.utils import timezone

from idempotency.completer import CompletePass, complete_once
from idempotency.models import IdempotencyKey, StagedJob
from rides_demo import payments, views
from rides_demo.jobs import send_ride_receipt
from rides_demo.models import AuditRecord, Receipt, Ride, User
from tests.kit.ageing import lock_end
from tests.kit.rides import RIDE, Phone, jane, joe, max_, sandbox, slowness  # noqa: F401
from tests.kit.threads import at_once
from tests.kit.waiting import eventually

pytestmark = pytest.mark.django_db


def charges() -> list:
    """All charges that Stripe lists."""
    return list(payments.stripe_client().v1.charges.list({"limit": 100}).auto_paging_iter())


def faults(sandbox, *wanted):
    sandbox.faults.replace([{"fault": fault, "count": count} for fault, count in wanted])


def error_code(response):
    return response.json()["error"]["code"]


def take_lock(key, seconds_ago):
    IdempotencyKey.objects.filter(idempotency_key=key).update(
        locked_until=lock_end(seconds_ago), claim_token=uuid.uuid4()
    )


@pytest.fixture
def failing(monkeypatch):
    """Break a step of the view, as a bad deploy would."""

    def fail(name):
        def broken(*args, **kwargs):
            raise RuntimeError("a bad deploy")

        monkeypatch.setattr(views, name, broken)
        return monkeypatch.undo

    return fail


class TestBooking:
    def test_a_new_key_books_a_ride_charges_it_and_stages_its_receipt(self, jane):
        response = jane.book(key="new")

        ride = Ride.objects.get()
        assert response.status_code == 201
        assert response.json() == {
            "ride": {
                "id": ride.pk,
                "origin": [37.7955, -122.3937],
                "target": [37.8199, -122.4783],
                "amount": 2000,
                "currency": "usd",
                "charge": ride.stripe_charge_id,
            },
            "message": "Payment accepted. Your pilot is on their way!",
        }
        assert response["Location"] == f"/rides/{ride.pk}"
        assert "Idempotent-Replayed" not in response
        assert (ride.user, ride.idempotency_key.idempotency_key) == (jane.user, "new")
        assert ride.idempotency_key.recovery_point == "finished"
        (charge,) = charges()
        assert (charge.id, charge.amount, charge.currency) == (ride.stripe_charge_id, 2000, "usd")
        assert charge.metadata["ride_id"] == str(ride.pk)
        record = AuditRecord.objects.get()
        assert (record.action, record.resource_type, record.resource_id) == (
            "ride.created",
            "ride",
            ride.pk,
        )
        assert (record.user, record.origin_ip) == (jane.user, "127.0.0.1")
        job = StagedJob.objects.get()
        assert (job.job_name, job.job_args) == (
            "rides_demo.jobs.send_ride_receipt",
            {"ride_id": ride.pk, "shard": "default"},
        )

    def test_a_finished_key_gets_the_same_bytes_and_does_nothing(self, jane):
        first = jane.book(key="again")

        second = jane.book(key="again")

        assert (second.status_code, second.content) == (201, first.content)
        assert (second["Location"], second["Idempotent-Replayed"]) == (first["Location"], "true")
        assert (
            Ride.objects.count(),
            AuditRecord.objects.count(),
            StagedJob.objects.count(),
            len(charges()),
        ) == (1, 1, 1, 1)

    def test_a_form_books_as_well(self, jane):
        body = "&".join(f"{name}={value}" for name, value in RIDE.items()).encode()

        response = jane.book(body, Content_Type="application/x-www-form-urlencoded")

        assert response.status_code == 201
        assert response.json()["ride"]["origin"] == [37.7955, -122.3937]

    def test_a_multipart_form_books_as_well(self, jane):
        response = jane.client.post(
            "/rides",
            RIDE,
            headers={"Authorization": f"Bearer {jane.token}", "Idempotency-Key": "multipart"},
        )

        assert response.status_code == 201

    def test_two_riders_may_use_the_same_key(self, jane, max_):
        assert jane.book(key="same").status_code == 201
        assert max_.book(key="same").status_code == 201

        assert set(Ride.objects.values_list("user", flat=True)) == {jane.user.pk, max_.user.pk}

    def test_other_parameters_under_the_same_key_are_refused(self, jane):
        jane.book(key="used")

        response = jane.book(RIDE | {"target_lat": 0.5}, key="used")

        assert (response.status_code, response.json()["code"]) == (422, "key_reused")
        assert jane.book(key="used").status_code == 201
        assert Ride.objects.count() == 1


class TestRefusals:
    @pytest.mark.parametrize(
        ("header", "code"),
        [
            (None, "auth_required"),
            ("", "auth_required"),
            ("Bearer nobody", "auth_invalid"),
            ("Bearer", "auth_invalid"),
            ("Basic ZGVtby1qYW5l", "auth_invalid"),
            ("Bearer \u00fc\u00df", "auth_invalid"),
            ("Bearer \x00", "auth_invalid"),
            ("Bearer demo-jane\x00", "auth_invalid"),
            ("Bearer DEMO-JANE", "auth_invalid"),
            ("Bearer \uff44emo-jane", "auth_invalid"),
        ],
    )
    def test_without_a_known_token_nothing_happens(self, jane, header, code):
        headers = {"Idempotency-Key": "k"} | ({} if header is None else {"Authorization": header})

        response = jane.client.post(
            "/rides", RIDE, content_type="application/json", headers=headers
        )

        assert (response.status_code, error_code(response)) == (401, code)
        assert not IdempotencyKey.objects.exists()

    def test_a_stored_answer_is_not_for_those_without_a_token(self, jane):
        jane.book(key="mine")

        jane.token = "stolen"

        assert jane.book(key="mine").status_code == 401

    def test_a_key_is_required(self, jane):
        response = jane.send("POST", "/rides", RIDE)

        assert (response.status_code, response["Content-Type"]) == (400, "application/problem+json")
        assert response.json()["code"] == "key_missing"

    def test_the_key_is_looked_at_before_the_parameters(self, jane):
        response = jane.send("POST", "/rides", {}, key="x" * 256)

        assert (response.status_code, response.json()["code"]) == (400, "key_invalid")

    @pytest.mark.parametrize("name", RIDE)
    def test_a_missing_parameter_spends_no_key(self, jane, name):
        body = {other: value for other, value in RIDE.items() if other != name}

        response = jane.book(body, key="kept")

        assert response.status_code == 422
        assert response.json() == {
            "error": {"code": "param_missing", "message": f"Please specify parameter '{name}'."}
        }
        assert not IdempotencyKey.objects.exists()
        assert jane.book(RIDE, key="kept").status_code == 201

    @pytest.mark.parametrize("value", ["abc", "37.5", "", True, False, [], [1.0], {}, {"a": 1}])
    def test_what_is_not_a_number_is_refused(self, jane, value):
        response = jane.book(RIDE | {"origin_lat": value})

        message = "Parameter 'origin_lat' must be a floating-point number."
        assert response.status_code == 422
        assert response.json() == {"error": {"code": "param_not_float", "message": message}}

    @pytest.mark.parametrize(
        ("name", "value", "code", "word"),
        [
            ("origin_lat", "90.0000001", "param_not_lat", "latitude"),
            ("target_lat", "-91", "param_not_lat", "latitude"),
            ("origin_lon", "180.0000001", "param_not_lon", "longitude"),
            ("target_lon", "-1e400", "param_not_lon", "longitude"),
            ("origin_lat", "NaN", "param_not_lat", "latitude"),
            ("origin_lon", "Infinity", "param_not_lon", "longitude"),
            ("origin_lat", "9" * 5000, "param_not_lat", "latitude"),
        ],
    )
    def test_what_is_not_on_earth_is_refused(self, jane, name, value, code, word):
        members = ",".join(
            f'"{other}": {value if other == name else number}' for other, number in RIDE.items()
        )

        response = jane.book(f"{{{members}}}".encode())

        message = f"Parameter '{name}' must be a valid {word} coordinate."
        assert response.status_code == 422
        assert response.json() == {"error": {"code": code, "message": message}}
        assert not Ride.objects.exists()

    def test_the_edges_of_the_earth_are_on_it(self, jane):
        edges = {"origin_lat": -90, "origin_lon": 180, "target_lat": 90, "target_lon": -180}

        assert jane.book(edges).json()["ride"]["origin"] == [-90.0, 180.0]


class TestPayment:
    def test_a_declined_card_is_a_stored_answer(self, joe):
        first = joe.book(key="declined")
        second = joe.book(key="declined")

        assert first.status_code == 402
        assert first.json() == {
            "error": {"code": "payment_declined", "message": "Your card was declined."}
        }
        assert (second.status_code, second.content, second["Idempotent-Replayed"]) == (
            402,
            first.content,
            "true",
        )
        assert IdempotencyKey.objects.get().recovery_point == "finished"
        assert Ride.objects.get().stripe_charge_id is None
        assert not charges()
        assert not StagedJob.objects.exists()

    @pytest.mark.parametrize("fault", ["down", "429", "500_before", "cut_before", "cut_after"])
    def test_an_unavailable_payment_is_not_stored_and_the_retry_goes_on_with_one_charge(
        self, jane, sandbox, fault
    ):
        faults(sandbox, (fault, 2))
        for _ in range(2):
            response = jane.book(key="patient")
            assert (response.status_code, error_code(response)) == (503, "payment_unavailable")
            assert int(response["Retry-After"]) >= 1
        key = IdempotencyKey.objects.get()
        assert (key.recovery_point, key.locked_until, key.response_code) == (
            "ride_created",
            None,
            None,
        )

        response = jane.book(key="patient")

        assert response.status_code == 201
        assert "Idempotent-Replayed" not in response
        assert [charge.id for charge in charges()] == [Ride.objects.get().stripe_charge_id]
        assert AuditRecord.objects.count() == 1

    @pytest.mark.processes
    def test_a_charge_that_takes_too_long_is_made_once(self, jane, sandbox, slowness, settings):
        settings.IDEMPOTENCY = settings.IDEMPOTENCY | {"LOCK_TIMEOUT_SECONDS": 5}
        sandbox.faults.replace([{"fault": "slow", "count": 1}])
        assert jane.book(key="slow").status_code == 503
        # The first charge is still under way: Stripe answers 409 idempotency_key_in_use.
        assert jane.book(key="slow").status_code == 503
        assert not charges()
        slowness.set()

        response = eventually(lambda: (r := jane.book(key="slow")).status_code != 503 and r)

        assert response.status_code == 201
        assert len(charges()) == 1

    def test_a_stored_failure_of_stripe_behind_which_there_is_a_charge_goes_on_with_it(
        self, jane, sandbox
    ):
        faults(sandbox, ("500_after", 1))
        assert jane.book(key="found").status_code == 503

        response = jane.book(key="found")

        assert response.status_code == 201
        assert [charge.id for charge in charges()] == [response.json()["ride"]["charge"]]

    def test_a_stored_failure_of_stripe_without_a_charge_needs_a_person(self, jane, sandbox):
        faults(sandbox, ("500_begun", 1))
        assert jane.book(key="stuck").status_code == 503

        answers = [jane.book(key="stuck") for _ in range(2)]

        assert {(answer.status_code, answer.json()["code"]) for answer in answers} == {
            (409, "key_stuck")
        }
        key = IdempotencyKey.objects.get()
        assert key.stuck_at is not None
        assert f"no charge for ride {Ride.objects.get().pk}" in key.stuck_reason

    def test_a_charge_is_not_made_again_after_stripe_may_have_forgotten_its_key(
        self, jane, sandbox
    ):
        faults(sandbox, ("cut_after", 1))
        assert jane.book(key="old").status_code == 503
        IdempotencyKey.objects.update(created_at=timezone.now() - timedelta(hours=23, minutes=1))

        response = jane.book(key="old")

        assert (response.status_code, response.json()["code"]) == (409, "key_stuck")
        assert len(charges()) == 1


class TestRecovery:
    def test_a_failure_at_started_leaves_nothing_and_frees_the_key(self, jane, failing):
        mend = failing("_audit")
        assert jane.book(key="k").status_code == 500
        key = IdempotencyKey.objects.get()
        assert (key.recovery_point, key.locked_until) == ("started", None)
        assert not Ride.objects.exists()

        mend()

        assert jane.book(key="k").status_code == 201
        assert Ride.objects.get().idempotency_key == key

    def test_a_failure_at_ride_created_goes_on_with_its_ride(self, jane, sandbox):
        faults(sandbox, ("down", 1))
        jane.book(key="k")
        ride = Ride.objects.get()

        response = jane.book(key="k")

        assert (response.status_code, response.json()["ride"]["id"]) == (201, ride.pk)
        assert Ride.objects.count() == 1

    def test_a_failure_at_charge_created_charges_no_more(self, jane, failing, sandbox):
        mend = failing("stage_job")
        assert jane.book(key="k").status_code == 500
        assert IdempotencyKey.objects.get().recovery_point == "charge_created"
        (charge,) = charges()

        mend()
        faults(sandbox, ("down", None))  # Stripe is not asked again

        assert jane.book(key="k").json()["ride"]["charge"] == charge.id
        assert StagedJob.objects.count() == 1

    @pytest.mark.parametrize(("seconds_ago", "status"), [(91, 201), (10, 409)])
    def test_a_lock_holds_for_90_seconds(self, jane, sandbox, seconds_ago, status):
        faults(sandbox, ("down", 1))
        jane.book(key="k")
        take_lock("k", seconds_ago)

        response = jane.book(key="k")

        assert response.status_code == status
        if status == 409:
            assert response.json()["code"] == "key_in_use"
            assert 1 <= int(response["Retry-After"]) <= 80

    @pytest.mark.postgres
    @pytest.mark.parametrize(("failures", "status"), [(1, 201), (1000, 409)])
    def test_a_serialization_failure_is_retried_and_then_frees_the_key(
        self, jane, monkeypatch, settings, failures, status
    ):
        settings.IDEMPOTENCY = settings.IDEMPOTENCY | {"SERIALIZATION_RETRIES": 2}
        left, audit = [failures], views._audit

        def conflicting(*args):
            if left[0]:
                left[0] -= 1
                with connection.cursor() as cursor:
                    cursor.execute("DO $$ BEGIN RAISE serialization_failure; END $$")
            audit(*args)

        monkeypatch.setattr(views, "_audit", conflicting)

        assert jane.book(key="k").status_code == status

        key = IdempotencyKey.objects.get()
        assert key.locked_until is None
        assert Ride.objects.count() == (status == 201)

    @pytest.mark.django_db(transaction=True)
    @pytest.mark.postgres
    def test_equal_requests_at_the_same_moment_book_once(self, jane):
        phones = [Phone(jane.token) for _ in range(6)]
        answers = at_once([partial(phone.book, key="at-once") for phone in phones])
        assert {answer.status_code for answer in answers} <= {201, 409}
        (content,) = {answer.content for answer in answers if answer.status_code == 201}
        assert jane.book(key="at-once").content == content
        assert (Ride.objects.count(), len(charges())) == (1, 1)


@pytest.mark.django_db(transaction=True)
class TestCompleter:
    def abandon(self, jane, sandbox, created_seconds_ago=301, last_run_seconds_ago=61):
        faults(sandbox, ("cut_after", 1))
        jane.book(key="gone")
        now = timezone.now()
        IdempotencyKey.objects.update(
            created_at=now - timedelta(seconds=created_seconds_ago),
            last_run_at=now - timedelta(seconds=last_run_seconds_ago),
        )

    def test_it_finishes_a_ride_as_its_own_rider_without_their_token(self, jane, sandbox):
        self.abandon(jane, sandbox)
        User.objects.update(api_token_hash=None)

        assert complete_once().finished == 1

        key, ride = IdempotencyKey.objects.get(), Ride.objects.get()
        assert (key.recovery_point, key.response_code, ride.user.username) == (
            "finished",
            201,
            "jane",
        )
        assert [charge.id for charge in charges()] == [ride.stripe_charge_id]
        assert StagedJob.objects.get().job_args == {"ride_id": ride.pk, "shard": "default"}

    def test_the_client_who_comes_back_gets_what_the_completer_stored(self, jane, sandbox):
        self.abandon(jane, sandbox)
        complete_once()

        response = jane.book(key="gone")

        assert (response.status_code, response["Idempotent-Replayed"]) == (201, "true")

    def test_a_failure_leaves_the_ride_where_it_was(self, jane, sandbox):
        self.abandon(jane, sandbox)
        faults(sandbox, ("down", None))

        assert complete_once().failed == 1

        key = IdempotencyKey.objects.get()
        assert (key.recovery_point, key.locked_until, key.stuck_at) == ("ride_created", None, None)

    @pytest.mark.parametrize(("created", "last_run"), [(2970, 601), (3001, 570)])
    def test_a_client_who_may_still_come_back_is_left_alone(
        self, jane, sandbox, settings, created, last_run
    ):
        limits = {"COMPLETER_MIN_AGE_SECONDS": 3000, "COMPLETER_IDLE_SECONDS": 600}
        settings.IDEMPOTENCY = settings.IDEMPOTENCY | limits
        self.abandon(jane, sandbox, created, last_run)

        assert complete_once() == CompletePass()


class TestReceipt:
    def test_a_ride_gets_one_receipt_and_one_mail(self, jane, mailoutbox):
        ride = jane.book().json()["ride"]["id"]

        send_ride_receipt(ride_id=ride)
        send_ride_receipt(ride_id=ride)

        receipt = Receipt.objects.get()
        assert (receipt.ride_id, receipt.email) == (ride, "jane@example.com")
        (mail,) = mailoutbox
        assert mail.to == ["jane@example.com"]
        assert "$20.00" in mail.body
