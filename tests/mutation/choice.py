"""Which modules get mutants, and which tests the mutants meet: those of ``make test``."""

#: All mutants of these, in the order in which they are tested.
WHOLE = (
    *("fence", "round_trips", "phases", "claims", "statements", "advisory_locks", "settlement"),
    *("phased_run", "phased", "plain", "retry"),
    *("view_call", "responses", "replays", "stored_request", "bodies", "inbox", "enqueuer", "_hand_over", "completer"),
)
#: So many mutants of these, drawn with the seed.
SAMPLED = {"decorators": 30, "options": 30, "entry": 30}
SEED = 16

#: Arguments of pytest for each database: the tier of ``make test``.
_TIER = "not processes and not full"
# The crash kit forks and patches the database by itself; the docs and the demo kill what the core's own tests must kill.
_LEFT_OUT = ("tests/crash", "tests/docs", "tests/demo", "tests/request/test_sqlite_writer.py")
POSTGRESQL = ("-m", _TIER, *(f"--ignore={path}" for path in _LEFT_OUT))
SQLITE = (
    *("-m", f"not postgres and {_TIER}"),
    *("tests/store/test_keys.py", "tests/store/test_claims.py", "tests/store/test_fence.py"),
    *("tests/request/test_phases.py", "tests/request/test_after_commit.py", "tests/request/test_foreign_calls.py"),
    *("tests/processes/test_completer.py", "tests/processes/test_rebuilt_requests.py"),
    *("tests/jobs/test_enqueuer.py", "tests/jobs/test_inbox.py"),
)
#: A short one that is run on both, and writes rows: with it the test databases are made.
FIRST_FILE = "tests/jobs/test_inbox.py"
