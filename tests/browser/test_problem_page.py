"""The page that a browser gets instead of a problem document: how it looks, and that its advice is
right."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
from django.core.handlers.wsgi import WSGIRequest
from django.http import HttpResponse, HttpResponseBase, HttpResponseRedirect
from playwright.sync_api import Browser, Page, expect

from idempotency._http import problems
from idempotency._http.problems import problem_of
from idempotency.exceptions import InProgress, InterventionRequired, KeyReused, Unavailable
from tests.browser.conftest import SCREENSHOTS
from tests.browser.visitor import Visitor

pytestmark = pytest.mark.processes

FORM = (
    '<form method="post"><input type="hidden" name="idempotency_key"'
    ' value="%s"><button>Order</button></form>'
)
PROBLEMS = {
    "in-use": problem_of(InProgress()),
    "stuck": problem_of(InterventionRequired()),
    "reused": problem_of(KeyReused()),
    "missing": problems.key_missing(),
    "unavailable": problem_of(Unavailable()),
}


class _Silent(WSGIRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Say nothing."""


class Shop:
    """A shop without a database: the first submission of a form gets a problem, the next one a
    redirect."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self._rendered = 0

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        response = self._answer(WSGIRequest(environ))
        start_response(f"{response.status_code} -", list(response.items()))
        return [response.content]  # type: ignore[attr-defined]

    def _answer(self, request: WSGIRequest) -> HttpResponseBase:
        name = request.path.strip("/")
        if name == "thanks":
            return HttpResponse("Thank you.")
        if request.method == "GET":
            self._rendered += 1
            return HttpResponse(FORM % f"key-{self._rendered}")
        self.keys.append(request.POST["idempotency_key"])
        return (
            PROBLEMS[name].response(request)
            if len(self.keys) == 1
            else HttpResponseRedirect("/thanks/")
        )


@contextmanager
def open_shop() -> Iterator[tuple[Shop, str]]:
    shop = Shop()
    with make_server("127.0.0.1", 0, shop, handler_class=_Silent) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield shop, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_reload_sends_the_form_again_with_its_key(browser: Browser) -> None:
    page: Page = browser.new_page()
    with open_shop() as (shop, url):
        page.goto(f"{url}/in-use/")
        page.get_by_role("button").click()
        expect(page.get_by_role("heading")).to_have_count(1)
        page.reload()
        expect(page.get_by_text("Thank you.")).to_be_visible()
        assert shop.keys == ["key-1", "key-1"]
        page.close()


@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1280), ("light", 390), ("dark", 1280), ("dark", 390)]
)
def test_the_page_can_be_read_everywhere(
    scheme: Any, width: int, browser: Browser, axe_script: str
) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    for name in PROBLEMS:
        with open_shop() as (_, url):
            visitor = Visitor(context, url, SCREENSHOTS, f"{scheme}-{width}")
            visitor.go(f"/{name}/")
            visitor.page.get_by_role("button").click()
            expect(visitor.page.get_by_role("heading")).to_have_count(1)
            visitor.shoot(f"problem-{name}")
            assert visitor.fits()
            assert visitor.elsewhere == []
            assert visitor.barriers(axe_script) == []
            visitor.page.close()
    context.close()
