# `make` lists the verbs. Everything is installed into .venv with uv; nothing outside it is touched.
SHELL := /bin/bash
PYTHON ?= python3
UV_VERSION := 0.13.9
VENV := .venv
BIN := $(VENV)/bin
PIN := constraints/dev.txt

# uv does not read pip's settings: hand it the folders where pip would look for wheels, so that a wheel on
# disk serves. Without such a folder torch comes as its CPU build, which is a tenth of the default's size.
WHEELS = $(shell for d in $$PIP_FIND_LINKS $$($(BIN)/pip config get global.find-links 2>/dev/null); do echo $$d; done | sort -u)
TORCH = $(if $(WHEELS),$(addprefix --find-links ,$(WHEELS)),--torch-backend cpu)
INSTALL = $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint $(PIN) $(TORCH)

.DEFAULT_GOAL := help
.PHONY: help demo test check tables bench live features constraints clean

help: ## List the verbs
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit("gpu-flows needs Python 3.11 or newer; set PYTHON=python3.x") if sys.version_info < (3, 11) else None'
	@echo "making $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

# The demo needs a quarter of the development environment; a .venv that has the latter serves both.
$(VENV)/.demo: pyproject.toml $(PIN) | $(BIN)/uv
	@echo "installing what the demo needs ..."
	@$(INSTALL) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml $(PIN) | $(BIN)/uv
	@echo "installing the development environment ..."
	@$(INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo ## Train a small network with DDP on two rented boxes of this machine, and give them back
	@$(BIN)/gpu-flows demo

# Real servers, signals and deadlines on a busy machine: what failed is shown, and tried once more, alone. A failure
# that comes back is one.
PYTEST = $(BIN)/python -m pytest -q
AGAIN = { echo; echo "--- once more, alone: what failed above ---"; $(PYTEST) --last-failed --last-failed-no-failures none

test: $(VENV)/.dev ## Run the tests
	@$(PYTEST) -n 2 --dist loadgroup -m "not table and not chaos" tests || $(AGAIN) -m "not table and not chaos" tests; }

check: $(VENV)/.dev ## Lint, format, types, and the direction of the arrows
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

tables: $(VENV)/.dev ## Run the tables of slow evidence (every row of every table)
	@$(PYTEST) -m table tests || $(AGAIN) -m table tests; }

bench: $(VENV)/.dev ## Measure what it costs, beside peers
	@$(BIN)/python tools/bench.py

GPUS ?= ANY
live: $(VENV)/.dev ## Rent the cheapest box of CLOUD=..., take one step, give it back: under a dollar of your money
	@test -n "$(CLOUD)" || { echo "say which cloud: make live CLOUD=runpod" >&2; exit 2; }
	@$(BIN)/gpu-flows run tools/live_step.py --clouds $(CLOUD) --gpus $(GPUS) --strategy cheapest --max-cost 1 \
	  --max-duration 10m --ready-timeout-s 900 --max-preemptions 0

features: $(VENV)/.dev ## Write the feature table of the clouds into its page
	@$(BIN)/python tools/feature_table.py

constraints: $(BIN)/uv ## Resolve the newest releases into constraints/dev.txt
	@$(BIN)/uv pip compile pyproject.toml --extra dev --python-version 3.11 --universal --quiet \
	  --no-annotate --no-header --no-emit-index-url --no-emit-find-links $(addprefix --find-links ,$(WHEELS)) \
	  --constraint <(echo torch==2.13.0) | grep -vE '^(nvidia-|triton|torch==)' > $(PIN).new
	@echo 'torch==2.13.0' >> $(PIN).new && mv $(PIN).new $(PIN)

clean: ## Remove the environment and every cache
	@rm -rf $(VENV) .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
