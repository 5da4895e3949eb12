# make demo: environment, then the main job on this machine. make test: environment, then the tests, but
# for the dearest whose claim has a cheaper witness; make test-all: every test.
# make docs: environment, then the documentation as a site in site/.

# The first interpreter that is new enough; PYTHON=... overrides.
PYTHON ?= $(shell for python in python3 python3.12 python3.13 python3.11 python3.14; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$python && break; done)

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OUT := out

# Ranks and tests run side by side: one thread each is what is measured.
export OMP_NUM_THREADS ?= 1

# Tests start many processes, which import the same: what one has compiled serves the others, whatever the shell says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all docs lint venv clean

demo: venv
	$(BIN)/workbench demo --out $(OUT) $(DEMO_FLAGS)

TESTS := $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations=15

test: export HYPOTHESIS_PROFILE ?= quick
test: venv
	$(TESTS) -m "not thorough"

test-all: venv
	$(TESTS)

docs: venv
	test -x $(BIN)/zensical || $(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	$(BIN)/python -m docs.generate --check
	$(BIN)/zensical build --config-file mkdocs.yml --strict --clean

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then \
		echo "make: no Python >= 3.11 found; install one or name it: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; fi
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: $(PYTHON) is older than the required 3.11: `$(PYTHON) --version 2>&1`" >&2; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV); torch alone takes minutes"
	$(BIN)/python -m pip install -q torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[run,report,data,dev]'
	@touch $@

# Everything that can be made again except the environment itself; delete .venv to rebuild that too.
clean:
	rm -rf $(OUT) site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
