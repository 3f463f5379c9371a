"""Idempotency keys for Django: every write runs once, is driven to an end, and answers every retry with the same response.

The modules are the API, as in Django itself: ``idempotency.decorators.idempotent``, ``idempotency.phases.atomic_phase``,
``idempotency.jobs.stage_job``, ``idempotency.inbox.process_once``. This one holds nothing but the version, because
a package in INSTALLED_APPS is imported before its models can be.
"""

__version__ = "0.1.0"
