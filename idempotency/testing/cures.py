"""The cures of failures: of views, and in ``OF_OPERATIONS`` the same ones of operations."""

OUTSIDE = (
    "Move this write into the atomic_phase that ends with the next recovery point, so that both"
    " commit together. In a plain view, remove the code that commits the write early."
)
NO_RECOVERY_POINT = (
    "End that phase with phase.set_recovery_point(NAME), declared in"
    " @idempotent(recovery_points=[...])."
)
WRITTEN_AGAIN = (
    "End the phase that writes it with phase.set_recovery_point(NAME). A run that begins at a later"
    " recovery point must skip this phase."
)
UNSAFE_CALL = (
    "If the downstream service supports idempotency keys, make the call in `with"
    " request.idempotency_key.call(NAME) as call:`, and pass call.key to the service. Otherwise add"
    " at_most_once=True: call(NAME, at_most_once=True) never makes the call twice. Both need a"
    " phased view: @idempotent(recovery_points=[...])."
)
CALL_IN_TRANSACTION = (
    f"Make the call between two phases. {UNSAFE_CALL} If the call changes nothing in that system, "
    'exclude its address with ignore=["HOST:PORT"].'
)
RANDOM_KEY = (
    "Pass call.key of `with request.idempotency_key.call(NAME) as call:`. It is the same in each"
    " run of this request, and different for every other request."
)
OTHER_ARGUMENTS = (
    "A service refuses a known key with other arguments. Compute each argument in a phase, store it"
    " in a row, and read it from that row before the call; or call with other arguments under"
    " another key, key.call(ANOTHER_NAME)."
)
LOST_UPDATE = (
    'Compute the value in the database, update(balance=F("balance") + 10), or lock each row with'
    " select_for_update() when you read it. Prevent double rows with a unique constraint. Or run"
    " the whole project at SERIALIZABLE. See docs/explanation/isolation.md."
)
LOST = (
    "Work after the last COMMIT, or in on_commit, is lost if the process dies. Do it before the"
    " phase that stores the response, or stage a job for it in that phase with stage_job()."
)
GONE_WITH_THE_RUN = (
    "Variables of an earlier run are gone. At each recovery point, read the data from the rows that"
    " earlier phases committed: Model.objects.get(idempotency_key=key)."
)
OTHER_ANSWER = (
    "Build the response from rows that the phases committed, read at the last recovery point; not"
    " from variables, counts or random values of the run that happens to answer."
)
NOT_REBUILT = (
    "The completer runs the stored request without middleware: it has no session, and only a few"
    " headers. Name each value that the view reads in @idempotent(keep=[...]), or set it in the"
    " function of IDEMPOTENCY['PREPARE_REQUEST']."
)
FOR_A_PERSON = (
    "The view must store a response, or refuse the request in the same way, in each later run."
)

_IN_CALL = (
    "Pass the function that makes the call as call=. If the downstream service supports idempotency"
    " keys, use keyed(function, valid_hours=...), and pass the first parameter of the function to"
    " the service as the key. Otherwise use at_most_once(function), which never makes the call"
    " twice."
)
#: The cures of operations, by the cures of views for the same causes.
OF_OPERATIONS = {
    OUTSIDE: (
        "Move this write into a function that runs in a transaction of the operation: after=, a"
        " step, or the function with @operation. The function in call= runs between these"
        " transactions, and each attempt may run it again."
    ),
    WRITTEN_AGAIN: (
        "Write rows only in the transactions of the operation: after=, a step, and the function"
        " with @operation. A function in call= may run several times, so it must not open a"
        " transaction of its own. Each caller must pass the same key, in the same scope."
    ),
    UNSAFE_CALL: _IN_CALL,
    CALL_IN_TRANSACTION: (
        f"The functions of an operation run in transactions, except the function in call=."
        f" {_IN_CALL} If the call changes nothing in that system, exclude its address with"
        ' ignore=["HOST:PORT"].'
    ),
    RANDOM_KEY: (
        "Pass the first parameter of the function in call= to the service as the idempotency key."
        " It is the same in each run of this key, and different for every other key."
    ),
    OTHER_ARGUMENTS: (
        "A service refuses a known key with other arguments. Take each argument from the arguments"
        " of the operation, or from a row that an earlier step committed. For another request to"
        " the service, add a step with a call of its own."
    ),
    LOST: (
        "Work after the last COMMIT, or in on_commit, is lost if the process dies. Make a call of a"
        " downstream service in call=. For other work, stage a job in the function with @operation:"
        " stage_job()."
    ),
    GONE_WITH_THE_RUN: (
        "Variables of an earlier run are gone, because another process may continue the operation."
        " Read the data from the arguments, and from the rows that earlier steps committed."
    ),
    OTHER_ANSWER: (
        "Build the result from the arguments, the value of the call, and rows that the operation"
        " wrote; not from variables, counts or random values of the run that happens to end it."
    ),
    NOT_REBUILT: (
        "The completer calls the functions of the operation with the stored arguments alone. A"
        " function must not read the request, the user, the language or a context variable of its"
        " caller: pass each value as an argument."
    ),
    FOR_A_PERSON: (
        "Each later run must return a result, or be rejected. A refusal after a transaction was"
        " committed needs undo=, which undoes that transaction."
    ),
}
