# Two commands do everything: `make quickstart` and `make test`. Both set themselves up and may be repeated.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help quickstart test test-slow lint types bench clean

help: ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "palestra needs Python 3.11 or newer; $(PYTHON) is older. Next: make quickstart PYTHON=python3.11"; exit 1; }
	@echo "== creating the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { echo "Next: install your system's venv package (Debian: apt install python3-venv)"; exit 1; }
	@touch $@

$(VENV)/.quickstart: pyproject.toml constraints.txt | $(VENV)/.python
	@echo "== installing palestra with torch and the sandbox (once; a few minutes the first time)"
	@$(PIP) -e '.[quickstart]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.python
	@echo "== installing palestra with its test and lint tools (once; a few minutes the first time)"
	@$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.quickstart

quickstart: $(VENV)/.quickstart ## set up, then train a real model with RL and show that it learned (about 10 minutes on 2 cores)
	@echo "== palestra quickstart: GRPO on a 135M-parameter model, on this machine's CPU; Ctrl-C once stops cleanly"
	@$(BIN)/palestra quickstart $(ARGS)

test: $(VENV)/.dev ## set up, then run the test suite (about 15 minutes on 2 cores)
	@echo "== running the tests that every change must pass; make test-slow runs the rest"
	@$(BIN)/python -m pytest -m 'not slow' $(ARGS)

test-slow: $(VENV)/.dev ## soak, chaos and real-model tests (many minutes)
	@echo "== running the slow tests: the real model, repeated kills"
	@$(BIN)/python -m pytest -m slow --timeout 1800 $(ARGS)

lint: $(VENV)/.dev ## ruff: style and formatting
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.dev ## pyright
	@$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/.dev ## every benchmark, each prints its table
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

clean: ## remove the virtual environment (runs and caches stay)
	rm -rf $(VENV)
