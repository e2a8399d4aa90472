"""The slice that the devices of a process form, by their kind and coordinates."""

from collections.abc import Sequence
from typing import Any

from meshscope.errors import SpecError
from meshscope.hardware.chips import CHIPS, TPU_KINDS, ChipKind
from meshscope.hardware.topology import Topology, parse_topology


def slice_of_devices(devices: Sequence[Any]) -> Topology:
    """The slice of JAX devices; SpecError if their kind is unknown or they form no grid."""
    kind, platform = str(devices[0].device_kind).lower(), devices[0].platform
    if platform == "cpu":
        return parse_topology(f"cpu:{len(devices)}")
    if platform == "gpu":
        names = [n for n, c in CHIPS.items() if c.kind is ChipKind.GPU and n in kind]
        if names:
            return parse_topology(f"{names[0]}:{len(devices)}")
    chip = TPU_KINDS.get(kind)
    if chip is not None and (grid := _grid(devices, CHIPS[chip].n_grid_dims)) is not None:
        topology = parse_topology(f"{chip}:{'x'.join(map(str, grid))}")
        if topology.n_devices == len(devices):
            return topology
    raise SpecError(
        f"the slice of {len(devices)} devices of kind '{devices[0].device_kind}' is unknown. "
        "Give topology=, such as 'v6e-8'."
    )


def _grid(devices: Sequence[Any], n_dims: int) -> list[int] | None:
    """Chips along each dimension; None if the devices have no coordinates."""
    coords = [getattr(device, "coords", None) for device in devices]
    known = [c for c in coords if c is not None]
    if len(known) < len(coords):
        return None
    return [max(c[dim] for c in known) - min(c[dim] for c in known) + 1 for dim in range(n_dims)]
