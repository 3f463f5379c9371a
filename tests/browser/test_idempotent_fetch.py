"""The function for browsers of the docs, as printed, in Chromium: one key for one operation, also
over a reload."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Error, Page, Route, expect

from idempotency.client._rules import RETRIED_STATUSES
from idempotency.conf import Settings
from tests.kit.examples import file_of
from tests.kit.faulty_service import (
    CUT_AFTER,
    CUT_BEFORE,
    CUT_IN_BODY,
    PROBLEM,
    SILENCE,
    FaultyService,
    Step,
    problem,
    serving,
)
from tests.kit.printed import ROOT
from tests.murphy.service import SLOW_SECONDS, Service

pytestmark = pytest.mark.processes

JSON = {"Content-Type": "application/json"}
HOWTO = "call-from-a-client.md"
FUNCTION = (ROOT / "examples" / "browser" / "idempotent-fetch.js").read_text()
DEFINED = FUNCTION.replace(
    "export async function idempotentFetch", "globalThis.idempotentFetch = async function"
)
#: The page of the shop. The icon is part of it, so that nothing but the test sends requests.
PAGE = '<!doctype html><link rel="icon" href="data:,"><title>shop</title>'
#: Each pause is as long as it may be, is noted, and is over at once.
PAUSES = "globalThis.pauses = []; Math.random = () => 1; const wait = setTimeout;"
PAUSES += "globalThis.setTimeout = (done, pause) => { pauses.push(pause); wait(done); };"
CALL = """async ([name, url, body, limits]) => {
    const answer = await idempotentFetch(name, url, {method: "POST", body}, limits);
    return [answer.status, await answer.text()];
}"""


@pytest.fixture
def service() -> Iterator[FaultyService]:
    with serving() as server:
        yield server


@pytest.fixture
def page(browser: Browser, service: FaultyService) -> Iterator[Page]:
    context = browser.new_context()
    page = context.new_page()
    page.add_init_script(f"{DEFINED}; {PAUSES}")
    page.route(
        f"{service.url}shop", lambda route: route.fulfill(body=PAGE, content_type="text/html")
    )
    page.goto(f"{service.url}shop")
    yield page
    context.close()


def call(
    page: Page, service: FaultyService, body: str = "book", name: str = "cart 17", **limits: Any
) -> tuple[int, str]:
    status, text = page.evaluate(CALL, [name, service.url, body, limits])
    return status, text


def kept(page: Page) -> list[str]:
    """Return the keys of operations without a final answer."""
    return page.evaluate("Object.values({...sessionStorage})")


@pytest.mark.parametrize(
    "step",
    [
        CUT_BEFORE,
        CUT_AFTER,
        CUT_IN_BODY,
        *((status, {}, b"") for status in (408, 425, 429, 500, 503)),
        (409, {"Retry-After": "0"}, b""),
        (503, PROBLEM, b"not JSON"),
        problem(409, True),
        problem(400, True),
    ],
    ids=str,
)
def test_what_may_succeed_is_sent_again_with_its_key(
    service: FaultyService, page: Page, step: Step
) -> None:
    service.script = [step]

    assert call(page, service) == (201, "done 0: book")
    assert len(service.heard) == 2
    assert len(set(service.keys())) == 1
    assert kept(page) == []


@pytest.mark.parametrize(
    "step",
    [
        problem(503, False), problem(409, False, **{"Retry-After": "0"}), (409, JSON, b"{}"),
        (400, PROBLEM, b'""'), (404, JSON, b'{"detail": "Not found."}'),
    ],
    ids=str,
)  # fmt: skip
def test_what_would_fail_again_is_final_and_the_next_operation_has_a_new_key(
    service: FaultyService, page: Page, step: Step
) -> None:
    service.script = [step]

    assert call(page, service)[0] == step[0]
    assert call(page, service) == (201, "done 0: book")
    first, second = service.keys()
    assert first != second


def test_each_operation_has_a_key_of_its_own(service: FaultyService, page: Page) -> None:
    for name in ("cart 17", "cart 17", "cart 18"):
        call(page, service, name=name)
    keys = service.keys()
    assert len(set(keys)) == 3
    assert all(re.fullmatch('"[0-9a-f-]{36}"', key) for key in keys)


def test_two_calls_at_once_are_one_operation(service: FaultyService, page: Page) -> None:
    service.script = [CUT_AFTER, (503, {}, b"")]

    page.evaluate(
        f"async (given) => Promise.all([({CALL})(given), ({CALL})(given)])",
        ["cart 17", service.url, "book", {}],
    )

    assert len(set(service.keys())) == 1


def test_retry_after_is_added_to_a_random_pause_that_doubles(
    service: FaultyService, page: Page
) -> None:
    # Not a cut before the answer: on a connection that was used before, Chromium itself would send
    # the request again.
    service.script = [
        (503, {}, b""),
        (503, {"Retry-After": "3"}, b""),
        CUT_IN_BODY,
        *[(500, {}, b"")] * 3,
    ]

    call(page, service, seconds=3600)

    assert page.evaluate("pauses") == [500, 4000, 2000, 4000, 8000, 10000]


def test_retry_after_may_be_a_date(service: FaultyService, page: Page) -> None:
    date = page.evaluate("new Date(Date.now() + 30000).toUTCString()")
    service.script = [(503, {"Retry-After": date}, b"")]

    call(page, service)

    (pause,) = page.evaluate("pauses")
    assert 20_000 < pause <= 30_500


@pytest.mark.parametrize("after", ["3600", "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_it_does_not_wait_for_a_time_after_its_end(
    service: FaultyService, page: Page, after: str
) -> None:
    service.script = [(503, {"Retry-After": after}, b"later")]

    assert call(page, service) == (503, "later")
    assert len(kept(page)) == 1


@pytest.mark.parametrize("limits", [{"attempts": 3}, {"seconds": 1.6}])
def test_it_gives_up_and_goes_on_later_with_the_same_key(
    service: FaultyService, page: Page, limits: dict[str, float]
) -> None:
    page.evaluate(
        "const began = Date.now(); Date.now = () => began + pauses.reduce((sum, pause) => sum +"
        " pause, 0)"
    )
    service.script = [(503, {}, b"busy")] * 100

    assert call(page, service, **limits) == (503, "busy")
    assert len(service.heard) == 3
    service.script = [CUT_AFTER] * 100
    with pytest.raises(Error, match="Failed to fetch"):
        call(page, service, attempts=2)
    service.script = []
    assert call(page, service) == (201, "done 0: book")
    assert len(set(service.keys())) == 1


def test_a_server_that_says_nothing_is_asked_again(service: FaultyService, page: Page) -> None:
    service.script = [SILENCE]

    assert call(page, service, attemptSeconds=0.3) == (201, "done 0: book")
    assert len(set(service.keys())) == 1


def test_a_caller_can_give_up(service: FaultyService, page: Page) -> None:
    service.script = [SILENCE] * 100
    code = (
        'url => idempotentFetch("cart 17", url, {method: "POST", signal: AbortSignal.timeout(300)})'
    )

    with pytest.raises(Error, match="TimeoutError"):
        page.evaluate(code, service.url)

    assert len(service.heard) == 1
    assert len(kept(page)) == 1


UNDECIDED = [
    (status, {}, b"") for status in sorted(Settings().NEVER_STORED_STATUSES - RETRIED_STATUSES)
]


CODES = {
    "key_missing": 400,
    "key_invalid": 400,
    "key_reused": 422,
    "key_stuck": 409,
    "scope_missing": 400,
}


@pytest.mark.parametrize(
    "step",
    [
        *UNDECIDED,
        *(
            (status, PROBLEM, b'{"code": "%s", "retryable": false}' % code.encode())
            for code, status in CODES.items()
        ),
        (422, JSON, b'{"code": "key_reused"}'),
        (409, JSON, b'{"error": {"type": "idempotency_error", "code": "key_stuck"}}'),
        (404, {"Content-Type": "text/html"}, b"<h1>Not Found</h1>"),
    ],
    ids=str,
)
def test_an_answer_that_says_nothing_of_the_operation_leaves_its_key(
    service: FaultyService, page: Page, step: Step
) -> None:
    service.script = [CUT_AFTER, step]

    assert call(page, service)[0] == step[0]
    assert call(page, service) == (201, "done 0: book")
    assert len(service.done) == 1


def test_a_page_that_a_redirect_leads_to_leaves_the_key(service: FaultyService, page: Page) -> None:
    """The session ended meanwhile, and the view is behind ``login_required``."""
    service.script = [CUT_AFTER, (302, {"Location": "/login"}, b""), (200, {}, b"Please log in.")]

    assert call(page, service) == (200, "Please log in.")
    assert call(page, service) == (201, "done 0: book")
    assert len(service.done) == 1


def test_after_a_reload_the_operation_goes_on_with_its_key(
    service: FaultyService, page: Page
) -> None:
    service.script = [CUT_AFTER, SILENCE]
    page.evaluate(f"given => {{ ({CALL})(given) }}", ["cart 17", service.url, "book", {}])
    while len(service.heard) < 2:
        page.wait_for_timeout(10)

    page.reload()

    assert len(kept(page)) == 1
    assert call(page, service) == (201, "done 0: book")
    assert len(set(service.keys())) == 1
    assert kept(page) == []


def served(body: str, kind: str) -> Callable[[Route], None]:
    """Return what answers with a file."""
    return lambda route: route.fulfill(body=body, content_type=kind)


def test_the_page_of_the_guide_orders_once(service: FaultyService, page: Page) -> None:
    html, script = (
        file_of(HOWTO, path) for path in ("shop/templates/shop.html", "shop/static/order.js")
    )
    page.route(f"{service.url}shop", served(html, "text/html"))
    for name, code in (("idempotent-fetch.js", FUNCTION), ("order.js", script)):
        page.route(f"{service.url}static/{name}", served(code, "text/javascript"))
    service.script = [CUT_IN_BODY]

    page.reload()
    page.click("button")

    expect(page.locator("output")).to_have_text('done 0: {"name":"tea"}')
    assert len(set(service.keys())) == 1


@pytest.mark.postgres
def test_a_reload_while_the_ride_is_being_booked_books_once(
    processes: Service, browser: Browser
) -> None:
    """On the real service: the page that sent the request is gone before the charge is made."""
    processes.begin()
    context = browser.new_context()
    page = context.new_page()
    page.add_init_script(DEFINED)
    page.goto(processes.url)
    processes.strike_stripe({"fault": "slow", "seconds": SLOW_SECONDS})
    body = json.dumps(
        {"origin_lat": 37.8, "origin_lon": -122.4, "target_lat": 37.7, "target_lon": -122.5}
    )
    headers = {"Authorization": "Bearer demo-jane", "Content-Type": "application/json"}
    book = """([body, headers]) => {
        idempotentFetch("ride", "/rides", {method: "POST", body, headers})
            .then(answer => { document.title = answer.status; });
    }"""
    with page.expect_request("**/rides"):
        page.evaluate(book, [body, headers])

    page.reload()
    page.evaluate(book, [body, headers])

    expect(page).to_have_title("201")
    (booking,) = processes.books()
    assert processes.charges() == {booking["charge"]: booking["ride"]}
    context.close()
