"""The routes of Rocket Rides."""

from django.contrib import admin
from django.urls import path, register_converter
from django.urls.converters import UUIDConverter

from rides_demo import documents, pages, switches, views, webhooks


class AnyCaseUUIDConverter(UUIDConverter):
    """A UUID converter that also accepts capital letters, as iOS writes them."""

    regex = "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"


register_converter(AnyCaseUUIDConverter, "any_case_uuid")

urlpatterns = [
    path("", pages.home, {"switches": switches.shown}, name="home"),
    path("sign-in", pages.sign_in, name="sign-in"),
    path("sign-out", pages.sign_out, name="sign-out"),
    path("page/booking", pages.booking, name="page-booking"),
    path("page/trace", pages.booking_trace, name="page-trace"),
    path("switches/charges", switches.charges, name="switches-charges"),
    path("switches/stripe", switches.stripe, name="switches-stripe"),
    path("switches/kill", switches.kill, name="switches-kill"),
    path("rides", views.create_ride),
    path("rides/<int:ride_id>", views.ride_detail),
    path("rides/<int:ride_id>/texts", views.text_pilot),
    path("rides/by-ref/<any_case_uuid:client_ref>", views.ride_by_ref),
    path("webhooks/stripe", webhooks.stripe_webhook),
    path("healthz", views.healthz),
    path("openapi.json", documents.openapi),
    path("admin/", admin.site.urls),
]
