"""Work of kernels that multiply rows with the experts of each: ragged dots, gmm, and mixtures in one kernel.

A grouped product takes the rows and experts that balanced routing reaches. A mixture in one kernel
(`fused_ep_moe` of SGLang-JAX and tpu-inference) takes blocks of tokens. In each block it sends every row to
its expert by a DMA of its own, multiplies the rows of one expert after the other in tiles, sends the results
back, and fetches and adds those of each token, again row by row. The loops over rows are scalar code, and
nothing else runs meanwhile. The weights are read once in each block.

Cycles are those of libtpu's bundles (`compiler_facts.json`); nothing was measured on a TPU. Left out: the
barriers of a block, the wait for the most loaded device, and the scan of all tokens for each expert if the
buffers of all experts exceed the kernel's share of the HBM.
"""

import re
from dataclasses import dataclass
from math import ceil, prod

from meshscope.cost.expert_load import ExpertLoad
from meshscope.cost.kernel_work import KernelWork, WorkSource, operand_arrays
from meshscope.cost.rates import Rates
from meshscope.cost.traffic import ArrayTraffic
from meshscope.hardware.compiler_facts import CompilerFacts
from meshscope.plans.dispatch import FUSED_BLOCK_TOKENS, DispatchForm
from meshscope.plans.experiment import Experiment
from meshscope.readers.hlo.communication import FusedExperts, fused_experts
from meshscope.readers.hlo.module import ArrayShape, Computation, Instruction

_NAME = re.compile(r"gmm|ragged[-_]?dot|grouped|megablox")
_TILE = re.compile(r"grouped_matmul_m(\d+)_")  # rows of a tile in meshscope's kernel
_SCOPED_VMEM = re.compile(r'"used_scoped_memory_configs":\[\{[^}]*"size":"(\d+)"')
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedOperands:
    """The rows and the weights of each expert; `n_together` experts are fetched as one block."""

    rows: ArrayShape
    weights: ArrayShape
    n_out: int
    scale_bytes: int  # of groups of inputs of all experts
    four_bit_dtype: str | None  # of weights in int4 arrays
    n_routed: int | None  # experts of all devices, if the group sizes are a slice of theirs
    n_together: int

    def weight_cycles(self, facts: CompilerFacts) -> float:
        """Cycles to convert a weight, by its bundles; 0 for other dtypes, whose loops the bytes outlast."""
        if self.four_bit_dtype is None:
            return 0.0
        return facts.four_bit_cycles.value[self.four_bit_dtype != "s4"]

    @property
    def n_experts(self) -> int:
        """Experts whose weights are an operand."""
        return self.weights.dims[0]


def grouped_work(
    computation: Computation,
    instruction: Instruction,
    load: ExpertLoad | None,
    facts: CompilerFacts,
) -> KernelWork | None:
    """Work for the expected load; None for a kernel that is not a grouped product.

    The kernels skip tiles without rows and experts without rows (read from programs of libtpu 0.0.42.1 and
    the public kernels), although operands hold room for more. Without a load, each row of the buffer is a
    draw from all routed experts.
    """
    operands = _grouped_operands(computation, instruction)
    if operands is None:
        return None
    taken = load or _drawn_load(operands)
    n_rows, width = operands.rows.dims
    n_used = min(n_rows, taken.rows)
    results = sum(array.n_bytes or 0 for array in instruction.arrays[:1])
    rows_bytes = (operands.rows.n_bytes or 0) * n_used / n_rows
    written_bytes = results * n_used / n_rows
    stored_bytes = (operands.weights.n_bytes or 0) + operands.scale_bytes
    weights_bytes = stored_bytes * _read_frac(operands, taken)
    return KernelWork(
        source=WorkSource.ALGORITHM,
        flops=2 * n_used * width * operands.n_out,
        moved=ArrayTraffic(
            hbm_bytes=round(rows_bytes + written_bytes + weights_bytes),
            hbm_written_bytes=round(written_bytes),
        ),
        conversion_cycles=_conversion_cycles(instruction, operands, taken, facts),
        operand_dtype=operands.rows.dtype,
        note=None if load else _note(operands),
    )


def _conversion_cycles(
    instruction: Instruction, operands: GroupedOperands, load: ExpertLoad, facts: CompilerFacts
) -> float:
    """Cycles of the kernel for few rows to convert weights of 4 bits, once for each visit of a tile of rows."""
    tile = _TILE.search(instruction.name)
    if tile is None:
        return 0.0
    n_tiles = ceil(min(operands.rows.dims[0], load.rows) / int(tile[1]))
    n_visits = load.experts + max(0, n_tiles - 1)
    return n_visits * prod(operands.weights.dims[1:]) * operands.weight_cycles(facts)


def fused_work(
    computation: Computation,
    instruction: Instruction,
    load: ExpertLoad | None,
    facts: CompilerFacts,
) -> KernelWork | None:
    """Work of a mixture of experts in one kernel; None for another kernel.

    Under balanced routing a device computes as many rows as it sends. It reads the weights of the experts
    that get any rows, once in each block of tokens.
    """
    sizes = fused_experts(computation, instruction)
    if sizes is None:
        return None
    n_rows = sizes.n_tokens * sizes.n_active
    n_blocks = ceil(sizes.n_tokens / sizes.block_tokens)
    miss_frac = (1 - 1 / sizes.n_experts) ** (n_rows * sizes.n_ranks / n_blocks)
    hit_frac = 1 - miss_frac if load is None else min(1.0, load.experts / sizes.n_local)
    n_reads = n_blocks * hit_frac
    token_bytes = sizes.exchanged_bytes // (2 * sizes.n_active)
    return KernelWork(
        source=WorkSource.ALGORITHM,
        flops=2 * n_rows * sizes.n_expert_weights,
        moved=ArrayTraffic(
            hbm_bytes=round(sizes.weights_bytes * n_reads) + 2 * token_bytes,
            hbm_written_bytes=token_bytes,
        ),
        cycles=_fused_cycles(sizes, n_reads, facts),
        note=None
        if load
        else f"fused experts are timed for balanced routing of {n_rows} rows over {sizes.n_experts} experts",
    )


def _fused_cycles(sizes: FusedExperts, n_reads: float, facts: CompilerFacts) -> float | None:
    """Cycles of the loops over rows and of the products, by their bundles; None on a chip without counts."""
    of_row = row_cycles(facts)
    of_tile = tile_cycles(facts, sizes.n_expert_weights)
    if of_row is None or of_tile is None:
        return None
    n_rows = sizes.n_tokens * sizes.n_active
    of_tile_frac = min(1.0, sizes.n_tokens / TILE_ROWS)
    n_tiles = sizes.n_local * n_reads * of_tile_frac
    return n_rows * of_row + max(n_tiles, n_rows / TILE_ROWS + n_tiles / 2) * of_tile


def _note(operands: GroupedOperands) -> str:
    routed = operands.n_routed or operands.n_experts
    return (
        f"grouped matrix products are timed for balanced routing of {operands.rows.dims[0]} rows "
        f"over {routed} experts"
    )


def _drawn_load(operands: GroupedOperands) -> ExpertLoad:
    routed = operands.n_routed or operands.n_experts
    n_rows, share = operands.rows.dims[0], operands.n_experts / routed
    reached = operands.n_experts * (1 - (1 - 1 / routed) ** n_rows)
    return ExpertLoad(rows=round(n_rows * share), experts=reached)


def _read_frac(operands: GroupedOperands, load: ExpertLoad) -> float:
    """Share of the weights in blocks of which at least one expert has rows."""
    missed = max(0.0, 1 - load.experts / operands.n_experts)
    return 1 - missed**operands.n_together


def _grouped_operands(computation: Computation, instruction: Instruction) -> GroupedOperands | None:
    if not _NAME.search(instruction.name):
        return None
    arrays = operand_arrays(computation, instruction)
    wide = [array for array in arrays if len(array.dims) == 3 and _is_number(array)]
    flat = [
        array
        for array in arrays
        if len(array.dims) == 2 and array.dtype.startswith(("bf", "f", "s8"))
    ]
    # Scales are flat arrays, too, of another dtype than rows and results.
    result = instruction.arrays[0].dtype if instruction.arrays else None
    by_dtype = sorted(flat, key=lambda array: array.dtype == result)
    by_size = sorted(wide, key=lambda array: prod(array.dims))
    for weights in reversed(by_size):
        for rows in reversed(by_dtype):
            if rows.dims[1] in weights.dims[1:]:
                return GroupedOperands(
                    rows=rows,
                    weights=weights,
                    n_out=prod(weights.dims[1:]) // rows.dims[1],
                    scale_bytes=sum(
                        array.n_bytes or 0
                        for array in wide
                        if array is not weights and array.dims[::2] == weights.dims[::2]
                    ),
                    four_bit_dtype=_four_bit_dtype(weights, arrays),
                    n_routed=_routed_experts(computation, instruction, weights.dims[0]),
                    n_together=_block_of_experts(arrays, instruction, weights),
                )
    return None


def _four_bit_dtype(weights: ArrayShape, arrays: list[ArrayShape]) -> str | None:
    """The dtype of weights in int4 arrays, by that of their scales; None for others."""
    if weights.dtype != "s4":
        return None
    return "f4e2m1fn" if any(array.dtype == "u8" for array in arrays) else "s4"


def _is_number(array: ArrayShape) -> bool:
    return array.dtype != "pred"


def _routed_experts(
    computation: Computation, instruction: Instruction, n_experts: int
) -> int | None:
    """The size of the array of which the group sizes are a slice."""
    for operand in computation.producers(instruction):
        if operand.arrays and operand.arrays[0].dims == (n_experts,):
            sources = computation.producers(operand)[:1]
            sizes = [source.arrays[0].dims for source in sources if source.arrays]
            if sizes and len(sizes[0]) == 1 and sizes[0][0] % n_experts == 0:
                return sizes[0][0]
    return None


def _block_of_experts(
    arrays: list[ArrayShape], instruction: Instruction, weights: ArrayShape
) -> int:
    """Experts in a block: a list of blocks is an operand, and VMEM has room for two blocks."""
    match = _SCOPED_VMEM.search(instruction.attributes)
    expert_bytes = (weights.n_bytes or 0) / weights.dims[0]
    fits = 1 if match is None or not expert_bytes else int(int(match[1]) / expert_bytes / 2)
    n_blocks = [prod(a.dims) for a in arrays if a.dtype == "s32" and prod(a.dims) > 1]
    together = [weights.dims[0] // n for n in n_blocks if n and weights.dims[0] % n == 0]
    return max((n for n in together if 1 < n <= fits), default=1)
