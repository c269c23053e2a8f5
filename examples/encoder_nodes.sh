#!/usr/bin/env bash
# Two encoder nodes for images, beside one prefill node and one decode node.
#   examples/encoder_nodes.sh MODEL_FOLDER [more flags of `kvbaton up`]
set -euo pipefail
model=${1:?usage: $0 MODEL_FOLDER [flags]}
exec kvbaton up --model "$model" --encode 2 --prefill 1 --decode 1 --min-encode-rows 0 --port 8000 "${@:2}"
