#!/usr/bin/env bash
# A prefill node and a decode node of two ranks each on this machine: four GPUs, the first two of
# them P's, or CPU cores. Sizes may differ; blocks are resharded as they cross.
#   examples/tensor_parallel.sh MODEL_FOLDER [more flags of `kvbaton up`]
set -euo pipefail
model=${1:?usage: $0 MODEL_FOLDER [flags]}
exec kvbaton up --model "$model" --prefill 1 --decode 1 --tensor-parallel-size 2 --port 8000 "${@:2}"
