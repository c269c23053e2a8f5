#!/usr/bin/env bash
# A whole cluster on this machine: two prefill nodes and two decode nodes behind one endpoint.
#   examples/one_command.sh MODEL_FOLDER [more flags of `kvbaton up`]
set -euo pipefail
model=${1:?usage: $0 MODEL_FOLDER [flags]}
exec kvbaton up --model "$model" --prefill 2 --decode 2 --port 8000 "${@:2}"
