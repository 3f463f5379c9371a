"""The web page of Rocket Rides: however it is pressed, and whatever Stripe does, one ride and one
charge."""

from collections.abc import Callable

import pytest
from playwright.sync_api import Route, expect

from tests.browser.visitor import STRIPE_WORKS, Visitor
from tests.murphy.service import SLOW_SECONDS, Service

pytestmark = [pytest.mark.postgres, pytest.mark.processes]

ACCEPTED = "Payment accepted."
looks = pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1280), ("light", 390), ("dark", 1280), ("dark", 390)]
)


def expect_one_booking(service: Service, visitor: Visitor) -> None:
    visitor.expect_counts(rides=1, charges=1, receipts=1)
    (booking,) = service.books()
    assert (booking["recovery_point"], booking["receipts"]) == ("finished", 1)
    assert service.charges() == {booking["charge"]: booking["ride"]}


def test_a_double_click_books_once(service: Service, visitor: Visitor) -> None:
    visitor.sign_in()
    service.strike_stripe({"fault": "slow", "seconds": SLOW_SECONDS})

    visitor.book.dblclick()

    visitor.expect_status(ACCEPTED)
    expect_one_booking(service, visitor)
    assert visitor.requests_sent() >= 2
    visitor.expect_story("Replay of the stored response")


def test_nothing_can_be_pressed_before_the_script_listens(
    service: Service, visitor: Visitor
) -> None:
    visitor.sign_in()
    held: list[Route] = []
    visitor.page.route("**/page.js", lambda route: held.append(route))
    with visitor.page.expect_request("**/page.js"):
        visitor.page.goto(visitor.url, wait_until="commit")

    expect(visitor.book).to_be_disabled()
    expect(visitor.page.get_by_label(STRIPE_WORKS, exact=True)).to_be_disabled()
    held.pop().continue_()

    expect(visitor.page.get_by_label(STRIPE_WORKS, exact=True)).to_be_enabled()
    visitor.book.click()
    visitor.expect_status(ACCEPTED)


def test_a_click_after_the_answer_gets_the_same_answer(service: Service, visitor: Visitor) -> None:
    visitor.sign_in()
    visitor.book.click()
    visitor.expect_status(ACCEPTED)

    visitor.book.click()

    visitor.expect_story(
        "201 Payment accepted. Your pilot is on their way! Replay of the stored response"
    )
    visitor.expect_status("Same answer, replayed: nothing was booked.")
    expect_one_booking(service, visitor)


def test_a_new_booking_is_another_one(service: Service, visitor: Visitor) -> None:
    visitor.sign_in()
    visitor.book.click()
    visitor.expect_status(ACCEPTED)

    with visitor.page.expect_navigation():
        visitor.page.get_by_role("link", name="Start a new booking").click()
    visitor.book.click()
    visitor.expect_status(ACCEPTED)

    assert len(service.books()) == len(service.charges()) == 2


def test_a_charge_whose_response_is_lost_ends_by_itself(service: Service, visitor: Visitor) -> None:
    visitor.sign_in()
    visitor.stripe("Charges, then disconnects")
    for _ in range(2):  # for each booking
        visitor.book.click()
        visitor.expect_status(ACCEPTED)
        visitor.expect_story("503 The payment provider cannot be reached")
        visitor.expect_counts(rides=1, charges=1, receipts=1)
        with visitor.page.expect_navigation():
            visitor.page.get_by_role("link", name="Start a new booking").click()
    assert len(service.books()) == len(service.charges()) == 2


def test_the_page_says_that_stripe_is_broken_and_the_retry_after_the_repair_books_once(
    service: Service, visitor: Visitor
) -> None:
    visitor.sign_in()
    visitor.stripe("Is down")
    visitor.book.click()
    visitor.expect_status(
        "503: The payment provider cannot be reached at the moment. Trying again with the same key"
    )
    expect(visitor.page.locator("#steps [data-point=ride_created]")).to_have_attribute(
        "data-state", "done"
    )
    visitor.shoot("page-stripe-down")

    visitor.stripe(STRIPE_WORKS)

    visitor.expect_status(ACCEPTED)
    expect_one_booking(service, visitor)


def test_a_declined_card_is_an_answer_that_stands(service: Service, visitor: Visitor) -> None:
    visitor.sign_in("demo-joe")

    visitor.book.click()

    visitor.expect_status("Your card was declined.")
    visitor.expect_counts(rides=1, charges=0, receipts=0)
    assert visitor.requests_sent() == 1
    expect(visitor.page.locator("#state")).to_contain_text("402")
    expect(visitor.page.locator("#steps [data-state=done]")).to_have_count(3)
    expect(visitor.page.locator("#steps [data-point=charge_created]")).to_have_attribute(
        "data-state", "skipped"
    )
    visitor.shoot("page-declined")


def expect_lost_run(service: Service, heir: str) -> None:
    """The history of the only key: a run that reached Stripe and was lost, and the run that took
    over."""
    (booking,) = service.books()
    (row,) = service.rows(
        "SELECT history FROM idempotency_idempotencykey WHERE idempotency_key = %s",
        [booking["key"]],
    )
    assert [(event["event"], event["detail"]) for event in row["history"]] == [
        ("claimed", "client"),
        ("recovery point", "ride_created"),
        ("call begun", "charge"),
        ("run lost", "lock expired"),
        ("claimed", heir),
        ("call begun", "charge"),
        ("recovery point", "charge_created"),
        ("finished", "status 201"),
    ]


def test_the_button_kills_the_worker_after_the_charge_and_the_retry_continues(
    service: Service, visitor: Visitor
) -> None:
    posted: list[Route] = []

    def lose_second(route: Route) -> None:
        posted.append(route)
        if len(posted) == 2:  # The killed worker has got the request that repairs Stripe.
            route.abort()
        else:
            route.continue_()

    visitor.page.route("**/switches/stripe", lose_second)
    visitor.sign_in()

    visitor.kill.click()

    visitor.expect_killed()
    visitor.expect_counts(rides=1, charges=1, receipts=0)
    visitor.expect_story("no response")
    expect(visitor.page.locator("#stripe-outcome")).to_have_text("Stripe works now.")
    assert len(posted) == 3
    visitor.expect_status("409")
    visitor.shoot("page-killed")
    service.let_locks_expire()
    visitor.expect_status(ACCEPTED)
    expect_one_booking(service, visitor)
    expect_lost_run(service, "client")
    expect(visitor.page.locator("#lesson")).to_contain_text("2 runs, 1 ride, 1 charge, 1 receipt")
    visitor.shoot("page-survived")
    expect(visitor.page.get_by_label(STRIPE_WORKS, exact=True)).to_be_checked()


def test_the_button_kills_the_worker_of_a_booking_that_is_under_way_and_the_completer_continues(
    service: Service, visitor: Visitor
) -> None:
    visitor.sign_in()
    visitor.stripe("Is slow")
    visitor.book.click()
    visitor.expect_counts(charges=1)

    visitor.kill.click()

    visitor.expect_killed()
    visitor.page.route("**/rides", lambda route: route.abort())
    service.let_locks_expire()
    service.processes["completer"].start()
    expect(visitor.page.locator("#lesson")).to_contain_text("completer")
    visitor.page.unroute("**/rides")
    visitor.expect_status(ACCEPTED)
    visitor.expect_story("Replay of the stored response")
    expect_one_booking(service, visitor)
    expect_lost_run(service, "completer")
    expect_trace(visitor)


def expect_trace(visitor: Visitor) -> None:
    """The trace of the booking has the killed request, and links to it from all that came later."""
    with visitor.page.expect_popup() as opened:
        visitor.page.get_by_role("link", name="Open the trace of this booking").click()
    opened.value.wait_for_load_state()
    rows = opened.value.locator("#trace tbody tr")
    killed = [row.split("\t")[1] for row in rows.filter(has_text="killed").all_inner_texts()]
    assert killed == ["POST /rides", "idempotency.request", "idempotency.call charge"]
    links = [row.split("\t")[:2] for row in rows.filter(has_text="↩").all_inner_texts()]
    assert {(process, name.strip("↩ ")) for process, name in links} == {
        ("web", "idempotency.request"),
        ("web", "POST /webhooks/stripe"),
        ("complete_keys", "idempotency.complete"),
        ("enqueue_jobs", "idempotency.enqueue"),
    }
    (job,) = rows.filter(has_text="idempotency.job").all_inner_texts()
    assert job.startswith("rqworker")


def test_the_button_books_a_new_ride_when_the_last_booking_is_over(
    service: Service, visitor: Visitor
) -> None:
    visitor.sign_in()
    visitor.book.click()
    visitor.expect_counts(receipts=1)

    visitor.kill.click()

    visitor.expect_killed()
    service.let_locks_expire()
    visitor.expect_status(ACCEPTED)
    visitor.expect_counts(rides=1, charges=1, receipts=1)
    assert len(service.books()) == len(service.charges()) == 2


def test_the_button_kills_nothing_when_no_card_was_charged(
    service: Service, visitor: Visitor
) -> None:
    visitor.sign_in("demo-joe")

    visitor.kill.click()

    visitor.expect_status("Your card was declined.")
    expect(visitor.page.locator("#kill-outcome")).to_contain_text("nothing was killed")
    expect(visitor.page.locator("#state")).to_contain_text("402")


@looks
def test_the_page_shows_a_booking_without_errors(
    visit: Callable[..., Visitor], scheme: str, width: int
) -> None:
    visitor = visit(scheme, width)
    visitor.go("/")
    visitor.shoot("page-sign-in")
    assert visitor.fits()
    visitor.sign_in()
    visitor.book.click()
    visitor.expect_counts(rides=1, charges=1, receipts=1)
    expect(visitor.page.locator("#rides")).to_contain_text("receipt sent to jane@example.com")

    visitor.shoot("page-booked")

    assert visitor.errors == []
    assert visitor.elsewhere == []
    assert visitor.fits()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_keeps_nobody_out(
    visit: Callable[..., Visitor], axe_script: str, scheme: str
) -> None:
    visitor = visit(scheme)
    visitor.go("/")
    assert visitor.barriers(axe_script) == []
    visitor.sign_in()
    visitor.stripe("Is down")
    visitor.book.click()
    visitor.expect_status("Trying again")
    expect(visitor.page.locator("#steps [data-state=waiting]")).to_have_count(1)
    assert visitor.barriers(axe_script) == []

    visitor.stripe(STRIPE_WORKS)
    visitor.expect_status(ACCEPTED)

    assert visitor.barriers(axe_script) == []
