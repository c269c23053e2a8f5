# Each target installs all it needs into .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
JOBS ?= 2
EXTRAS := $(VENV)-extras/bin/python
GPU_PYTHON ?= $(BIN)/python

# Several processes share the cores: one thread each, else they fight.
test test-slow test-kernels test-lmcache: export OMP_NUM_THREADS ?= 1

# Long enough for several chunks, so that blocks cross while the prefill runs. The model's weights are
# random: what it answers is noise, how it answers is real.
PROMPT := Write a short story about a relay race in which the runners hand over a baton. The first \
runner starts slowly, since the track is wet and the crowd is loud. The second runner waits with an \
open hand and looks back. When the baton comes, nobody stops, nobody looks, and nothing is dropped. \
The third runner is the fastest of all, and the fourth has only to finish what the others began.

.PHONY: demo servers test test-all test-slow test-kernels test-lmcache test-gpu lint bench clean

demo: $(VENV)/.runtime  ## 1 prefill + 1 decode + router on this machine, answering a prompt
	$(BIN)/python -m kvbaton.testing.checkpoints demo-model
	$(BIN)/kvbaton up --model demo-model --prefill 1 --decode 1 --port 0 \
	  --max-num-batched-tokens 64 --max-tokens 48 --prompt "$(PROMPT)"

servers:  ## what some tests start, from Debian or Ubuntu (as root); without it they skip
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq redis-server iproute2

test: $(VENV)/.dev  ## the test suite: about 10 minutes on 2 cores
	$(BIN)/pytest -q -n $(JOBS) --dist loadgroup -m "not slow and not gpu and not multigpu"

test-all: test test-slow test-kernels test-lmcache  ## everything that needs no GPU

test-slow: $(VENV)/.dev  ## longer simulations
	$(BIN)/pytest -q -n $(JOBS) --dist loadgroup -m "slow and not gpu and not multigpu"

test-kernels: $(VENV)-extras/.done  ## the Triton kernels under their interpreter
	$(EXTRAS) -m pytest -q -n $(JOBS) -m "not gpu" tests/kernels

test-lmcache: $(VENV)-extras/.done  ## the stores over LMCache, with its real server
	$(EXTRAS) -m pytest -q tests/connectors/test_store_lmcache.py \
	  tests/connectors/test_store_remote.py tests/conformance/test_remote_stores_conform.py \
	  tests/conformance/test_table.py -k lmcache

# One process, one test after the other: they share the GPUs. GPU_PYTHON=python3 takes a Python that
# has all packages already, TESTS=tests/engine a part. On one GPU what needs two skips; on none this
# fails.
test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.dev)  ## what needs GPUs: one, or two
	$(GPU_PYTHON) -c "import torch, triton; print(torch.cuda.device_count(), torch.cuda.get_device_name())"
	$(GPU_PYTHON) -m pytest -q -rs -m "gpu or multigpu" $(TESTS)

lint: $(VENV)/.dev  ## style, types, size and ways of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python benchmarks/size.py
	$(BIN)/python benchmarks/hops.py

bench: $(VENV)/.dev  ## the benchmarks that need no GPU
	$(BIN)/kvbaton bench transfer --out out/bench-transfer.json
	$(BIN)/python benchmarks/bench_throughput.py --out out/bench-throughput.json
	$(BIN)/python benchmarks/bench_handover.py --out out/bench-handover.json

clean:
	rm -rf $(VENV) $(VENV)-extras demo-model out

$(VENV)/.runtime: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt torch
	$(PIP) -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) -c constraints.txt -e ".[dev]"
	touch $@

# Apart, on top of the same packages: LMCache holds numpy below 2.3, and the interpreter of this
# Triton works with no newer one either.
$(VENV)-extras/.done: $(VENV)/.dev
	$(PYTHON) -m venv --clear $(VENV)-extras
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" \
	  > $$($(EXTRAS) -c "import site; print(site.getsitepackages()[0])")/base.pth
	$(EXTRAS) -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[lmcache]" triton==3.6.0
	touch $@
