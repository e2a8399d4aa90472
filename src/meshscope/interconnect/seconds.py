"""Seconds of a collective: a floor or the hops, whichever is longer, then the bytes over the narrowest wire."""

from dataclasses import dataclass

import numpy as np

from meshscope.events.enums import Kind
from meshscope.interconnect.constants import LinkConstants, Spreads
from meshscope.interconnect.fabric import FloatArray
from meshscope.interconnect.geometry import GroupGeometry, geometry_of
from meshscope.interconnect.lines import collective_lines, fastest
from meshscope.interconnect.stored import constants_of
from meshscope.spec.hardware.topology import Topology
from meshscope.spec.plan.mesh import Groups

NOTHING = "nothing travels"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeledTime:
    """The time of one collective, and the interval in which 9 of 10 such lie; null where none is known.

    `is_extrapolated`: its chip, kind, size or group lies outside of what was measured; the interval
    is then that of chips which the fit has not seen. `axes` are the wires that the strategy uses, of
    x, y, z (of a torus), cores (of a chip), links (of GPUs), network (between hosts).
    """

    seconds: float
    low_s: float | None
    high_s: float | None
    is_extrapolated: bool
    strategy: str
    axes: tuple[str, ...] = ()


def collective_time(  # noqa: PLR0913  what a collective is
    kind: Kind,
    *,
    groups: Groups,
    payload_bytes: int,
    topology: Topology,
    algorithm: str | None = None,
    constants: LinkConstants | None = None,
) -> ModeledTime:
    """Seconds of one collective over all its groups at once, with interval and strategy.

    `payload_bytes` by the nccl-tests rule (all-gather: output; reduce-scatter: input; all-to-all and
    permute: what one device holds). `algorithm` is the compiler's words. SpecError for a chip
    without published figures and without `constants`, and for groups that are not in the topology.
    """
    constants = constants or constants_of(topology.chip)
    geometry = geometry_of(topology, groups)
    lines = collective_lines(kind, geometry, constants, algorithm)
    if not lines:
        return ModeledTime(
            seconds=0.0, low_s=0.0, high_s=0.0, is_extrapolated=False, strategy=NOTHING
        )
    best = fastest(lines, payload_bytes)
    seconds = best.seconds(payload_bytes)
    is_measured = constants.is_measured(kind, payload_bytes, geometry.group_size)
    spread = _spread(
        constants.spreads, is_short=best.is_short(payload_bytes), is_measured=is_measured
    )
    return ModeledTime(
        seconds=seconds,
        low_s=None if spread is None else seconds / spread,
        high_s=None if spread is None else seconds * spread,
        is_extrapolated=not is_measured,
        strategy=best.strategy,
        axes=best.axes,
    )


def _spread(spreads: Spreads | None, *, is_short: bool, is_measured: bool) -> float | None:
    if spreads is None:
        return None
    if not is_measured:
        return spreads.unseen
    return spreads.short if is_short else spreads.long


def collective_seconds(
    kind: Kind,
    *,
    shape_of_group: GroupGeometry,
    payload_bytes: FloatArray,
    constants: LinkConstants,
) -> FloatArray:
    """[n] seconds of collectives of one kind over the same groups, for [n] payloads in bytes."""
    lines = collective_lines(kind, shape_of_group, constants)
    if not lines:
        return np.zeros(np.shape(payload_bytes))
    payload = np.asarray(payload_bytes, dtype=np.float64)
    return np.minimum.reduce([line.base_s + payload * line.s_per_byte for line in lines])
