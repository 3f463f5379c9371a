# Each target sets up what it needs in .venv, and ends with one line: "NAME: ok" or "NAME: FAILED n".

.PHONY: demo serve test lint clean
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
PY := .venv/bin/python

# $(call report,NAME,COMMANDS)
report = @status=0; ( set -e; $(2) ) || status=$$?; \
	if [ $$status -eq 0 ]; then echo "$(1): ok"; else echo "$(1): FAILED $$status"; exit $$status; fi
# $(call set-up,NAME,STAMP)
set-up = @$(MAKE) -s .venv/$(2).stamp || { echo "$(1): FAILED 2"; exit 2; }

demo:
	$(call set-up,demo,demo)
	@exec $(PY) manage.py demo

serve:
	$(call set-up,serve,demo)
	@exec $(PY) manage.py serve

# Everything on PostgreSQL, then what needs no PostgreSQL on SQLite.
test:
	$(call set-up,test,test)
	$(call report,test,$(PY) -m pytest $(PYTEST_ARGS); \
		DATABASE_URL=sqlite:///$(CURDIR)/.run/core.sqlite3 $(PY) -m pytest -m "not postgres and not murphy" $(PYTEST_ARGS))

lint:
	$(call set-up,lint,lint)
	$(call report,lint,$(PY) -m ruff check; $(PY) -m ruff format --check; $(PY) -m mypy; .venv/bin/lint-imports; \
		DATABASE_URL=sqlite://:memory: $(PY) manage.py makemigrations --check --dry-run)

clean:
	$(call report,clean,rm -rf .venv .run .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis)

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
