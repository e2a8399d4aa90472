#!/usr/bin/env bash
# Installs meshscope on a worker of a slice, and mounts buckets:
#   install_on_worker.sh KEY WHEEL EXTRAS JAX_VERSION BUCKET...
# uv fetches a Python that is new enough; the VM images have an older one.
set -euo pipefail
key=$1
wheel=$HOME/$2
extras=$3
jax=$4
shift 4
home=$HOME/meshscope
mkdir -p "$home/runs"
exec 9>"$home/lock" # an installation whose connection was lost ends first
flock 9
rm -f "$home/installed"
python3 -m pip install --quiet --user uv
python3 -m uv venv --quiet --clear --python 3.11 "$home/env"
python3 -m uv pip install --quiet --python "$home/env/bin/python" "meshscope$extras @ file://$wheel" "jax[tpu]==$jax"
for bucket; do
  mounted=$home/buckets/$bucket
  mkdir -p "$mounted"
  command -v gcsfuse >/dev/null || sudo apt-get install --quiet --yes gcsfuse
  if [[ -z $(ls -A "$mounted") ]]; then
    gcsfuse --implicit-dirs -o ro "$bucket" "$mounted" >/dev/null
  fi
done
"$home/env/bin/meshscope" --version
echo "$key $(cat /proc/sys/kernel/random/boot_id)" >"$home/installed" # a mount does not outlive a boot
