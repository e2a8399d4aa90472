"""Sets up eight virtual CPU devices before JAX is imported; without JAX, there is no test of programs."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from made import UNOPTIMIZED

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["NPROC"] = "32"  # threads, so that collectives of all devices run at once
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {UNOPTIMIZED}"

sys.path.insert(0, str(Path(__file__).parent))  # for tiny_models

collect_ignore_glob = [] if find_spec("jax") else ["test_*.py"]

if find_spec("jax"):
    import jax

    # At once, as JAX keeps the devices of its first use, whatever test that is in.
    assert len(jax.devices()) == 8
