"""A shop as a real process, and a visitor who goes through its checkout."""

import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import psycopg
from psycopg import sql

from rides_demo.processes.ports import free_port
from rides_demo.processes.process import Process

SESSIONS = (
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <>"
    " pg_backend_pid()"
)
AGE_KEYS = """
from idempotency.models import IdempotencyKey
from idempotency.testing import age
age(IdempotencyKey.objects.all(), seconds=400)
"""


def eventually(condition: Callable[[], Any], seconds: float = 30) -> None:
    """Wait until ``condition`` is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "The state was not reached."
        time.sleep(0.02)


class RunningShop(Process):
    """One web server with eight threads. ``kill`` sends SIGKILL, ``start`` starts it again."""

    def __init__(
        self,
        name: str,
        folder: Path,
        environment: Mapping[str, str],
        log: Path,
        manage: Callable[..., str],
    ) -> None:
        self.port = free_port()
        self.database = environment["DATABASE_URL"]
        self._manage = manage
        self._visitors: list[Visitor] = []
        command = [
            sys.executable,
            "-m",
            "gunicorn",
            "shop.wsgi",
            "--bind",
            f"127.0.0.1:{self.port}",
            "--threads",
            "8",
            "--no-control-socket",
        ]
        super().__init__(
            name, command, environment=os.environ | dict(environment), folder=folder, output=log
        )

    def is_ready(self) -> bool:
        """Return whether the shop answers."""
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/en-gb/basket/").status_code == 200
        except httpx.TransportError:
            return False

    def expire(self) -> None:
        """Make all keys 400 seconds older: their locks are expired, and the completer may run
        them."""
        self._manage("shell", "--command", AGE_KEYS)

    def complete(self) -> None:
        """Make all keys 400 seconds older, then run the completer once."""
        self.expire()
        self._manage("complete_keys")

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query in the database of the shop."""
        with psycopg.connect(self.database) as connection:
            return connection.execute(query).fetchall()

    def count(self, what: str) -> int:
        """Return the number of orders, payments or keys."""
        tables = {
            "orders": "order_order",
            "payments": "payment_source",
            "keys": "idempotency_idempotencykey",
        }
        with psycopg.connect(self.database) as connection:
            query = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(tables[what]))
            return int(connection.execute(query).fetchall()[0][0])

    def visitor(self, language: str = "en-gb") -> "Visitor":
        """Return a guest with one product in the basket."""
        visitor = Visitor(self, language)
        self._visitors.append(visitor)
        visitor.fill_basket()
        return visitor

    def close(self) -> None:
        """Close the clients of the visitors, and stop the shop."""
        for visitor in self._visitors:
            visitor.leave()
        self.stop()

    def mails(self) -> int:
        """Return the number of mails that the shop has sent; its mail backend prints them."""
        assert isinstance(self.output, Path)
        return self.output.read_text().count("\nSubject: ")

    def is_waiting_for_a_row(self) -> bool:
        """Return whether a request of the shop waits for a lock in the database."""
        return bool(self.rows(f"{SESSIONS} AND wait_event_type = 'Lock'"))

    def is_gone(self) -> bool:
        """Return whether the database has ended all sessions of a killed shop."""
        return not self.rows(SESSIONS)


class Visitor:
    """A guest with a browser's cookies."""

    def __init__(self, shop: RunningShop, language: str = "en-gb") -> None:
        self.language = language
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{shop.port}", timeout=30)

    def leave(self) -> None:
        """Close the HTTP client."""
        self._client.close()

    def page(self, path: str) -> str:
        """Return the text of a page in the visitor's language, after all redirects."""
        return (
            self._client.get(f"/{self.language}{path}", follow_redirects=True)
            .raise_for_status()
            .text
        )

    def follow(self, response: httpx.Response) -> str:
        """Return the text of the page to which a redirect leads; that page must not redirect
        again."""
        page = self._client.get(response.headers["Location"])
        assert page.status_code == 200
        return page.text

    def is_thanked(self, response: httpx.Response, number: str) -> bool:
        """Return whether a redirect leads to the thank-you page of an order."""
        return "/checkout/thank-you/" in response.headers[
            "Location"
        ] and f"<strong>{number}</strong>" in self.follow(response)

    def send(self, path: str, page: str, **fields: str) -> httpx.Response:
        """Send a form of a page, and do not follow a redirect."""
        token, *_ = re.findall(r'name="csrfmiddlewaretoken" value="(\w+)"', page)
        return self._client.post(
            f"/{self.language}{path}", data={"csrfmiddlewaretoken": token} | fields
        )

    def fill_basket(self) -> None:
        """Put one product into the basket."""
        page = self.page("/catalogue/darjeeling_1/")
        assert self.send("/basket/add/1/", page, quantity="1").status_code == 302

    def go_to_preview(self) -> dict[str, str]:
        """Go through the checkout to its last page, and return the fields of the form that places
        the order."""
        page = self.page("/checkout/")
        assert (
            self.send(
                "/checkout/", page, username="guest@example.com", options="anonymous"
            ).status_code
            == 302
        )
        page = self.page("/checkout/shipping-address/")
        address = {
            "first_name": "A",
            "last_name": "Guest",
            "line1": "1 Road",
            "line4": "London",
            "postcode": "N1 9GU",
        }
        assert self.send("/checkout/shipping-address/", page, **address).status_code == 302
        self.page("/checkout/shipping-method/")  # Oscar has one shipping method, and selects it.
        return self.form_of_preview()

    def form_of_preview(self) -> dict[str, str]:
        """Return the fields of the form that places the order."""
        page = self.page("/checkout/preview/")
        (form,) = re.findall(r'<form[^>]*id="place_order_form".*?</form>', page, re.S)
        return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', form))

    def place_order(self, form: Mapping[str, str]) -> httpx.Response:
        """Click on "Place order", and do not follow a redirect."""
        return self._client.post(f"/{self.language}/checkout/preview/", data=dict(form))
