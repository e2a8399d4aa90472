"""Eight virtual CPU devices for torch_xla and for JAX, set before either is imported.

These tests need the extra torchxla, whose torch is not that of the other tests: `make test` runs them
with a Python of their own, and elsewhere they are not collected.
"""

import importlib.util
import os

from kept_workers import _kept_workers, processes
from made import UNOPTIMIZED

__all__ = ["_kept_workers", "processes"]

HAS_TORCH_XLA = importlib.util.find_spec("torch_xla") is not None

os.environ.update(
    {
        "JAX_PLATFORMS": "cpu",
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": "8",
        "XLA_HLO_DEBUG": "1",
        "USE_TORCH_XLA": "0",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
)
if HAS_TORCH_XLA:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {UNOPTIMIZED}"
