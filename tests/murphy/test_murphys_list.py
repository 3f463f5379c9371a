"""Each line of Murphy's list: whatever goes wrong, one ride, one charge, one receipt, and the same
bytes for each retry."""

import socket
import struct
import urllib.parse

import httpx
import psycopg
import pytest
import redis
from rq.job import Job

from tests.kit.rides import RIDE
from tests.kit.threads import at_once, background
from tests.kit.waiting import eventually
from tests.murphy.rider import Rider, code
from tests.murphy.service import LOCK_TIMEOUT_SECONDS, SLOW_SECONDS, Service

pytestmark = [pytest.mark.processes, pytest.mark.sample]

SLOW = {"fault": "slow", "seconds": SLOW_SECONDS}


def assert_booked_once(service: Service, *answers: tuple[Rider, httpx.Response]) -> None:
    """Assert that each rider has one ride, one charge and one receipt, that there are no others,
    and retries are replays."""
    books = service.books()
    assert {
        row["key"]: (row["recovery_point"], row["response_code"], row["ride"]) for row in books
    } == {rider.key: ("finished", 201, answer.json()["ride"]["id"]) for rider, answer in answers}
    assert len(books) == len(answers)
    assert {row["audit_records"] for row in books} == {1}
    assert service.charges() == {row["charge"]: row["ride"] for row in books}
    for rider, answer in answers:
        again = rider.post()
        assert (
            (again.status_code, again.content)
            == (answer.status_code, answer.content)
            == (201, answer.content)
        )
        assert again.headers["Idempotent-Replayed"] == "true"
        assert [again.headers[name] for name in ("Location", "ETag")] == [
            answer.headers[name] for name in ("Location", "ETag")
        ]
    eventually(
        lambda: all(row["receipts"] for row in service.books()) and not service.staged_jobs()
    )
    assert [row["receipts"] for row in service.books()] == [1] * len(answers)
    assert [service.mails(row["ride"]) for row in books] == [1] * len(answers)


def assert_told_to_come_back(answers: list[httpx.Response], *codes: str) -> None:
    """Assert that each answer is of these codes, and says when to send the same request again."""
    assert {code(answer) for answer in answers} == set(codes)
    for answer in answers:
        assert answer.status_code == (409 if code(answer) == "key_in_use" else 503)
        assert 1 <= int(answer.headers["Retry-After"]) <= LOCK_TIMEOUT_SECONDS


def send_in_part(rider: Rider, end: int, *, politely: bool) -> None:
    """Send the booking as a form up to its byte ``end``, and break the connection: with a FIN, or
    with a reset."""
    address = urllib.parse.urlsplit(rider.url)
    body = urllib.parse.urlencode(RIDE)
    headers = rider.headers() | {
        "Content-Type": "application/x-www-form-urlencoded",
        "Content-Length": str(len(body)),
    }
    lines = [
        "POST /rides HTTP/1.1",
        f"Host: {address.netloc}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    request = "\r\n".join([*lines, "", body]).encode()
    with socket.create_connection((address.hostname, address.port), 30) as connection:
        if not politely:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(request[:end])
        if politely:
            # What the server makes of it is read to the end: it has taken note of this request when
            # the retry comes.
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass


def test_1_the_connection_breaks_before_the_request_reaches_the_server_and_the_retry_succeeds(
    service, rider
):
    jane = rider()
    # Without a byte, in the middle of the headers, and in the last number, which is a number all
    # the same.
    for end in (0, 60, -2):
        for politely in (True, False):
            send_in_part(jane, end, politely=politely)
    assert service.books() == []

    answer = jane.settle()

    assert [heard.status_code for heard in jane.heard] == [201]
    assert [row["attempts"] for row in service.books()] == [1]
    assert_booked_once(service, (jane, answer))


def test_2_two_requests_create_the_key_at_the_same_moment_one_goes_through_and_the_other_gets_409(
    service, rider
):
    service.strike_stripe(SLOW)
    pairs = []
    for _ in range(4):
        one = rider(service.url)
        pairs.append((one, rider(service.second_url, one.key)))
    riders = [one for pair in pairs for one in pair]
    answers = dict(zip(riders, at_once([one.post for one in riders]), strict=True))

    booked = []
    for pair in pairs:
        winner, loser = sorted(pair, key=lambda one: answers[one].status_code)
        assert (answers[winner].status_code, answers[loser].status_code) == (201, 409)
        assert_told_to_come_back([answers[loser]], "key_in_use")
        assert loser.settle().content == answers[winner].content
        booked.append((winner, answers[winner]))
    assert_booked_once(service, *booked)


def test_3_the_key_is_created_then_the_database_goes_down_and_retries_go_on_when_it_is_back(
    service, rider
):
    service.strike_stripe(SLOW | {"count": 1})
    jane = rider()

    with background(jane.settle) as settled:
        service.wait_until_stripe_works()
        [before] = service.books()
        service.processes["postgres"].crash()
        eventually(lambda: len(jane.heard) >= 3)
        down = list(jane.heard)
        service.processes["postgres"].start()
        service.let_locks_expire()  # Nobody could give the lock back.
        answer = settled.result(60)

    assert_told_to_come_back(down, "database_unavailable")
    assert before["recovery_point"] == "ride_created"
    assert before["ride"] == answer.json()["ride"]["id"]
    assert "Idempotent-Replayed" not in answer.headers
    assert [key["replays"] for key in service.stripe_keys()] == [1]
    assert_booked_once(service, (jane, answer))


def test_4_stripe_is_down_503_until_it_is_back_then_the_charge_succeeds_once(service, rider):
    service.strike_stripe({"fault": "down", "path": "/"})
    jane = rider()

    with background(jane.settle) as settled:
        eventually(lambda: len(jane.heard) >= 3)
        [waiting] = service.books()
        assert (waiting["recovery_point"], waiting["charge"], service.charges()) == (
            "ride_created",
            None,
            {},
        )
        service.strike_stripe()
        answer = settled.result(60)

    assert_told_to_come_back(jane.heard[:-1], "payment_unavailable")
    assert waiting["ride"] == answer.json()["ride"]["id"]
    assert len(service.stripe_keys()) == 1
    assert_booked_once(service, (jane, answer))


def test_5_the_server_process_dies_while_it_waits_for_stripe_and_the_retry_sends_the_same_key(
    service, rider
):
    service.strike_stripe(SLOW | {"count": 1})
    jane = rider()

    with background(jane.settle) as settled:
        service.wait_until_stripe_works()
        [before] = service.books()
        service.processes["web"].kill()
        service.processes["web"].launch()
        eventually(lambda: jane.heard)
        service.wait_until_stripe_is_done()
        service.let_locks_expire()
        answer = settled.result(60)

    assert (before["ride"], before["charge"]) == (answer.json()["ride"]["id"], None)
    assert (
        sum(count for event, count in jane.tally.counts.items() if event.startswith("no answer"))
        >= 1
    )
    # The lock of the dead one holds until it expires.
    assert_told_to_come_back(jane.heard[:-1], "key_in_use")
    assert [key["replays"] for key in service.stripe_keys()] == [1]
    assert_booked_once(service, (jane, answer))


def test_6_after_a_bad_deploy_is_fixed_retries_continue_and_the_completer_finishes_the_rest(
    service, rider
):
    patient, gone = rider(), rider()
    try:
        service.serve("tests.murphy.bad_deploy")
        assert [one.post().status_code for one in (patient, patient, gone)] == [500, 500, 500]
        before = {row["key"]: (row["recovery_point"], row["ride"]) for row in service.books()}
    finally:
        service.serve("rides_demo.wsgi")
    assert {key: point for key, (point, _) in before.items()} == {
        patient.key: "ride_created",
        gone.key: "ride_created",
    }

    answer = patient.settle()
    service.processes["completer"].launch()
    eventually(lambda: {row["recovery_point"] for row in service.books()} == {"finished"})
    of_gone = gone.post()

    assert {row["key"]: row["ride"] for row in service.books()} == {
        key: ride for key, (_, ride) in before.items()
    }
    assert {row["key"]: row["completer_attempts"] for row in service.books()} == {
        patient.key: 0,
        gone.key: 1,
    }
    assert sorted(key["replays"] for key in service.stripe_keys()) == [1, 2]
    assert_booked_once(service, (patient, answer), (gone, of_gone))


def test_7_stripe_charged_the_response_was_lost_nobody_retries_and_the_completer_finishes(
    service, rider
):
    service.strike_stripe({"fault": "cut_after", "count": 1})
    jane = rider()

    jane.send_and_leave()
    eventually(service.charges)
    [before] = service.books()
    service.processes["completer"].launch()
    eventually(lambda: service.books()[0]["recovery_point"] == "finished")

    assert (before["recovery_point"], before["charge"]) == ("ride_created", None)
    [after] = service.books()
    assert (after["completer_attempts"], after["attempts"]) == (1, 2)
    assert [key["replays"] for key in service.stripe_keys()] == [1]
    late = jane.post()
    assert late.content == bytes(after["response_body"])
    assert_booked_once(service, (jane, late))


def test_8_the_first_request_is_so_slow_that_its_lock_expires_and_a_retry_takes_over(
    service, rider
):
    service.strike_stripe(SLOW | {"count": 1})
    slow = rider()
    jane = rider(service.second_url, slow.key)

    with background(slow.post) as first:
        service.wait_until_stripe_works()
        with service.frozen_web(), background(jane.settle) as settled:
            eventually(lambda: jane.heard)
            service.wait_until_stripe_is_done()
            service.let_locks_expire()
            answer = settled.result(60)
        late = first.result(60)

    assert_told_to_come_back(jane.heard[:-1], "key_in_use")
    assert "Idempotent-Replayed" not in answer.headers
    assert late.status_code in (201, 409)
    assert late.content == answer.content if late.status_code == 201 else code(late) == "key_in_use"
    assert [row["attempts"] for row in service.books()] == [2]
    assert [key["replays"] for key in service.stripe_keys()] == [1]
    assert_booked_once(service, (jane, answer))


def test_9_the_enqueuer_dies_between_enqueueing_a_job_and_deleting_it_and_one_receipt_is_sent(
    service, rider
):
    enqueuer = service.processes["enqueuer"]
    enqueuer.stop()
    jane = rider()
    answer = jane.settle()
    [job_id] = service.staged_jobs()

    with psycopg.connect(service.environment["DATABASE_URL"]) as connection:
        # Rows may be locked, but not deleted: the enqueuer stops right between the two.
        connection.execute("LOCK TABLE idempotency_stagedjob IN SHARE MODE")
        enqueuer.launch()
        eventually(lambda: service.books()[0]["receipts"])
        eventually(
            lambda: service.rows(
                "SELECT FROM pg_stat_activity WHERE query LIKE 'DELETE%' AND wait_event_type ="
                " 'Lock'"
            )
        )
        enqueuer.kill()
    assert service.staged_jobs() == [job_id]

    enqueuer.launch()
    eventually(lambda: not service.staged_jobs())
    with redis.Redis.from_url(service.environment["REDIS_URL"]) as broker:
        deliveries = eventually(
            lambda: (
                (results := Job.fetch(job_id, broker).results()) and len(results) > 1 and results
            )
        )
    assert [delivery.type.name for delivery in deliveries] == ["SUCCESSFUL", "SUCCESSFUL"]
    took_effect = service.rows(
        "SELECT FROM idempotency_processedmessage WHERE message_id = %s", [job_id]
    )
    assert len(took_effect) == 1
    assert_booked_once(service, (jane, answer))
