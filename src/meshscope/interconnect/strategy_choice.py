"""Which strategy the compiler takes: by its own words in compiled text, else by what it is known to take.

Known: what libtpu 0.0.42 wrote for 67 MB collectives over v4, v5e, v5p and v6e slices of 2 to 256
chips, and what measured rates leave no doubt of. It gathers in one ring through all chips of v5e and
v6e (emitters `1DAllGather*`, over 2x4, 4x4 and 16x16), axis after axis on v4 and v5p (`2DAllGather`,
`3DAllGather`; v5p measured at one link's rate over 2x2x1). tpu7x measured at two links' rate over
2x2x1 and 2x2x2 alike: one ring. On a slice of 2x2 chips v5e and v6e, too, gather and scatter axis by
axis (emitter `2DAllGatherOnMajorDim`, strategy `StrategySubgroupND`). All-reduces take whichever of one ring (2x4) and a colour for each
axis (4x4, 8x8, 16x16, 2x2x2, 4x4x4) is faster.
"""

from meshscope.events.enums import Kind
from meshscope.interconnect.strategies import BOTH_WAYS, COLOURS, ONE_WAY, PHASES
from meshscope.spec.hardware.chips import ChipKind
from meshscope.spec.hardware.topology import Topology

_HALVES = frozenset({Kind.ALL_GATHER, Kind.REDUCE_SCATTER})

# The compiler's words -> ours, the first that is found. "Pincer" rings run both ways; `UniDirection`
# ones one way each colour, with as many colours as ways. `StrategySubgroupND` of reduce-scatters
# measured at one link's rate on v5p.
_WORDS: tuple[tuple[str, str], ...] = (
    ("1DAllGather", BOTH_WAYS),
    ("2DAllGather", PHASES),
    ("3DAllGather", PHASES),
    ("StrategySubgroupND", PHASES),
    ("UniDirectionNDRing", COLOURS),
    ("StrategyND", COLOURS),
    ("UniDirection1DRing", BOTH_WAYS),
    ("StrategyRing", BOTH_WAYS),
    ("SinglePhaseRingSum", ONE_WAY),
)


def told_strategy(algorithm: str) -> str | None:
    """Our name of the strategy that the compiler's words, or our own, tell; None where they tell none."""
    if algorithm in {BOTH_WAYS, ONE_WAY, COLOURS, PHASES}:
        return algorithm
    return next((ours for words, ours in _WORDS if words in algorithm), None)


def usual_strategies(
    kind: Kind, topology: Topology, available: frozenset[str]
) -> frozenset[str] | None:
    """Those of the available among which the compiler takes the fastest; None where it may take any."""
    chip = topology.chip
    if chip.kind is not ChipKind.TPU:
        return None
    if kind not in _HALVES:
        return frozenset({BOTH_WAYS, COLOURS})
    is_small = chip.name in {"v5e", "v6e"} and topology.grid == (2, 2)
    if chip.name in {"v4", "v5p"} or (is_small and PHASES in available):
        return frozenset({PHASES})
    return frozenset({BOTH_WAYS})
