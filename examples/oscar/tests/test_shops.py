"""Test a double submit in each shop, one after the other and concurrently."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from bank import Bank
from running_shop import RunningShop, Visitor, eventually

PROTECTED = pytest.mark.parametrize(("name", "by_card"), [("plain", False), ("phased", True)])


def charges(shop: RunningShop, bank: Bank) -> int:
    """Return the number of payments: charges of the bank, or invoices of a shop without a bank."""
    return len(bank.charges) if "BANK_URL" in (shop.environment or {}) else shop.count("payments")


def thanks_for_the_only_order(
    visitor: Visitor, response: httpx.Response, shop: RunningShop
) -> bool:
    """Return whether a response redirects to the thank-you page of the only order, without a
    further redirect."""
    ((number,),) = shop.rows("SELECT number FROM order_order")
    return visitor.is_thanked(response, number)


def test_an_unprotected_shop_charges_twice(
    open_shop: Callable[..., RunningShop], bank: Bank
) -> None:
    shop = open_shop("unprotected", by_card=True)
    visitor = shop.visitor()
    form = visitor.go_to_preview()
    bank.answers.clear()
    with ThreadPoolExecutor() as threads:
        clicks = [threads.submit(visitor.place_order, form) for _ in range(2)]
        eventually(lambda: bank.charges)
        # the row of the basket, which the other request has frozen
        eventually(shop.is_waiting_for_a_row)
        bank.answers.set()
        # 200 is an error page
        assert sorted(click.result().status_code for click in clicks) == [200, 302]
    assert (shop.count("orders"), len(bank.charges)) == (1, 2)


@PROTECTED
@pytest.mark.parametrize("language", ["en-gb", "de"])
def test_a_second_submit_leads_to_the_order_of_the_first(
    open_shop: Callable[..., RunningShop], bank: Bank, name: str, by_card: bool, language: str
) -> None:
    shop = open_shop(name, by_card=by_card)
    visitor = shop.visitor(language)
    form = visitor.go_to_preview()
    first, second = (visitor.place_order(form) for _ in range(2))
    assert (first.status_code, second.headers["Location"]) == (302, first.headers["Location"])
    assert "Idempotent-Replayed" not in first.headers
    assert second.headers["Idempotent-Replayed"] == "true"
    assert thanks_for_the_only_order(visitor, second, shop)
    assert (shop.count("orders"), charges(shop, bank), shop.mails()) == (1, 1, 1)


@PROTECTED
def test_two_submits_at_once_make_one_order_and_one_charge(
    open_shop: Callable[..., RunningShop], bank: Bank, name: str, by_card: bool
) -> None:
    shop = open_shop(name, by_card=by_card)
    visitor = shop.visitor()
    form = visitor.go_to_preview()
    with ThreadPoolExecutor() as threads:
        clicks = [threads.submit(visitor.place_order, form) for _ in range(2)]
        responses = [click.result() for click in clicks]
    assert [response.status_code for response in responses] == [302, 302]
    assert all(thanks_for_the_only_order(visitor, response, shop) for response in responses)
    assert (shop.count("orders"), charges(shop, bank)) == (1, 1)


@PROTECTED
def test_the_other_steps_need_no_key_and_an_order_does(
    open_shop: Callable[..., RunningShop], name: str, by_card: bool
) -> None:
    shop = open_shop(name, by_card=by_card)
    visitor = shop.visitor()
    form = visitor.go_to_preview()
    page = visitor.page("/checkout/preview/")
    assert visitor.send("/checkout/preview/", page).status_code == 200  # Oscar shows the preview.
    assert visitor.send("/checkout/preview/", page, action="place_order").status_code == 400
    assert (shop.count("keys"), shop.count("orders")) == (0, 0)
    assert visitor.place_order(form).status_code == 302


@PROTECTED
def test_the_next_basket_is_another_order(
    open_shop: Callable[..., RunningShop], bank: Bank, name: str, by_card: bool
) -> None:
    shop = open_shop(name, by_card=by_card)
    visitor = shop.visitor()
    form = visitor.go_to_preview()
    assert visitor.place_order(form).status_code == 302
    visitor.fill_basket()
    assert visitor.place_order(visitor.go_to_preview()).status_code == 302
    assert (shop.count("orders"), charges(shop, bank)) == (2, 2)
    late = visitor.place_order(form)  # a repeated submit of the first order
    assert visitor.is_thanked(late, shop.rows("SELECT min(number) FROM order_order")[0][0])


@PROTECTED
def test_only_who_has_its_address_sees_an_order(
    open_shop: Callable[..., RunningShop], name: str, by_card: bool
) -> None:
    shop = open_shop(name, by_card=by_card)
    visitor = shop.visitor()
    response = visitor.place_order(visitor.go_to_preview())
    ((number,),) = shop.rows("SELECT number FROM order_order")
    stranger = shop.visitor()
    assert stranger.is_thanked(response, number)
    for guess in ("", f"?order={number}", f"?order={number}:guessed"):
        assert number not in stranger.page(f"/checkout/thank-you/{guess}")
