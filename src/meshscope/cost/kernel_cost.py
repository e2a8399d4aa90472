"""FLOPs and bytes of kernels, from the author's cost estimate or from the shapes of known kernels.

Custom calls that communicate are priced as collectives, not here.
"""

import re
from math import prod

from meshscope.cost.expert_load import ExpertLoad
from meshscope.readers.hlo.module import ArrayShape, Computation, Instruction
from meshscope.spec.model.flops import causal_blocks

_FLOPS = re.compile(r'"cost_estimate":\{[^}]*"flops":"?(\d+)')
_WINDOW = re.compile(r'"sliding_window_length":\s*(\d+)')
_CAUSAL = re.compile(r'"mask_type":\s*"CAUSAL"')
_BYTES = re.compile(r'"cost_estimate":\{[^}]*"bytes_accessed":"?(\d+)')


def declared_cost(instruction: Instruction) -> tuple[int, int] | None:
    """FLOPs and bytes that the kernel's author declares; None without a declaration."""
    flops, accessed = (pattern.search(instruction.attributes) for pattern in (_FLOPS, _BYTES))
    if flops is None or accessed is None:
        return None
    cost = int(flops[1]), int(accessed[1])
    return cost if any(cost) else None


def _float_operands(computation: Computation, instruction: Instruction) -> list[ArrayShape]:
    operands = computation.producers(instruction)
    arrays = (array for operand in operands for array in operand.arrays[:1])
    return [array for array in arrays if array.dtype.startswith(("bf", "f"))]


def known_kernel_flops(computation: Computation, instruction: Instruction) -> int | None:
    """FLOPs of an attention kernel or ragged dot from its operands; None for another kernel."""
    shapes = [array.dims for array in _float_operands(computation, instruction)]
    if (instruction.custom_call_target or "").startswith("__cudnn$fmha"):
        return _cudnn_flops(instruction, shapes)
    if instruction.name.startswith("splash_"):
        return _splash_flops(computation, instruction, shapes)
    is_ragged = instruction.name.startswith("ragged-dot")
    if is_ragged and len(shapes) >= 2 and len(shapes[-1]) == 3:
        rows, weights = shapes[-2], shapes[-1]
        return 2 * prod(rows) * weights[-1]
    return 0 if is_ragged else None


def ragged_dot_cost(
    computation: Computation, instruction: Instruction, load: ExpertLoad
) -> tuple[int, int] | None:
    """FLOPs and bytes of a ragged dot for the expected expert load; None for another kernel.

    The kernel declares all rows of its buffer, and the experts of all layers of a stack. libtpu's
    kernel (0.0.42.1, read from compiled programs) lists the tiles of experts with rows, and computes and
    reads only these.
    """
    floats = _float_operands(computation, instruction)
    is_ragged = instruction.name.startswith("ragged-dot") and len(floats) >= 2
    if not is_ragged or len(floats[-1].dims) != 3 or len(floats[-2].dims) != 2:
        return None
    (n_rows, width), (n_experts, _, n_out) = floats[-2].dims, floats[-1].dims
    n_used_rows = min(n_rows, load.rows)
    row_bytes = sum(array.n_bytes or 0 for array in (floats[-2], *instruction.arrays[:1])) / n_rows
    read_frac = min(1.0, load.experts / n_experts)
    n_bytes = n_used_rows * row_bytes + read_frac * (floats[-1].n_bytes or 0)
    return 2 * n_used_rows * width * n_out, round(n_bytes)


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
    computed_frac = causal_blocks(n_rows, min(width, n_rows)) / n_rows**2
    n_pairs = prod(queries[:-1]) * keys[-2]
    return round(2 * n_pairs * (queries[-1] + values[-1]) * computed_frac)
