# `make` alone lists what there is.
VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || echo python3)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Packages that make demo needs; the developers' tools come with the other targets.
DEMO_STAMP := $(VENV)/.installed-demo
export OMP_NUM_THREADS ?= 1
export FLWR_TELEMETRY_ENABLED = 0
export FLWR_DISABLE_UPDATE_CHECK = 1
# Federations of real processes run one at a time, all else on every core.
QUICK := not slow and not docker and not gpu
SLOW := slow and not docker and not gpu
SPREAD := -n logical --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help install demo demo-hostile test test-slow test-all lint fmt types bench clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## Make .venv with everything that developers need.

demo: $(DEMO_STAMP) ## A federation of five sites on this machine (SEED=n for another split, DP=1 for noisy sums).
	$(BIN)/python examples/digits/$(if $(DP),private_demo,demo).py --seed $(or $(SEED),0)

demo-hostile: $(DEMO_STAMP) ## For sceptics: a server that lies to five live nodes, and what they answer.
	$(BIN)/python examples/hostile/demo.py --seed $(or $(SEED),0)

test: $(STAMP) ## Quick tests.
	$(BIN)/pytest -m "$(QUICK) and not e2e" $(SPREAD)
	$(BIN)/pytest -m "$(QUICK) and e2e"

test-slow: $(STAMP) ## The tests that take minutes.
	$(BIN)/pytest -m "$(SLOW) and not e2e" -n logical
	$(BIN)/pytest -m "$(SLOW) and e2e"

test-all: test test-slow ## All tests that this machine can run (GPU and Docker ones skip where there is none).
	$(BIN)/pytest -m "docker or gpu" || [ $$? = 5 ]

lint: $(STAMP) ## Style and common mistakes.
	$(BIN)/ruff check .

fmt: $(STAMP) ## Sort imports and repair what can be repaired.
	$(BIN)/ruff check --fix .

types: $(STAMP) ## mypy --strict over the three packages.
	$(BIN)/mypy

bench: $(STAMP) ## One benchmark: make bench NAME=convergence; results go to bench/results.
	@test -n "$(NAME)" || { echo "Give NAME, one of:"; ls bench/*.py | sed 's|bench/||; s|\.py$$||' | grep -v __init__; exit 2; }
	$(BIN)/python -m bench.$(NAME)

clean: ## Remove what the demo and the tools left behind (not .venv).
	rm -rf .demo .demo-hostile .demo-private .pytest_cache .mypy_cache .ruff_cache .hypothesis build

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	@touch $(STAMP) $(DEMO_STAMP)

$(DEMO_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[server,client,examples]"
	@touch $(DEMO_STAMP)
