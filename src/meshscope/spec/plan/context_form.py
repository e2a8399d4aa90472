"""How a sequence lies over cp: contiguous blocks of the prompt, then generated tokens dealt in turn.

A device keeps its block of the prompt in the first slots of its cache, and of the tokens that are
generated every cp-th one behind it: decode then finds as many of them on each device.
"""

from enum import StrEnum

from meshscope.events.collective import Groups
from meshscope.events.enums import Phase
from meshscope.spec.hardware.chips import ChipKind
from meshscope.spec.hardware.topology import Topology
from meshscope.spec.model.model import CompressedAttention, Indexer, Model
from meshscope.spec.plan.plan import Plan
from meshscope.spec.workload import Workload


class ContextForm(StrEnum):
    """How a block of the prompt sees the keys and values of the others, in prefill."""

    AUTO = "auto"  # a ring, where there is one
    RING = "ring"  # they travel around, partial softmaxes are merged
    ALLGATHER = "allgather"  # every device gathers them all


def local_tokens(plan: Plan, phase: Phase, n_tokens: int) -> int:
    """Of a step's `n_tokens` of a sequence, those of one device of cp.

    Prefill splits them; in decode all devices of cp hold the same token.
    """
    return n_tokens // plan.cp if phase is Phase.PREFILL else n_tokens


def cache_slots(plan: Plan, workload: Workload) -> int:
    """Positions of a sequence that one device has room for: its block, and its share rounded up."""
    return workload.prompt // plan.cp + -(-workload.output // plan.cp)


def ring_pairs(groups: Groups) -> Groups:
    """The (source, target) pairs of one turn of the ring: each device sends to the next of its group."""
    return tuple(
        (source, target)
        for group in groups
        for source, target in zip(group, (*group[1:], group[0]), strict=True)
    )


def index_candidates(indexer: Indexer, n_slots: int) -> int:
    """Positions that one device proposes where an indexer chooses among those of all devices."""
    return min(indexer.top_k, n_slots)


def why_no_ring(model: Model, plan: Plan, topology: Topology) -> str | None:
    """Why blocks of keys cannot travel around a ring; None where they can.

    On CPU, a permute waits for all devices of the program, and takes any permute for its own: those
    of stages that take different branches are mixed up.
    """
    if isinstance(model.attention, CompressedAttention):
        return "compressed entries are gathered, as many as a query may see"
    if plan.pp > 1 and topology.chip.kind is ChipKind.CPU:
        return "on CPU devices, XLA takes the permutes of a ring for the hand-over between stages"
    return None
