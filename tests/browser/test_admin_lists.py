"""The lists of the admin on a night with many stuck keys: act on all that match, with and without
scripts."""

import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import expect

from tests.browser.visitor import Visitor
from tests.murphy.service import Service

pytestmark = [pytest.mark.postgres, pytest.mark.processes]

KEYS = "/admin/idempotency/idempotencykey/"
_STUCK_KEYS = """
    INSERT INTO idempotency_idempotencykey (
        scope, idempotency_key, attempts, completer_attempts, request_method, request_path,
        request_content_type, request_headers, remote_addr, request_fingerprint, seed,
        recovery_point, stuck_at, stuck_code, stuck_reason, last_error, lease_seconds, history,
        created_at, last_run_at
    )
    SELECT 'user:1', 'night-' || n, 1, 0, 'POST', '/night', '', '{}', '', 'v1:0', '',
        'ride_created', now() - interval '1 hour',
        CASE WHEN n %% 10 = 0 THEN 'call_in_doubt' ELSE 'view_gave_up' END,
        'Stripe lists no charge for ride ' || n || '.', 'OSError: down', 90, '[]',
        now() - n * interval '1 second' - interval '2 hours', now() - interval '2 hours'
    FROM generate_series(1, %s) AS n RETURNING id
"""
#: The stuck keys of this test; other tests leave some too.
_NIGHT = "state=stuck&path=/night"
_GONE = "DELETE FROM idempotency_idempotencykey WHERE idempotency_key LIKE 'night-%' RETURNING id"
_ACKNOWLEDGED = """
    SELECT count(*) AS number FROM idempotency_idempotencykey
    WHERE acknowledged_at IS NOT NULL AND request_path = '/night'
"""


_FAILED_JOBS = """
    INSERT INTO idempotency_stagedjob (
        id, job_name, job_args, queue, run_at, hand_overs, refusals, last_error, failed_at
    )
    SELECT gen_random_uuid(), 'rides_demo.jobs.send_ride_receipt',
        jsonb_build_object('ride_id', -n), 'nobody', now(), 0, 5,
        'OSError: mail server ' || n || ' is down', now() - n * interval '1 minute'
    FROM generate_series(1, %s) AS n RETURNING id
"""
_RETRIED = (
    "DELETE FROM idempotency_stagedjob WHERE queue = 'nobody' AND failed_at IS NULL RETURNING id"
)
_NO_JOBS = "DELETE FROM idempotency_stagedjob WHERE queue = 'nobody' RETURNING id"


@pytest.fixture
def failed_jobs(service: Service) -> Iterator[Callable[[int], object]]:
    """Return a function that makes so many failed jobs. The enqueuer would hand them over, and is
    killed."""
    service.processes["enqueuer"].kill()
    yield lambda count: service.rows(_FAILED_JOBS, (count,))
    service.rows(_NO_JOBS)


@pytest.fixture
def night(service: Service) -> Iterator[Callable[[int], object]]:
    """Return a function that lets there be so many stuck keys."""
    yield lambda count: service.rows(_STUCK_KEYS, (count,))
    service.rows(_GONE)


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 400)])
def test_two_thousand_keys_are_acknowledged(
    service: Service,
    night: Callable[[int], object],
    visit: Callable[..., Visitor],
    axe_script: str,
    scheme: str,
    width: int,
) -> None:
    night(2_000)
    visitor = visit(scheme, width)
    page = visitor.page
    visitor.sign_in_to_admin(f"{KEYS}?{_NIGHT}")
    assert visitor.barriers(axe_script) == []
    page.locator("#action-toggle").check()
    page.get_by_role("button", name=re.compile("Select all 2,000")).first.click()
    page.locator("select[name=action]").first.select_option("acknowledge")
    visitor.shoot("admin-list")
    assert visitor.barriers(axe_script) == []
    page.get_by_role("button", name="Go").first.click()

    expect(page.locator("#content")).to_contain_text("call_in_doubt")
    visitor.shoot("admin-bulk-question")
    assert visitor.barriers(axe_script) == []
    assert visitor.fits()
    page.get_by_label("Note").fill("ticket 7")
    page.get_by_role("button", name="Acknowledge").click()

    # In a message, or on the page of the work if the completer of the service is faster.
    expect(page.locator("#container")).to_contain_text("2,000 keys were acknowledged")
    assert service.rows(_ACKNOWLEDGED)[0]["number"] == 2_000


def test_filters_are_saved_under_a_name_that_a_person_chooses(
    visit: Callable[..., Visitor],
) -> None:
    page = (visitor := visit("light", 400)).page
    visitor.sign_in_to_admin(KEYS)
    expect(page.get_by_label("Save these filters as")).to_be_hidden()
    visitor.go(f"{KEYS}?{_NIGHT}&p=1")
    page.get_by_label("Save these filters as").fill("<b>Night</b>")
    page.get_by_role("button", name="Save the view").click()

    visitor.go(KEYS)
    page.get_by_role("link", name="<b>Night</b>").click()
    expect(page).to_have_url(re.compile(re.escape(f"?{_NIGHT.replace('/', '%2F')}") + "$"))
    page.get_by_role("button", name="Remove the view <b>Night</b>").click()
    page.reload()
    expect(page.get_by_role("link", name="<b>Night</b>")).to_have_count(0)
    assert visitor.errors == []


def test_without_scripts_a_person_presses_continue(
    night: Callable[[int], object], visit: Callable[..., Visitor], axe_script: str
) -> None:
    night(700)
    visitor = visit()
    page = visitor.page
    page.route("**/continue.js", lambda route: route.abort())
    visitor.sign_in_to_admin(f"{KEYS}bulk/acknowledge/?{_NIGHT}")
    page.get_by_role("button", name="Acknowledge").click()
    expect(page.locator("progress")).to_have_attribute("max", "700")
    visitor.shoot("admin-bulk-progress")
    assert visitor.barriers(axe_script) == []
    for _ in range(5):  # A slow machine needs more parts.
        if page.get_by_role("button", name="Continue").count():
            page.get_by_role("button", name="Continue").click()
    expect(page.locator("#container")).to_contain_text("700 keys were acknowledged")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_pages_of_bulk_work_fit_and_keep_nobody_out(
    failed_jobs: Callable[[int], object],
    night: Callable[[int], object],
    visit: Callable[..., Visitor],
    axe_script: str,
    scheme: str,
    width: int,
) -> None:
    """Each question, the preview of an answer, and work in progress, stopped and finished."""
    failed_jobs(3)
    night(1_200)
    visitor = visit(scheme, width)
    page = visitor.page
    page.route("**/continue.js", lambda route: route.abort())
    found: list[str] = []

    def look(name: str) -> None:
        page.wait_for_load_state("networkidle")
        visitor.shoot(f"admin-bulk-{name}")
        found.extend(f"{name}: {each}" for each in visitor.barriers(axe_script, every=True))
        if not visitor.fits():
            found.append(f"{name} is wider than its window")

    visitor.sign_in_to_admin(f"{KEYS}bulk/unacknowledge/?{_NIGHT}")
    look("none")
    for path in ("stagedjob/bulk/retry/", "stagedjob/bulk/discard/"):
        visitor.go(f"/admin/idempotency/{path}?state=failed")
        look(path.split("/")[-2])
    visitor.go(f"{KEYS}bulk/answer/?{_NIGHT}&stuck_code=call_in_doubt")
    page.get_by_label("Body:").fill('{"error": "no seat for {key.id}"}')
    page.get_by_role("button", name="Preview").click()
    look("preview")
    for action, button in (("hand_back", "Hand back"), ("acknowledge", "Acknowledge")):
        visitor.go(f"{KEYS}bulk/{action}/?{_NIGHT}")
        look(action)
        page.get_by_role("button", name=button).click()
        look("begun")
        if action == "hand_back":
            page.get_by_role("button", name="Stop").click()
            look("stopped")
            continue
        page.get_by_role("button", name="Continue").click()
        look("going-on")
    visitor.go(f"{KEYS}dashboard/")
    look("dashboard")
    assert found == []


def test_a_group_of_failed_jobs_is_retried_from_the_dashboard(
    service: Service, failed_jobs: Callable[[int], object], visitor: Visitor
) -> None:
    failed_jobs(30)
    page = visitor.page
    visitor.sign_in_to_admin(f"{KEYS}dashboard/")
    group = page.get_by_role("row").filter(has_text="OSError: mail server # is down")
    expect(group.locator(".idem-number")).to_contain_text("30")

    group.get_by_role("link", name="Retry").click()
    expect(page.locator("#content")).to_contain_text("OSError: mail server")
    page.get_by_role("button", name="Retry").click()

    expect(page.locator("#container")).to_contain_text("30 jobs are due again")
    assert len(service.rows(_RETRIED)) == 30


def test_the_oldest_key_of_a_group_is_found_and_answered(
    service: Service, night: Callable[[int], object], visitor: Visitor
) -> None:
    night(30)
    page = visitor.page
    visitor.sign_in_to_admin(f"{KEYS}dashboard/")
    group = (
        page.get_by_role("row")
        .filter(has_text="view_gave_up")
        .filter(has_text="Stripe lists no charge")
    )
    group.locator(".idem-number a").click()
    page.locator("#result_list tbody th a").first.click()
    # Of ride 30 the call is in doubt.
    expect(page.locator("#content")).to_contain_text("Stripe lists no charge for ride 29.")

    page.get_by_role("link", name="Answer").click()
    page.get_by_label("Body:").fill('{"error": "not charged"}')
    page.get_by_role("button", name="Preview").click()
    page.get_by_role("button", name="Store this answer").click()

    expect(page.locator(".messagelist")).to_contain_text("Answered with status 409")
    expect(page.locator("#idem-state")).to_contain_text("Stuck")  # the next key of the list
