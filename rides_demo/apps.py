"""The app configuration of the demo."""

from django.apps import AppConfig
from django.conf import settings


class RidesDemoConfig(AppConfig):
    name = "rides_demo"
    verbose_name = "Rocket Rides"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        if settings.TRACES:
            from rides_demo import traces

            traces.start()
