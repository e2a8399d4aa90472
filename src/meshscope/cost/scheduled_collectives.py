"""Time and links of the collectives in a compiled schedule."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache

from meshscope.cost.op_cost import part_of
from meshscope.errors import SpecError
from meshscope.events.collective import Groups
from meshscope.events.enums import Kind, Part
from meshscope.events.step_time import TimeEstimate
from meshscope.hardware.topology import Topology
from meshscope.interconnect import LinkConstants, collective_time, constants_of, link_loads
from meshscope.readers.hlo.operations import Operation
from meshscope.readers.hlo.semantics import KIND_OF_OPCODE

_EXCHANGE_PARTS = {Part.MOE_DISPATCH, Part.MOE_COMBINE}


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
    """Estimates collectives on a topology with fitted or calibrated link constants.

    All-to-alls with experts take `exchange_load` times as long as under balanced routing.
    """

    def __init__(
        self,
        topology: Topology,
        constants: LinkConstants | None = None,
        *,
        exchange_load: float = 1.0,
    ) -> None:
        self.topology = topology
        self.constants = constants or constants_of(topology.chip)
        self.exchange_load = exchange_load

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
        is_exchange = kind is Kind.ALL_TO_ALL and part_of(first.site.instruction) in _EXCHANGE_PARTS
        load = self.exchange_load if is_exchange else 1.0
        low_s, high_s = (None if s is None else s * load for s in (time.low_s, time.high_s))
        seconds = TimeEstimate(value_s=time.seconds * load, low_s=low_s, high_s=high_s)
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
