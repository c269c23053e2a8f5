#!/usr/bin/env bash
# Two prefill nodes and two decode nodes on the machines of a Ray cluster; the router runs here. Each
# machine needs kvbaton[ray], and the model at the same path. To start the cluster:
#   ray start --head --port 6379               # on one machine
#   ray start --address ADDRESS_OF_THAT:6379   # on each of the others
# Then, on any of them (set RAY_ADDRESS if there are several clusters):
#   examples/ray.sh MODEL_FOLDER [more flags of `kvbaton up`]
# The endpoint is open to all networks: set KVBATON_API_KEY to require a key.
set -euo pipefail
model=${1:?usage: $0 MODEL_FOLDER [flags]}
exec kvbaton up --ray --host 0.0.0.0 --model "$model" --prefill 2 --decode 2 --port 8000 "${@:2}"
