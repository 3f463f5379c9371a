"""The Django application."""

from django.apps import AppConfig
from django.core.signals import request_started


class IdempotencyConfig(AppConfig):
    """Register the models, the system checks and the signal receivers."""

    name = "idempotency"
    verbose_name = "Idempotency"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Import the modules that register checks and receivers."""
        from idempotency import _prompt  # noqa: F401
        from idempotency._request import atomic_requests
        from idempotency.checks import settings, views  # noqa: F401

        request_started.connect(atomic_requests.leave_out_protected_views, dispatch_uid="idempotency.atomic_requests")
