"""Time of a collective, and the bytes that it puts on every physical ICI link."""

from dataclasses import dataclass

import numpy as np

from meshscope.events.collective import Groups
from meshscope.events.enums import Kind
from meshscope.hardware.topology import Topology
from meshscope.interconnect.constants import LinkConstants, Spreads, constants_of, spec_constants
from meshscope.interconnect.fabric import Fabric, fabric_of, loads_of
from meshscope.interconnect.geometry import geometry_of
from meshscope.interconnect.lines import collective_lines, fastest
from meshscope.interconnect.strategies import strategies_with_short

NO_TRANSFER = "no transfer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeledTime:
    """Time of one collective with the interval that covers 90 % of cases; None if unknown.

    `is_extrapolated` marks a chip, kind, payload or group size outside the measurements; the interval
    is then that of chips left out of the fit. `axes` are the links used: x, y, z (torus), cores (of a
    chip), links (GPUs) and network (between hosts).
    """

    seconds: float
    low_s: float | None
    high_s: float | None
    is_extrapolated: bool
    strategy: str
    axes: tuple[str, ...] = ()


def collective_time(  # noqa: PLR0913  the properties of a collective
    kind: Kind,
    *,
    groups: Groups,
    payload_bytes: int,
    topology: Topology,
    algorithm: str | None = None,
    constants: LinkConstants | None = None,
) -> ModeledTime:
    """Seconds of one collective over all its groups at once, with interval and strategy.

    `payload_bytes` follows the nccl-tests rule (all-gather: output; reduce-scatter: input; all-to-all
    and permute: the array of one device). `algorithm` is the strategy name in compiled HLO. SpecError
    for a chip with neither published figures nor `constants`, and for groups outside the topology.
    """
    constants = constants or constants_of(topology.chip)
    geometry = geometry_of(topology, groups)
    lines = collective_lines(kind, geometry, constants, algorithm)
    if not lines:
        return ModeledTime(
            seconds=0.0, low_s=0.0, high_s=0.0, is_extrapolated=False, strategy=NO_TRANSFER
        )
    best = fastest(lines, payload_bytes)
    seconds = best.seconds(payload_bytes)
    is_measured = constants.is_measured(kind, payload_bytes, geometry.group_size)
    spread = _spread(
        constants.spreads,
        is_latency_bound=best.is_latency_bound(payload_bytes),
        is_measured=is_measured,
    )
    return ModeledTime(
        seconds=seconds,
        low_s=None if spread is None else seconds / spread,
        high_s=None if spread is None else seconds * spread,
        is_extrapolated=not is_measured,
        strategy=best.strategy,
        axes=best.axes,
    )


def _spread(spreads: Spreads | None, *, is_latency_bound: bool, is_measured: bool) -> float | None:
    if spreads is None:
        return None
    if not is_measured:
        return spreads.out_of_sample
    return spreads.short if is_latency_bound else spreads.long


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
