"""Atomic phases, whose writes and recovery point commit together, and the calls between them.

Source: Brandur Leach, "Implementing Stripe-like Idempotency Keys in Postgres" ("atomic phases" and
"recovery points").
"""

from idempotency._engine.call_handles import AtMostOnceCall, KeyedCall
from idempotency._engine.claimed_key import ClaimedKey
from idempotency._engine.phase import AtomicPhase, atomic_phase

__all__ = ["AtMostOnceCall", "AtomicPhase", "ClaimedKey", "KeyedCall", "atomic_phase"]
