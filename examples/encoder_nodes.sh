#!/usr/bin/env bash
# Images are encoded on two nodes of their own, for a prefill node and a decode node.
#   examples/encoder_nodes.sh MODEL_FOLDER [more flags of `kvbaton up`]
set -euo pipefail
model=${1:?usage: $0 MODEL_FOLDER [flags]}
exec kvbaton up --model "$model" --encode 2 --prefill 1 --decode 1 --min-encode-rows 0 --port 8000 "${@:2}"
