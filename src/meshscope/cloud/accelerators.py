"""What Google Cloud calls the slices of each chip.

Source: cloud.google.com/tpu/docs, pages "TPU configurations", "TPU software versions" and "Manage queued
resources"; cloud.google.com/kubernetes-engine/docs, page "Plan TPUs in GKE".
"""

from dataclasses import dataclass

from meshscope.errors import SpecError
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.topology import NAMES_COUNT_CORES, Topology, parse_topology


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudChip:
    """Names of a chip; `accelerator` and `runtime` are None where TPU VMs have no such chip."""

    accelerator: str | None  # before the size in --accelerator-type
    runtime: str | None  # the software version of its VMs
    kubernetes: str  # the label cloud.google.com/gke-tpu-accelerator


CLOUD_CHIPS: dict[str, CloudChip] = {
    "v4": CloudChip(accelerator="v4", runtime="tpu-ubuntu2204-base", kubernetes="tpu-v4-podslice"),
    "v5e": CloudChip(
        accelerator="v5litepod",
        runtime="v2-alpha-tpuv5-lite",
        kubernetes="tpu-v5-lite-podslice",
    ),
    "v5p": CloudChip(accelerator="v5p", runtime="v2-alpha-tpuv5", kubernetes="tpu-v5p-slice"),
    "v6e": CloudChip(accelerator="v6e", runtime="v2-alpha-tpuv6e", kubernetes="tpu-v6e-slice"),
    "tpu7x": CloudChip(accelerator=None, runtime=None, kubernetes="tpu7x"),
}
MAX_HOST_CHIPS = {"v5e": 8, "v6e": 8}  # of a slice on a single host; larger ones have 4 a host


def cloud_chip(topology: Topology) -> CloudChip:
    """The names of a slice's chip; SpecError for CPUs and GPUs."""
    if topology.chip.kind is not ChipKind.TPU:
        raise SpecError(f"'{topology.name}' is no TPU slice. Give one, like v6e-8.")
    return CLOUD_CHIPS[topology.chip.name]


def accelerator_type(topology: Topology) -> str:
    """The value of --accelerator-type, such as `v5litepod-16`; SpecError if the slice has none."""
    chip = cloud_chip(topology)
    name = topology.chip.name
    if chip.accelerator is None:
        raise SpecError(
            f"{name} has no TPU VMs: Google Cloud offers it through Kubernetes alone. "
            f"Use 'meshscope tpu manifest FILE --topology {topology.name}'."
        )
    if topology.n_slices > 1:
        raise SpecError(
            f"'{topology.name}' has {topology.n_slices} slices, and meshscope asks for one at a time. "
            f"Use one, like {topology.chip.name}:{'x'.join(map(str, topology.grid))}."
        )
    n = topology.n_chips * (2 if name in NAMES_COUNT_CORES else 1)
    default = parse_topology(f"{name}-{n}")
    if default.grid != topology.grid:
        raise SpecError(
            f"'{topology.name}' is not the default grid of {topology.n_chips} {name} chips, "
            f"which is all that an accelerator type can name. Use {default.name}."
        )
    return f"{chip.accelerator}-{n}"


def runtime_version(topology: Topology) -> str:
    """The software version of the slice's VMs."""
    accelerator_type(topology)
    runtime = cloud_chip(topology).runtime
    assert runtime is not None  # a chip with an accelerator type has one
    return runtime


def n_hosts(topology: Topology) -> int:
    """The VMs of a slice, each a worker."""
    n_chips = topology.n_chips // topology.n_slices
    on_one_host = MAX_HOST_CHIPS.get(topology.chip.name, topology.chip.chips_per_host)
    return 1 if n_chips <= on_one_host else -(-n_chips // 4)
