"""A visitor with a browser window: what the pages show, what the console says, what was fetched
from where."""

from pathlib import Path
from typing import Any
from urllib.parse import quote

from playwright.sync_api import BrowserContext, ConsoleMessage, Locator, Page, expect

STRIPE_WORKS = "Works"
#: What the login of the admin says: the labels of its fields, and its button.
ENGLISH = ("Username", "Password", "Log in")


class Visitor:
    """One window on the service; ``errors`` is what its console said, ``elsewhere`` what it asked
    of other servers."""

    def __init__(self, context: BrowserContext, url: str, screenshots: Path, name: str) -> None:
        self.page: Page = context.new_page()
        self.url, self.name = url, name
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        self._screenshots = screenshots
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        context.on(
            "request",
            lambda request: (
                None
                if request.url.startswith((url, "data:"))
                else self.elsewhere.append(request.url)
            ),
        )

    def _note(self, message: ConsoleMessage) -> None:
        # The admin has no icon, for which a browser asks once.
        if message.type == "error" and not message.location["url"].endswith("/favicon.ico"):
            self.errors.append(message.text)

    def go(self, path: str) -> None:
        self.page.goto(f"{self.url}{path}")

    def sign_in(self, rider: str = "demo-jane") -> None:
        """Open the page and sign in there."""
        self.go("/")
        self.page.locator(f"button[value={rider}]").click()

    def sign_in_to_admin(
        self,
        path: str,
        username: str = "admin",
        password: str = "admin",
        *,
        labels: tuple[str, str, str] = ENGLISH,
    ) -> None:
        """Open ``path`` of the admin, through its login."""
        self.go(f"/admin/login/?next={quote(path)}")
        log_in(self.page, username, password, labels=labels)

    @property
    def book(self) -> Locator:
        return self.page.get_by_role("button", name="Book for $20.00")

    @property
    def kill(self) -> Locator:
        return self.page.get_by_role("button", name="Kill the web worker")

    def expect_killed(self) -> None:
        """Wait until the page shows that the process is dead, and that its lock is not."""
        expect(self.page.locator("#steps [data-point=charge_created]")).to_have_attribute(
            "data-state", "killed"
        )

    def expect_story(self, text: str) -> None:
        expect(self.page.locator("#story")).to_contain_text(text)

    def stripe(self, position: str) -> None:
        """Move the switch, and wait until it is there."""
        self.page.get_by_label(position, exact=True).check()
        expect(self.page.locator("#stripe-outcome")).to_have_text(f"Stripe {position.lower()} now.")

    def expect_status(self, text: str) -> None:
        expect(self.page.locator("#outcome")).to_contain_text(text)

    def expect_counts(self, **counts: int) -> None:
        """Wait until the page counts so many ``rides``, ``charges``, ``receipts``."""
        for name, count in counts.items():
            expect(self.page.locator(f"#count-{name}")).to_have_text(str(count))

    def requests_sent(self) -> int:
        """Return how often the page says that it sent the booking."""
        return int(self.page.locator("#sent").inner_text())

    def shoot(self, what: str) -> None:
        """Keep a picture of the whole page."""
        self.page.screenshot(path=self._screenshots / f"{what}-{self.name}.png", full_page=True)

    def fits(self) -> bool:
        """Return whether nothing is wider than the window."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))

    def tabs_to(self, selector: str, at_most: int) -> int:
        """Return how often Tab is pressed, on a page that was just opened, until it is on such an
        element; 0 if never."""
        for pressed in range(1, at_most + 1):
            self.page.keyboard.press("Tab")
            if self.page.evaluate(
                "(selector) => document.activeElement?.matches(selector)", selector
            ):
                return pressed
        return 0

    def barriers(self, axe_script: str, *, every: bool = False) -> list[str]:
        """Return the violations that axe-core finds, with the elements: the serious and critical
        ones, or every one."""
        self.page.evaluate(axe_script)
        found: list[dict[str, Any]] = self.page.evaluate(
            "axe.run().then((result) => result.violations)"
        )
        return [
            f"{violation['id']}: {node['html']}"
            for violation in found
            if every or violation["impact"] in ("serious", "critical")
            for node in violation["nodes"]
        ]


def log_in(
    page: Page,
    username: str = "admin",
    password: str = "admin",
    *,
    labels: tuple[str, str, str] = ENGLISH,
) -> None:
    """Fill in the login of the admin, and send it."""
    user, secret, button = labels
    page.get_by_label(user).fill(username)
    page.get_by_label(secret).fill(password)
    page.get_by_role("button", name=button).click()
