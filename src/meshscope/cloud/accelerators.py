"""What Google Cloud calls a slice."""

from meshscope.errors import SpecError
from meshscope.hardware.chips import CloudNames
from meshscope.hardware.topology import Topology, parse_topology


def cloud_names(topology: Topology) -> CloudNames:
    """The names of a slice's chip; SpecError for CPUs and GPUs."""
    if topology.chip.cloud is None:
        raise SpecError(f"'{topology.name}' is no TPU slice. Give one, like v6e-8.")
    return topology.chip.cloud


def accelerator_type(topology: Topology) -> str:
    """The value of --accelerator-type, such as `v5litepod-16`; SpecError if the slice has none."""
    chip = cloud_names(topology)
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
    n = topology.n_chips * (2 if topology.chip.name_counts_cores else 1)
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
    runtime = cloud_names(topology).runtime
    assert runtime is not None  # a chip with an accelerator type has one
    return runtime


def n_hosts(topology: Topology) -> int:
    """The VMs of a slice, each a worker."""
    n_chips = topology.n_chips // topology.n_slices
    on_one_host = topology.chip.max_host_chips or topology.chip.chips_per_host
    return 1 if n_chips <= on_one_host else -(-n_chips // 4)
