"""Operations of a user, type-checked by ``tests/docs/test_typing.py``: what mypy must reveal, or
refuse, stands at the line."""

from dataclasses import dataclass
from typing import Any, reveal_type

from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.http import HttpRequest, JsonResponse
from django.views.decorators.http import require_POST

from idempotency.http import key_of, problems
from idempotency.operations import Rejected, at_most_once, keyed, operation, step


@dataclass
class Transfer:
    id: str
    declined: bool


@operation
def note(*, name: str, loud: bool = False) -> dict[str, int]:
    return {"id": len(name)}


@operation("shop.greet", wait_seconds=2, retention_hours=100)
def greet(name: str) -> str | Rejected:
    return Rejected("no_name") if not name else f"Hello {name}"


def booked(*, pilot: int, cents: int) -> None: ...


def transfer(key: str, *, pilot: int, cents: int) -> Transfer:
    return Transfer(key, declined=cents > 100)


def unbooked(why: Rejected, *, pilot: int, cents: int) -> None:
    reveal_type(why.code)  # R: "str"


@operation(
    "shop.pay_pilot",
    after=booked,
    call=keyed(transfer, valid_hours=23),
    undo=unbooked,
    retention_hours="forever",
)
def pay_pilot(made: Transfer, /, *, pilot: int, cents: int) -> dict[str, str] | Rejected:
    return Rejected("declined") if made.declined else {"transfer": made.id}


@step(call=keyed(transfer, valid_hours=23), after=booked)
def paid(made: Transfer, /, *, pilot: int, cents: int) -> None: ...


def sms(key: str, *, pilot: int, cents: int) -> dict[str, Any]:
    return {"sent": True}


@operation("shop.pay_and_tell", after=paid, call=at_most_once(sms), retention_hours=720)
def pay_and_tell(sent: dict[str, Any], /, *, pilot: int, cents: int) -> bool:
    return bool(sent["sent"])


@require_POST
@login_required
@problems
def pay_view(request: HttpRequest, pilot: int) -> JsonResponse:
    key = reveal_type(key_of(request))  # R: "str"
    assert isinstance(request.user, User)
    result = pay_pilot.by(request.user).once(key, pilot=pilot, cents=5)
    return JsonResponse(result, status=201)


@problems
async def pay_async(request: HttpRequest) -> JsonResponse:
    result = await pay_pilot.aonce(key_of(request), pilot=1, cents=5)
    return JsonResponse(reveal_type(result))  # R: "dict[str, str]"


async def results(user: User) -> None:
    reveal_type(note.once("key", name="a"))  # R: "dict[str, int]"
    reveal_type(note.by(user).once("key", name="a", loud=True))  # R: "dict[str, int]"
    reveal_type(greet.once("key", "jane"))  # R: "str"
    reveal_type(await greet.aonce("key", name="jane"))  # R: "str"
    reveal_type(pay_pilot.once("key", pilot=1, cents=2))  # R: "dict[str, str]"
    reveal_type(pay_pilot.by(user, scope="x").once("k", pilot=1, cents=2))  # R: "dict[str, str]"
    reveal_type(pay_and_tell.once("key", pilot=1, cents=2))  # R: "bool"
    staged = pay_pilot.stage("key", pilot=1, cents=2)
    reveal_type(staged)  # R: "idempotency._records.StagedJob"


def mistakes(user: User, request: HttpRequest) -> None:
    pay_pilot.once("key", pilot=1, cent=2)  # E: call-arg
    pay_pilot.once("key", pilot="one", cents=2)  # E: arg-type
    pay_pilot.once("key", pilot=1)  # E: call-arg
    pay_pilot.once(pilot=1, cents=2)  # E: call-arg
    pay_pilot.once(7, pilot=1, cents=2)  # E: arg-type
    pay_pilot.once("key", 1, cents=2)  # E: call-arg
    pay_pilot.by(user).once("key", pilot=1)  # E: call-arg
    pay_pilot.stage("key", pilot=1, cents="2")  # E: arg-type
    pay_pilot(pilot=1, cents=2)  # E: operator
    _number: int = pay_pilot.once("key", pilot=1, cents=2)  # E: assignment
    keyed(transfer)  # E: call-arg
    operation("shop.other", after=booked, retention_hours="always")  # E: call-overload
    pay_view(request)  # E: call-arg


@operation("shop.other", call=keyed(transfer, valid_hours=23))  # E: arg-type
def takes_another_value(made: int, /, *, pilot: int, cents: int) -> None: ...


@operation("shop.other", after=booked, call=keyed(sms, valid_hours=23))  # E: arg-type
def has_other_parameters(made: dict[str, Any], /, *, pilot: int) -> None: ...
