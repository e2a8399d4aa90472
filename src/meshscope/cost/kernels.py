"""Work of kernels from their operands: attention, and products of rows with their experts.

Known are splash, cuDNN, paged and ragged paged attention, ragged dots, gmm, and mixtures in one kernel. A grouped
product takes the rows and experts that balanced routing reaches. A mixture in one kernel
(`fused_ep_moe` of SGLang-JAX and tpu-inference) takes blocks of tokens. In each block it sends every row to
its expert in a separate DMA, multiplies the rows expert by expert in tiles, sends the results back, and fetches
and adds each token's results, again row by row. The loops over rows are scalar code, and nothing else runs
meanwhile. The weights are read once per block.

Cycles count libtpu's bundles (`compiler_facts.json`); nothing was measured on a TPU. Left out: the
barriers of a block, the wait for the most loaded device, and the scan of all tokens for each expert if the
buffers of all experts exceed the kernel's share of the HBM.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

from meshscope.cost.array_traffic import KernelWork, operand_arrays, touched_traffic
from meshscope.cost.expert_load import TILE_ROWS, ExpertLoad, fused_cycles
from meshscope.cost.paged import PagedBlocks
from meshscope.cost.rates import NO_TRAFFIC, ArrayTraffic, Rates
from meshscope.errors import SpecError
from meshscope.hardware.compiler_facts import OPERATIONS, CompilerFacts
from meshscope.model.arrays import LANES
from meshscope.model.mechanisms.attention import causal_blocks
from meshscope.plans.kernel_choice import SPLASH_BLOCKS, WHOLE_BLOCK_SCOPE
from meshscope.plans.workload import SequenceLengths
from meshscope.readers.hlo.communication import fused_experts
from meshscope.readers.hlo.module import ArrayShape, Computation, Instruction

_WINDOW = re.compile(r'"sliding_window_length":\s*(\d+)')
_CAUSAL = re.compile(r'"mask_type":\s*"CAUSAL"')
# Scopes of tpu-inference: RPA-bq_64-bkvp_9-p_128 (0.12); RPAd-p_128-bq_1_1-bkv_2048_512 (later), in which
# d is decode, p prefill and m mixed.
_RAGGED_PAGED = re.compile(r"^RPA([dpm]?)-")
_BLOCK_SIZE = re.compile(r"-(p|bq|bkvp|bkv)_(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedOperands:
    """Operands and block sizes of a paged attention kernel."""

    case: str  # d: decode only, p: prefill only; else all sequences
    n_tokens: int
    n_sequences: int
    n_group: int  # query heads of a KV head
    n_kv_heads: int
    head_dim: int
    key_bytes: float  # of keys and values of one position, all heads
    capacity: float  # positions that the pages of a sequence hold
    page: int
    block_queries: int
    block_keys: int


def attention_work(
    computation: Computation,
    instruction: Instruction,
    lengths: Sequence[SequenceLengths],
    rates: Rates,
) -> KernelWork | None:
    """Work of a known attention kernel; None for another kernel.

    Scores of heads narrower than 128 take as long as at 128 in splash attention, which fills the registers.
    """
    if operands := _ragged_paged_operands(computation, instruction):
        _check_lengths(operands, lengths, instruction.name)
        return _paged_work(operands, lengths, rates.flops_per_s / (rates.clock_hz or 1e9))
    arrays = operand_arrays(computation, instruction)
    shapes = [array.dims for array in arrays if array.dtype.startswith(("bf", "f"))]
    is_splash, flops, cycles = instruction.name.startswith("splash_"), None, None
    if (instruction.custom_call_target or "").startswith("__cudnn$fmha"):
        flops = _cudnn_flops(instruction, shapes)
    elif is_splash:
        flops = _splash_flops(computation, instruction, shapes)
    if flops is None:
        return None
    block_cycles = rates.facts.splash_block_cycles
    if block_cycles is not None and is_splash:
        queries, _, values = shapes[:3]
        n_blocks = flops / (2 * (queries[-1] + values[-1])) / SPLASH_BLOCKS[0] ** 2
        width = sum(ceil(dims[-1] / LANES) * LANES for dims in (queries, values))
        cycles = n_blocks * block_cycles * width / (2 * LANES)
    moved = touched_traffic(computation, instruction)
    return KernelWork(flops=flops, moved=moved, cycles=cycles)


def _ragged_paged_operands(
    computation: Computation, instruction: Instruction
) -> PagedOperands | None:
    """Queries [K, T, G/p, p, H], cache [pages, page, K, 2, H]; lists of lengths and pages of sequences."""
    if (match := _RAGGED_PAGED.match(instruction.name)) is None:
        return None
    arrays = operand_arrays(computation, instruction)
    floats = [array for array in arrays if len(array.dims) == 5]
    lists = [array.dims[0] for array in arrays if array.dtype == "s32" and len(array.dims) == 1]
    sizes = {key: int(size) for key, size in _BLOCK_SIZE.findall(instruction.name)}
    if len(floats) < 2 or len(lists) < 2 or "bq" not in sizes or "p" not in sizes:
        return None
    queries, cache, page = floats[0], floats[-1], sizes["p"]
    return PagedOperands(
        case=match[1],
        n_tokens=queries.dims[1],
        n_sequences=lists[0],
        n_group=prod(queries.dims[2:4]),
        n_kv_heads=queries.dims[0],
        head_dim=queries.dims[-1],
        key_bytes=(cache.n_bytes or 0) / prod(cache.dims[:2]),
        capacity=lists[1] / lists[0] * page,
        page=page,
        block_queries=sizes["bq"],
        block_keys=sizes["bkv"] if "bkv" in sizes else sizes.get("bkvp", 1) * page,
    )


def _check_lengths(operands: PagedOperands, lengths: Sequence[SequenceLengths], name: str) -> None:
    n_sequences = sum(group.n_sequences for group in lengths)
    n_tokens = sum(group.n_sequences * group.n_queries for group in lengths)
    if n_sequences > operands.n_sequences or n_tokens > operands.n_tokens:
        raise SpecError(
            f"the lengths have {n_sequences} sequences with {n_tokens} new tokens, but '{name}' of the "
            f"program has room for {operands.n_sequences} with {operands.n_tokens}. Give the lengths of "
            "one step of this program on one device."
        )


def _paged_work(
    operands: PagedOperands, lengths: Sequence[SequenceLengths], flops_per_cycle: float
) -> KernelWork:
    """The work for all sequences of the kernel's case; a kernel without sequences only starts.

    Without lengths, sequences are equal: new ones in prefill; in decode, the pages of each are half full.
    """
    taken, note = list(lengths), None
    if not taken:
        n_queries = max(1, operands.n_tokens // operands.n_sequences)
        n_keys = n_queries if n_queries > 1 else max(1.0, operands.capacity / 2)
        n_sequences = operands.n_sequences
        taken = [SequenceLengths(n_sequences=n_sequences, n_queries=n_queries, n_keys=n_keys)]
        note = (
            f"attention kernels are timed for {n_sequences} sequences of {n_queries} "
            f"queries and {n_keys:g} keys, an assumption from the operands"
        )
    case = operands.case
    works = [
        _sequences_work(operands, group, flops_per_cycle)
        for group in taken
        if case != ("p" if group.n_queries == 1 else "d")
        and not (case == "m" and group.n_queries == 1)
    ]
    if not works:
        return KernelWork(
            moved=NO_TRAFFIC, cycles=OPERATIONS.paged_attention["vllm-v3"].fetch_cycles
        )
    return KernelWork(
        flops=sum(work.flops for work in works),
        moved=sum((work.moved for work in works), start=NO_TRAFFIC),
        cycles=sum(work.cycles or 0.0 for work in works),
        note=note,
    )


def _sequences_work(
    operands: PagedOperands, taken: SequenceLengths, flops_per_cycle: float
) -> KernelWork:
    """Each block of queries runs over all blocks of keys of its sequence, present positions only.

    The vector or the matrix unit bounds a block of queries and keys, for all KV heads.
    """
    n_query_blocks = taken.n_sequences * ceil(taken.n_queries / operands.block_queries)
    n_bodies = n_query_blocks * ceil(taken.n_keys / operands.block_keys)
    block_queries = min(operands.block_queries, taken.n_queries)
    cycles = PagedBlocks(queries=block_queries, keys=operands.block_keys).cycles(
        n_heads=operands.n_group,
        n_kv_heads=operands.n_kv_heads,
        score_flops=4 * operands.head_dim,
        flops_per_cycle=flops_per_cycle,
    )
    fetched = ceil(taken.n_keys / operands.page) * operands.page * operands.key_bytes
    n_heads = operands.n_kv_heads * operands.n_group
    n_queries = taken.n_sequences * taken.n_queries
    written = n_queries * (2 * n_heads * operands.head_dim + operands.key_bytes)
    return KernelWork(
        flops=4 * n_queries * taken.n_keys * n_heads * operands.head_dim,
        moved=ArrayTraffic(
            hbm_bytes=round(n_query_blocks * fetched + 2 * written),
            hbm_written_bytes=round(written),
        ),
        cycles=n_bodies * cycles,
    )


def _cudnn_flops(instruction: Instruction, shapes: list[tuple[int, ...]]) -> int | None:
    """Products of [B, S, N, H] queries, [B, T, K, H] keys and their values.

    A causal mask computes half of the pairs, a window at most its width per query.
    """
    if len(shapes) < 3 or any(len(shape) != 4 for shape in shapes[:3]):
        return None
    queries, keys, values = shapes[:3]
    n_keys = float(keys[1])
    if _CAUSAL.search(instruction.attributes):
        n_keys /= 2
    window = _WINDOW.search(instruction.attributes)
    if window is not None and int(window[1]):
        n_keys = min(n_keys, int(window[1]))
    return round(2 * prod(queries[:3]) * n_keys * (queries[3] + values[3]))


def _splash_flops(
    computation: Computation, instruction: Instruction, shapes: list[tuple[int, ...]]
) -> int | None:
    """Products of queries, keys and values in the blocks of the mask that splash attention computes.

    The first two operands are the grid of mask blocks: rows of query blocks, and as many columns as the
    widest row has key blocks, fewer than rows under a window. A batch dimension precedes both.
    """
    if len(shapes) < 3:
        return None
    queries, keys, values = shapes[:3]
    grids = [
        array.dims[-2:]
        for operand in computation.producers(instruction)[:2]
        for array in operand.arrays[:1]
        if len(array.dims) >= 2
    ]
    n_rows, width = max(grids, default=(1, 1))
    # A chunk of a prompt has more columns than rows: columns before it are computed for every row.
    if WHOLE_BLOCK_SCOPE in (instruction.op_name or "").split("/"):
        n_blocks = n_rows * width
    else:
        n_blocks = causal_blocks(n_rows, min(width, n_rows)) + max(0, width - n_rows) * n_rows
    computed_frac = n_blocks * queries[-2] / (n_rows**2 * keys[-2])
    n_pairs = prod(queries[:-1]) * keys[-2]
    return round(2 * n_pairs * (queries[-1] + values[-1]) * computed_frac)


_NAME = re.compile(r"gmm|ragged[-_]?dot|grouped|megablox")
_TILE = re.compile(r"grouped_matmul_m(\d+)_")  # rows of a tile in meshscope's kernel
_SCOPED_VMEM = re.compile(r'"used_scoped_memory_configs":\[\{[^}]*"size":"(\d+)"')


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
    arrays = operand_arrays(computation, instruction)
    operands = _grouped_operands(instruction, arrays)
    if operands is None:
        return None
    rows, weights, scale_bytes = operands
    n_experts, (n_rows, width), note = weights.dims[0], rows.dims, None
    if load is None:
        routed = _routed_experts(computation, instruction, n_experts)
        note = (
            f"grouped matrix products are timed for balanced routing of {n_rows} rows "
            f"over {routed} experts"
        )
        reached = n_experts * (1 - (1 - 1 / routed) ** n_rows)
        load = ExpertLoad(rows=round(n_rows * (n_experts / routed)), experts=reached)
    n_used = min(n_rows, load.rows)
    results = sum(array.n_bytes or 0 for array in instruction.arrays[:1])
    rows_bytes = (rows.n_bytes or 0) * n_used / n_rows
    written_bytes = results * n_used / n_rows
    # A block of experts is read if any of them has rows.
    read_frac = 1 - max(0.0, 1 - load.experts / n_experts) ** _block_of_experts(
        arrays, instruction, weights
    )
    weights_bytes = ((weights.n_bytes or 0) + scale_bytes) * read_frac
    conversion_cycles, tile = 0.0, _TILE.search(instruction.name)
    if tile is not None and weights.dtype == "s4":
        # The kernel for few rows converts weights of 4 bits once for each visit of a tile of rows.
        n_visits = load.experts + max(0, ceil(n_used / int(tile[1])) - 1)
        is_mxfp4 = any(array.dtype == "u8" for array in arrays)  # by its scales
        of_weight = facts.four_bit_cycles[is_mxfp4]
        conversion_cycles = n_visits * prod(weights.dims[1:]) * of_weight
    return KernelWork(
        flops=2 * n_used * width * (prod(weights.dims[1:]) // width),
        moved=ArrayTraffic(
            hbm_bytes=round(rows_bytes + written_bytes + weights_bytes),
            hbm_written_bytes=round(written_bytes),
        ),
        conversion_cycles=conversion_cycles,
        operand_dtype=rows.dtype,
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
    cycles, of_kernel = None, fused_cycles(facts, sizes.n_expert_weights)
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
    instruction: Instruction, arrays: Sequence[ArrayShape]
) -> tuple[ArrayShape, ArrayShape, int] | None:
    """The rows, the weights of each expert, and the bytes of all scales of groups of inputs."""
    if not _NAME.search(instruction.name):
        return None
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
                return rows, weights, sum(array.n_bytes or 0 for array in scales)
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
    arrays: Sequence[ArrayShape], instruction: Instruction, weights: ArrayShape
) -> int:
    """Experts in a block: a list of blocks is an operand, and VMEM has room for two blocks."""
    match = _SCOPED_VMEM.search(instruction.attributes)
    expert_bytes = (weights.n_bytes or 0) / weights.dims[0]
    fits = 1 if match is None or not expert_bytes else int(int(match[1]) / expert_bytes / 2)
    n_blocks = [prod(a.dims) for a in arrays if a.dtype == "s32" and prod(a.dims) > 1]
    together = [weights.dims[0] // n for n in n_blocks if n and weights.dims[0] % n == 0]
    return max((n for n in together if 1 < n <= fits), default=1)
