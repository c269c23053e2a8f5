#!/usr/bin/env bash
# A cluster by hand: a router, and a prefill and a decode node that register with it; then a request.
# Each of the three commands may run on its own machine: then give all of them the same
# KVBATON_CLUSTER_KEY, and a --host that the others can reach.
#   examples/node_by_node.sh MODEL_FOLDER [more flags of the nodes]
set -euo pipefail
model=${1:?usage: $0 MODEL_FOLDER [flags]}
router=http://127.0.0.1:8000
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT

kvbaton router --model "$model" --port 8000 --log-level warning &
kvbaton prefill --model "$model" --port 8100 --router "$router" "${@:2}" &
kvbaton decode --model "$model" --port 8200 --router "$router" "${@:2}" &

# The cluster is ready when the router can pair the two nodes.
until curl -fs "$router/nodes" | grep -q '"pairs":\[\['; do
  ((SECONDS < 600)) || { echo "not ready after 600 s" >&2; exit 1; }
  [[ $(jobs -rp | wc -l) == 3 ]] || { echo "a process ended" >&2; exit 1; }
  sleep 0.5
done

curl -fsS "$router/v1/completions" -H 'Content-Type: application/json' -d @- <<JSON
{"model": "$model", "prompt": "The quick brown fox", "max_tokens": 32, "temperature": 0}
JSON
echo
