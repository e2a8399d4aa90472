"""How much a kernel computes: by its own cost estimate, or by the shapes of the kernels that we know.

A custom call that talks to other chips is priced with the collectives, not here.
"""

import re
from dataclasses import dataclass
from math import prod

from meshscope.readers.hlo.module import Computation, Instruction

_FLOPS = re.compile(r'"cost_estimate":\{[^}]*"flops":"?(\d+)')
_WINDOW = re.compile(r'"sliding_window_length":\s*(\d+)')
_CAUSAL = re.compile(r'"mask_type":\s*"CAUSAL"')
_BYTES = re.compile(r'"cost_estimate":\{[^}]*"bytes_accessed":"?(\d+)')


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """What routing is expected to bring to one device in a layer: rows, and experts that have some."""

    rows: int
    experts: float


def stated_cost(instruction: Instruction) -> tuple[int, int] | None:
    """Flops and bytes that the kernel's author states; None where nothing is stated."""
    flops, moved = (pattern.search(instruction.attributes) for pattern in (_FLOPS, _BYTES))
    if flops is None or moved is None:
        return None
    cost = int(flops[1]), int(moved[1])
    return cost if any(cost) else None


def known_flops(computation: Computation, instruction: Instruction) -> int | None:
    """Flops of an attention kernel or a ragged dot by its operands; None for another kernel."""
    shapes = [
        array.dims
        for operand in computation.producers(instruction)
        for array in operand.arrays[:1]
        if array.dtype.startswith(("bf", "f"))
    ]
    name = instruction.name
    if (instruction.custom_call_target or "").startswith("__cudnn$fmha"):
        return _cudnn_flops(instruction, shapes)
    if name.startswith("splash_"):
        return _splash_flops(computation, instruction, shapes)
    if name.startswith("ragged-dot") and len(shapes) >= 2 and len(shapes[-1]) == 3:
        rows, weights = shapes[-2], shapes[-1]
        return 2 * prod(rows) * weights[-1]
    return 0 if name.startswith("ragged-dot") else None


def ragged_dot_cost(
    computation: Computation, instruction: Instruction, load: ExpertLoad
) -> tuple[int, int] | None:
    """Flops and bytes of a ragged dot for the rows that routing is expected to bring; None for another kernel.

    It states all rows that its buffer has room for, and the experts of all layers where they lie in a
    stack. libtpu's kernel (0.0.42.1, read from the text in the compiled program) lists the tiles of
    experts that have rows, and takes those alone: the others are neither computed nor read.
    """
    floats = [
        array
        for operand in computation.producers(instruction)
        for array in operand.arrays[:1]
        if array.dtype.startswith(("bf", "f"))
    ]
    is_ragged = instruction.name.startswith("ragged-dot") and len(floats) >= 2
    if not is_ragged or len(floats[-1].dims) != 3 or len(floats[-2].dims) != 2:
        return None
    (n_rows, width), (n_experts, _, n_out) = floats[-2].dims, floats[-1].dims
    n_kept = min(n_rows, load.rows)
    row_bytes = sum(array.n_bytes or 0 for array in (floats[-2], *instruction.arrays[:1])) / n_rows
    read_frac = min(1.0, load.experts / n_experts)
    n_bytes = n_kept * row_bytes + read_frac * (floats[-1].n_bytes or 0)
    return 2 * n_kept * width * n_out, round(n_bytes)


def _cudnn_flops(instruction: Instruction, shapes: list[tuple[int, ...]]) -> int | None:
    """Scores of [B, S, N, H] queries with [B, T, K, H] keys, and their product with the values.

    A causal mask leaves half of the scores, a window its width of each query's.
    """
    if len(shapes) < 3 or any(len(shape) != 4 for shape in shapes[:3]):
        return None
    queries, keys, values = shapes[:3]
    seen = float(keys[1])
    if _CAUSAL.search(instruction.attributes):
        seen /= 2
    window = _WINDOW.search(instruction.attributes)
    if window is not None and int(window[1]):
        seen = min(seen, int(window[1]))
    return round(2 * prod(queries[:3]) * seen * (queries[3] + values[3]))


def _splash_flops(
    computation: Computation, instruction: Instruction, shapes: list[tuple[int, ...]]
) -> int | None:
    """Scores and their product with the values, for the blocks of a causal mask that are computed.

    The first operands are the grid of the mask's blocks, of which a causal mask leaves those on the
    diagonal and below: (n + 1) / 2n. A kernel that is mapped over a batch has it in front.
    """
    if len(shapes) < 3:
        return None
    queries, keys, values = shapes[:3]
    grids = [
        array.dims
        for operand in computation.producers(instruction)[:2]
        for array in operand.arrays[:1]
    ]
    n_blocks = max((dims[-2] for dims in grids if len(dims) >= 2), default=1)
    n_keys, n_queries = keys[-2], prod(queries[:-1])
    causal = (n_blocks + 1) / (2 * n_blocks)
    return round(2 * n_queries * n_keys * (queries[-1] + values[-1]) * causal)
