"""Operations with one bug each, and operations that are right. The fakes of other systems are those
of ``tests.crash.views``."""

import uuid
from contextvars import ContextVar
from typing import Any

from django.db import transaction

from idempotency.jobs import stage_job
from idempotency.operations import Operation, Rejected, at_most_once, keyed, operation, step
from tests.crash.views import systems
from tests.models import Account, Entry

#: A value that the completer does not have.
currency: ContextVar[str] = ContextVar("currency")
OPTIONS: Any = {"retention_hours": 100}


def booked(*, name: str) -> None:
    """Write an entry in the first transaction."""
    Entry.objects.create(name=name)


def charged(key: str, *, name: str) -> Any:
    """Charge with the key of the call."""
    return systems.charge(amount=5, idempotency_key=key)


def declined(key: str, *, name: str) -> Any:
    """Charge, and find that the bank has declined."""
    charged(key, name=name)
    raise Rejected("declined", "The bank declined.", {"name": name})


def texted(key: str, *, name: str) -> Any:
    """Text through a service that knows no keys."""
    return systems.text(name)


def unbooked(why: Rejected, *, name: str) -> None:
    """Undo the first transaction."""
    Entry.objects.filter(name=name).update(name=why.code)


# Right.


@operation("crash.plain")
def plain(*, name: str) -> dict[str, Any]:
    """Write rows and stage a job, in the one transaction of a plain operation."""
    entry = Entry.objects.create(name=name)
    Account.objects.filter(name="till").update(balance=5)
    stage_job("tests.kit.jobs.anything", {"entry_id": entry.pk, "token": uuid.uuid4().hex})
    return {"id": entry.pk}


@operation("crash.asynchronous")
async def asynchronous(*, name: str) -> dict[str, Any]:
    """Write through the async ORM."""
    return {"id": (await Entry.objects.acreate(name=name)).pk}


@operation("crash.refusal")
def refusal(*, name: str) -> Rejected:
    """Refuse, and commit the writes with it."""
    Entry.objects.create(name=name)
    return Rejected("no", "It is refused.", [1])


@operation("crash.pay", after=booked, call=keyed(charged, valid_hours=23), **OPTIONS)
def pay(charge: Any, /, *, name: str) -> dict[str, Any]:
    """Book, charge, and write the charge."""
    Entry.objects.filter(name=name).update(name=charge["id"])
    stage_job("tests.kit.jobs.anything", {"charge": charge["id"]})
    return {"charge": charge["id"]}


@operation(
    "crash.declining",
    after=booked,
    call=keyed(declined, valid_hours=23),
    undo=unbooked,
    **OPTIONS,
)
def declining(charge: Any, /, *, name: str) -> None:
    """Be refused by the bank after the first transaction, and undo that."""


@operation("crash.texting", call=at_most_once(texted), **OPTIONS)
def texting(sent: Any, /, *, name: str) -> dict[str, Any]:
    """Write what was sent."""
    Entry.objects.create(name=sent)
    return {"sent": sent}


@step(call=keyed(charged, valid_hours=23), after=booked)
def paid(charge: Any, /, *, name: str) -> None:
    """Write the charge."""
    Entry.objects.create(name=charge["id"])


def shipped(key: str, *, name: str) -> Any:
    """Charge the shipping."""
    return systems.charge(shipping=7, idempotency_key=key)


@operation("crash.chain", after=paid, call=keyed(shipped, valid_hours=23), **OPTIONS)
def chain(shipping: Any, /, *, name: str) -> dict[str, Any]:
    """Make two calls, with a transaction after each."""
    return {"shipping": shipping["id"], "entry": Entry.objects.get(name=name).pk}


# Wrong.


def charged_and_written(key: str, *, name: str) -> Any:
    """Write outside of any transaction."""
    Entry.objects.create(name="outside")
    return charged(key, name=name)


@operation("crash.write", after=booked, call=keyed(charged_and_written, valid_hours=23), **OPTIONS)
def write_in_the_call(charge: Any, /, *, name: str) -> str:
    """Write in the function that makes the call."""
    return str(charge["id"])


def charged_and_committed(key: str, *, name: str) -> Any:
    """Write in a transaction of its own."""
    with transaction.atomic():
        Entry.objects.create(name="committed")
    return charged(key, name=name)


@operation("crash.own", after=booked, call=keyed(charged_and_committed, valid_hours=23), **OPTIONS)
def transaction_in_the_call(charge: Any, /, *, name: str) -> str:
    """Commit in the function that makes the call."""
    return str(charge["id"])


def charged_without_key(key: str, *, name: str) -> Any:
    """Forget the key: a repeat charges again."""
    return systems.charge(amount=5)


@operation("crash.no_key", call=keyed(charged_without_key, valid_hours=23), **OPTIONS)
def key_not_passed(charge: Any, /, *, name: str) -> str:
    """Charge without a key."""
    return str(charge["id"])


def charged_with_another_key(key: str, *, name: str) -> Any:
    """Charge with a key of this attempt."""
    return systems.charge(amount=5, idempotency_key=uuid.uuid4().hex)


@operation("crash.random_key", call=keyed(charged_with_another_key, valid_hours=23), **OPTIONS)
def random_key(charge: Any, /, *, name: str) -> str:
    """Charge with another key in each attempt."""
    return str(charge["id"])


def charged_another_amount(key: str, *, name: str) -> Any:
    """Charge an amount of this attempt."""
    return systems.charge(amount=uuid.uuid4().int, idempotency_key=key)


@operation("crash.amounts", call=keyed(charged_another_amount, valid_hours=23), **OPTIONS)
def other_arguments(charge: Any, /, *, name: str) -> str:
    """Charge another amount in each attempt."""
    return str(charge["id"])


@operation("crash.last", call=keyed(charged, valid_hours=23), **OPTIONS)
def text_in_the_last_transaction(charge: Any, /, *, name: str) -> str:
    """Text in the last transaction, which another attempt repeats."""
    systems.text("hello")
    Entry.objects.create(name=name)
    return str(charge["id"])


@operation("crash.plain_text")
def text_in_a_plain_operation(*, name: str) -> None:
    """Text in the transaction of a plain operation."""
    systems.text("hello")
    Entry.objects.create(name=name)


@operation("crash.on_commit", call=keyed(charged, valid_hours=23), **OPTIONS)
def text_after_commit(charge: Any, /, *, name: str) -> str:
    """Text when everything is committed: it is lost with the process."""
    transaction.on_commit(lambda: systems.text("hello"))
    Entry.objects.create(name=name)
    return str(charge["id"])


@operation("crash.context", after=booked, call=keyed(charged, valid_hours=23), **OPTIONS)
def context_of_the_caller(charge: Any, /, *, name: str) -> str:
    """Read a context variable, which the completer does not set."""
    Entry.objects.create(name=currency.get())
    return str(charge["id"])


@operation("crash.no_undo", after=booked, call=keyed(declined, valid_hours=23), **OPTIONS)
def refusal_that_nothing_undoes(charge: Any, /, *, name: str) -> None:
    """Be refused by the bank after the first transaction."""


@operation("crash.lost_update")
def lost_update(*, name: str) -> None:
    """Read a balance, and write it back."""
    account = Account.objects.get(name="till")
    account.balance += 10
    account.save()


ALL = [value for value in vars().copy().values() if isinstance(value, Operation)]
