"""Rocket Rides: the reference service that django-idempotency is proved on."""
