# Chores. Every target works on a fresh machine: it makes .venv when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help install run test check format lint types imports unit compiled compiled-tests wheel docs bench clean

help: ## what the targets do
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(BIN)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

install: $(BIN)/.installed ## make .venv with pinned packages

run: install ## demo: simulated engines, the gateway and a live table; no GPU; ARGS="--duration 10" are its options
	$(BIN)/kvgate demo $(ARGS)

test: check ## everything that decides whether a change may land

check: lint types imports unit compiled ## format, lint, types, import direction, docs, tests

format: install ## rewrite the code in the project's format
	$(BIN)/ruff format setup.py gateway tests benchmarks docs dashboards
	$(BIN)/ruff check --fix setup.py gateway tests benchmarks docs dashboards

lint: install
	$(BIN)/ruff format --check setup.py gateway tests benchmarks docs dashboards
	$(BIN)/ruff check setup.py gateway tests benchmarks docs dashboards

types: install
	$(BIN)/mypy

imports: install
	$(BIN)/lint-imports

# Most tests wait for something, so there are more processes than cores. JOBS=0 runs them one after another in one process.
# What failed beside others is tried once more, alone: real processes share the cores, and only what fails then is broken.
JOBS ?= 4
unit: install ## the tests, JOBS processes at a time
	$(BIN)/pytest -n $(JOBS) --dist worksteal --durations 10 \
	  || $(BIN)/pytest -n 0 --last-failed --last-failed-no-failures none

# The modules of setup.py compiled as for a release, but quickly, and what a request may pass tested with them. PYTHONSAFEPATH: the
# processes that tests start take the package from PYTHONPATH too, not from the folder they start in.
COMPILED := build/compiled
LEFT_BY_BUILDS := build/lib* build/temp* build/bdist*
COMPILED_TESTS := tests/unit tests/property tests/golden tests/cancellation \
  $(patsubst %,tests/integration/test_%.py,accounting approximate auth broken_streams fuzz fuzz_structured gateway health hedging \
  hedging_engines queue relay relay_failures same_decisions sessions stuck_worker)

AS_COMPILED = PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/$(COMPILED):$(CURDIR) $(BIN)/pytest -o pythonpath=

$(COMPILED)/.built: setup.py pyproject.toml $(shell find gateway -name '*.py') | install
	rm -rf $(COMPILED) $(LEFT_BY_BUILDS)
	KVGATE_COMPILED=quick $(BIN)/pip install --quiet --no-build-isolation --no-deps --target $(COMPILED) .
	@touch $@

compiled: install ## tests of the way of a request with its modules compiled; skipped, and said so, without a C compiler
	@cc=$$($(BIN)/python -c 'import sysconfig as s; print(s.get_config_var("CC"), "-I" + s.get_path("include"))'); \
	if echo '#include <Python.h>' | $$cc -E - >/dev/null 2>&1; then $(MAKE) --no-print-directory compiled-tests; \
	else echo 'NOT TESTED as compiled: there is no C compiler, or no header of Python (Debian: gcc, python3-dev)'; fi

compiled-tests: $(COMPILED)/.built
	$(AS_COMPILED) -n $(JOBS) --dist worksteal $(COMPILED_TESTS) || $(AS_COMPILED) -n 0 --last-failed --last-failed-no-failures none

wheel: install ## dist/kvgate-*.whl with those modules compiled: a sixth less CPU per request; takes some minutes and a C compiler
	rm -rf $(LEFT_BY_BUILDS)
	KVGATE_COMPILED=1 $(BIN)/pip wheel --quiet --no-build-isolation --no-deps -w dist .

docs: install ## write docs/reference and the dashboards from the code
	$(BIN)/python docs/generate_reference.py
	$(BIN)/python dashboards/generate.py

RELEASE := build/release

$(RELEASE)/.built: setup.py pyproject.toml $(shell find gateway -name '*.py') | install
	rm -rf $(RELEASE) $(LEFT_BY_BUILDS)
	KVGATE_COMPILED=1 $(BIN)/pip install --quiet --no-build-isolation --no-deps --target $(RELEASE) .
	@touch $@

bench: $(RELEASE)/.built ## CPU and latency beside nginx, in one run, as a release has it; ARGS="--only chats" are its options
	PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/$(RELEASE):$(CURDIR) $(BIN)/python -m benchmarks $(ARGS)

clean: ## remove what the targets made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
