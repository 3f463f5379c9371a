"""Why a key is stuck, for who has never seen this project: what each code means, and what to do."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StuckCode:
    """A stuck code: its cause, and its cure."""

    cause: str
    cure: str


STUCK_CODES = {
    "attempts_exhausted": StuckCode(
        "The completer ran the request until its attempts were used up, and it failed each time.",
        "Read the last error and mend its cause. Then complete the key: it gets all its attempts again.",
    ),
    "call_in_doubt": StuckCode(
        "A call to a service that knows no idempotency keys was begun, and nobody knows whether it took effect.",
        "Look at that service. If it took effect, answer the key with what the client should know; if not, answer "
        "it with an error such as 409, and the client may send a new request. Should its result have come in late, which this "
        "page shows, complete the key; else completing would stop at the same place.",
    ),
    "downstream_key_expired": StuckCode(
        "The key for another service is past its validity there: calling again could do the work twice.",
        "Look at that service, as for call_in_doubt, and answer the key. Completing would stop at the same place.",
    ),
    "view_gave_up": StuckCode(
        "The view itself raised KeyStuck, with the reason that is shown.",
        "Do what the reason says. Then complete the key, or answer it.",
    ),
    "retention_passed": StuckCode(
        "The request was not finished within the retention, and its view has no on_abandon to settle it.",
        "Its client has long given up. Decide whether the work is still wanted: complete it if so; if not, take back what it "
        "has begun elsewhere, and answer it with 410.",
    ),
    "on_abandon": StuckCode(
        "The on_abandon of the view was begun and did not come to its end: what it did elsewhere may be done.",
        "Look there, finish by hand what is missing, then answer the key. It cannot be completed: the view must not build upon "
        "what was undone.",
    ),
    "unknown_recovery_point": StuckCode(
        "The code that runs now does not know the recovery point at which the key stands: a deploy renamed or removed it.",
        "Deploy code that declares the recovery point. The next retry, or the completer, then goes on by itself.",
    ),
    "refused_when_rebuilt": StuckCode(
        "The completer made the request again from what is kept of it, and the view refused it each time, before anything was "
        "begun. Its client may be answered otherwise.",
        "A retry of the client runs it. If the rebuilt request lacks what a middleware adds, set PREPARE_REQUEST and complete "
        "the key; or answer it.",
    ),
    "view_missing": StuckCode(
        "No view that is protected with @idempotent answers the path of the request any more.",
        "Deploy a view that answers it, then complete the key; or answer it.",
    ),
    "user_missing": StuckCode(
        "The sender of the request is gone, not active, or not allowed to make it any more; or the sender is no user of "
        "Django's, and PREPARE_REQUEST does not say who it is.",
        "The reason on the page says which. Mend it and complete the key; or take back what the request has begun, and "
        "answer it.",
    ),
    "body_not_kept": StuckCode(
        "The body of the request was not kept (an upload, or store_body=False), so only its client can send it again.",
        "Completing would stop at the same place. Take back, or finish by hand, what was begun, and answer the "
        "key; if the work is still wanted, its client sends a new request.",
    ),
    "body_redacted": StuckCode(
        "Parts of the request were redacted, so only its client can send it again.",
        "As for body_not_kept.",
    ),
}
