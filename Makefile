# Each target sets up what it needs in .venv, and ends with one line: "NAME: ok" or "NAME: FAILED n".

.PHONY: demo soak serve test test-processes test-all test-configurations test-pools test-unmerged conformance screenshots fuzz citus proof failover coverage mutants docs calls bench bench-scale admin-scale examples package matrix lint clean
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
PY := .venv/bin/python
# Python keeps what it has compiled: each process of a run would compile the suite again, which takes 6 seconds.
export PYTHONDONTWRITEBYTECODE :=

# Steps are all run; n counts those that failed. The seconds are those after set-up. The failed tests of all steps stand at the end.
steps := failed=0; began=$$(date +%s); export FAILED_TESTS=$$(mktemp); step() { "$$@" || failed=$$((failed + 1)); }
# $(call end,NAME)
end = echo "$$(($$(date +%s) - began)) seconds"; cat "$$FAILED_TESTS"; rm "$$FAILED_TESTS"; if [ $$failed -eq 0 ]; then echo "$(1): ok"; else echo "$(1): FAILED $$failed"; exit 1; fi
# $(call set-up,NAME,STAMP)
set-up = @$(MAKE) -s .venv/$(2).stamp || { echo "$(1): FAILED 2"; exit 2; }

# BROKER=rabbitmq or BROKER=kafka: the jobs go over that broker instead of Redis, and it is killed too.
demo:
	$(call set-up,demo,demo)
	$(if $(BROKER),$(call set-up,demo,brokers))
	@exec $(PY) manage.py demo

# Book rides for MINUTES (default 10) under all faults; SEED repeats a run.
soak:
	$(call set-up,soak,demo)
	@exec $(PY) manage.py soak

serve:
	$(call set-up,serve,demo)
	@exec $(PY) manage.py serve

# The tiers of the suite (tests/kit/tiers.py). Each prints its ten slowest tests, and fails on a skip that is not expected.
WORKERS := -n 2 --dist worksteal
SQLITE = env DATABASE_URL=sqlite:///$(CURDIR)/.run/core.sqlite3 $(PY) -m pytest
IN_PROCESS := not processes and not full

# Everything that runs in one process, on PostgreSQL; the core, the contract and five kinds of view on SQLite too, at the same time.
test:
	$(call set-up,test,test)
	@$(steps); mkdir -p .run; \
	$(SQLITE) -m "not postgres and $(IN_PROCESS)" $(CORE) tests/frameworks $(PYTEST_ARGS) >.run/test-sqlite.log 2>&1 & sqlite=$$!; \
	step $(PY) -m pytest -m "$(IN_PROCESS)" $(WORKERS) $(PYTEST_ARGS); \
	step wait $$sqlite; cat .run/test-sqlite.log; \
	step $(PY) -m tests.configurations --sample; \
	$(call end,test)

# Real processes, kills, brokers, a browser, the demo. SAMPLE=1: one case for each queue and each kind of kill.
test-processes:
	$(call set-up,test-processes,test)
	@$(steps); \
	step $(PY) -m pytest -m "processes$(if $(SAMPLE), and sample)" -n 2 --dist $(if $(SAMPLE),worksteal,loadfile) $(PYTEST_ARGS); \
	$(call end,test-processes)

# Both, with all kinds of view and all of SQLite; then the crash kit, the fuzz tests and the poolers.
test-all:
	$(call set-up,test-all,test)
	@$(steps); \
	step $(PY) -m pytest -m "not processes" $(WORKERS) $(PYTEST_ARGS); \
	step $(SQLITE) -m "not postgres and not processes" $(WORKERS) $(PYTEST_ARGS); \
	for tier in test-processes test-configurations proof fuzz test-pools test-unmerged; do step $(MAKE) $$tier; done; \
	$(call end,test-all)

# One small project with the settings, middleware, packages and databases of others, each with the same contract; in an
# environment of its own. NAMES: some of them.
test-configurations:
	@$(MAKE) -s .venv-configurations/configurations.stamp || { echo "test-configurations: FAILED 2"; exit 2; }
	@$(steps); \
	step .venv-configurations/bin/python -m tests.configurations $(NAMES); \
	$(call end,test-configurations)

.venv-configurations/configurations.stamp: requirements/configurations.txt
	@python3.11 -m venv .venv-configurations
	@.venv-configurations/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

CORE := $(addprefix tests/,store/test_keys.py store/test_round_trips.py request/test_decorators.py request/test_signals.py request/test_lost_connections.py \
	store/test_replication.py request/test_in_test_cases.py request/test_phases.py request/test_after_commit.py request/test_at_most_once_calls.py \
	request/test_calls_in_doubt.py request/test_http.py request/test_retries_in_process.py request/test_scopes.py \
	request/test_async.py request/test_isolation.py processes/test_abandonment.py processes/test_completer.py \
	processes/test_rebuilt_requests.py processes/test_completer_and_deploys.py processes/test_reaper.py jobs/test_enqueuer.py \
	jobs/test_jobs.py jobs/test_inbox.py jobs/test_inbox_on_asyncio.py conformance once)

# The core behind Django's connection pool, then behind PgBouncer in transaction mode.
test-pools:
	$(call set-up,test-pools,test)
	@$(steps); \
	step env RIDES_TEST_POOL=1 $(PY) -m pytest -m "$(IN_PROCESS)" $(CORE) $(WORKERS) $(PYTEST_ARGS); \
	step env RIDES_TEST_PGBOUNCER=1 $(PY) -m pytest -m "$(IN_PROCESS)" $(CORE) $(WORKERS) $(PYTEST_ARGS); \
	$(call end,test-pools)

# The core with one round trip for each statement, as with MERGE_ROUND_TRIPS off; its round trips with psycopg's pure Python.
test-unmerged:
	$(call set-up,test-unmerged,test)
	@$(steps); \
	step env RIDES_TEST_UNMERGED=1 $(PY) -m pytest -m "$(IN_PROCESS)" $(CORE) $(WORKERS) $(PYTEST_ARGS); \
	step env PSYCOPG_IMPL=python $(PY) -m pytest tests/store/test_round_trips.py -m "$(IN_PROCESS)" $(PYTEST_ARGS); \
	$(call end,test-unmerged)

# The core and a storm of two tenants on Citus: on the cluster of CITUS_URL, or on one that is built from the source CITUS_SOURCE.
citus:
	$(call set-up,citus,test)
	@$(PY) -m tests.citus $(CORE) -- $(PYTEST_ARGS); status=$$?; \
	if [ $$status -eq 0 ]; then echo "citus: ok"; else echo "citus: FAILED $$status"; exit $$status; fi

# Pictures of the demo and the admin, for the docs.
screenshots:
	$(call set-up,screenshots,test)
	@exec $(PY) -m tests.browser.screenshots

# The seconds and the plans of each page of the admin and of the scrape on a table of 1,000,000 keys.
admin-scale:
	$(call set-up,admin-scale,test)
	@exec $(PY) -m tests.admin.scale --plans

# Each number of the contract, and of the rules of operations, as a line, and what the suites of others say.
conformance:
	$(call set-up,conformance,test)
	@$(PY) -m tests.conformance $(PYTEST_ARGS)

# At least 20,000 requests that nobody would think of.
fuzz:
	$(call set-up,fuzz,test)
	@$(steps); \
	step $(PY) -m pytest -q tests/fuzz/fuzz_*.py $(PYTEST_ARGS); \
	$(call end,fuzz)

# The crash kit on planted bugs, correct views, the demo and the docs, as a table; on PostgreSQL, then on SQLite.
proof:
	$(call set-up,proof,test)
	@$(steps); \
	step $(PY) -m tests.crash.table $(PYTEST_ARGS); \
	step env DATABASE_URL=sqlite:///$(CURDIR)/.run/crash.sqlite3 $(PY) -m tests.crash.table $(PYTEST_ARGS); \
	$(call end,proof)

# Two PostgreSQL nodes: kills, promotions and restarts under traffic, in each kind of replication; a table. ROUNDS (3) of each event;
# SEED repeats a run. Then `python -m tests.failover.results` writes the table into docs/contributing/failover.md.
failover:
	$(call set-up,failover,test)
	@exec $(PY) -m tests.failover

# Branch coverage of the app by its tests in process, and what is not covered; docs/contributing/coverage.md.
ON_SQLITE := $(addprefix tests/,store/test_keys.py store/test_claims.py store/test_fence.py request/test_phases.py \
	request/test_at_most_once_calls.py request/test_calls_in_doubt.py processes/test_completer.py processes/test_rebuilt_requests.py \
	processes/test_reaper.py jobs/test_enqueuer.py jobs/test_inbox.py processes/test_doctor.py)
coverage:
	$(call set-up,coverage,test)
	@$(steps); \
	rm -rf .run/coverage; mkdir -p .run/coverage; \
	step $(PY) -m coverage run -m pytest -q -m "$(IN_PROCESS)" $(WORKERS) $(PYTEST_ARGS); \
	step env DATABASE_URL=sqlite:///$(CURDIR)/.run/core.sqlite3 $(PY) -m coverage run -m pytest -q -m "not postgres and $(IN_PROCESS)" \
		$(ON_SQLITE) $(WORKERS) $(PYTEST_ARGS); \
	step $(PY) -m coverage combine --quiet; \
	step $(PY) -m coverage report; \
	$(call end,coverage)

# Small bugs in the claim, the fence, the phases and their SQL: each is found by a test, or explained in tests/mutation/SURVIVORS.md.
# MODULES: some of them; tests/mutation/choice.py has all. RESUME=1 believes what an earlier run found, and leaves out the modules
# of tests/mutation/TESTED.txt whose code has not changed.
# In an environment of its own: Cosmic Ray brings much that slows tests.
mutants:
	@$(MAKE) -s .venv-mutation/mutation.stamp || { echo "mutants: FAILED 2"; exit 2; }
	@exec .venv-mutation/bin/python -m tests.mutation --modules "$(MODULES)" --minutes $(or $(MINUTES),30) $(if $(RESUME),--resume)

.venv-mutation/mutation.stamp: requirements/mutation.txt
	@python3.11 -m venv .venv-mutation
	@.venv-mutation/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

# The docs as HTML in .run/docs, warnings as errors, in an environment of their own. FULL=1: all guides too, each in an environment
# that has only what the guide installs.
docs:
	@$(MAKE) -s .venv-docs/docs.stamp $(if $(FULL),.venv/test.stamp) || { echo "docs: FAILED 2"; exit 2; }
	@$(steps); \
	step .venv-docs/bin/python -m sphinx -nWqE --keep-going docs .run/docs; \
	step .venv-docs/bin/python tests/docs/search.py .run/docs; \
	$(if $(FULL),step env GUIDES=all $(PY) -m pytest -q tests/docs/test_howtos_as_printed.py -k installs $(WORKERS) $(PYTEST_ARGS);) \
	$(call end,docs)

.venv-docs/docs.stamp: requirements/docs.txt
	@python3.11 -m venv .venv-docs && echo '*' > .venv-docs/.gitignore
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

# The Python function calls of a request, compared with benchmarks/calls.json. STORE=1 stores the figures there.
calls:
	$(call set-up,calls,test)
	@$(steps); \
	step $(PY) -m benchmarks.calls $(if $(STORE),--store); \
	$(call end,calls)

# Us and the peers beside a bare view, in an environment of their own; fails when a target of benchmarks/targets.py is missed.
# QUICK=1: under 3 minutes, to see that it works. Then `python -m benchmarks.report .run/bench.json` writes the page of the docs.
bench:
	@$(MAKE) -s .venv-bench/bench.stamp || { echo "bench: FAILED 2"; exit 2; }
	@mkdir -p .run
	@exec .venv-bench/bin/python -m benchmarks $(if $(QUICK),--quick) --json .run/bench.json

# The table of keys at ten million rows too, which takes 15 GB of disk and up to half an hour.
bench-scale:
	$(call set-up,bench-scale,demo)
	@mkdir -p .run
	@$(steps); \
	step $(PY) -m benchmarks.sizes --scale --json .run/sizes.json; \
	$(call end,bench-scale)

# A shop on django-oscar, as it is and with two protections: its tests, and how many lines each protection changes. Then the
# guide to GraphQL and agents, with the packages that it names.
examples:
	@$(MAKE) -s .venv-examples/examples.stamp || { echo "examples: FAILED 2"; exit 2; }
	@$(steps); \
	step .venv-examples/bin/python -m pytest -q examples/oscar $(PYTEST_ARGS); \
	step .venv-examples/bin/python -m pytest -q examples/guides $(PYTEST_ARGS); \
	for patch in examples/oscar/plain.patch examples/oscar/phased.patch; do echo "$$patch:"; step git apply --stat $$patch; done; \
	$(call end,examples)

.venv-examples/examples.stamp: requirements/examples.txt
	@python3.11 -m venv .venv-examples
	@.venv-examples/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

# The wheel and the sdist: built, looked into, tried in empty projects, one of them the tutorial's; mypy sees them as a user does.
package:
	$(call set-up,package,lint)
	@$(MAKE) -s .venv-package/package.stamp || { echo "package: FAILED 2"; exit 2; }
	@$(steps); \
	step $(PY) -m pytest -q tests/docs/test_packaging.py tests/docs/test_typing.py tests/docs/test_tutorial.py $(WORKERS) $(PYTEST_ARGS); \
	$(call end,package)

# A line for each Python and Django that is supported: the core on the newest PostgreSQL, then on SQLite; then on the oldest
# PostgreSQL, which Debian has. What is not found is said. CELLS: only some of them. MINUTES: after so many, no cell but the first.
CELLS := py311-django52 py311-lowest py312-django52 py312-django60 py312-django61 py313-django52 py313-django60 py313-django61 postgres15
IN_CELLS := $(CORE) $(addprefix tests/,admin/test_admin.py request/test_checks.py jobs/test_jobs_offered_again.py jobs/test_tasks.py)
# The tests of the other packages, for the cell with their lowest versions.
OF_EXTRAS := $(addprefix tests/,frameworks jobs/test_backends.py jobs/test_celery.py)
matrix:
	$(call set-up,matrix,test)
	@$(MAKE) -s .venv-package/package.stamp || { echo "matrix: FAILED 2"; exit 2; }
	@$(steps); ended=0; mkdir -p .run; \
	others=$$(pyenv versions --bare 2>/dev/null | grep -xE '3\.1[123]\.[0-9]+' | paste -sd:); \
	[ -z "$$others" ] || export PYENV_VERSION="$$others"; \
	tox() { .venv-package/bin/python -m tox run --discover "$$python" -e $$cell "$$@"; }; \
	cell_postgres() { $(PY) -m tests.kit.debian_postgres 15 $(PY) -m pytest -q -m "$(IN_PROCESS)" $(IN_CELLS) $(WORKERS) $(PYTEST_ARGS); }; \
	cell_tox() { [ $$cell != py311-lowest ] || set -- $(OF_EXTRAS); tox --skip-pkg-install -- $(IN_CELLS) "$$@" $(WORKERS) $(PYTEST_ARGS); }; \
	for cell in $(CELLS); do \
		log=.run/matrix-$$cell.log; \
		if [ $$ended -gt 0 ] && [ $$(($$(date +%s) - began)) -ge $$(($(or $(MINUTES),600) * 60)) ]; then echo "$$cell: left out (no time)"; continue; fi; \
		if [ $$cell = postgres15 ]; then \
			run=cell_postgres; what=/usr/lib/postgresql/15/bin/postgres; \
			[ -x $$what ] || { echo "$$cell: not found ($$what)"; continue; }; \
		else \
			run=cell_tox; what=python$$(echo $$cell | sed -E 's/^py3([0-9]+)-.*/3.\1/'); \
			python=$$($$what -c 'import sys; print(sys.executable)' 2>/dev/null) || { echo "$$cell: not found ($$what)"; continue; }; \
			tox --notest >$$log 2>&1 || { failed=$$((failed + 1)); echo "$$cell: FAILED to be set up ($$log)"; continue; }; \
		fi; \
		start=$$(date +%s); $$run >$$log 2>&1 && end=ok || { end=FAILED; failed=$$((failed + 1)); }; \
		ended=$$((ended + 1)); \
		echo "$$cell: $$end ($$(($$(date +%s) - start)) s, $$log)"; \
		[ $$end = ok ] || tail -n 15 $$log; \
	done; \
	echo "$$ended of $(words $(CELLS)) cells were run"; \
	$(call end,matrix)

# Ruff's S608 finds what bandit's B608 does. On stderr bandit warns of a nosec that a part of its statement did not need.
lint:
	$(call set-up,lint,lint)
	@$(steps); \
	step $(PY) -m ruff check; \
	step $(PY) -m ruff format --check; \
	step $(PY) -m mypy; \
	step .venv/bin/lint-imports; \
	step sh -c '$(PY) -m bandit --quiet --skip B608 --recursive idempotency 2>/dev/null'; \
	step env DATABASE_URL=sqlite://:memory: $(PY) manage.py makemigrations --check --dry-run; \
	$(call end,lint)

clean:
	@$(steps); \
	step rm -rf .venv .venv-docs .venv-bench .venv-package .venv-mutation .venv-examples .venv-configurations .tox .run .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis; \
	$(call end,clean)

.venv-package/package.stamp: requirements/package.txt .venv/test.stamp
	@[ -x $(@D)/bin/python ] || $(PY) -m venv $(@D)
	@echo "set-up: installing requirements/package.txt into $(@D)"
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

.venv-bench/bench.stamp: requirements/bench.txt .venv/demo.stamp
	@[ -x $(@D)/bin/python ] || $(PY) -m venv $(@D)
	@echo "set-up: installing requirements/bench.txt into $(@D)"
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

.venv/%.stamp: requirements/%.txt
	@set -e; \
	if ! $(PY) -c 'import pip' 2>/dev/null; then \
		for python in python3.11 python3 python; do \
			$$python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && break; python=; \
		done; \
		[ -n "$$python" ] || { echo "Python 3.11 was not found. Install it (Debian: apt install python3.11 python3.11-venv)." >&2; exit 1; }; \
		$$python -m venv --clear .venv || { echo "The venv module of Python is missing. Install it (Debian: apt install python3.11-venv)." >&2; exit 1; }; \
	fi; \
	echo "set-up: installing requirements/$*.txt into .venv"; \
	$(PY) -m pip install --quiet --disable-pip-version-check --requirement $< \
		|| { echo "The packages of $< could not be installed: a package index must be reachable (see above)." >&2; exit 1; }; \
	touch $@
