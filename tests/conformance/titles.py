"""What views and operations do, number by number. The tests of a number are named after it:
``test_NN_...`` for the HTTP side, ``test_oNN_...`` for operations."""

TITLES = {
    1: "the header is found whatever its case, under each of the configured names",
    2: "a quoted and a bare key are the same key; the bare form can be refused",
    3: "a header that is not one well-formed key is refused before the view runs",
    4: "key length and further rules are limits that can be set",
    5: "keys that differ in case differ",
    6: "the key may come from the body, a form field or a function",
    7: "no log line shows a key",
    8: "safe methods run each time; the others are protected",
    9: "a required key that is missing is refused; an optional one leaves the request unprotected",
    10: "what fails before the view spends no key, and a replay passes the same gates",
    11: "a request that says nothing of who sends it is refused",
    12: "of many equal requests at once, one runs",
    13: "a process killed anywhere leaves the work and its key, or neither",
    14: "status, bytes and headers are stored, but none that belongs to one answer alone",
    15: (
        "definitive answers are stored; those with another cure than a new key are not, and only"
        " the client's retry runs again"
    ),
    16: "a server error is rolled back and may be retried",
    17: "a large or streamed body is delivered once, and its replay says that it is missing",
    18: "without the database the answer is to come back, and nothing runs",
    19: "a COMMIT that fails is never taken for a success",
    20: "a replay is the same bytes and does nothing",
    21: "a replay, and nothing else, is marked",
    22: "a replay stays the first answer, whatever became of its subject",
    23: "a finished key is replayed though its lock is still set",
    24: "the replay comes before If-Match is looked at",
    25: "the same key with another request is refused, and the first answer stays",
    26: "another request under a key in flight is told so, not to wait",
    27: "how a body is written does not matter, what it says does",
    28: "a refusal shows nothing of the other request",
    29: "a key in flight is refused with the seconds to wait",
    30: "a duplicate may wait for the first to finish",
    31: "a run that fell silent is taken over, and can change nothing any more",
    32: "a serialization failure is retried inside the request",
    33: "errors are problem+json with a stable code",
    34: "errors can be written in another form",
    35: "a finished key is kept for its retention, then it is a new one",
    36: "old keys are deleted in batches, unfinished ones never",
    37: "the policy of each view can be printed and published",
    38: "a retry runs only the phases that are left",
    39: "the completer finishes what its client has left",
    40: "what may not be done again goes to a person",
    41: "every kind of view behaves the same",
    42: "ATOMIC_REQUESTS, several databases and users' own tests work",
    43: "the official Stripe client, retrying through faults, causes one execution",
    44: "the vectors of idemkit hold",
    45: "schemathesis finds no answer that the demo's document does not declare",
    46: "a stuck key says so; a deploy that knows its point goes on",
    47: "a view that changes who asks needs a scope of its own",
    48: "what only the completer's rebuilt request was answered is not the client's answer",
    49: "no answer and no replay reports a write that another database has rolled back",
    50: "a view that is rolled back leaves request, session and messages as they were",
    51: "tenants in schemas of one database do not meet each other's locks",
    52: "a read-only or demoted database is one that cannot be reached",
    53: (
        "a body that store_body=False does not store is nowhere in the tables and log lines of"
        " the app"
    ),
    54: (
        "a response that asks to be retried is not stored; what is stored keeps Retry-After in its"
        " replay"
    ),
    55: (
        "a plain view in a transaction that a middleware opened commits or vanishes with it; a"
        " phased one is refused"
    ),
    56: (
        "a protected view that another one calls with the same key is a part of its run, or is"
        " refused"
    ),
    57: (
        "a database that the view does not use changes nothing; a decoded body is whole; hooks of"
        " frameworks run once"
    ),
    58: "limits of time that the project or its roles set are never raised",
    59: (
        "wrappers of execute_wrapper() get the cursor, the SQL and the result as from any query of"
        " the ORM"
    ),
    60: (
        "no report of an error shows a secret, a key, a seed, a token, a body or arguments in a"
        " frame of this app"
    ),
}

OPERATIONS = {
    1: "an operation runs once per key, and its value is the result",
    2: "each repeat gets the stored result, from any caller, and runs nothing",
    3: "the same key with other arguments is refused, also in progress, and the result stays",
    4: "a call in progress is refused with the seconds to wait; of many at once, one runs",
    5: "a run past its lease is taken over by a repeat or the completer, and can commit no more",
    6: (
        "a process killed anywhere leaves the work of a transaction and its recovery point, or"
        " neither; a repeat or the completer continues, with one effect and one result"
    ),
    7: (
        "a refusal is stored and raised by each repeat; raised, it rolls the writes back,"
        " returned, it commits them"
    ),
    8: (
        "a refusal after a commit is stored in one transaction with its compensation; without"
        " undo= the key is stuck"
    ),
    9: (
        "after an exception before the first effect only the caller continues; after it the"
        " completer does, and the caller is told so"
    ),
    10: "a function that moved has the same keys; under another name it has others",
    11: "a key is kept for its retention, or forever and then without its arguments",
    12: (
        "in an open transaction a plain operation commits or vanishes with it; a phased one is"
        " refused with the cure"
    ),
    13: "a staged call runs after the COMMIT, once, as one of the callers of its key",
    14: "a name that the running code does not have waits for a deploy that has it",
    15: "stored arguments that do not fit wait for a deploy that they fit",
    16: "more than 1,000 operations in one transaction are refused",
    17: "a serialization failure repeats a transaction and not the call before it",
    18: "a stuck key says so to each caller, and the answer of an operator is its result",
}

#: All titles, by the number as it is printed.
LABELS = {f"{number:02}": title for number, title in TITLES.items()} | {
    f"O{number:02}": title for number, title in OPERATIONS.items()
}
