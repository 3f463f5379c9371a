"""The Django application."""

import logging
import sys

from django.apps import AppConfig
from django.core.signals import request_started
from django.utils.module_loading import autodiscover_modules
from django.utils.translation import gettext_lazy as _


class IdempotencyConfig(AppConfig):
    """Register the models, the system checks and the signal receivers."""

    name = "idempotency"
    verbose_name = _("Idempotency")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from idempotency import _prompt, signals  # noqa: F401
        from idempotency._engine import adapter
        from idempotency._http import atomic_requests
        from idempotency._http.rerun import HttpAdapter
        from idempotency._operations.definition import METHOD
        from idempotency._operations.stored import OperationAdapter
        from idempotency._text import escape_arguments
        from idempotency.checks import databases, operations, settings, views  # noqa: F401

        logging.getLogger("idempotency").addFilter(escape_arguments)
        adapter.register(adapter.HTTP, HttpAdapter())
        adapter.register(METHOD, OperationAdapter())
        request_started.connect(
            atomic_requests.exclude_protected_views, dispatch_uid="idempotency.atomic_requests"
        )
        autodiscover_modules("operations")
        if "celery" in sys.modules:  # Its workers must know the task of staged operations.
            from idempotency.contrib import celery  # noqa: F401
