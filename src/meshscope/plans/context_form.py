"""Context parallelism: contiguous blocks of the prompt, round-robin generated tokens.

A device caches its block of the prompt in its first slots, followed by every cp-th generated token,
so that decode is balanced across devices.
"""

from enum import StrEnum
from functools import lru_cache

from meshscope.events.collective import Groups
from meshscope.events.enums import Phase
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.topology import Topology
from meshscope.model.mechanisms.attention import Indexer
from meshscope.model.model import Model
from meshscope.plans.plan import Plan
from meshscope.plans.workload import Workload

CACHED_RINGS = 64  # of large slices: a search asks for the same ring of many plans


class ContextForm(StrEnum):
    """How prefill shares keys and values between the blocks of a prompt."""

    AUTO = "auto"  # ring if supported, else allgather
    RING = "ring"  # ring permutes; partial softmaxes are merged
    ALLGATHER = "allgather"  # every device gathers all keys and values


def local_tokens(plan: Plan, phase: Phase, n_tokens: int) -> int:
    """Tokens per cp device out of a step's `n_tokens` per sequence.

    Prefill splits the tokens; in decode all cp devices process the same token.
    """
    return n_tokens // plan.cp if phase is Phase.PREFILL else n_tokens


def cache_slots(plan: Plan, workload: Workload) -> int:
    """Cache positions per sequence on one device: its prompt block plus its share of the output."""
    return workload.prompt // plan.cp + -(-workload.output // plan.cp)


@lru_cache(maxsize=CACHED_RINGS)
def ring_pairs(groups: Groups) -> Groups:
    """(source, target) pairs of one ring step: each device sends to the next one in its group."""
    return tuple(
        (source, target)
        for group in groups
        for source, target in zip(group, (*group[1:], group[0]), strict=True)
    )


def ring_sends(cp: int, n_local: int, window: int | None) -> int:
    """Times that each block moves on: a block of `n_local` positions beyond the window need not arrive."""
    return cp - 1 if window is None else min(cp - 1, -(-(window - 1) // n_local))


def index_candidates(indexer: Indexer, n_slots: int) -> int:
    """Candidates that each device proposes to an indexer that selects across devices."""
    return min(indexer.top_k, n_slots)


def why_no_ring(model: Model, plan: Plan, topology: Topology) -> str | None:
    """The reason why ring attention is not supported; None if it is.

    XLA on CPU matches permutes across all devices of the program, so permutes of stages in
    different branches are mixed up.
    """
    if model.attention.why_no_ring is not None:
        return model.attention.why_no_ring
    if plan.pp > 1 and topology.chip.kind is ChipKind.CPU:
        return "XLA on CPU confuses ring permutes with the sends between pipeline stages"
    return None
