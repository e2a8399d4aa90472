"""Time and links of the collectives in a compiled schedule."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache

from meshscope.errors import SpecError
from meshscope.events.collective import Groups
from meshscope.events.enums import Kind
from meshscope.events.step_time import TimeEstimate
from meshscope.interconnect import LinkConstants, collective_time, constants_of, link_loads
from meshscope.readers.hlo.operations import Operation
from meshscope.readers.hlo.semantics import KIND_OF_OPCODE
from meshscope.spec.hardware.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveEstimate:
    """Time of a collective, the links that it occupies, and the strategy.

    `is_extrapolated` marks a time outside the measured range.
    """

    seconds: TimeEstimate
    resources: tuple[Hashable, ...]
    is_extrapolated: bool
    strategy: str


class CollectiveEstimator:
    """Estimates collectives on a topology with fitted or calibrated link constants."""

    def __init__(self, topology: Topology, constants: LinkConstants | None = None) -> None:
        self.topology = topology
        self.constants = constants or constants_of(topology.chip)

    def estimate(self, operations: tuple[Operation, ...]) -> CollectiveEstimate | None:
        """The estimate of one scheduled instruction with all its arrays; None if bytes are unknown.

        The opcode decides: a reduce-scatter that the compiler implements as an all-reduce costs an
        all-reduce. Combined arrays count as one payload.
        """
        first = operations[0]
        sizes = [operation.payload_bytes for operation in operations]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes) or not first.groups:
            return None
        kind = KIND_OF_OPCODE.get(first.opcode, first.kind)
        time = collective_time(
            kind,
            groups=first.groups,
            payload_bytes=sum(known),
            topology=self.topology,
            algorithm=first.algorithm,
            constants=self.constants,
        )
        seconds = TimeEstimate(value_s=time.seconds, low_s=time.low_s, high_s=time.high_s)
        return CollectiveEstimate(
            seconds=seconds,
            resources=_occupied_links(self.topology, kind, first.groups),
            is_extrapolated=time.is_extrapolated,
            strategy=time.strategy,
        )


@lru_cache(maxsize=4096)
def _occupied_links(topology: Topology, kind: Kind, groups: Groups) -> tuple[Hashable, ...]:
    """Dimensions and directions of the ICI links that a collective uses on any chip, and DCN.

    Collectives that share a link serialize. On chips where one of them is inactive they could overlap;
    this is left out.
    """
    links: set[str] = set()
    if topology.crosses_slices(groups):
        links.add("network")
    try:
        loads = link_loads(kind, groups=groups, payload_bytes=1, topology=topology)
    except SpecError:
        loads = []
    for load in loads:
        at = "xyz".index(load.dim)
        is_up = (load.target[at] > load.source[at]) != load.is_wrap
        links.add(f"{load.dim}{'+' if is_up else '-'}")
    return tuple(sorted(links)) or ("other",)
