"""``python -m tests.conformance`` runs the contract and prints what became of each number; 0 when
all of them hold."""

import sys

import pytest

from tests.conformance.report import Report

if __name__ == "__main__":
    report = Report()
    # By its name too, so that the workers of pytest-xdist know which tests to leave out.
    status = pytest.main(["-q", "-p", "tests.conformance.report", *sys.argv[1:]], plugins=[report])
    # When all numbers hold and the run has failed, it was a test without a number.
    failed = report.failed() or int(status != pytest.ExitCode.OK)
    verdict = f"conformance: FAILED {failed}" if failed else "conformance: ok"
    sys.stdout.write("\n".join(["", *report.lines(), verdict, ""]))
    sys.exit(bool(failed))
