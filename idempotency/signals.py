"""Signals for metrics and logs.

The sender is ``IdempotencyKey``; the arguments are ``key`` and ``request`` (None in commands); ``key_conflict`` has the
error's ``code`` besides. Each is sent after COMMIT with ``send_robust``: a receiver that fails is logged by Django and changes
nothing.
"""

from django.dispatch import Signal

key_claimed = Signal()
key_replayed = Signal()
key_conflict = Signal()
phase_committed = Signal()
key_finished = Signal()
key_stuck = Signal()
