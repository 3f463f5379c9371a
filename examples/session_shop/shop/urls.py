from django.conf.urls.i18n import i18n_patterns
from django.urls import path

from shop.views import Checkout, basket, thanks

urlpatterns = i18n_patterns(
    path("basket/", basket, name="basket"),
    path("checkout/", Checkout.as_view(), name="checkout"),
    path("thanks/", thanks, name="thanks"),
)
