#!/usr/bin/env bash
# Installs meshscope on a worker of a slice: install_on_worker.sh WHEEL JAX_VERSION
# uv fetches a Python that is new enough; the VM images have an older one.
set -euo pipefail
wheel=$HOME/$1
jax=$2
home=$HOME/meshscope
mkdir -p "$home/runs"
python3 -m pip install --quiet --user uv
python3 -m uv venv --quiet --clear --python 3.11 "$home/env"
python3 -m uv pip install --quiet --python "$home/env/bin/python" "$wheel" "jax[tpu]==$jax"
"$home/env/bin/meshscope" --version
