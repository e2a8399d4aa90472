#!/usr/bin/env bash
# Has a worker of a slice run one meshscope command once, detached from the connection that asks for it:
#   run_on_worker.sh KEY SECONDS NAME COMMAND ARGUMENTS...
# Prints "meshscope-job CODE": the command's exit code, 75 while it runs after SECONDS, or 76 if the installation
# KEY is missing. Asking again waits on, and starts the command only if it neither runs nor ended here.
# SECONDS of "stop" ends the command and forgets it.
set -euo pipefail
key=$1
seconds=$2
name=$3
shift 3
home=$HOME/meshscope
answer() {
  echo "meshscope-job $1"
  exit 0
}
attributes=http://metadata.google.internal/computeMetadata/v1/instance/attributes
attribute() {
  curl --silent --fail --header 'Metadata-Flavor: Google' "$attributes/$1"
}
boot=$(cat /proc/sys/kernel/random/boot_id)
[[ -e $home/installed && $(cat "$home/installed") == "$key $boot" ]] || answer 76
job=$home/jobs/$key/$name
mkdir -p "$job"
exec 9>"$job/lock" # held by the command and its processes until the last one ends
if [[ $seconds == stop ]]; then
  if ! flock --nonblock 9; then
    kill -TERM -- "-$(cat "$job/pid")" || true
    flock --timeout 20 9 || kill -KILL -- "-$(cat "$job/pid")" || true
  fi
  rm -rf "$job"
  answer 0
fi
if [[ ! -e $job/code ]] && flock --nonblock 9; then
  # The workers find each other through the first one; the metadata server knows its address.
  endpoints=$(attribute worker-network-endpoints)
  n_workers=$(tr ',' '\n' <<<"$endpoints" | grep -c .)
  several=()
  if ((n_workers > 1)); then
    first=$(cut -d, -f1 <<<"$endpoints" | cut -d: -f3)
    worker=$(attribute agent-worker-number)
    several=(--coordinator "$first:8476" --n-processes "$n_workers" --process-id "$worker")
  fi
  # One command at a time has the chips; another one that runs on is waited for.
  # shellcheck disable=SC2016  expanded by the detached shell
  setsid bash -c '
    job=$1 chips=$2
    shift 2
    echo $$ >"$job/pid"
    exec 8>"$chips"
    flock 8
    code=0
    "$@" || code=$?
    echo "$code" >"$job/code.partial"
    mv "$job/code.partial" "$job/code"
  ' job "$job" "$home/chips" "$home/env/bin/meshscope" "$@" --out "$home/runs/$name" --force \
    ${several[@]+"${several[@]}"} </dev/null >"$job/log" 2>&1 &
fi
exec 9>&-
end=$((SECONDS + seconds))
while [[ ! -e $job/code ]]; do
  ((SECONDS < end)) || answer 75
  sleep 0.2
done
code=$(cat "$job/code")
((code == 0)) || tail --bytes=65536 "$job/log" >&2
answer "$code"
