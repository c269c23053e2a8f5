#!/usr/bin/env bash
# Two prefill nodes and two decode nodes on the machines of a Ray cluster, and the router here. Each
# machine has kvbaton[ray] and the model, at the same path. The cluster:
#   ray start --head --port 6379               # on one machine
#   ray start --address ADDRESS_OF_THAT:6379   # on each of the others
# Then, on any of them (RAY_ADDRESS names the cluster, if there are several):
#   examples/ray.sh MODEL_FOLDER [more flags of `kvbaton up`]
# Clients can reach the endpoint from everywhere: KVBATON_API_KEY closes it to all who have no key.
set -euo pipefail
model=${1:?usage: $0 MODEL_FOLDER [flags]}
exec kvbaton up --ray --host 0.0.0.0 --model "$model" --prefill 2 --decode 2 --port 8000 "${@:2}"
