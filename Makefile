# Everything a developer needs. `make` alone lists it.
#   PYTHON=/path/to/python3.11   which Python to make .venv from (default: found)
#   ARGS="..."                   passed on to pytest, `headwater demo` or `headwater bench`
#   JOBS=2                       how many tests run at a time
#   ENGINES=2                    how many with real vLLM: 8 GB and a core for each
#   ROUNDS=20000                 how long `make soak` takes

PYTHON ?=
ARGS ?=
BENCH ?= node
JOBS ?= 2
ENGINES ?= 2
ROUNDS ?= 20000
# Where ARGS choose tests, all may be in one of the three runs; pytest ends with 5 when it finds none.
NONE := $(if $(ARGS), || [ $$? -eq 5 ])
BIN := .venv/bin

# Shells and images that set it have every one of the hundreds of processes that the tests start compile all of its
# source anew. `make clean` removes what is kept for the next.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup test soak check types rules demo demo-cluster bench sizes format clean distclean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

setup:  ## .venv with vLLM's CPU build and headwater, and the real model in .cache; quick when nothing changed
	@command -v python3 >/dev/null || { echo "set-up: python3 is missing; install Python 3.11 or newer" >&2; exit 1; }
	@python3 scripts/setup_env.py --python "$(PYTHON)"

test: setup  ## all tests, JOBS at a time; those that need the machine for themselves one by one; real engines, ENGINES at a time
	$(BIN)/python -m tests.steady -n $(JOBS) --dist worksteal -m "not (alone or engine)" $(ARGS)$(NONE)
	$(BIN)/python -m tests.steady -m "alone" $(ARGS)$(NONE)
	$(BIN)/python -m tests.steady -n $(ENGINES) --dist loadfile -m "engine and not alone" $(ARGS)$(NONE)

soak: setup  ## hours: the disk's crash loop and the simulators, many times longer (ROUNDS=20000)
	HEADWATER_TEST_SOAK_ROUNDS=$(ROUNDS) $(BIN)/python -m pytest -q --timeout=0 tests/tiers/test_disk_faults.py -k crash
	$(BIN)/python -m headwater.sim --seeds 0:$(ROUNDS)
	$(BIN)/python -m headwater.sim cluster --seeds 0:$(ROUNDS)

check: setup  ## lint, format, types, house rules
	@$(MAKE) --no-print-directory -j $(JOBS) types rules

types:
	$(BIN)/mypy

rules:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -q tests/tidy

demo: setup  ## two real vLLM instances share one KV cache
	@$(BIN)/headwater demo $(ARGS)

demo-cluster: setup  ## three nodes, a directory and two vLLM instances; then nodes, directory and links break
	@$(BIN)/headwater demo-cluster $(ARGS)

bench: setup  ## measure this machine (BENCH=node)
	@$(BIN)/headwater bench $(BENCH) $(ARGS)

sizes: setup  ## lines of code by folder, and the longest files
	@$(BIN)/python -m tests.tidy.sizes

format: setup  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what building and testing left; keeps .venv and the model
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests scripts examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean  ## the same, and .venv and .cache too
	rm -rf .venv .cache src/headwater/_kernels/*.so
