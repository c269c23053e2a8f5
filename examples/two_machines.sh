#!/usr/bin/env bash
# Two machines: a router and a prefill node on the first, a decode node on the second. Both need the
# model's folder at the same path, and the same KVBATON_CLUSTER_KEY.
#   on the first:   examples/two_machines.sh first MODEL_FOLDER ITS_ADDRESS [more flags of the node]
#   on the second:  examples/two_machines.sh second MODEL_FOLDER ITS_ADDRESS ADDRESS_OF_THE_FIRST [flags]
# Clients use http://ADDRESS_OF_THE_FIRST:8000/v1. POLICY=least-loaded hands every prompt over, even
# where that does not pay.
set -euo pipefail
which=${1:?usage: $0 first|second MODEL_FOLDER ADDRESS ...}
model=${2:?usage: $0 $which MODEL_FOLDER ADDRESS ...}
here=${3:?usage: $0 $which MODEL_FOLDER ADDRESS ...}
: "${KVBATON_CLUSTER_KEY:?set it to the same secret on both machines}"

if [[ $which == second ]]; then
  first=${4:?usage: $0 second MODEL_FOLDER ADDRESS ADDRESS_OF_THE_FIRST}
  exec kvbaton decode --model "$model" --host "$here" --port 8200 --router "http://$first:8000" "${@:5}"
fi

trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
trap exit INT TERM
kvbaton router --model "$model" --host "$here" --port 8000 --policy "${POLICY:-cost}" &
kvbaton prefill --model "$model" --host "$here" --port 8100 --router "http://$here:8000" "${@:4}" &
wait -n  # if one ends, so does the other
