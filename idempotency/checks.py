"""System checks (ids ``idempotency.E001`` and on): mistakes are found before the first request, not at it."""
