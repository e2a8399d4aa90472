"""Work of kernels that multiply each row with its experts: ragged dots, gmm, and mixtures in one kernel.

A grouped product takes the rows and experts that balanced routing reaches. A mixture in one kernel
(`fused_ep_moe` of SGLang-JAX and tpu-inference) takes blocks of tokens. In each block it sends every row to
its expert in a separate DMA, multiplies the rows expert by expert in tiles, sends the results back, and fetches
and adds each token's results, again row by row. The loops over rows are scalar code, and nothing else runs
meanwhile. The weights are read once per block.

Cycles count libtpu's bundles (`compiler_facts.json`); nothing was measured on a TPU. Left out: the
barriers of a block, the wait for the most loaded device, and the scan of all tokens for each expert if the
buffers of all experts exceed the kernel's share of the HBM.
"""

import re
from dataclasses import dataclass
from math import ceil, prod
from typing import NamedTuple

from meshscope.cost.array_traffic import KernelWork, operand_arrays
from meshscope.cost.expert_load import ExpertLoad
from meshscope.cost.rates import ArrayTraffic, Rates
from meshscope.hardware.compiler_facts import CompilerFacts
from meshscope.plans.dispatch import FUSED_BLOCK_TOKENS, DispatchForm
from meshscope.plans.experiment import Experiment
from meshscope.readers.hlo.communication import fused_experts
from meshscope.readers.hlo.module import ArrayShape, Computation, Instruction

_NAME = re.compile(r"gmm|ragged[-_]?dot|grouped|megablox")
_TILE = re.compile(r"grouped_matmul_m(\d+)_")  # rows of a tile in meshscope's kernel
_SCOPED_VMEM = re.compile(r'"used_scoped_memory_configs":\[\{[^}]*"size":"(\d+)"')
TILE_ROWS = 128
# Passes over the rows of experts while weights are read: staged, results stored, and sent back (2).
FUSED_ROW_PASSES = 4
_COUNTED_WEIGHTS = 3 * 2048 * 768  # of the expert whose bundles are in `compiler_facts.json`


class FusedRates(NamedTuple):
    """Seconds of a row in all loops over rows, and of the products of a tile of rows with one expert."""

    row_s: float
    tile_s: float


def fused_rates(experiment: Experiment, rates: Rates) -> FusedRates | None:
    """The rates of the fused kernel; None if the program has none."""
    moe = experiment.model.moe
    if experiment.dispatch_form is not DispatchForm.FUSED or moe is None or not rates.clock_hz:
        return None
    cycles = _fused_cycles(rates.facts, 3 * experiment.model.hidden * moe.ffn)
    return cycles and FusedRates(*(n / rates.clock_hz for n in cycles))


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


def _fused_cycles(facts: CompilerFacts, n_weights: int) -> tuple[float, float] | None:
    """Cycles to send a row, fetch its result, wait for it and add it, and to multiply a tile of rows with an expert.

    None on a chip without counts.
    """
    cycles = facts.fused_expert_cycles.value
    return None if cycles is None else (cycles[0], cycles[1] * n_weights / _COUNTED_WEIGHTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupedOperands:
    """The rows and the weights of each expert; `n_together` experts are fetched as one block."""

    rows: ArrayShape
    weights: ArrayShape
    scale_bytes: int  # of groups of inputs of all experts
    n_routed: int  # experts of all devices, if the group sizes are a slice of theirs
    n_together: int


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
    weights, n_experts, note = operands.weights, operands.weights.dims[0], None
    n_rows, width = operands.rows.dims
    if load is None:
        routed = operands.n_routed
        note = (
            f"grouped matrix products are timed for balanced routing of {n_rows} rows "
            f"over {routed} experts"
        )
        reached = n_experts * (1 - (1 - 1 / routed) ** n_rows)
        load = ExpertLoad(rows=round(n_rows * (n_experts / routed)), experts=reached)
    n_used = min(n_rows, load.rows)
    results = sum(array.n_bytes or 0 for array in instruction.arrays[:1])
    rows_bytes = (operands.rows.n_bytes or 0) * n_used / n_rows
    written_bytes = results * n_used / n_rows
    # A block of experts is read if any of them has rows.
    read_frac = 1 - max(0.0, 1 - load.experts / n_experts) ** operands.n_together
    weights_bytes = ((weights.n_bytes or 0) + operands.scale_bytes) * read_frac
    conversion_cycles, tile = 0.0, _TILE.search(instruction.name)
    if tile is not None and weights.dtype == "s4":
        # The kernel for few rows converts weights of 4 bits once for each visit of a tile of rows.
        n_visits = load.experts + max(0, ceil(n_used / int(tile[1])) - 1)
        arrays = operand_arrays(computation, instruction)
        is_mxfp4 = any(array.dtype == "u8" for array in arrays)  # by its scales
        of_weight = facts.four_bit_cycles.value[is_mxfp4]
        conversion_cycles = n_visits * prod(weights.dims[1:]) * of_weight
    return KernelWork(
        flops=2 * n_used * width * (prod(weights.dims[1:]) // width),
        moved=ArrayTraffic(
            hbm_bytes=round(rows_bytes + written_bytes + weights_bytes),
            hbm_written_bytes=round(written_bytes),
        ),
        conversion_cycles=conversion_cycles,
        operand_dtype=operands.rows.dtype,
        note=note,
    )


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
    cycles, of_kernel = None, _fused_cycles(facts, sizes.n_expert_weights)
    if of_kernel is not None:
        of_row, of_tile = of_kernel
        n_tiles = sizes.n_local * n_reads * min(1.0, sizes.n_tokens / TILE_ROWS)
        cycles = n_rows * of_row + max(n_tiles, n_rows / TILE_ROWS + n_tiles / 2) * of_tile
    return KernelWork(
        flops=2 * n_rows * sizes.n_expert_weights,
        moved=ArrayTraffic(
            hbm_bytes=round(sizes.weights_bytes * n_reads) + 2 * token_bytes,
            hbm_written_bytes=token_bytes,
        ),
        cycles=cycles,
        note=None
        if load
        else f"fused experts are timed for balanced routing of {n_rows} rows over {sizes.n_experts} experts",
    )


def _grouped_operands(
    computation: Computation, instruction: Instruction
) -> _GroupedOperands | None:
    if not _NAME.search(instruction.name):
        return None
    arrays = operand_arrays(computation, instruction)
    wide = [array for array in arrays if len(array.dims) == 3 and array.dtype != "pred"]
    flat = [a for a in arrays if len(a.dims) == 2 and a.dtype.startswith(("bf", "f", "s8"))]
    # Scales are flat arrays, too, of another dtype than rows and results.
    result = instruction.arrays[0].dtype if instruction.arrays else None
    flat.sort(key=lambda array: array.dtype == result)
    wide.sort(key=lambda array: prod(array.dims))
    for weights in reversed(wide):
        for rows in reversed(flat):
            if rows.dims[1] in weights.dims[1:]:
                scales = (a for a in wide if a is not weights and a.dims[::2] == weights.dims[::2])
                return _GroupedOperands(
                    rows=rows,
                    weights=weights,
                    scale_bytes=sum(array.n_bytes or 0 for array in scales),
                    n_routed=_routed_experts(computation, instruction, weights.dims[0]),
                    n_together=_block_of_experts(arrays, instruction, weights),
                )
    return None


def _routed_experts(computation: Computation, instruction: Instruction, n_experts: int) -> int:
    """The size of the array that the group sizes are sliced from, else the number of experts."""
    for operand in computation.producers(instruction):
        if operand.arrays and operand.arrays[0].dims == (n_experts,):
            sources = computation.producers(operand)[:1]
            sizes = [source.arrays[0].dims for source in sources if source.arrays]
            if sizes and len(sizes[0]) == 1 and sizes[0][0] % n_experts == 0:
                return sizes[0][0] or n_experts
    return n_experts


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
