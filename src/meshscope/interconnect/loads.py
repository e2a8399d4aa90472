"""Bytes that a collective puts on every physical ICI link."""

from dataclasses import dataclass

import numpy as np

from meshscope.events.collective import Groups
from meshscope.events.enums import Kind
from meshscope.hardware.topology import Topology
from meshscope.interconnect.constants import spec_constants
from meshscope.interconnect.fabric import Fabric, fabric_of, loads_of
from meshscope.interconnect.short_rings import strategies_with_short
from meshscope.interconnect.time_model import NO_TRANSFER, collective_time


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLoad:
    """Bytes over one link in one direction. Chips are (x, y, z) in a slice; `dim` is x, y or z."""

    slice_index: int
    source: tuple[int, int, int]
    target: tuple[int, int, int]
    dim: str
    is_wrap: bool
    load_bytes: float


def link_loads(
    kind: Kind,
    *,
    groups: Groups,
    payload_bytes: int,
    topology: Topology,
    strategy: str | None = None,
) -> list[LinkLoad]:
    """Bytes on every ICI link of a collective over all its groups, by a named or the fastest strategy."""
    fabric = fabric_of(topology)
    if strategy is None:
        strategy = collective_time(
            kind,
            groups=groups,
            payload_bytes=payload_bytes,
            topology=topology,
            constants=spec_constants(topology.chip),
        ).strategy
    if strategy == NO_TRANSFER or not fabric.is_torus:
        return []
    legs = strategies_with_short(kind, fabric, groups)[strategy]
    total = np.sum([loads_of(fabric, leg.flow).link for leg in legs], axis=0)
    return [
        _link_load(fabric, *map(int, at), load_bytes=float(total[tuple(at)]) * payload_bytes)
        for at in np.argwhere(total)
    ]


def _link_load(
    fabric: Fabric, chip: int, dim: int, direction: int, *, load_bytes: float
) -> LinkLoad:
    x, y, z = fabric.sizes
    rest, at_x = divmod(chip, x)
    rest, at_y = divmod(rest, y)
    slice_index, at_z = divmod(rest, z)
    source = [at_x, at_y, at_z]
    target = source.copy()
    neighbor = source[dim] + (1, -1)[direction]
    target[dim] = neighbor % fabric.sizes[dim]
    return LinkLoad(
        slice_index=slice_index,
        source=(source[0], source[1], source[2]),
        target=(target[0], target[1], target[2]),
        dim="xyz"[dim],
        is_wrap=target[dim] != neighbor,
        load_bytes=load_bytes,
    )
