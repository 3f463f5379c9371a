"""Oscar's app ``checkout``, with the views of this folder in place of its own."""

from oscar.apps.checkout import apps


class CheckoutConfig(apps.CheckoutConfig):
    name = "shop.checkout"
