# Every target makes what it needs by itself, through `setup`.
#
#   PYTHON       the interpreter that the environments are made with (3.11)
#   TORCH_INDEX  address of a package index that has PyTorch's CPU build, for machines where pip would take the GPU build
#   SEED         of the demo
#   COLLECTOR    of the demo: embedded (the store's own receivers) or otelcol (the real OpenTelemetry Collector before it)
#   GATEWAY      of the demo: on, or off (the agent calls vLLM itself; the gateway only publishes new weights)
#   BENCH        which benchmarks `make bench` runs
#   ARGS         of the target's command, such as `make test ARGS="-k ledger"`
#   PART         which of how many parts of the slow tests to run, such as 2/4: files are dealt out in turn
#   WORKERS      how many processes share the tests: four, since they wait much, but none beside ARGS, where starting them would take longer than the tests

PYTHON ?= python3.11
TORCH_INDEX ?=
SEED ?= 0
COLLECTOR ?= embedded
GATEWAY ?= on
BENCH ?= ingest lookup gateway span_export build publish dispatch rollouts idle_trainer
ARGS ?=
WORKERS ?= $(if $(ARGS),0,4)

export TORCH_INDEX
# Hundreds of processes of the tests import our modules: they keep the bytecode, even where the environment says otherwise.
export PYTHONDONTWRITEBYTECODE :=

# The real Collector that `make otelcol` built. Another is found by SPANGRAD_OTELCOL or in PATH, and so is clickhouse-go's client (SPANGRAD_CHGO).
OTELCOL_VERSION := v0.161.0
OTELCOL := $(wildcard $(CURDIR)/build/otelcol/otelcol-spangrad)
ifneq ($(OTELCOL),)
export SPANGRAD_OTELCOL ?= $(OTELCOL)
endif

BIN := .venv/bin
PACKAGES := spangrad commands span_processors gateway collector runner transition_builder trainer prompts dashboards page examples recipes tests benchmarks packaging

.PHONY: setup setup-server node otelcol demo test test-slow gpu-check check format bench docs reference pictures clean
.DEFAULT_GOAL := setup

setup:
	@$(PYTHON) packaging/environment.py

setup-server:
	@$(PYTHON) packaging/environment.py server

# Packages of an agent in JavaScript; without them, or without npm, its test is skipped and says so.
node:
	@command -v npm >/dev/null && $(PYTHON) packaging/environment.py node || echo "make node: there is no npm, or its packages could not be installed."

otelcol:
	@command -v go >/dev/null || { echo "make otelcol: there is no Go here. Install Go (go.dev), or set SPANGRAD_OTELCOL to a released otelcol-contrib." >&2; exit 1; }
	GOBIN=$(CURDIR)/build/bin go install go.opentelemetry.io/collector/cmd/builder@$(OTELCOL_VERSION)
	build/bin/builder --config collector/distribution/builder.yaml
	build/otelcol/otelcol-spangrad validate --config otel-config.yaml

demo: setup
	$(BIN)/spangrad demo --seed $(SEED) --collector $(COLLECTOR) --gateway $(GATEWAY) $(ARGS)

test: setup node
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: setup
	$(BIN)/python -m pytest -m slow $(if $(PART),--part $(PART)) $(ARGS)

gpu-check: setup
	$(BIN)/python -m pytest -m gpu tests/gpu --gpu-report $(GPU_REPORT) $(ARGS)

check: setup-server
	$(BIN)/ruff check $(PACKAGES)
	$(BIN)/ruff format --check $(PACKAGES)
	$(BIN)/pyright
	$(BIN)/lint-imports

format: setup-server
	$(BIN)/ruff check --fix $(PACKAGES)
	$(BIN)/ruff format $(PACKAGES)

bench: setup
	@set -e; for name in $(BENCH); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name $(ARGS); done

docs:
	@$(PYTHON) packaging/environment.py docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --site-dir build/site $(ARGS)
	@echo "build/site/index.html"

reference: setup-server
	$(BIN)/python packaging/reference.py

pictures: setup
	$(BIN)/python -m tests.programs.page_pictures

clean:
	rm -rf .venv .venv-vllm .venv-docs .venv-node .venv-peers .setup build runs data
