"""The grouped product with 8-bit weights equals products with dequantized matrices, group by group."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tables import cases

from meshscope.programs.jax.grouped_matmul import GroupedKernel, tiles_of


class Case(NamedTuple):
    """Rows of each group, sizes of the matrices, their stack, and the block of a scale."""

    counts: tuple[int, ...]
    n_inputs: int
    n_outputs: int
    dtype: str = "float8_e4m3fn"
    n_before: int = 0  # groups of other layers in the stack
    block: int | None = None


def _name(case: Case) -> str:
    return "-".join(map(str, case))


def check_products(  # noqa: PLR0917  the operands and what they should give
    kernel: GroupedKernel,
    case: Any,
    rows: Any,
    stored: Any,
    scale: Any,
    matrices: Any,
    *,
    atol: float,
) -> None:
    """Products of the kernel equal those of each group's rows with its matrix."""
    counts, scale = jnp.array(case.counts, jnp.int32), jnp.asarray(scale)
    got = kernel(jnp.asarray(rows), stored, counts, scale=scale, first=case.n_before)
    of_groups = np.split(rows[: sum(case.counts)], np.cumsum(case.counts)[:-1])
    expected = np.concatenate([x @ w for x, w in zip(of_groups, matrices, strict=True)])
    np.testing.assert_allclose(got[: len(expected)], expected, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("case", cases(__file__, Case, "wide"), ids=_name)
def test_groups_are_multiplied_with_their_dequantized_matrices(case: Case) -> None:
    random, n_groups = np.random.default_rng(7), len(case.counts)
    shape = (n_groups + 2 * case.n_before, case.n_inputs, case.n_outputs)
    rows = random.normal(size=(sum(case.counts) + 3, case.n_inputs)).astype(np.float32)
    stored = jnp.asarray(random.uniform(-9, 9, size=shape).round()).astype(case.dtype)
    blocks = (case.n_inputs, 1) if case.block is None else (case.block, case.block)
    n_scales = [-(-size // block) for size, block in zip(shape[1:], blocks, strict=True)]
    scale = random.uniform(0.5, 2, size=(n_groups, *n_scales)).astype(np.float32)
    kernel = GroupedKernel(block=case.block, is_interpreted=True)
    factors = scale.repeat(blocks[0], 1).repeat(blocks[1], 2)[:, : shape[1], : shape[2]]
    matrices = np.asarray(stored, np.float32)[case.n_before :][:n_groups] * factors
    scale = scale[:, 0] if case.block is None else scale
    check_products(kernel, case, rows, stored, scale, matrices, atol=2e-3)


@pytest.mark.parametrize("has_codes", [False, True])
@pytest.mark.parametrize("case", cases(__file__, Case, "groups"), ids=_name)
def test_weights_of_4_bits_are_multiplied_with_the_scales_of_their_groups(
    case, *, has_codes
) -> None:
    """Int4 with bfloat16 scales, and mxfp4 by `ml_dtypes`; the scales are those of the whole stack."""
    random, n_groups = np.random.default_rng(8), len(case.counts)
    rows = random.normal(size=(sum(case.counts) + 3, case.n_inputs)).astype(np.float32)
    shape = (n_groups + 2 * case.n_before, case.n_inputs, case.n_outputs)
    codes = random.integers(-8, 8, size=shape).astype(np.int8)
    n_scales = (shape[0], case.n_inputs // case.block, case.n_outputs)
    if has_codes:
        scale = random.integers(124, 130, size=n_scales).astype(np.uint8)
        factors = scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        numbers = (codes.view(np.uint8) & 15).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    else:
        scale = random.uniform(0.5, 2, size=n_scales).astype(ml_dtypes.bfloat16)
        factors, numbers = scale.astype(np.float32), codes.astype(np.float32)
    kernel = GroupedKernel(has_codes=has_codes, is_interpreted=True)
    matrices = (numbers * factors.repeat(case.block, 1))[case.n_before :][:n_groups]
    stored = jnp.asarray(codes.astype(ml_dtypes.int4))
    check_products(kernel, case, rows, stored, scale, matrices, atol=4e-3)


@pytest.mark.parametrize(
    ("mean_rows", "n_inputs", "n_outputs"),
    [(2, 2880, 360), (2, 360, 2880), (1280, 7168, 2048), (0.1, 100, 7), (64, 2048, 96)],
)
def test_blocks_of_inputs_divide_them_and_fill_tiles(
    mean_rows: float, n_inputs: int, n_outputs: int
) -> None:
    tiles = tiles_of(mean_rows, n_inputs, n_outputs)

    assert n_inputs % tiles.inputs == 0
    assert tiles.inputs == n_inputs or tiles.inputs % 128 == 0
    assert tiles.outputs == n_outputs or tiles.outputs % 128 == 0
    assert tiles.rows % 16 == 0
    assert tiles.inputs * tiles.outputs <= 1 << 20
