# `make help` lists the commands. Each builds the environment it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SHELL := /bin/sh
# Two processes of pytest; tests that share a job run in the same one.
TWO := -n 2 --dist loadgroup
.DELETE_ON_ERROR:

.PHONY: help run test test-middle test-shard test-full test-load chaos lint format bench clean

help:
	@echo "make run        train on handwritten digits with two workers, and check what FleetX promises"
	@echo "make test       lint, types and the fast tests (up to 3 minutes)"
	@echo "make test-middle, test-shard   what CI runs after it: whole jobs and breadth; a part of the slow tests"
	@echo "make test-full  everything, GPU tests where there is a GPU; goes on where it was interrupted"
	@echo "make test-load  the fast and the middle tests again and again on a busy machine"
	@echo "make chaos      disturb jobs in every way we know (about two hours, goes on where it was interrupted)"
	@echo "make bench      measure the step and the gradient reduction; writes benchmarks/results/"
	@echo "make release-check  build the last commit into dist/, install it into an empty environment and try it"
	@echo "make format     put the code into its house style"
	@echo "make clean      remove the environment and what the commands wrote"

run: $(VENV)/.ready
	$(BIN)/fleetx train

test: lint
	$(BIN)/pytest $(TWO)

test-middle: $(VENV)/.trainers
	$(BIN)/pytest $(TWO) -m "middle and not full and not gpu"

# One part of thirty, another one for each commit.
test-shard: $(VENV)/.ready
	$(BIN)/pytest tests $(TWO) -m "full and not gpu" --shard "$$(git rev-parse HEAD)"

test-full: lint $(VENV)/.trainers
	$(BIN)/python -m tests.runs full

test-load: $(VENV)/.trainers
	$(BIN)/python -m tests.runs load

chaos: $(VENV)/.ready
	$(BIN)/python -m tests.chaos

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

bench: $(VENV)/.ready
	$(BIN)/python -m benchmarks step
	$(BIN)/python -m benchmarks reduce

.PHONY: release-check
release-check: $(VENV)/.ready
	$(BIN)/python scripts/release_check.py

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs log dist build .pytest_cache .ruff_cache .hypothesis .test-runs

# The stamp is written last, so an interrupted install is done again.
$(VENV)/.ready: pyproject.toml requirements/run.txt requirements/dev.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"FleetX needs Python 3.11 or newer, this is {v[0]}.{v[1]}: make PYTHON=python3.11 ...")'
	@echo "Installing into $(VENV) (about a minute) ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --requirement requirements/dev.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# Other libraries, which some tests of the middle tier train in.
$(VENV)/.trainers: $(VENV)/.ready requirements/trainers.txt
	@echo "Installing transformers, accelerate and lightning into $(VENV) (up to a minute) ..."
	$(BIN)/pip install --quiet --requirement requirements/trainers.txt
	@touch $@
