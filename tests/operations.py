"""Operations under test, and the bank that they call."""

import os
import urllib.request
from collections.abc import Callable
from typing import Any

from django.conf import settings

from idempotency._engine.phased_run import current_key
from idempotency.operations import Rejected, at_most_once, keyed, operation, step
from tests.models import Account, Entry


class Bank:
    """A service that makes one transfer for each key. With an address it is on a socket, for tests
    whose processes are killed."""

    def __init__(self) -> None:
        self.transfers: dict[str, int] = {}
        self.requests = 0
        #: Called before and after each transfer, and in the transaction after it.
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None
        self.inside: Callable[[], None] = lambda: None

    def transfer(self, key: str, cents: int) -> int:
        self.requests += 1
        self.before()
        if url := os.environ.get("TEST_BANK_URL"):
            headers = {"Idempotency-Key": key}
            request = urllib.request.Request(url, str(cents).encode(), headers, method="POST")
            with urllib.request.urlopen(request, timeout=10) as response:
                made = int(response.read().split()[1].rstrip(b":"))
        else:
            made = self.transfers.setdefault(key, len(self.transfers))
        self.after()
        return made


bank = Bank()


@operation("tests.note", lease_seconds=30)
def note(*, name: str, fails: str = "") -> dict[str, Any] | Rejected:
    entry = Entry.objects.create(name=name)
    if fails == "raises":
        raise Rejected("refused", "It was refused.", {"name": name})
    if fails == "returns":
        return Rejected("refused", "It was refused.", {"name": name})
    if fails == "breaks":
        raise ValueError("It is broken.")
    if fails == "no json":
        return {"entry": entry}
    return {"entry": entry.pk, "list": [1, 2]}


@operation("tests.book")
def book(*, name: str) -> int:
    return Entry.objects.create(name=name).pk


def booked(*, name: str, cents: int) -> Rejected | None:
    if cents == 0:
        raise ValueError("The amount must be positive.")
    if cents < 0:
        raise Rejected("negative")
    Entry.objects.create(name=f"booked {name}", idempotency_key=current_key.get())
    return None


def transfer(key: str, *, name: str, cents: int) -> int:
    if cents == 402:
        raise Rejected("declined", "The bank declined.")
    return bank.transfer(key, cents)


def unbooked(why: Rejected, *, name: str, cents: int) -> None:
    Entry.objects.filter(name=f"booked {name}").update(name=f"{why.code} {name}")


@operation(
    "tests.pay",
    after=booked,
    call=keyed(transfer, valid_hours=23),
    undo=unbooked,
    retention_hours="forever",
)
def pay(made: int, /, *, name: str, cents: int) -> dict[str, Any] | Rejected:
    if cents == 403:
        raise Rejected("raised late")
    if cents == 404:
        return Rejected("returned late")
    Account.objects.create(name=name, balance=cents)
    return {"transfer": made}


@operation(
    "tests.pay_without_undo",
    after=booked,
    call=keyed(transfer, valid_hours=23),
    retention_hours=100,
)
def pay_without_undo(made: int, /, *, name: str, cents: int) -> dict[str, Any]:
    return {"transfer": made}


@operation("tests.charge", call=keyed(transfer, valid_hours=23), retention_hours=100)
def charge(made: int, /, *, name: str, cents: int) -> dict[str, Any]:
    bank.inside()
    Account.objects.create(name=name, balance=cents)
    return {"transfer": made}


#: The settings of ``tests.failover`` have one database.
SHARD = "shard_b" if "shard_b" in settings.DATABASES else "default"


@operation("tests.book_in_shard", using=SHARD)
def book_in_shard(*, name: str) -> int:
    return Entry.objects.using(SHARD).create(name=name).pk


@operation(
    "tests.charge_in_shard",
    call=keyed(transfer, valid_hours=23),
    retention_hours=100,
    using=SHARD,
)
def charge_in_shard(made: int, /, *, name: str, cents: int) -> int:
    return made


def told(key: str, *, name: str, cents: int) -> dict[str, Any]:
    if cents == 402:
        raise Rejected("unknown address")
    if cents == 501:
        return {"told": bank}
    return {"told": bank.transfer(key, cents)}


@operation("tests.tell", call=at_most_once(told), retention_hours=100)
def tell(made: dict[str, Any], /, *, name: str, cents: int) -> dict[str, Any]:
    if cents == 500:
        raise ValueError("broken")
    Entry.objects.create(name=f"told {name}")
    return made


@step(call=keyed(transfer, valid_hours=23), after=booked)
def paid(made: int, /, *, name: str, cents: int) -> None:
    Entry.objects.create(name=f"paid {name} {made}")


@operation("tests.ship", after=paid, call=at_most_once(told), retention_hours=100)
def ship(made: dict[str, Any], /, *, name: str, cents: int) -> dict[str, Any]:
    Entry.objects.create(name=f"shipped {name}")
    return made


@operation("tests.outer")
def outer(*, name: str, inner: str) -> Any:
    """Call another operation in the same transaction."""
    Entry.objects.create(name=f"outer {name}")
    return note.once(inner, name=name)
