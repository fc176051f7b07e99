# Every target makes what it needs by itself, through `setup`.
#
#   PYTHON       the interpreter that the environments are made with (3.11)
#   TORCH_INDEX  address of a package index that has PyTorch's CPU build, for machines where pip would take the GPU build
#   SEED         of the demo

PYTHON ?= python3.11
TORCH_INDEX ?=
SEED ?= 0
ARGS ?=

export TORCH_INDEX

# Ready binaries of the real collector and of clickhouse-go, where a machine has them beside the checkout.
READY := $(abspath ../shared/bin)
ifneq ($(wildcard $(READY)/otelcol-spangrad),)
export SPANGRAD_OTELCOL ?= $(READY)/otelcol-spangrad
endif
ifneq ($(wildcard $(READY)/chgo),)
export SPANGRAD_CHGO ?= $(READY)/chgo
endif

BIN := .venv/bin
PACKAGES := spangrad commands span_processors gateway collector runner transition_builder trainer examples tests benchmarks packaging

.PHONY: setup setup-server demo test test-slow check format bench docs clean
.DEFAULT_GOAL := setup

setup:
	@$(PYTHON) packaging/environment.py

setup-server:
	@$(PYTHON) packaging/environment.py server

demo: setup
	$(BIN)/spangrad demo --seed $(SEED) $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

test-slow: setup
	$(BIN)/python -m pytest -m slow $(ARGS)

check: setup-server
	$(BIN)/ruff check $(PACKAGES)
	$(BIN)/ruff format --check $(PACKAGES)
	$(BIN)/pyright
	$(BIN)/lint-imports

format: setup-server
	$(BIN)/ruff check --fix $(PACKAGES)
	$(BIN)/ruff format $(PACKAGES)

bench: setup
	@set -e; for benchmark in benchmarks/*.py; do echo "== $$benchmark"; $(BIN)/python $$benchmark $(ARGS); done

docs: setup-server
	$(BIN)/python -m pytest tests/unit/test_docs.py $(ARGS)

clean:
	rm -rf .venv .venv-vllm .setup runs data
