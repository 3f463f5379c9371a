"""The app configuration of the demo."""

from django.apps import AppConfig


class RidesDemoConfig(AppConfig):
    name = "rides_demo"
    verbose_name = "Rocket Rides"
    default_auto_field = "django.db.models.BigAutoField"
