"""Idempotency keys for Django: each request runs once, is completed, and has the same response for
each retry.

The public API is in the modules, such as ``idempotency.decorators`` and ``idempotency.phases``.
This module contains only the version, because Django imports a package in INSTALLED_APPS before its
models.
"""

__version__ = "0.1.0"
