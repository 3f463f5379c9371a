"""The app's entry in INSTALLED_APPS."""

from django.apps import AppConfig


class IdempotencyConfig(AppConfig):
    """Register the models, the system checks, and the hand-over after COMMIT."""

    name = "idempotency"
    verbose_name = "Idempotency"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Import what registers itself."""
        from idempotency import checks, prompt  # noqa: F401
