"""A mixture of experts in one kernel, as serving engines have it: the time of its loops.

The kernel (`fused_ep_moe` of SGLang-JAX and tpu-inference) takes blocks of tokens. In each block it sends
every row to its expert by a DMA of its own, multiplies the rows of one expert after the other in tiles, sends
the results back, and fetches and adds those of each token, again row by row. The loops over rows are scalar
code, and nothing else runs meanwhile. The weights are read once in each block.

The cycles are those of libtpu's bundles (`compiler_facts.json`); nothing was measured on a TPU. Left out: the
barriers of a block, the wait for the most loaded device, and the scan of all tokens for each expert if the
buffers of all experts exceed the kernel's share of the HBM.
"""

from dataclasses import dataclass

from meshscope.cost.rates import Rates
from meshscope.hardware.compiler_facts import CompilerFacts
from meshscope.plans.dispatch import FUSED_BLOCK_TOKENS, DispatchForm
from meshscope.plans.experiment import Experiment

TILE_ROWS = 128
# Passes over the rows of experts while weights are read: staged, results stored, and sent back (2).
FUSED_ROW_PASSES = 4
_COUNTED_WEIGHTS = 3 * 2048 * 768  # of the expert whose bundles are in `compiler_facts.json`


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedRates:
    """Seconds of a row in all loops over rows, and of the products of a tile of rows with one expert."""

    row_s: float
    tile_s: float


def fused_rates(experiment: Experiment, rates: Rates) -> FusedRates | None:
    """The rates of the fused kernel; None if the program has none."""
    moe = experiment.model.moe
    if experiment.dispatch_form is not DispatchForm.FUSED or moe is None or not rates.clock_hz:
        return None
    n_weights = 3 * experiment.model.hidden * moe.ffn
    row, tile = row_cycles(rates.facts), tile_cycles(rates.facts, n_weights)
    if row is None or tile is None:
        return None
    return FusedRates(row_s=row / rates.clock_hz, tile_s=tile / rates.clock_hz)


def fused_notes(experiment: Experiment) -> tuple[str, ...]:
    """What the time of a fused kernel assumes; () without one."""
    moe = experiment.model.moe
    if experiment.dispatch_form is not DispatchForm.FUSED or moe is None:
        return ()
    note = (
        f"the fused kernel of experts is timed for blocks of {FUSED_BLOCK_TOKENS} tokens per device, as "
        "SGLang-JAX has tuned them for Qwen3-30B-A3B on v6e; for sizes that it has not tuned, it takes 32, "
        "and reads the experts once for each block"
    )
    return (note,)


def row_cycles(facts: CompilerFacts) -> float | None:
    """Cycles to send a row, fetch its result, wait for it and add it; None on a chip without counts."""
    cycles = facts.fused_expert_cycles.value
    return None if cycles is None else cycles[0]


def tile_cycles(facts: CompilerFacts, n_weights: int) -> float | None:
    """Cycles to multiply a tile of rows with the weights of one expert; None on a chip without counts."""
    cycles = facts.fused_expert_cycles.value
    return None if cycles is None else cycles[1] * n_weights / _COUNTED_WEIGHTS
