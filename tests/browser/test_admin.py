"""The admin, as the person on call has it: a stuck key is found, explained, and moved on; who may only look sees no buttons."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from django.contrib.auth.hashers import PBKDF2PasswordHasher
from playwright.sync_api import expect

from tests.browser.visitor import STRIPE_WORKS, Visitor, log_in
from tests.murphy.rider import Rider
from tests.murphy.service import Service

pytestmark = [pytest.mark.postgres, pytest.mark.processes]

KEYS = "/admin/idempotency/idempotencykey/"
DASHBOARD = f"{KEYS}dashboard/"
in_both = pytest.mark.parametrize("scheme", ["light", "dark"])

_STUCK = """
    SELECT k.id, k.idempotency_key, r.id AS ride, u.stripe_customer_id AS customer
    FROM idempotency_idempotencykey AS k JOIN rides AS r ON r.idempotency_key_id = k.id JOIN users AS u ON u.id = r.user_id
    WHERE k.stuck_at IS NOT NULL ORDER BY k.id DESC LIMIT 1
"""
_ADD_VIEWER = """
    WITH viewer AS (
        INSERT INTO users (username, email, password, is_staff, is_active, is_superuser, first_name, last_name, date_joined)
        VALUES ('viewer', 'viewer@example.com', %s, true, true, false, '', '', now()) RETURNING id
    )
    INSERT INTO users_user_permissions (user_id, permission_id)
    SELECT viewer.id, p.id FROM viewer, auth_permission AS p WHERE p.codename = 'view_idempotencykey' RETURNING user_id
"""


@pytest.fixture
def stuck(service: Service) -> dict[str, Any]:
    """Book while Stripe fails for good, until the key waits for a person; return its row."""
    service.strike_stripe({"fault": "500_begun"})
    rider = Rider(service.url)
    assert [rider.post().status_code for _ in range(2)] == [503, 409]
    rider.close()
    (row,) = service.rows(_STUCK)
    assert row["idempotency_key"] == rider.key
    return row


def charge_by_hand(service: Service, stuck: dict[str, Any]) -> None:
    """Do at Stripe what the stuck key says that a person must: settle whether the ride is charged."""
    service.strike_stripe()
    charge = {"amount": 2000, "currency": "usd", "customer": stuck["customer"], "metadata[ride_id]": stuck["ride"]}
    url = f"{service.environment['STRIPE_API_BASE']}/v1/charges"
    httpx.post(
        url, data=charge, headers={"Authorization": "Bearer sk_test_by_hand"}, timeout=60, trust_env=False
    ).raise_for_status()


def test_a_stuck_key_is_found_explained_and_completed(service: Service, stuck: dict[str, Any], visitor: Visitor) -> None:
    page = visitor.page
    visitor.sign_in_to_admin(KEYS)
    page.get_by_role("link", name="stuck", exact=True).click()
    visitor.shoot("admin-stuck-keys")
    page.get_by_role("link", name=str(stuck["id"]), exact=True).click()
    expect(page.locator("#content")).to_contain_text(f"lists no charge for ride {stuck['ride']}.")
    expect(page.locator("[aria-current=step]")).to_contain_text("ride_created")
    visitor.shoot("admin-stuck-key")

    charge_by_hand(service, stuck)
    page.get_by_role("link", name="Complete now").click()
    visitor.shoot("admin-complete")
    page.get_by_role("button", name="Complete now").click()

    expect(page.locator(".messagelist")).to_contain_text("The request was completed")
    expect(page.get_by_role("link", name="Complete now")).to_have_count(0)
    visitor.shoot("admin-completed-key")
    (booking,) = service.books()
    assert (booking["recovery_point"], booking["response_code"]) == ("finished", 201)
    assert service.charges() == {booking["charge"]: stuck["ride"]}


def test_a_rider_who_was_kept_waiting_hears_of_it(service: Service, visitor: Visitor) -> None:
    visitor.sign_in()
    visitor.stripe("Fails permanently")
    visitor.book.click()
    visitor.expect_status("This booking is stuck and needs manual review.")
    expect(visitor.page.locator("#steps [data-point=charge_created]")).to_have_attribute("data-state", "stuck")
    visitor.shoot("page-stuck")
    with visitor.page.expect_popup() as opened:
        visitor.page.get_by_role("link", name="Open this key in the admin").click()
    admin = opened.value
    log_in(admin)
    (stuck,) = service.rows(_STUCK)
    charge_by_hand(service, stuck)
    admin.get_by_role("link", name="Complete now").click()
    admin.get_by_role("button", name="Complete now").click()
    expect(admin.locator(".messagelist")).to_contain_text("The request was completed")

    visitor.page.evaluate("window.dispatchEvent(new Event('focus'))")

    visitor.expect_status("The booking is finished.")
    visitor.expect_counts(rides=1, charges=1, receipts=1)
    visitor.stripe(STRIPE_WORKS)
    visitor.book.click()
    visitor.expect_status("Payment accepted.")


def test_who_may_only_look_sees_the_key_and_no_buttons(
    service: Service, stuck: dict[str, Any], visitor: Visitor, axe_script: str
) -> None:
    service.rows(_ADD_VIEWER, (PBKDF2PasswordHasher().encode("viewer", "salt", 1000),))

    visitor.sign_in_to_admin(f"{KEYS}{stuck['id']}/change/", "viewer", "viewer")

    expect(visitor.page.locator("#content")).to_contain_text(f"lists no charge for ride {stuck['ride']}")
    expect(visitor.page.locator("#content").locator("button, input[type=submit], .button")).to_have_count(0)
    expect(visitor.page.locator("#content")).to_contain_text("idempotency.complete_idempotencykey")
    visitor.shoot("admin-view-only")
    assert visitor.barriers(axe_script) == []
    visitor.go(KEYS)
    expect(visitor.page.locator("#result_list")).to_be_visible()
    expect(visitor.page.locator("select[name=action]")).to_have_count(0)
    assert visitor.barriers(axe_script) == []
    visitor.go(f"{KEYS}bulk/acknowledge/")
    expect(visitor.page.locator("#content")).to_contain_text("idempotency.acknowledge_idempotencykey")
    visitor.shoot("admin-refused")
    assert visitor.barriers(axe_script) == []


@in_both
def test_the_dashboard_and_the_key_page_render_without_errors_and_keep_nobody_out(
    stuck: dict[str, Any], visit: Callable[..., Visitor], axe_script: str, scheme: str
) -> None:
    visitor = visit(scheme)
    visitor.sign_in_to_admin(DASHBOARD)
    expect(visitor.page.locator("svg").first).to_be_visible()
    visitor.shoot("admin-dashboard")
    assert visitor.barriers(axe_script) == []

    visitor.go(f"{KEYS}{stuck['id']}/change/")
    expect(visitor.page.locator("[aria-current=step]")).to_be_visible()
    visitor.shoot("admin-key")
    assert visitor.barriers(axe_script) == []

    assert visitor.errors == []
    assert visitor.elsewhere == []
