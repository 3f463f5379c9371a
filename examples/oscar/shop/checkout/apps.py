"""Oscar's app ``checkout``, with the views of this folder instead of Oscar's."""

from oscar.apps.checkout import apps


class CheckoutConfig(apps.CheckoutConfig):
    name = "shop.checkout"
