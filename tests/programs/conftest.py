"""Sets up eight virtual CPU devices before JAX is imported."""

import os
import sys
from pathlib import Path

# Each program runs once, and optimizing it takes longer than that saves.
UNOPTIMIZED = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false"
)

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {UNOPTIMIZED}"

sys.path.insert(0, str(Path(__file__).parent))  # for tiny_models
