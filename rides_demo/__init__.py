"""Rocket Rides: an example service that uses django-idempotency.

The modules of this folder are the service. ``processes`` starts and supervises its processes,
``sandbox`` replaces Stripe, and ``simulator`` tests the service under faults.
"""
