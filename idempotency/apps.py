"""The app's entry in INSTALLED_APPS."""

from django.apps import AppConfig
from django.core.signals import request_started


class IdempotencyConfig(AppConfig):
    """Register the models, the system checks, and the hand-over after COMMIT."""

    name = "idempotency"
    verbose_name = "Idempotency"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Import what registers itself."""
        from idempotency import atomic_requests, checks, prompt  # noqa: F401

        request_started.connect(atomic_requests.leave_out_protected_views, dispatch_uid="idempotency.atomic_requests")
