# warmfront: two commands matter, `make up` and `make test`. `make help` lists the rest.
VENV ?= .venv
PYTHON ?= python3
ARGS ?=
RUN = $(VENV)/bin/python -m
BENCH = $(VENV)/bin/python -P bench
.DEFAULT_GOAL := help

.PHONY: help up test test-slow soak check lint proto lock bench bench-cache bench-engine bench-lora bench-workloads bench-router bench-placement bench-rollout clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-14s %s\n", $$1, $$2 }'

# One stamp per set of packages, newer than what it was made from: running a target again installs nothing.
$(VENV)/.runtime: requirements.lock pyproject.toml tools/install.sh
	@tools/install.sh runtime "$(VENV)" "$(PYTHON)"

$(VENV)/.dev: $(VENV)/.runtime requirements-dev.lock
	@tools/install.sh dev "$(VENV)" "$(PYTHON)"

# The compiled kernel is taken where it is built and never required: without a compiler everything runs on torch alone.
$(VENV)/.kernel: $(VENV)/.runtime worker/cpu_kernel/kernel.cpp worker/cpu_kernel/__init__.py
	@$(RUN) worker.cpu_kernel || echo "going on without the compiled CPU kernel: workers on CPUs are slower"
	@touch $@

.PHONY: cpu-kernel
cpu-kernel: $(VENV)/.runtime ## compile the kernel for bfloat16 models on CPUs (seconds; up, test and bench do it where g++ is)
	@$(RUN) worker.cpu_kernel

up: $(VENV)/.runtime $(VENV)/.kernel ## install once, then run a cluster in the foreground; ARGS="--replicas 3" reaches `warmfront up`
	@exec $(RUN) warmfront up $(ARGS)

test: check ## what CI runs: the checks, then every test that is not slow (at most 15 minutes on 2 cores)
	$(RUN) pytest $(ARGS)

test-slow: $(VENV)/.dev $(VENV)/.kernel test-triton ## real-model fuzz and chaos, the CUDA kernel in Triton's interpreter (at most an hour)
	$(RUN) pytest -m slow $(ARGS)

# Triton's interpreter wants an older numpy than the rest: an environment of its own, made when this first runs.
.venv-triton/.triton: tools/install.sh
	@tools/install.sh triton .venv-triton "$(PYTHON)"

.PHONY: test-triton
test-triton: .venv-triton/.triton ## the CUDA attention kernels, without a GPU: compiled, and run by Triton's interpreter
	.venv-triton/bin/python -m pytest --noconftest tests/worker/test_triton_compile.py
	TRITON_INTERPRET=1 .venv-triton/bin/python -m pytest --noconftest tests/worker/test_attention.py -k triton
	TRITON_INTERPRET=1 PYTHONPATH=.:proto .venv-triton/bin/python -P bench/gpu_check.py --device cpu --limit-s 1200

soak: $(VENV)/.dev ## leaks and drift (hours; SOAK_SCALE=0.15 shortens it)
	$(RUN) pytest -m soak --timeout 0 $(ARGS)

check: $(VENV)/.dev $(VENV)/.kernel lint proto-check ## formatting, lint, types, import rules, and that the generated code is the .proto's

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	PYTHONPATH=.:proto $(VENV)/bin/lint-imports

.PHONY: proto-check
proto-check:
	@made=$$(mktemp -d) && trap 'rm -rf "$$made"' EXIT && proto/generate.sh "$$made" && \
	for file in "$$made"/warmfront_pb/v1/*; do \
	  cmp -s "$$file" "proto/warmfront_pb/v1/$${file##*/}" || { echo "$${file##*/} is not what its .proto gives: run make proto"; exit 1; }; \
	done && echo "proto: the generated code is current"

proto: ## regenerate proto/warmfront_pb from its .proto files
	proto/generate.sh

.PHONY: helm
helm: $(VENV)/.dev ## bring the chart's README and schema up to date with its values and the program's flags
	$(VENV)/bin/python tools/helm-sync

# torch stands in the lock without its CUDA packages: it is installed first and brings along what its own build needs.
LOCK = pip-compile --quiet --strip-extras --annotation-style=line --no-header --no-emit-index-url --no-emit-find-links \
  --no-emit-trusted-host --constraint tools/constraints.txt
lock: ## rewrite the lock files from pyproject.toml (needs pip-tools on the PATH)
	$(LOCK) --extra all -o - pyproject.toml | tools/lock-filter > requirements.lock
	$(LOCK) --extra all --extra test --extra dev --constraint requirements.lock -o - pyproject.toml | tools/lock-filter requirements.lock > requirements-dev.lock

bench: bench-cache bench-engine bench-lora bench-router bench-placement ## every benchmark, as JSON lines

bench-cache: $(VENV)/.dev ## hashing, block pool, index
	$(BENCH)/cache.py $(ARGS)

bench-engine: $(VENV)/.dev $(VENV)/.kernel ## TTFT cold and warm, decode, beside transformers; shared prefix, nothing shared, host memory
	$(BENCH)/engine.py $(ARGS)
	$(BENCH)/shared_prefix.py
	$(BENCH)/nothing_shared.py
	$(BENCH)/host_tier.py

bench-workloads: $(VENV)/.dev $(VENV)/.kernel ## what caching saves on eight shapes of load, real model (10 minutes; ARGS="--svg FILE")
	$(BENCH)/workloads.py $(ARGS)

bench-lora: $(VENV)/.dev $(VENV)/.kernel ## what adapters add to a step
	$(BENCH)/lora.py $(ARGS)

bench-router: $(VENV)/.dev ## what a router costs a request, beside proxies that decide nothing; events; Redis away
	$(BENCH)/decision.py $(ARGS)
	$(BENCH)/router.py $(ARGS)

bench-placement: $(VENV)/.dev ## placement rules over many loads, in virtual time (ARGS="--mooncake TRACE" adds that one)
	$(BENCH)/placement_matrix.py $(ARGS)

bench-rollout: $(VENV)/.dev ## a rolling replacement under load, with pre-warm and without (5 minutes; ARGS="--svg FILE" draws it)
	$(BENCH)/rollout.py $(ARGS)

clean: ## remove the virtual environments and caches
	rm -rf $(VENV) .venv-proto .venv-helm .venv-triton .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
