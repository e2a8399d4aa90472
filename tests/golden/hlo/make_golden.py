"""Compiles tiny programs for TPUs and writes their optimized HLO as golden files.

    python tests/golden/hlo/make_golden.py          # all files, for the installed JAX
    python tests/golden/hlo/make_golden.py v6e_tp8  # only files whose names contain the word

Needs `jax[tpu]`, but no TPU. README.md lists the versions that wrote the files.
"""

import gzip
import os
import re
import subprocess
import sys
from pathlib import Path

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

import jax
import numpy as np
from goldens import GOLDENS, Golden
from jax.experimental import topologies
from jax.sharding import Mesh
from programs import PROGRAMS

HERE = Path(__file__).parent


def compiled_text(golden: Golden) -> str:
    """The optimized HLO, with directories stripped from source file names."""
    options = {"num_slices": golden.n_slices} if golden.n_slices > 1 else {}
    if golden.topology.startswith("v4:"):
        options["chip_config_name"] = "megacore"  # both cores of a chip are one device
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=golden.topology, **options
    )
    names, sizes = zip(*golden.axes, strict=True)
    mesh = Mesh(np.array(topology.devices).reshape(sizes), names)
    function, shapes = PROGRAMS[golden.program](golden, mesh)
    text = function.lower(*shapes).compile().as_text()
    return re.sub(r'"[^"\n]*/(\w+\.py)"', r'"\1"', text)


def write_golden(name: str, golden: Golden) -> None:
    """Writes one file; a program with libtpu flags compiles in a new process."""
    flags = " ".join(golden.flags)
    if flags != os.environ.get("LIBTPU_INIT_ARGS", ""):
        command = [sys.executable, __file__, name]
        subprocess.run(command, check=True, env=os.environ | {"LIBTPU_INIT_ARGS": flags})
        return
    path = HERE / f"{name}.jax-{jax.__version__}.txt.gz"
    path.write_bytes(gzip.compress(compiled_text(golden).encode(), mtime=0))
    sys.stdout.write(f"{path.name} {path.stat().st_size} bytes\n")


if __name__ == "__main__":
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    for golden_name, wanted in GOLDENS.items():
        if word in golden_name:
            write_golden(golden_name, wanted)
