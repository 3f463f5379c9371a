"""Pictures of the pages for the docs: each page at two widths, light and dark.

They include the way through an incident with 60,000 stuck keys, whose times are printed.

``make screenshots`` writes all of them to ``.run/screenshots``, and those that the docs show to
``docs/images``. It fails if axe-core finds a violation on a page, or if a page is wider than its
window.
"""

# ruff: noqa: T201 - it prints where the pictures are

import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import expect, sync_playwright

from rides_demo.management.commands.serve import NO_KEEP_ALIVE
from rides_demo.processes import web_workers
from tests.browser import chromium
from tests.browser.visitor import Visitor
from tests.murphy.service import Service

ROOT = Path(__file__).parents[2]
ALL, IMAGES = ROOT / ".run" / "screenshots", ROOT / "docs" / "images"
#: The docs show the top of these pages, light, and as wide as a desk has it.
OF_THE_DOCS, SHOWN = ("demo", "trace", "dashboard", "key"), "light-1280"
RIDE = {"origin_lat": 0.0, "origin_lon": 0.0, "target_lat": 0.0, "target_lon": 0.0}
LISTS = "/admin/idempotency"

#: A bad hour: 60 keys that are stuck for three reasons, jobs that failed, and a week of requests.
TROUBLE = (
    """
    INSERT INTO idempotency_idempotencykey (
        scope, idempotency_key, attempts, completer_attempts, request_method, request_path,
        request_headers, remote_addr, request_content_type, request_body, request_fingerprint, seed,
        recovery_point, created_at, last_run_at, stuck_at, stuck_code, stuck_reason, last_error,
        lease_seconds, history
    )
    SELECT 'user:1', 'made-up-' || n, 3, 2, 'POST', '/rides', '{}', '127.0.0.1',
        'application/json', '{"origin_lat": 0.0}', 'v1:0', '', 'ride_created',
        now() - n * interval '90 s', now() - n * interval '80 s', now() - n * interval '70 s',
        (ARRAY['call_in_doubt', 'attempts_exhausted', 'view_gave_up'])[1 + n % 3],
        (ARRAY[
            'The call ''sms'' was begun, and its result was never recorded.',
            'The completer ran it 25 times without success. '
                || 'The last error: ReadTimeout: no answer after ' || n || ' s',
            'Stripe lists no charge for ride ' || n || '.'
        ])[1 + n % 3], '', 90, '[]'
    FROM generate_series(1, 60) AS n
    """,
    """
    INSERT INTO idempotency_stagedjob (
        id, job_name, job_args, queue, run_at, hand_overs, refusals, last_error, failed_at
    )
    SELECT gen_random_uuid(), 'rides_demo.jobs.send_ride_receipt',
        jsonb_build_object('ride_id', n), 'default', now(), 0, 5,
        'ConnectionError: mail server ' || n || ' refused', now() - n * interval '1 min'
    FROM generate_series(1, 12) AS n
    """,
    """
    INSERT INTO idempotency_trafficcount (minute, kind, count)
    SELECT extract(epoch FROM now())::int / 60 - m, kind,
        1 + (size * (2 + sin(m / 180.0)) + m * 7919 % (size + 1))::int
    FROM generate_series(1, 10080) AS m,
        (VALUES ('ran 8', 30), ('ran 14', 6), ('replayed', 5), ('conflict', 1)) AS k (kind, size)
    UNION ALL
    SELECT extract(epoch FROM now())::int / 60 - m, 'failed', 20 - abs(m - 25)
    FROM generate_series(12, 38) AS m
    ON CONFLICT DO NOTHING
    """,
)
#: The keys of an outage, 20,000 of each cause.
INCIDENT = re.sub(r"'[789]0 s'", "'5 ms'", TROUBLE[0]).replace("1, 60)", "1, 60000)")
_OFF_THE_LIST = """
    UPDATE idempotency_idempotencykey SET acknowledged_at = now() WHERE stuck_at IS NOT NULL
"""
ANSWER = '{"detail": "Order {key.id} was not placed. Use a new key."}'
_COMPLETER_RUNS = """
    SELECT 1 FROM idempotency_processheartbeat
    WHERE name = 'complete_keys' AND beat_at > now() - interval '20 s'
"""
_OPEN_WORKS = "SELECT count(*) AS number FROM idempotency_bulkwork WHERE finished_at IS NULL"


def main() -> int:
    """Start the demo, make trouble, and take the pictures."""
    axe = chromium.axe_script(ROOT / ".run")
    ALL.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=90_000)  # for the lock of a killed server
    with tempfile.TemporaryDirectory(prefix="shots-") as folder, sync_playwright() as playwright:
        environment = {web_workers.SUPERVISOR: str(os.getpid()), "GUNICORN_CMD_ARGS": NO_KEEP_ALIVE}
        environment |= {"LOCK_TIMEOUT_SECONDS": "10", "TRACES": "1"}
        with Service(Path(folder), environment) as service:
            service.begin()
            browser = playwright.chromium.launch(
                executable_path=chromium.chromium(), args=chromium.ARGUMENTS
            )
            first = Visitor(browser.new_context(), service.url, ALL, "first")
            first.sign_in()
            first.book.click()
            first.expect_counts(rides=1, charges=1, receipts=1)
            trace = path_of_trace(service, first)
            service.strike_stripe({"fault": "500_begun"})
            headers = {"Authorization": "Bearer demo-jane", "Idempotency-Key": "screenshot"}
            while (
                httpx.post(
                    f"{service.url}/rides", json=RIDE, headers=headers, timeout=60
                ).status_code
                != 409
            ):
                pass  # The last answer says that the key is stuck.
            service.strike_stripe()
            for statement in TROUBLE:
                service.rows(f"{statement} RETURNING 1")
            found: list[str] = []
            for scheme in ("light", "dark"):
                for width in (1280, 400):
                    context = browser.new_context(
                        color_scheme=scheme, viewport={"width": width, "height": 900}
                    )
                    visitor = Visitor(context, service.url, ALL, f"{scheme}-{width}")
                    found += shoot(service, visitor, axe, trace)
                    context.close()
            context = browser.new_context(viewport={"width": 1280, "height": 900})
            print(walk_through_incident(service, Visitor(context, service.url, ALL, "incident")))
            browser.close()
    print(*found, sep="\n")
    pictures = len(list(ALL.glob("docs-*.png")))
    print(f"screenshots: {'FAILED' if found else 'ok'}, {pictures} pictures in {ALL}")
    return bool(found)


def path_of_trace(service: Service, visitor: Visitor) -> str:
    """Return the path of the trace of a booking: its server is killed, a retry is rejected, the
    completer finishes the booking, and another retry gets its response."""
    visitor.kill.click()
    visitor.expect_killed()
    visitor.expect_status("409")
    visitor.page.route("**/rides", lambda route: route.abort())
    service.let_locks_expire()
    service.processes["completer"].start()
    expect(visitor.page.locator("#lesson")).to_contain_text("completer")
    service.processes["completer"].kill()
    visitor.page.unroute("**/rides")
    visitor.expect_status("Payment accepted")
    return str(visitor.page.locator("#trace-link").get_attribute("href"))


def shoot(service: Service, visitor: Visitor, axe: str, trace: str) -> list[str]:
    """Take the picture of each page in one window. Return what keeps people out: violations of
    axe-core, and pages that are wider than the window."""
    (key,) = service.rows(
        "SELECT id FROM idempotency_idempotencykey WHERE idempotency_key = 'screenshot'"
    )
    (job,) = service.rows(
        "SELECT id FROM idempotency_stagedjob WHERE failed_at IS NOT NULL LIMIT 1"
    )
    visitor.page.set_default_timeout(120_000)  # The demo polls until the worker sent the receipt.
    visitor.sign_in()
    pages = {
        "demo": "/",
        "trace": trace,
        "dashboard": f"{LISTS}/idempotencykey/dashboard/",
        "keys": f"{LISTS}/idempotencykey/?state=stuck",
        "key": f"{LISTS}/idempotencykey/{key['id']}/change/",
        "job": f"{LISTS}/stagedjob/{job['id']}/change/",
        "filters": f"{LISTS}/idempotencykey/?path=/rides#changelist-filter",
        "index": "/admin/",
        "app": f"{LISTS}/",
        "jobs": f"{LISTS}/stagedjob/",
        "calls": f"{LISTS}/downstreamcall/",
        "messages": f"{LISTS}/processedmessage/",
        "hand-back": f"{LISTS}/idempotencykey/bulk/hand_back/?state=stuck",
        "discard": f"{LISTS}/stagedjob/bulk/discard/?state=failed",
    }
    found = []
    for name, path in pages.items():
        visitor.sign_in_to_admin(path) if name == "dashboard" else visitor.go(path)
        if name == "demo":  # a booking whose server was killed
            visitor.kill.click()
            visitor.expect_status("Payment accepted")
            expect(visitor.page.get_by_text("What just happened")).to_be_visible(timeout=30_000)
            visitor.page.evaluate("scrollTo(0, 0)")
        visitor.page.wait_for_load_state("networkidle")
        visitor.shoot(f"docs-{name}")
        if name in OF_THE_DOCS and visitor.name == SHOWN:
            visitor.page.screenshot(path=IMAGES / f"{name}.png")
        found += [f"{visitor.name} {path} {each}" for each in visitor.barriers(axe, every=True)]
        if not visitor.fits():
            found.append(f"{visitor.name} {path} is wider than its window")
    return found


def walk_through_incident(service: Service, visitor: Visitor) -> str:
    """Decide about 60,000 stuck keys as docs/incidents.md says, with pictures; return the times."""
    service.rows(f"{_OFF_THE_LIST} RETURNING 1")
    service.rows(f"{INCIDENT.replace('made-up-', 'incident-')} RETURNING 1")
    service.processes["completer"].start()
    while not service.rows(_COMPLETER_RUNS):
        time.sleep(0.2)
    page, start = visitor.page, time.monotonic()

    def picture(name: str, height: int) -> None:
        clip: Any = {"x": 0, "y": 0, "width": 1280, "height": height}
        page.screenshot(path=IMAGES / f"incident-{name}.png", clip=clip)

    def decide(cause: str, action: str) -> None:
        page.get_by_role("row").filter(has_text=cause).get_by_role("link", name=action).click()
        page.get_by_label("Note").fill("ticket 7")

    def to_dashboard(*, from_work: bool = True) -> None:
        if from_work:
            # At the end of its work the page of the progress leads to the list.
            shown = page.locator("#idem-progress, #changelist")
            expect(shown).to_be_visible(timeout=30_000)
        page.get_by_role("link", name="Dashboard", exact=True).last.click()
        expect(page.locator("#idem-banner")).to_be_visible()

    visitor.sign_in_to_admin("/admin/")
    to_dashboard(from_work=False)
    expect(page.get_by_role("row").filter(has_text="20,000")).to_have_count(3)
    picture("groups", 650)
    decide("attempts_exhausted", "Hand back")
    page.get_by_role("button", name="Hand back").click()
    to_dashboard()
    decide("call_in_doubt", "Answer")
    page.get_by_label("Status").fill("410")
    page.get_by_label("Body:").fill(ANSWER)
    page.get_by_role("button", name="Preview").click()
    expect(page.get_by_role("button", name="Answer 20,000 keys")).to_be_visible()
    picture("answer", 700)
    page.get_by_role("button", name="Answer 20,000 keys").click()
    to_dashboard()
    decide("view_gave_up", "Acknowledge")
    page.get_by_role("button", name="Acknowledge").click()
    to_dashboard()
    decided = time.monotonic() - start
    works = page.locator("section").filter(has=page.get_by_role("heading", name="Bulk work"))
    works.screenshot(path=IMAGES / "incident-works.png")
    while service.rows(_OPEN_WORKS)[0]["number"]:
        time.sleep(0.5)
    settled = time.monotonic() - start
    return f"incident: decided after {decided:.0f} s, all work finished after {settled:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
