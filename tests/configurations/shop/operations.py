"""The operations of the shop."""

from typing import Any

from idempotency.operations import Rejected, keyed, operation
from tests.configurations.shop import views
from tests.configurations.shop.models import Order


@operation("shop.sell")
def sell(*, name: str) -> dict[str, Any] | Rejected:
    """Write an order in one transaction."""
    order = Order.objects.create(name=name)
    views.happen("after write")
    if name == "poison":
        return Rejected("forbidden")
    return {"order": order.pk}


def booked(*, name: str) -> None:
    """Write the order before the call."""
    Order.objects.create(name=f"booked {name}")


def charge(key: str, *, name: str) -> int:
    """Call a service."""
    views.happen("before call")
    views.CALLS.append(key)
    views.happen("after call")
    return len(set(views.CALLS))


@operation(
    "shop.order", after=booked, call=keyed(charge, valid_hours=23), retention_hours="forever"
)
def order(charged: int, /, *, name: str) -> dict[str, Any]:
    """Write the order after the call."""
    Order.objects.create(name=name)
    views.happen("after write")
    return {"charge": charged}
