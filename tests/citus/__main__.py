"""Run the core and the tests of this folder on Citus: ``make citus``.

``CITUS_URL`` names a database on the coordinator of a cluster, in which Citus and two workers are
set up; the schemas of the tests are dropped. Otherwise a cluster is built from the source tree
``CITUS_SOURCE``.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.citus import cluster

ROOT = Path(__file__).resolve().parents[2]
HOW = """\
There is no Citus. Either name a cluster:
    make citus CITUS_URL=postgresql://postgres@127.0.0.1:5432/idempotency
or a source tree, which is built and started (10 minutes the first time; Debian's PostgreSQL 15).
PostgreSQL 15.20 declares a function that Citus defines too, which sed renames:
    apt-get install postgresql-15 postgresql-server-dev-15
    apt-get install libssl-dev libkrb5-dev liblz4-dev libzstd-dev
    git clone --branch v13.2.2 https://github.com/citusdata/citus
    sed -i 's/\\bhave_createdb_privilege\\b/citus_&/' $(grep -rl have_createdb_privilege citus/src)
    make citus CITUS_SOURCE=citus
"""


def _tests(url: str, core: list[str], arguments: list[str]) -> int:
    """Run the tests on a cluster; return the number of runs that failed."""
    own = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests" / "citus").glob("citus_*.py"))
    ]
    environment = {**os.environ, "DATABASE_URL": url, "CITUS_URL": url}
    failed = 0
    for tests in (core, own):
        cluster.prepare(url, "core", "tenant_a", "tenant_b")
        command = [
            *(
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:xdist",
                "-p",
                "tests.citus.plugin",
                "--ds=tests.citus.settings",
            ),
            *("--reuse-db", "-m", "not processes and not full", *tests, *arguments),
        ]
        failed += subprocess.run(
            command, cwd=ROOT, env=environment, check=False
        ).returncode not in (0, 5)
    return failed


def main(core: list[str], arguments: list[str]) -> int:
    """Run the tests on a cluster; return the exit status."""
    if url := os.environ.get("CITUS_URL"):
        return _tests(url, core, arguments)
    if not (source := os.environ.get("CITUS_SOURCE")):
        sys.stderr.write(HOW)
        return 2
    try:
        binaries = cluster.install(Path(source).resolve(), ROOT / ".run" / "citus")
    except cluster.NotToBeHad as error:
        sys.stderr.write(f"{error}\n{HOW}")
        return 2
    with (
        tempfile.TemporaryDirectory(prefix="idempotency-citus-") as folder,
        cluster.started(binaries, Path(folder)) as url,
    ):
        return _tests(url, core, arguments)


if __name__ == "__main__":
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    sys.exit(main(sys.argv[1:split], sys.argv[split + 1 :]))
