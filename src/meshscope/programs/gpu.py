"""GPU descriptions that let XLA compile for GPUs without the hardware.

`PJRT_TopologyDescription_Create` of XLA's CUDA plugin takes a GPU description and the shape of the
system (github.com/openxla/xla/pull/16913). Without a device the compiler cannot autotune, so a
program compiled on the GPU itself may use other matmul kernels and tiles. Its collectives are the
same, as autotuning comes later.
"""

import importlib.util
from typing import Any, NamedTuple

from meshscope.errors import MissingToolError, SpecError
from meshscope.hardware.chips import Chip
from meshscope.hardware.topology import Topology

PLUGINS = {
    "jax-cuda12-plugin": "jax_plugins.xla_cuda12",
    "jax-cuda13-plugin": "jax_plugins.xla_cuda13",
}


class GpuTarget(NamedTuple):
    """The properties of a GPU in XLA's description; shared memory and FP32 units per multiprocessor."""

    description: str
    compute_capability: int
    n_multiprocessors: int
    n_fp32_units: int
    clock_ghz: float
    shared_memory_bytes: int
    l2_bytes: int


# Source: XLA's repository, xla/tools/hlo_opt/gpu_specs (h100_sxm, a100_sxm_80). An H200 is an H100
# with other memory (NVIDIA's announcement of 2023-11-13), which `Chip` has.
_OF_H100 = (9, 132, 128, 1.98, 233_472, 52_428_800)
TARGETS = {
    "a100": GpuTarget("NVIDIA A100-SXM4-80GB", 8, 108, 64, 1.41, 167_936, 41_943_040),
    "h100": GpuTarget("NVIDIA H100 80GB HBM3", *_OF_H100),
    "h200": GpuTarget("NVIDIA H200", *_OF_H100),
}
RESERVED_BYTES = 1024  # shared memory that a block cannot use, by both descriptions
# Versions that the driver and cuDNN would report: the CUDA of the extra, and cuDNN 9.
CUDA_VERSION = (12, 9)
CUDNN_VERSION = (9, 10)


def check_can_compile_for_gpu(topology: Topology) -> None:
    """Raises an error if the GPU has no description or XLA's CUDA plugin is missing."""
    chip = topology.chip
    if chip.name not in TARGETS:
        raise SpecError(
            f"'{chip.name}' has no description for XLA's GPU compiler. Use {', '.join(TARGETS)}, "
            "or predict."
        )
    _shape(topology)  # raises an error for partial hosts
    if plugin() is None:
        raise MissingToolError(
            f"compiling for '{topology.name}' needs XLA's CUDA plugin, which is not installed. "
            "Install the extra: pip install -e '.[cuda]' in your clone (Linux; no GPU is needed)."
        )


def plugin() -> str | None:
    """The installed distribution of XLA's CUDA plugin; None if there is none."""
    if importlib.util.find_spec("jax_plugins") is None:
        return None
    installed = (name for name, module in PLUGINS.items() if importlib.util.find_spec(module))
    return next(installed, None)


def gpu_devices(topology: Topology) -> list[Any]:
    """The devices of the topology as XLA describes them, ordered by host."""
    from jax.experimental import topologies  # noqa: PLC0415  slow to import

    description = topologies.get_topology_desc(
        platform="cuda",
        topology="x".join(map(str, _shape(topology))),
        target_config=target_config(topology.chip),
    )
    return list(description.devices)


def _shape(topology: Topology) -> tuple[int, int, int]:
    """The numbers of slices, hosts per slice and GPUs per host."""
    n, per_host = topology.devices_per_slice, topology.chip.chips_per_host
    if n > per_host and n % per_host:
        raise SpecError(
            f"topology '{topology.name}': {n} GPUs do not fill hosts of {per_host}. "
            f"Use a multiple of {per_host}, or fewer than {per_host}."
        )
    n_hosts = max(1, n // per_host)
    return topology.n_slices, n_hosts, n // n_hosts


def target_config(chip: Chip) -> str:
    """The description of a GPU as the text of a `GpuTargetConfigProto`."""
    target = TARGETS[chip.name]
    assert chip.hbm_bytes is not None
    assert chip.hbm_bytes_per_s is not None
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * 1024}
  shared_memory_per_core: {target.shared_memory_bytes}
  shared_memory_per_block_optin: {target.shared_memory_bytes - RESERVED_BYTES}
  threads_per_core_limit: 2048
  core_count: {target.n_multiprocessors}
  fpus_per_core: {target.n_fp32_units}
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
  memory_bandwidth: {chip.hbm_bytes_per_s:.0f}
  l2_cache_size: {target.l2_bytes}
  clock_rate_ghz: {target.clock_ghz}
  device_memory_size: {chip.hbm_bytes}
  cuda_compute_capability {{ major: {target.compute_capability} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
runtime_version {{ major: {CUDA_VERSION[0]} minor: {CUDA_VERSION[1]} }}
dnn_version_info {{ major: {CUDNN_VERSION[0]} minor: {CUDNN_VERSION[1]} }}
device_description_str: "{target.description}"
"""
