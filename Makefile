# Two commands matter: `make up` starts everything on this machine, `make test` proves it. Both make .venv first.
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3.11)
BIN := .venv/bin
# Cheapest first; the engine starts once, for the last ones.
ALL_TESTS := tests/unit tests/contracts tests/integration tests/chaos tests/kernels tests/e2e
TESTS ?= $(ALL_TESTS)

.DEFAULT_GOAL := help
.PHONY: help venv up test test-kernels venv-kernels check format pins clean bench-router bench-switch bench-start bench-tenancy bench-metering bench-kernels bench-serving sanitize-kernels

help:
	@echo "make up [ARGS=...]    start Tenantry here (ARGS=--help lists the options)"
	@echo "make test [ARGS=...]  all tests (TESTS=tests/unit for some)"
	@echo "make test-kernels     the Triton kernels in Triton's interpreter, in .venv-kernels (GPU: see kernels/README.md)"
	@echo "make check            lint, types, import rules"
	@echo "make format           format the code"
	@echo "make bench-router     the router beside LiteLLM and vllm-router (its own venv; minutes)"
	@echo "make bench-switch     what changing the adapter costs on the real engine"
	@echo "make bench-tenancy    what a noisy tenant can do to a quiet one, and what fairness costs"
	@echo "make bench-metering   whether the engine's time adds up, who pays for it, and what measuring it costs"
	@echo "make bench-start      seconds to start, memory of each process"
	@echo "make bench-serving    on a GPU, with vLLM 0.26 in SERVING_PYTHON: serving 8 adapters beside the base alone (ARGS=\"--model gptoss-20b\")"
	@echo "make bench-kernels    on a GPU, with vLLM in KERNELS_PYTHON: kernels beside vLLM's, after their tests"
	@echo "make sanitize-kernels the same tests under NVIDIA's compute-sanitizer"
	@echo "make venv             only install into .venv"
	@echo "make pins             write constraints/ from what .venv holds"
	@echo "make clean            remove .venv, .venv-kernels and .tenantry (the data of make up)"

venv:
	@$(PYTHON) deploy/make_venv.py

up: venv
	@exec $(BIN)/tenantry up $(ARGS)

test: venv
	@$(BIN)/python -m pytest $(TESTS) $(ARGS)
	@$(if $(filter-out $(TESTS),$(ALL_TESTS)),,$(MAKE) --no-print-directory test-kernels KERNEL_FILES="$(QUICK_KERNEL_FILES)" ARGS=-q)

# The kernels' own Python: a CPU vLLM must not find triton. On a GPU box name one that has torch, triton, pytest (and vLLM for the benchmark).
KERNELS_PYTHON ?= .venv-kernels/bin/python

KERNELS_PATH := kernels$(if $(PYTHONPATH),:$(PYTHONPATH))
KERNEL_TESTS := -m pytest -c tests/kernels_gpu/pytest.ini --rootdir tests/kernels_gpu --confcutdir tests/kernels_gpu -p no:cacheprovider -p no:benchmark

KERNEL_FILES ?= tests/kernels_gpu
# A minute in the interpreter; the rest takes several.
QUICK_KERNEL_FILES := $(addprefix tests/kernels_gpu/test_,arguments.py bench.py configs.py plans.py tune.py moe_decode.py dense_decode.py)

venv-kernels:
	@[ $(KERNELS_PYTHON) != .venv-kernels/bin/python ] || $(PYTHON) deploy/make_kernels_venv.py

test-kernels: venv-kernels
	@OMP_NUM_THREADS=1 PYTHONPATH="$(KERNELS_PATH)" $(KERNELS_PYTHON) $(KERNEL_TESTS) -n auto $(KERNEL_FILES) $(ARGS)

bench-kernels: venv-kernels
	@PYTHONPATH="$(KERNELS_PATH)" $(KERNELS_PYTHON) -m lora_kernels.bench $(ARGS)

sanitize-kernels: venv-kernels
	@PYTHONPATH="$(KERNELS_PATH)" $(KERNELS_PYTHON) -m lora_kernels.bench.sanitize $(ARGS)

check: venv
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/basedpyright
	@$(BIN)/lint-imports

format: venv
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

pins: venv
	@$(BIN)/python deploy/pins.py

bench-router: venv
	@$(BIN)/python -m benchmarks.router $(ARGS)

bench-switch: venv
	@$(BIN)/python -m benchmarks.switch_cost $(ARGS)

bench-tenancy: venv
	@$(BIN)/python -m benchmarks.tenancy $(ARGS)
	@$(BIN)/python -m benchmarks.tenancy_control $(CONTROL_ARGS)

# On a GPU's machine: a Python with vLLM 0.26.0, this distribution and kernels/ installed (docs/gpu-worker.md).
SERVING_PYTHON ?= python3
bench-serving:
	@$(SERVING_PYTHON) -m benchmarks.serving $(ARGS)

bench-metering: venv
	@$(BIN)/python -m benchmarks.metering $(ARGS)

bench-start: venv
	@$(BIN)/python -m benchmarks.start_up $(ARGS)

clean:
	rm -rf .venv .venv-kernels .tenantry
