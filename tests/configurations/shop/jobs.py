"""The jobs of the shop."""

from tests.configurations.shop.models import Order


def send_receipt(name: str) -> None:
    """Write a row for the receipt."""
    Order.objects.create(name=f"receipt of {name}")
