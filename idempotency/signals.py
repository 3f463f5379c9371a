"""Signals for metrics and logs.

The sender is ``IdempotencyKey``. The arguments are ``key`` and ``request``, which is None in commands. The signal
``key_conflict`` also has the ``code`` of the error. Each signal is sent after COMMIT with ``send_robust``: Django logs an
exception of a receiver, and it has no other effect.
"""

from django.dispatch import Signal

key_claimed = Signal()
key_replayed = Signal()
key_conflict = Signal()
phase_committed = Signal()
key_finished = Signal()
key_stuck = Signal()
