"""How much a kernel computes: by its own cost estimate, or by the shapes of the kernels that we know.

A custom call that talks to other chips is priced with the collectives, not here.
"""

import re
from math import prod

from meshscope.hlo.module import Computation, Instruction

_FLOPS = re.compile(r'"cost_estimate":\{[^}]*"flops":"?(\d+)')
_BYTES = re.compile(r'"cost_estimate":\{[^}]*"bytes_accessed":"?(\d+)')


def stated_cost(instruction: Instruction) -> tuple[int, int] | None:
    """Flops and bytes that the kernel's author states; None where nothing is stated."""
    flops, moved = (pattern.search(instruction.attributes) for pattern in (_FLOPS, _BYTES))
    if flops is None or moved is None:
        return None
    cost = int(flops[1]), int(moved[1])
    return cost if any(cost) else None


def known_flops(
    computation: Computation, instruction: Instruction, expert_rows: int | None = None
) -> int | None:
    """Flops of a splash attention or ragged dot by its operands; None for another kernel.

    A ragged dot skips the rows of its buffer that no expert has: `expert_rows` are those expected.
    """
    shapes = [
        array.dims
        for operand in computation.producers(instruction)
        for array in operand.arrays[:1]
        if array.dtype.startswith(("bf", "f"))
    ]
    name = instruction.name
    if name.startswith("splash_"):
        return _splash_flops(computation, instruction, shapes)
    if name.startswith("ragged-dot") and len(shapes) >= 2 and len(shapes[-1]) == 3:
        rows, weights = shapes[-2], shapes[-1]
        n_rows = rows[0] if expert_rows is None else min(rows[0], expert_rows)
        return 2 * n_rows * prod(rows[1:]) * weights[-1]
    return 0 if name.startswith("ragged-dot") else None


def expected_cost(
    computation: Computation,
    instruction: Instruction,
    stated: tuple[int, int],
    expert_rows: int | None,
) -> tuple[int, int]:
    """What a kernel states, of a ragged dot for the rows that routing is expected to bring.

    It states all rows that its buffer has room for. Those that no expert has are skipped; weights are
    read for however few.
    """
    rows = [
        array
        for operand in computation.producers(instruction)
        for array in operand.arrays[:1]
        if array.dtype.startswith(("bf", "f")) and len(array.dims) == 2
    ]
    if expert_rows is None or not instruction.name.startswith("ragged-dot") or not rows:
        return stated
    skipped_frac = 1 - min(1.0, expert_rows / rows[-1].dims[0])
    row_bytes = sum(array.n_bytes or 0 for array in (rows[-1], *instruction.arrays[:1]))
    return (
        round(stated[0] * (1 - skipped_frac)),
        max(0, round(stated[1] - skipped_frac * row_bytes)),
    )


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
