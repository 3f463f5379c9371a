"""Which modules get mutants, and which tests the mutants meet: those of ``make test``."""

#: All mutants of these, in the order in which they are tested.
WHOLE = ("keys", "phases", "claims", "sql", "runs", "retries", "calls", "http", "inbox", "enqueuer", "completer")
#: So many mutants of these, drawn with the seed.
SAMPLED = {"execution": 60, "decorators": 60}
SEED = 16

_ELSEWHERE = (
    *("browser", "outside", "murphy", "model", "fuzz", "mutation", "crash", "test_processes_killed.py", "test_rides_*"),
    *("test_sandbox.py", "test_services.py", "test_supervisor.py", "test_soak.py", "test_benchmarks.py", "test_packaging.py"),
    *("test_typing.py", "test_tutorial.py", "test_client.py", "test_docs.py", "test_howtos*.py", "test_scaling.py"),
    *("test_contributing.py", "conformance/test_processes.py", "conformance/test_kill.py"),
)
#: Arguments of pytest for each database.
POSTGRESQL = ("-m", "not murphy", *(f"--ignore-glob=tests/{name}" for name in _ELSEWHERE))
SQLITE = (
    *("-m", "not postgres and not murphy"),
    *("tests/test_keys.py", "tests/test_claims_and_phases.py", "tests/test_phases.py", "tests/test_foreign_calls.py"),
    *("tests/test_edges_of_claims_and_phases.py", "tests/test_completer.py", "tests/test_enqueuer.py", "tests/test_inbox.py"),
)
#: A short one that is run on both, and writes rows: with it the test databases are made.
FIRST_FILE = "tests/test_inbox.py"
#: The kinds of view whose cases of the frameworks table are run.
FAMILIES = frozenset({"function", "async function", "form", "DRF APIView", "Ninja"})
