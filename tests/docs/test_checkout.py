"""The shop of ``docs/how-to/checkout-in-the-session.md``, on PostgreSQL, with real servers, clicks
at once, and kills."""

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from django.db import connection
from psycopg.sql import SQL, Identifier

from rides_demo.processes.ports import free_port
from tests.kit.printed import GUIDES, Project, changed_lines
from tests.kit.threads import at_once, in_background
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.postgres, pytest.mark.processes]

_, SHOP, PLAIN, PHASED = (GUIDES / "checkout-in-the-session.md").read_text().split("\n## ")
UNFINISHED = "SELECT 1 FROM idempotency_idempotencykey WHERE finished_at IS NULL"
SETTINGS = """
DATABASES = {"default": %r}
IDEMPOTENCY = {
    "LOCK_TIMEOUT_SECONDS": 3, "COMPLETER_MIN_AGE_SECONDS": 1, "COMPLETER_IDLE_SECONDS": 1
}
"""
#: A bank that keeps the charges in a file. It answers a new charge when the file ``closed`` is
#: gone.
BANK = """
import time
from pathlib import Path

FOLDER = Path(__file__).parent


class CardDeclined(Exception):
    pass


def charge_card(amount, idempotency_key):
    if amount > 5:
        raise CardDeclined
    charges = (FOLDER / "charges").read_text().split() if (FOLDER / "charges").exists() else []
    if idempotency_key not in charges:
        with (FOLDER / "charges").open("a") as file:
            file.write(idempotency_key + "\\n")
        while (FOLDER / "closed").exists():
            time.sleep(0.01)
    return "ch_" + idempotency_key[:8]
"""


class Shop:
    """The shop of the page, up to a stage, with a database on the PostgreSQL of the tests."""

    def __init__(self, folder: Path, *stages: str) -> None:
        self.project, self.name, self.url = Project(folder), f"checkout_{os.getpid()}", ""
        self.bank = folder / "shop"
        for stage in (SHOP, *stages):
            self.project.follow(stage, "manage.py test")
        if PHASED in stages:
            (self.bank / "bank.py").write_text(BANK)
        self.administer("CREATE DATABASE {}")
        reached = connection.settings_dict
        database = {name: reached[name] for name in ("ENGINE", "USER", "PASSWORD", "PORT")}
        database |= {
            "HOST": reached["HOST"] or reached["OPTIONS"].get("host", ""),
            "NAME": self.name,
            "ATOMIC_REQUESTS": True,
        }
        with (folder / "shop" / "settings.py").open("a") as file:
            file.write(SETTINGS % database)
        self.project.run("python manage.py migrate --verbosity 0")

    def administer(self, statement: str) -> None:
        """Execute a statement about the database of the shop."""
        with psycopg.connect(
            **connection.get_connection_params() | {"dbname": "postgres"}, autocommit=True
        ) as server:
            server.execute(SQL(statement).format(Identifier(self.name)))

    def rows(self, query: str) -> list[Any]:
        """Return the first column of the rows."""
        with psycopg.connect(
            **connection.get_connection_params() | {"dbname": self.name}
        ) as database:
            return [row[0] for row in database.execute(query.encode())]

    @contextmanager
    def serve(self) -> Iterator["subprocess.Popen[bytes]"]:
        """Run a server, which is killed at the end of the block."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = ["python", "manage.py", "runserver", "--noreload", str(port)]
        with (self.project.folder / "server.log").open("ab") as log:
            server = subprocess.Popen(
                command,
                cwd=self.project.folder,
                env=self.project.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            eventually(self.answers)
            yield server
        finally:
            server.kill()
            server.wait()

    def answers(self) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/de/basket/").is_success
        return False

    def killed_after_the_charge(self) -> "Visitor":
        """Kill a server after the bank has charged and before it answers; return the visitor, whose
        click got no answer."""
        charges = self.bank / "charges"
        before = charges.read_text() if charges.exists() else ""
        (self.bank / "closed").touch()
        with self.serve() as server:
            visitor = Visitor(self)
            click = in_background(lambda: suppressed(visitor.place_order))
            eventually(lambda: charges.exists() and charges.read_text() != before)
            os.kill(server.pid, signal.SIGKILL)
            assert click.result(60) is None
        (self.bank / "closed").unlink()
        return visitor


def suppressed(click: Callable[[], httpx.Response]) -> httpx.Response | None:
    with suppress(httpx.TransportError):
        return click()
    return None


class Visitor:
    """A browser whose visitor has items in the basket and sees the preview."""

    def __init__(self, shop: Shop, items: int = 1) -> None:
        self.shop, self.cookies = shop, httpx.Cookies()
        page = self.open("/de/basket/")
        for _ in range(items):
            page = self.open("/de/basket/", fields(page) | {"item": "tea"})
        page = self.open(
            "/de/checkout/", fields(self.open("/de/checkout/")) | {"email": "jane@example.com"}
        )
        self.form = fields(page) | {"action": "place_order"}

    def open(self, url: str, form: dict[str, str] | None = None) -> httpx.Response:
        """Open a page, or send a form."""
        with httpx.Client(
            base_url=self.shop.url,
            cookies=self.cookies,
            timeout=60,
            headers={"Accept": "text/html"},
        ) as tab:
            answer = tab.request("POST" if form else "GET", url, data=form)
            self.cookies.update(tab.cookies)
        return answer

    def place_order(self) -> httpx.Response:
        """Click on the last button."""
        return self.open("/de/checkout/", self.form)


def fields(page: httpx.Response) -> dict[str, str]:
    """Return the hidden fields of a page."""
    return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]+)">', page.text))


@contextmanager
def shop_of(folder: Path, *stages: str) -> Iterator[Shop]:
    shop = Shop(folder, *stages)
    try:
        yield shop
    except BaseException as error:
        with suppress(FileNotFoundError):
            error.add_note((folder / "server.log").read_text())
        raise
    finally:
        shop.administer("DROP DATABASE IF EXISTS {} WITH (FORCE)")


def test_the_stages_change_as_few_lines_as_the_page_says() -> None:
    plain, phased = changed_lines(PLAIN), changed_lines(PHASED)
    page = (GUIDES / "checkout-in-the-session.md").read_text()
    assert (plain <= 20, phased <= 50) == (True, True)
    assert [int(number) for number in re.findall(r"changes (\d+) (?:more )?lines", page)] == [
        plain,
        phased,
    ]


@pytest.mark.sample
def test_two_clicks_at_once_and_one_on_the_empty_basket_make_one_order(tmp_path: Path) -> None:
    with shop_of(tmp_path, PLAIN) as shop, shop.serve():
        visitor = Visitor(shop)
        answers = at_once([visitor.place_order] * 2)
        assert visitor.open("/de/checkout/").headers["Location"] == "/de/basket/"
        answers.append(visitor.place_order())
        (number,) = shop.rows("SELECT number FROM shop_order")
        assert [(answer.status_code, answer.headers["Location"]) for answer in answers] == [
            (302, f"/de/thanks/{number}/")
        ] * 3
        assert answers[-1].headers["Idempotent-Replayed"] == "true"
        assert "tea" in Visitor(shop).open(answers[-1].headers["Location"]).text
        del visitor.form["idempotency_key"]
        refused = visitor.place_order()
        assert (refused.status_code, refused.headers["Content-Type"]) == (
            400,
            "text/html; charset=utf-8",
        )


def test_a_decorator_below_the_guard_is_reported_and_sends_the_retry_to_the_basket(
    tmp_path: Path,
) -> None:
    with shop_of(tmp_path, PLAIN) as shop:
        shop.project.change("shop/views.py", [('name="dispatch"', 'name="post"')])
        assert "idempotency.W012" in shop.project.run("python manage.py check")
        with shop.serve():
            visitor = Visitor(shop)
            first, second = (visitor.place_order().headers["Location"] for _ in range(2))
            assert first.startswith("/de/thanks/")
            assert second == "/de/basket/"


@pytest.mark.sample
def test_a_killed_order_is_finished_by_the_completer_or_by_a_retry_with_one_charge(
    tmp_path: Path,
) -> None:
    with shop_of(tmp_path, PLAIN, PHASED) as shop:
        left, returns = shop.killed_after_the_charge(), shop.killed_after_the_charge()
        with shop.serve():
            eventually(lambda: is_thanked(returns.place_order()))
            eventually(
                lambda: (
                    shop.project.run("python manage.py complete_keys") and not shop.rows(UNFINISHED)
                )
            )
            assert "empty" in left.open("/de/basket/").text
            replay = left.place_order()
            assert (is_thanked(replay), replay.headers["Idempotent-Replayed"]) == (True, "true")
            assert "tea" in left.open(replay.headers["Location"]).text
            declined = Visitor(shop, items=2)
            assert [declined.place_order().status_code for _ in range(2)] == [402, 402]
            assert "tea, tea" in declined.open("/de/basket/").text
        assert (
            len(shop.rows("SELECT 1 FROM shop_order WHERE charge != ''"))
            == len(shop.rows("SELECT 1 FROM shop_order"))
            == 2
        )
        assert len((shop.bank / "charges").read_text().split()) == 2


def is_thanked(answer: httpx.Response) -> bool:
    return answer.status_code == 302 and answer.headers["Location"].startswith("/de/thanks/")
