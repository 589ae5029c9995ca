# Two commands matter: `make up` starts everything on this machine, `make test` proves it. Both make .venv first.
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3.11)
BIN := .venv/bin
# Cheapest first; the engine starts once, for the last ones.
TESTS ?= tests/unit tests/contracts tests/integration tests/chaos tests/kernels tests/e2e

.DEFAULT_GOAL := help
.PHONY: help venv up test check format pins clean bench-router bench-switch bench-start

help:
	@echo "make up [ARGS=...]    start Tenantry here (ARGS=--help lists the options)"
	@echo "make test [ARGS=...]  all tests (TESTS=tests/unit for some)"
	@echo "make check            lint, types, import rules"
	@echo "make format           format the code"
	@echo "make bench-router     the router beside LiteLLM and vllm-router (its own venv; minutes)"
	@echo "make bench-switch     what changing the adapter costs on the real engine"
	@echo "make bench-start      seconds to start, memory of each process"
	@echo "make venv             only install into .venv"
	@echo "make pins             write constraints/ from what .venv holds"
	@echo "make clean            remove .venv and .tenantry (the data of make up)"

venv:
	@$(PYTHON) deploy/make_venv.py

up: venv
	@exec $(BIN)/tenantry up $(ARGS)

test: venv
	@$(BIN)/python -m pytest $(TESTS) $(ARGS)

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

bench-start: venv
	@$(BIN)/python -m benchmarks.start_up $(ARGS)

clean:
	rm -rf .venv .tenantry
