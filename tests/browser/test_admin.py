"""The admin, as the person on call has it: a stuck key is found, explained, and moved on; who may
only look sees no buttons."""

from collections.abc import Callable, Iterator
from dataclasses import replace
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
JOBS = "/admin/idempotency/stagedjob/"
in_both = pytest.mark.parametrize("scheme", ["light", "dark"])

_STUCK = """
    SELECT k.id, k.idempotency_key, r.id AS ride, u.stripe_customer_id AS customer
    FROM idempotency_idempotencykey AS k
    JOIN rides AS r ON r.idempotency_key_id = k.id JOIN users AS u ON u.id = r.user_id
    WHERE k.stuck_at IS NOT NULL ORDER BY k.id DESC LIMIT 1
"""
_ADD_STUCK = """
    INSERT INTO idempotency_idempotencykey (
        scope, idempotency_key, attempts, completer_attempts, request_method, request_path,
        request_headers, remote_addr, request_content_type, request_fingerprint, seed,
        recovery_point, lease_seconds, stuck_at, stuck_code, stuck_reason, last_error, history
    ) VALUES (
        'user:1', %s, 1, 0, 'POST', '/rides', '{}', '', '', 'v1:0', '', 'started', 90, now(),
        'view_gave_up', 'Look.', '', '[]'
    ) RETURNING id
"""
#: Let a run hold the key whose charge failed: the page shows it as in flight, for as long as the
#: lock lasts.
_HOLD = """
    UPDATE idempotency_idempotencykey SET locked_until = now() + interval '90 s'
    WHERE id = (
        SELECT max(id) FROM idempotency_idempotencykey
        WHERE finished_at IS NULL AND stuck_at IS NULL
    ) RETURNING id
"""
_ANSWERED = (
    "SELECT id, response_code FROM idempotency_idempotencykey WHERE response_code IS NOT NULL ORDER"
    " BY id"
)
_ADD_VIEWER = """
    WITH viewer AS (
        INSERT INTO users (
            username, email, password, is_staff, is_active, is_superuser, first_name, last_name,
            date_joined
        ) VALUES ('viewer', 'viewer@example.com', %s, true, true, false, '', '', now()) RETURNING id
    )
    INSERT INTO users_user_permissions (user_id, permission_id)
    SELECT viewer.id, p.id FROM viewer, auth_permission AS p
    WHERE p.codename = 'view_idempotencykey' RETURNING user_id
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
    """Do at Stripe what the stuck key says that a person must: settle whether the ride is
    charged."""
    service.strike_stripe()
    charge = {
        "amount": 2000,
        "currency": "usd",
        "customer": stuck["customer"],
        "metadata[ride_id]": stuck["ride"],
    }
    url = f"{service.environment['STRIPE_API_BASE']}/v1/charges"
    httpx.post(
        url,
        data=charge,
        headers={"Authorization": "Bearer sk_test_by_hand"},
        timeout=60,
        trust_env=False,
    ).raise_for_status()


def test_a_stuck_key_is_found_explained_and_completed(
    service: Service, stuck: dict[str, Any], visitor: Visitor
) -> None:
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

    expect(page.locator(".messagelist")).to_contain_text("It was completed")
    expect(page.get_by_role("link", name="Complete now")).to_have_count(0)
    visitor.shoot("admin-completed-key")
    (booking,) = service.books()
    assert (booking["recovery_point"], booking["response_code"]) == ("finished", 201)
    assert service.charges() == {booking["charge"]: stuck["ride"]}


def test_a_stuck_key_is_answered_on_a_phone(
    service: Service, stuck: dict[str, Any], visit: Callable[..., Visitor], axe_script: str
) -> None:
    visitor = visit("light", 400)
    page = visitor.page
    visitor.sign_in_to_admin(f"{KEYS}{stuck['id']}/change/")
    page.get_by_role("link", name="Answer").click()
    expect(page.get_by_label("Body:")).to_be_visible()
    assert visitor.fits()
    assert visitor.barriers(axe_script) == []
    page.get_by_label("Body:").fill('{"error": no seat}')
    page.get_by_role("button", name="Preview").click()
    expect(page.locator(".errorlist")).to_contain_text("line 1, column 11")

    page.get_by_label("Body:").fill('{"error": "no seat"}')
    page.get_by_role("button", name="Preview").click()
    expect(page.locator(".idem-preview")).to_contain_text("409 Conflict")
    assert visitor.fits()
    assert visitor.barriers(axe_script) == []
    visitor.shoot("admin-answer-preview")
    assert service.rows(_STUCK)
    page.get_by_role("button", name="Store this answer").click()

    expect(page.locator(".messagelist")).to_contain_text("Answered with status 409.")
    assert not service.rows(_STUCK)


def test_a_rider_who_was_kept_waiting_hears_of_it(service: Service, visitor: Visitor) -> None:
    visitor.sign_in()
    visitor.stripe("Fails permanently")
    visitor.book.click()
    visitor.expect_status("This booking is stuck and needs manual review.")
    expect(visitor.page.locator("#steps [data-point=charge_created]")).to_have_attribute(
        "data-state", "stuck"
    )
    visitor.shoot("page-stuck")
    with visitor.page.expect_popup() as opened:
        visitor.page.get_by_role("link", name="Open this key in the admin").click()
    admin = opened.value
    log_in(admin)
    (stuck,) = service.rows(_STUCK)
    charge_by_hand(service, stuck)
    admin.get_by_role("link", name="Complete now").click()
    admin.get_by_role("button", name="Complete now").click()
    expect(admin.locator(".messagelist")).to_contain_text("It was completed")

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

    expect(visitor.page.locator("#content")).to_contain_text(
        f"lists no charge for ride {stuck['ride']}"
    )
    expect(visitor.page.locator("#content").locator("input[type=submit], .button")).to_have_count(0)
    expect(visitor.page.locator(".idem-missing")).to_contain_text(
        "idempotency.complete_idempotencykey"
    )
    visitor.shoot("admin-view-only")
    assert visitor.barriers(axe_script) == []
    visitor.go(KEYS)
    expect(visitor.page.locator("#result_list")).to_be_visible()
    expect(visitor.page.locator("select[name=action]")).to_have_count(0)
    assert visitor.barriers(axe_script) == []
    visitor.go(f"{KEYS}bulk/acknowledge/")
    expect(visitor.page.locator("#content")).to_contain_text(
        "idempotency.acknowledge_idempotencykey"
    )
    visitor.shoot("admin-refused")
    assert visitor.barriers(axe_script) == []


@in_both
def test_the_dashboard_renders_without_errors_and_keeps_nobody_out(
    stuck: dict[str, Any], visit: Callable[..., Visitor], axe_script: str, scheme: str
) -> None:
    visitor = visit(scheme)
    visitor.sign_in_to_admin(DASHBOARD)
    expect(visitor.page.locator("svg").first).to_be_visible()
    visitor.shoot("admin-dashboard")
    assert visitor.barriers(axe_script) == []

    assert visitor.errors == []
    assert visitor.elsewhere == []


def test_the_dashboard_follows_what_happens_until_it_is_paused(
    service: Service, visitor: Visitor
) -> None:
    visitor.page.clock.install()
    visitor.sign_in_to_admin(DASHBOARD)
    banner = visitor.page.locator(".idem-banner")
    (before,) = service.rows(
        "SELECT count(*) AS stuck FROM idempotency_idempotencykey WHERE stuck_at IS NOT NULL"
    )

    def expect_stuck(added: int) -> None:
        expect(banner).to_contain_text(f"Keys that need manual review: {before['stuck'] + added},")

    service.rows(_ADD_STUCK, ("first",))
    visitor.page.clock.fast_forward(11_000)
    expect_stuck(1)

    visitor.page.get_by_role("button", name="Pause").click()
    service.rows(_ADD_STUCK, ("second",))
    visitor.page.clock.fast_forward(60_000)
    expect(visitor.page.locator("#idem-live-note")).to_have_text("(paused)")
    expect_stuck(1)

    visitor.page.get_by_role("button", name="Resume").click()
    expect_stuck(2)


def test_a_dashboard_whose_person_is_signed_out_says_so(service: Service, visitor: Visitor) -> None:
    visitor.page.clock.install()
    visitor.sign_in_to_admin(DASHBOARD)
    expect(visitor.page.get_by_role("button", name="Pause")).to_be_visible()
    visitor.page.context.clear_cookies()

    visitor.page.clock.fast_forward(11_000)

    expect(visitor.page.locator("#idem-live-note")).to_contain_text("reload the page")


@pytest.fixture
def keys_of_each_kind(service: Service, stuck: dict[str, Any]) -> dict[str, int]:
    """Make a key that is stuck, one in flight, a finished one, and one with a declined card; return
    their ids."""
    service.strike_stripe({"fault": "down", "path": "/v1/charges", "count": 1})
    for rider, status in (
        (Rider(service.url), 503),
        (Rider(service.url), 201),
        (Rider(service.url), 402),
    ):
        if status == 402:
            rider.booking = replace(rider.booking, token="demo-joe")
        assert rider.post().status_code == status
        rider.close()
    (held,) = service.rows(_HOLD)
    answered = {row["response_code"]: row["id"] for row in service.rows(_ANSWERED)}
    return {
        "stuck": stuck["id"],
        "in-flight": held["id"],
        "finished": answered[201],
        "declined": answered[402],
    }


@in_both
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_of_each_kind_of_key_fits_and_keeps_nobody_out(
    keys_of_each_kind: dict[str, int],
    visit: Callable[..., Visitor],
    axe_script: str,
    scheme: str,
    width: int,
) -> None:
    visitor = visit(scheme, width)
    visitor.sign_in_to_admin(DASHBOARD)
    expect(visitor.page.locator("svg").first).to_be_visible()
    for kind, pk in keys_of_each_kind.items():
        visitor.go(f"{KEYS}{pk}/change/")
        expect(visitor.page.locator(".idem-timeline")).to_be_visible()
        visitor.shoot(f"admin-key-{kind}")
        assert visitor.fits(), kind
        assert visitor.barriers(axe_script, every=True) == [], kind
    assert visitor.errors == []
    assert visitor.elsewhere == []


@pytest.fixture
def german(service: Service) -> Iterator[None]:
    """Let the web server speak German."""
    service.serve("tests.browser.german")
    yield
    service.serve("rides_demo.wsgi")


@pytest.mark.parametrize("width", [1280, 400])
def test_the_pages_fit_in_german(
    keys_of_each_kind: dict[str, int],
    german: None,
    visit: Callable[..., Visitor],
    axe_script: str,
    width: int,
) -> None:
    visitor = visit("light", width)
    page = visitor.page
    visitor.sign_in_to_admin(DASHBOARD, labels=("Benutzername", "Passwort", "Anmelden"))
    expect(page.locator("#idem-traffic")).to_have_text("Anfragen der letzten Stunde")
    page.get_by_role("button", name="Anhalten").click()
    expect(page.get_by_role("button", name="Fortsetzen")).to_be_visible()
    expect(page.locator("#idem-live-note")).to_have_text("(angehalten)")
    paths = {kind: f"{KEYS}{pk}/change/" for kind, pk in keys_of_each_kind.items()}
    lists = {
        "keys": f"{KEYS}?state=stuck",
        "jobs": JOBS,
        "question": f"{KEYS}bulk/hand_back/?state=stuck",
    }
    for name, path in {"dashboard": DASHBOARD, **paths, **lists}.items():
        visitor.go(path)
        expect(page.locator("#content h1, #content h2").first).to_be_visible()
        visitor.shoot(f"admin-german-{name}")
        assert visitor.fits(), name
        assert visitor.barriers(axe_script) == [], name
    visitor.go(paths["stuck"])
    page.get_by_role("link", name="Beantworten").click()
    visitor.shoot("admin-german-answer")
    assert visitor.fits()
    assert visitor.errors == []


def test_the_keyboard_reaches_the_cure_within_ten_tabs(
    stuck: dict[str, Any], visitor: Visitor
) -> None:
    visitor.sign_in_to_admin(DASHBOARD)
    expect(visitor.page.locator("svg").first).to_be_visible()
    visitor.go(f"{KEYS}{stuck['id']}/change/")
    assert visitor.tabs_to("a.button.default", at_most=10)
    visitor.page.keyboard.press("Enter")
    expect(visitor.page.get_by_role("button", name="Preview")).to_be_visible()


def test_the_key_is_copied_at_a_press(stuck: dict[str, Any], visitor: Visitor) -> None:
    visitor.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    visitor.sign_in_to_admin(f"{KEYS}{stuck['id']}/change/")
    visitor.page.get_by_role("button", name="Copy the key").click()
    expect(visitor.page.get_by_role("button", name="Copied")).to_be_visible()
    assert visitor.page.evaluate("navigator.clipboard.readText()") == stuck["idempotency_key"]


def test_the_page_of_a_key_follows_what_happens(
    service: Service, stuck: dict[str, Any], visitor: Visitor
) -> None:
    visitor.page.clock.install()
    visitor.sign_in_to_admin(f"{KEYS}{stuck['id']}/change/")
    heading = visitor.page.locator("#idem-state")
    expect(heading).to_contain_text("Stuck")

    service.rows(
        "UPDATE idempotency_idempotencykey SET acknowledged_at = now() WHERE id = %s RETURNING id",
        (stuck["id"],),
    )
    visitor.page.clock.fast_forward(6_000)

    expect(heading).to_contain_text("Acknowledged")
