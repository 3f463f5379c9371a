"""Which modules get mutants, and which tests the mutants meet: those of ``make test``."""

#: All mutants of these, in the order in which they are tested.
WHOLE = ("keys", "phases", "claims", "sql", "runs", "retries", "calls", "http", "inbox", "enqueuer", "completer")
#: So many mutants of these, drawn with the seed.
SAMPLED = {"execution": 60, "decorators": 60}
SEED = 16

#: Arguments of pytest for each database: the tier of ``make test``.
_TIER = "not processes and not full"
# The crash kit forks and patches the database by itself.
POSTGRESQL = ("-m", _TIER, "--ignore=tests/crash")
SQLITE = (
    *("-m", f"not postgres and {_TIER}"),
    *("tests/test_keys.py", "tests/test_claims_and_phases.py", "tests/test_phases.py", "tests/test_foreign_calls.py"),
    *("tests/test_edges_of_claims_and_phases.py", "tests/test_completer.py", "tests/test_enqueuer.py", "tests/test_inbox.py"),
)
#: A short one that is run on both, and writes rows: with it the test databases are made.
FIRST_FILE = "tests/test_inbox.py"
