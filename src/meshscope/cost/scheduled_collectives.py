"""What a scheduled collective takes on the wires, and which of them it keeps from others."""

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
    """Seconds of a collective, the wires that it occupies, and how far the model was stretched for it."""

    seconds: TimeEstimate
    resources: tuple[Hashable, ...]
    is_extrapolated: bool
    strategy: str


class CollectiveEstimates:
    """The interconnect of a topology, as the model or a measured profile knows it."""

    def __init__(self, topology: Topology, constants: LinkConstants | None = None) -> None:
        self.topology = topology
        self.constants = constants or constants_of(topology.chip)

    def price(self, operations: tuple[Operation, ...]) -> CollectiveEstimate | None:
        """The price of one scheduled instruction with the arrays that it carries; None if not known.

        It is priced as what is carried out, whatever it means: a reduce-scatter that the compiler
        wrote as an all-reduce costs an all-reduce. Combined arrays travel as one.
        """
        first = operations[0]
        sizes = [operation.payload_bytes for operation in operations]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes) or not first.groups:
            return None
        return self.of(carried_out_as(first), first.groups, sum(known), first.algorithm)

    def of(
        self, kind: Kind, groups: Groups, payload_bytes: int, algorithm: str | None = None
    ) -> CollectiveEstimate:
        """The price of a collective of this kind."""
        found = collective_time(
            kind,
            groups=groups,
            payload_bytes=payload_bytes,
            topology=self.topology,
            algorithm=algorithm,
            constants=self.constants,
        )
        seconds = TimeEstimate(value_s=found.seconds, low_s=found.low_s, high_s=found.high_s)
        return CollectiveEstimate(
            seconds=seconds,
            resources=_occupied(self.topology, kind, groups),
            is_extrapolated=found.is_extrapolated,
            strategy=found.strategy,
        )


def carried_out_as(operation: Operation) -> Kind:
    """The kind that an operation costs: its opcode's, where that is one of XLA's collectives."""
    return KIND_OF_OPCODE.get(operation.opcode, operation.kind)


@lru_cache(maxsize=4096)
def _occupied(topology: Topology, kind: Kind, groups: Groups) -> tuple[Hashable, ...]:
    """Dimensions and directions of links that a collective uses on any chip, and the network of hosts.

    Two collectives that share one of them follow each other. On a chip where one of the two is
    silent they could run together; that is left out.
    """
    found: set[Hashable] = set()
    if topology.crosses_slices(groups):
        found.add("network")
    try:
        loads = link_loads(kind, groups=groups, payload_bytes=1, topology=topology)
    except SpecError:
        loads = []
    for load in loads:
        at = "xyz".index(load.dim)
        is_up = (load.target[at] > load.source[at]) != load.is_wrap
        found.add(f"{load.dim}{'+' if is_up else '-'}")
    return tuple(sorted(map(str, found))) or ("other",)
