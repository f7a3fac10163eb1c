# Everything starts here: `make setup` on a fresh Debian, then `make run`, `make test`.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
PYTEST_ARGS ?=

# Much of a test is waiting for a sandbox: two workers keep two cores busy.
PYTEST_WORKERS ?= 2

# Tests start hundreds of processes: what is compiled once is kept, also where that is turned off.
test: export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup venv frameworks run test lint format lock clean bench

help: ## Show this help
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

venv:
	@bash scripts/venv.sh

setup: venv ## Install what is missing, build the tools and the template, check the host
	@$(BIN)/sojourn setup --if-needed

run: setup ## Run the demonstration from start to end
	@$(BIN)/sojourn demo

frameworks: venv ## Install the agent frameworks, and E2B's JavaScript SDKs, that tests drive
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --require-hashes \
	  -r requirements-frameworks.lock
	@bash scripts/javascript.sh

test: setup ## Run all tests (PYTEST_ARGS="-k name" to pick)
	@$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal $(PYTEST_ARGS)

lint: venv ## Check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv ## Bring the sources into the house form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: venv ## Write requirements.lock anew from pyproject.toml
	$(BIN)/python -m pip install --quiet 'uv>=0.5'
	$(BIN)/uv pip compile --quiet --universal --extra dev --generate-hashes --no-emit-index-url \
	  --no-emit-find-links --custom-compile-command 'make lock' pyproject.toml -o requirements.lock
	$(BIN)/uv pip compile --quiet --universal --extra dev --extra frameworks --generate-hashes \
	  --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' \
	  --constraint requirements.lock pyproject.toml -o requirements-frameworks.lock
	$(BIN)/uv pip compile --quiet --universal --extra observability --generate-hashes \
	  --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' \
	  --constraint requirements.lock pyproject.toml -o deploy/requirements.lock

bench: setup ## Measure, next to the bare runtime (BENCH_ARGS to pick)
	@$(BIN)/python -m bench $(BENCH_ARGS)

clean: ## Remove what was built in this tree (SOJOURN_HOME and data are kept)
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf supervisor/build tests/js/node_modules
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
