#!/usr/bin/env bash
# A prefill node and a decode node of two ranks each on this machine: on four GPUs (the first two for
# prefill) or on CPU cores. Sizes may differ; KV blocks are resharded during the hand-over.
#   examples/tensor_parallel.sh MODEL_FOLDER [more flags of `kvbaton up`]
set -euo pipefail
model=${1:?usage: $0 MODEL_FOLDER [flags]}
exec kvbaton up --model "$model" --prefill 1 --decode 1 --tensor-parallel-size 2 --port 8000 "${@:2}"
