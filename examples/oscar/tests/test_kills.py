"""Kill the web process during an order: test the stored data, and that a retry or the completer
finishes the order."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import psycopg
import pytest
from bank import Bank
from running_shop import RunningShop, Visitor, eventually


@contextmanager
def submitted(visitor: Visitor, form: dict[str, str]) -> Iterator[Future[httpx.Response]]:
    """Click on "Place order" in another thread."""
    with ThreadPoolExecutor() as threads:
        yield threads.submit(visitor.place_order, form)


def killed_after_the_charge(shop: RunningShop, visitor: Visitor, bank: Bank) -> dict[str, str]:
    """Kill the shop after the bank has charged and before it answers; start the shop again and
    return the form."""
    form = visitor.go_to_preview()
    bank.answers.clear()
    with submitted(visitor, form) as click:
        eventually(lambda: bank.charges)
        shop.kill()
        assert isinstance(click.exception(), httpx.TransportError)
    bank.answers.set()
    shop.start()
    return form


def paid(shop: RunningShop) -> list[tuple[int]]:
    """Return the number of debits of each order."""
    return shop.rows(
        "SELECT count(payment_transaction.id) FROM order_order LEFT JOIN payment_source ON order_id"
        " = order_order.id LEFT JOIN payment_transaction ON source_id = payment_source.id GROUP BY"
        " order_order.id"
    )


@pytest.mark.parametrize("finisher", ["completer", "retry", "both"])
def test_a_kill_between_charge_and_order_is_finished(
    open_shop: Callable[..., RunningShop], bank: Bank, finisher: str
) -> None:
    shop = open_shop("phased", by_card=True)
    visitor = shop.visitor()
    form = killed_after_the_charge(shop, visitor, bank)
    if finisher != "completer":
        shop.expire()
    if finisher != "retry":
        shop.complete()
        assert (paid(shop), len(bank.charges)) == ([(1,)], 1)
    response = visitor.place_order(form)
    assert ("Idempotent-Replayed" in response.headers) == (finisher != "retry")
    ((number,),) = shop.rows("SELECT number FROM order_order")
    assert visitor.is_thanked(response, number)
    assert (paid(shop), len(bank.charges), shop.count("payments")) == ([(1,)], 1, 1)
    assert shop.rows("SELECT num_allocated FROM partner_stockrecord") == [(1,)]


def test_a_kill_in_the_plain_shop_leaves_nothing_and_a_retry_orders(
    open_shop: Callable[..., RunningShop],
) -> None:
    shop = open_shop("plain")
    visitor = shop.visitor()
    form = visitor.go_to_preview()
    with psycopg.connect(shop.database) as hold, submitted(visitor, form) as click:
        # The order waits for this row lock.
        hold.execute("SELECT * FROM partner_stockrecord FOR UPDATE")
        eventually(shop.is_waiting_for_a_row)
        shop.kill()
        assert isinstance(click.exception(), httpx.TransportError)
    eventually(shop.is_gone)
    assert (shop.count("orders"), shop.count("keys")) == (0, 0)
    shop.start()
    assert "Idempotent-Replayed" not in visitor.place_order(form).headers
    assert (shop.count("orders"), shop.count("payments")) == (1, 1)


def test_a_declined_card_leaves_no_order_and_the_basket_can_be_ordered_again(
    open_shop: Callable[..., RunningShop], bank: Bank
) -> None:
    shop = open_shop("phased", by_card=True)
    visitor = shop.visitor()
    form = visitor.go_to_preview()
    bank.declines = True
    declined, again = (visitor.place_order(form) for _ in range(2))
    assert again.headers["Location"] == declined.headers["Location"]
    assert (shop.count("orders"), shop.rows("SELECT num_allocated FROM partner_stockrecord")) == (
        0,
        [(0,)],
    )
    assert "declined" in visitor.follow(declined)
    bank.declines = False
    assert visitor.place_order(visitor.form_of_preview()).status_code == 302
    assert (paid(shop), len(bank.charges)) == ([(1,)], 1)


def test_the_completer_orders_no_basket_that_may_have_changed(
    open_shop: Callable[..., RunningShop], bank: Bank
) -> None:
    shop = open_shop("phased", by_card=True)
    visitor = shop.visitor()
    form = visitor.go_to_preview()
    with psycopg.connect(shop.database) as hold, submitted(visitor, form) as click:
        hold.execute("SELECT * FROM partner_stockrecord FOR UPDATE")
        eventually(shop.is_waiting_for_a_row)
        shop.kill()
        assert isinstance(click.exception(), httpx.TransportError)
    shop.start()
    shop.complete()
    assert (shop.count("orders"), len(bank.charges)) == (0, 0)
    assert visitor.place_order(form).headers["Location"] == "/en-gb/basket/"
    assert visitor.place_order(visitor.form_of_preview()).status_code == 302
    assert (shop.count("orders"), len(bank.charges)) == (1, 1)
