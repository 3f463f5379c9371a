"""The modules that are mutated, and the tests for the mutants: tests of ``make test``."""

#: Modules of which all mutants are tested, in this order.
WHOLE = (
    *(
        "fence",
        "round_trips",
        "calls",
        "phase",
        "claims",
        "statements",
        "updates",
        "advisory_locks",
        "decisions",
    ),
    *(
        "run",
        "plain_run",
        "phased_run",
        "attempts",
        "request_state",
        "limits",
        "several_databases",
        "savepoints",
        "sessions",
    ),
    *("view", "_http/work", "responses", "replays", "stored_request", "_http/bodies", "inbox"),
    *(
        "_operations/work",
        "_operations/call",
        "_operations/stored",
        "steps",
        "results",
        "definition",
        "deploys",
        "idempotency/operations",
    ),
    *("enqueuer", "_batch", "_hand_over", "_outcomes", "_unwritten", "completer"),
)
#: Modules of which a sample of this size is tested; the seed determines the sample.
SAMPLED = {"decorators": 30, "options": 30, "entry": 30}
SEED = 16

#: Arguments of pytest for each database: the tier of ``make test``.
_TIER = "not processes and not full"
# The crash kit forks and patches the database itself. The core's own tests must kill the mutants,
# not docs and demo.
_LEFT_OUT = ("tests/crash", "tests/docs", "tests/demo", "tests/request/test_sqlite_writer.py")
POSTGRESQL = ("-m", _TIER, *(f"--ignore={path}" for path in _LEFT_OUT))
SQLITE = (
    *("-m", f"not postgres and {_TIER}"),
    *("tests/store/test_keys.py", "tests/store/test_claims.py", "tests/store/test_fence.py"),
    *(
        "tests/request/test_phases.py",
        "tests/request/test_after_commit.py",
        "tests/request/test_at_most_once_calls.py",
    ),
    *("tests/processes/test_completer.py", "tests/processes/test_rebuilt_requests.py"),
    *("tests/jobs/test_enqueuer.py", "tests/jobs/test_inbox.py"),
)
#: A short file that runs on both databases and writes rows. Its run creates the test databases.
FIRST_FILE = "tests/jobs/test_inbox.py"
