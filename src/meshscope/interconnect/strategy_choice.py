"""Strategy of a collective: the one named in the compiled HLO, else those libtpu is known to choose.

The routes of gathers and scatters per chip are in `meshscope.spec.hardware.compiler_facts`. All-reduces
take the faster of one bidirectional ring (libtpu 0.0.42 over 2x4) and multi-color rings (over 4x4, 8x8,
16x16, 2x2x2 and 4x4x4); small ones take short rings on chips for which libtpu has them, and those of
SparseCores multi-color rings.
"""

import re
from math import inf

from meshscope.events.enums import Kind
from meshscope.interconnect.short_rings import SHORT
from meshscope.interconnect.strategies import (
    BIDIRECTIONAL_RING,
    DIMENSION_ORDERED,
    MULTI_COLOR,
    UNIDIRECTIONAL_RING,
)
from meshscope.spec.hardware.chips import ChipKind
from meshscope.spec.hardware.compiler_facts import GatherRoute, compiler_facts
from meshscope.spec.hardware.topology import Topology

_GATHERS = frozenset({Kind.ALL_GATHER, Kind.REDUCE_SCATTER})

_SHORT_RINGS = re.compile(r"RotatedPincerShort.*multistep ([01](?:,[01])*)")

# Names in compiled HLO and their strategy; the first match wins. "Pincer" rings run both ways. Each
# color of a `UniDirection` ring runs one way, with as many colors as ways. `StrategySubgroupND`
# reduce-scatters were measured at the rate of one link on v5p.
_COMPILER_NAMES: tuple[tuple[str, str], ...] = (
    ("1DAllGather", BIDIRECTIONAL_RING),
    ("2DAllGather", DIMENSION_ORDERED),
    ("3DAllGather", DIMENSION_ORDERED),
    ("StrategySubgroupND", DIMENSION_ORDERED),
    ("UniDirectionNDRing", MULTI_COLOR),
    ("StrategyND", MULTI_COLOR),
    ("UniDirection1DRing", BIDIRECTIONAL_RING),
    ("StrategyRing", BIDIRECTIONAL_RING),
    ("SinglePhaseRingSum", UNIDIRECTIONAL_RING),
    ("SparseCore", MULTI_COLOR),
    # Names of earlier versions of meshscope.
    ("ring, both ways", BIDIRECTIONAL_RING),
    ("ring, one way", UNIDIRECTIONAL_RING),
    ("phases per axis,", MULTI_COLOR),
    ("phases per axis", DIMENSION_ORDERED),
)


def named_strategy(algorithm: str) -> str | None:
    """The strategy that a name from compiled HLO, or one of our own names, denotes; None if unknown."""
    if algorithm in {BIDIRECTIONAL_RING, UNIDIRECTIONAL_RING, MULTI_COLOR, DIMENSION_ORDERED}:
        return algorithm
    if short := _SHORT_RINGS.search(algorithm):
        return f"{SHORT} {short[1]}"
    return next((strategy for name, strategy in _COMPILER_NAMES if name in algorithm), None)


def default_strategies(
    kind: Kind, topology: Topology, available: frozenset[str]
) -> frozenset[str] | None:
    """The strategies from which libtpu takes the fastest; None if it may take any available one."""
    chip = topology.chip
    if chip.kind is not ChipKind.TPU:
        return None
    if kind is Kind.ALL_REDUCE:
        short = compiler_facts(chip.name).has_short_all_reduces.value
        plain = frozenset({BIDIRECTIONAL_RING, MULTI_COLOR})
        if offloaded_from(kind, chip.name) < inf and MULTI_COLOR in available:
            plain = frozenset({MULTI_COLOR})
        return plain | frozenset(name for name in available if short and name.startswith(SHORT))
    if kind not in _GATHERS:
        return None
    facts = compiler_facts(chip.name)
    is_small = topology.grid in facts.grids_gathered_by_dimension.value
    is_by_dimension = facts.gather_route.value is GatherRoute.BY_DIMENSION
    if is_by_dimension or (is_small and DIMENSION_ORDERED in available):
        return frozenset({DIMENSION_ORDERED})
    return frozenset({BIDIRECTIONAL_RING})


def offloaded_from(kind: Kind, chip: str) -> float:
    """The least payload of this kind that SparseCores transfer; infinite if the core always does."""
    start = compiler_facts(chip).offloads_all_reduces_from.value
    return inf if kind is not Kind.ALL_REDUCE or start is None else start
