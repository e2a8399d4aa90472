#!/usr/bin/env bash
# Runs one meshscope command on every worker of a slice: run_on_worker.sh NAME COMMAND ARGUMENTS...
# The workers find each other through the first one; the metadata server knows its address.
set -euo pipefail
name=$1
shift
home=$HOME/meshscope
attributes=http://metadata.google.internal/computeMetadata/v1/instance/attributes
attribute() {
  curl --silent --fail --header 'Metadata-Flavor: Google' "$attributes/$1"
}
endpoints=$(attribute worker-network-endpoints)
n_workers=$(tr ',' '\n' <<<"$endpoints" | grep -c .)
several=()
if ((n_workers > 1)); then
  first=$(cut -d, -f1 <<<"$endpoints" | cut -d: -f3)
  worker=$(attribute agent-worker-number)
  several=(--coordinator "$first:8476" --n-processes "$n_workers" --process-id "$worker")
fi
exec "$home/env/bin/meshscope" "$@" --out "$home/runs/$name" --force ${several[@]+"${several[@]}"}
