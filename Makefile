# Each target installs all it needs into .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
JOBS ?= 2

export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all lint bench clean

demo: $(VENV)/.runtime  ## 1 prefill + 1 decode + router on this machine, answering a prompt
	$(BIN)/python -m kvbaton.testing.checkpoints demo-model
	OMP_NUM_THREADS= $(BIN)/kvbaton up --model demo-model --prefill 1 --decode 1 --port 0 \
	  --max-num-batched-tokens 64 --max-tokens 48 \
	  --prompt "The quick brown fox jumps over the lazy dog. The five boxing wizards jump quickly. Pack my box with five dozen liquor jugs. How vexingly quick daft zebras jump."

test: $(VENV)/.dev  ## the test suite: about 10 minutes on 2 cores
	$(BIN)/pytest -q -n $(JOBS) --dist loadgroup -m "not slow and not gpu and not multigpu"

test-all: $(VENV)/.dev  ## also the slow lanes
	$(BIN)/pytest -q -n $(JOBS) --dist loadgroup -m "not gpu and not multigpu"

lint: $(VENV)/.dev  ## style, types, size of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python benchmarks/size.py

bench: $(VENV)/.dev  ## the benchmarks that need no GPU
	$(BIN)/python benchmarks/bench_handover.py

clean:
	rm -rf $(VENV) demo-model out

$(VENV)/.runtime: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt torch
	$(PIP) -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) -c constraints.txt -e ".[dev]"
	touch $@
