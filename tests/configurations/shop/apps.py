"""The app of the project: its models, and what some packages set up when they start."""

import os

from django.apps import AppConfig


class ShopConfig(AppConfig):
    """The shop. Its models depend on the configuration, so it has no migrations."""

    name = "tests.configurations.shop"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Start the packages that a project starts itself, such as error trackers."""
        from tests.configurations import starts

        for start in filter(None, os.environ.get("CONFIGURATION_STARTS", "").split(",")):
            getattr(starts, start)()
