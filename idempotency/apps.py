"""The app's entry in INSTALLED_APPS."""

from django.apps import AppConfig


class IdempotencyConfig(AppConfig):
    """Register the models and the system checks."""

    name = "idempotency"
    verbose_name = "Idempotency"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Import the checks, which register themselves."""
        from idempotency import checks  # noqa: F401
