"""Grouped matrix product for TPUs that reads narrow weights as they are stored and converts them in VMEM.

XLA's kernel for `lax.ragged_dot` does so for some dtypes of a chip; others it converts in HBM first. The
grid goes over tiles of columns, visits, and blocks of inputs. A visit pairs a group with a tile of
rows, at least one of which belongs to the group. The number of visits is dynamic, so groups without rows are
neither fetched nor computed. Consecutive visits of one tile of rows keep its outputs in VMEM, as in megablox
(jax.experimental.pallas.ops.tpu.megablox), which accepts neither narrow weights nor scales.

Shapes: R rows, K inputs, N outputs, G groups in the weights, e groups of the rows, V visits at most.
"""

from dataclasses import dataclass
from functools import partial
from math import ceil, lcm
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from meshscope.programs.jax.matrix import FP8_FACTOR, decoded_in_vmem, wide_scales
from meshscope.programs.jax.numerics import Array

LANES = 128
SUBLANES = 8
ROWS_OF_TILE = 16  # of a 16-bit array
GROUPS_OF_TILE = 8  # of an array of float32
# Tiles of 512 rows and 1,024 outputs take 512 FLOPs for each byte of 16-bit rows and 8-bit weights that they
# fetch, close to the 560 of v6e. Blocks, accumulators and results take some 12 MiB of VMEM together.
MAX_TILE_ROWS = 512
MAX_BLOCK_INPUTS = 1024
MAX_BLOCK_WEIGHTS = 1 << 20


class MatmulTiles(NamedTuple):
    """Rows and outputs of a tile, and the inputs of one block of the sum."""

    rows: int
    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedKernel:
    """The product of rows, sorted by group, with the matrix of their group."""

    block: int | None = None  # inputs and outputs that share a scale; else each output has its own
    has_codes: bool = False  # int4 weights are codes of mxfp4
    has_bf16: bool = False  # the chip multiplies weights and scales in the dtype of the rows
    is_interpreted: bool = False  # on a CPU

    def __call__(
        self,
        rows: Array,
        weights: Array,
        group_sizes: Array,
        *,
        scale: Array | None = None,
        first: Array | int = 0,
    ) -> Array:
        """[R, N] of rows [R, K] and weights [G, K, N]; the groups [e] start at `first` in the weights.

        `scale` is [e, N], or [e, K/block, N/block] with a `block`, or [G, K/n, N] if `n` inputs of an output
        share a scale. Rows beyond the groups give arbitrary values.
        """
        n_rows, n_inputs = rows.shape
        n_groups = group_sizes.shape[0]
        rows = jnp.pad(rows, ((0, -n_rows % ROWS_OF_TILE), (0, 0)))
        first = jnp.asarray(first, jnp.int32)[None]
        has_groups = scale is not None and scale.ndim == 3 and self.block is None
        of_scale = n_inputs // scale.shape[1] if scale is not None and has_groups else None
        weights = self._in_hbm(weights)
        tiles = tiles_of(n_rows / n_groups, n_inputs, weights.shape[2], of_scale)
        *scalars, n_visits = _visits(group_sizes, rows.shape[0], tiles.rows)
        n_blocks = n_inputs // tiles.inputs
        scales: list[Array] = []
        if scale is not None and self.block is None:
            scales = [self._in_hbm(scale) if has_groups else scale.astype(jnp.float32)]
        elif scale is not None:
            scales = [scale.reshape(scale.shape[0], n_blocks, -1, scale.shape[2])]
        call = pl.pallas_call(
            partial(_kernel, kernel=self, tiles=tiles, of_scale=of_scale, n_blocks=n_blocks),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=4,
                grid=(pl.cdiv(weights.shape[2], tiles.outputs), n_visits, n_blocks),
                in_specs=[
                    pl.BlockSpec(
                        (tiles.rows, tiles.inputs), lambda _n, v, k, _o, _g, t, _f: (t[v], k)
                    ),
                    pl.BlockSpec(
                        (None, tiles.inputs, tiles.outputs),
                        lambda n, v, k, _o, g, _t, f: (g[v] + f[0], k, n),
                    ),
                    *(self._scale_spec(x, tiles, n_inputs) for x in scales),
                ],
                out_specs=pl.BlockSpec(
                    (tiles.rows, tiles.outputs), lambda n, v, _k, _o, _g, t, _f: (t[v], n)
                ),
                scratch_shapes=[pltpu.VMEM((tiles.rows, tiles.outputs), jnp.float32)],
            ),
            out_shape=jax.ShapeDtypeStruct((rows.shape[0], weights.shape[2]), rows.dtype),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary", "arbitrary")
            ),
            name=f"grouped_matmul_m{tiles.rows}_k{tiles.inputs}_n{tiles.outputs}",
            interpret=self.is_interpreted,
        )
        return call(*scalars, first, rows, weights, *scales)[:n_rows]

    def _in_hbm(self, array: Array) -> Array:
        if self.is_interpreted:
            return array
        # Otherwise XLA may copy all experts to VMEM, even those without rows.
        return pltpu.with_memory_space_constraint(array, pltpu.HBM)

    def _scale_spec(self, scale: Array, tiles: MatmulTiles, n_inputs: int) -> pl.BlockSpec:
        if self.block is None and scale.ndim == 3:
            n_scales = scale.shape[1] * tiles.inputs // n_inputs
            return pl.BlockSpec(
                (None, n_scales, tiles.outputs), lambda n, v, k, _o, g, _t, f: (g[v] + f[0], k, n)
            )
        if self.block is None:
            n_groups = min(GROUPS_OF_TILE, scale.shape[0])
            return pl.BlockSpec(
                (n_groups, tiles.outputs),
                lambda n, v, _k, _o, g, _t, _f: (lax.div(g[v], n_groups), n),
            )
        return pl.BlockSpec(
            (None, None, *scale.shape[2:]), lambda _n, v, k, _o, g, _t, _f: (g[v], k, 0, 0)
        )


def tiles_of(
    mean_rows: float, n_inputs: int, n_outputs: int, of_scale: int | None = None
) -> MatmulTiles:
    """MatmulTiles for groups of `mean_rows`: wide ones reuse weights and rows, narrow ones waste no rows.

    Blocks of inputs divide them, so that no block sums beyond the end. If `of_scale` inputs share a scale,
    the scales of a block fill sublanes.
    """
    n_rows = ROWS_OF_TILE
    while n_rows < min(2 * mean_rows, MAX_TILE_ROWS):
        n_rows *= 2
    unit = LANES if of_scale is None else lcm(LANES, SUBLANES * of_scale)
    steps = range(unit, min(n_inputs, MAX_BLOCK_INPUTS) + 1, unit)
    block = max((size for size in steps if n_inputs % size == 0), default=n_inputs)
    n_wide = max(1, MAX_BLOCK_WEIGHTS // block // LANES)
    return MatmulTiles(rows=n_rows, inputs=block, outputs=min(n_wide * LANES, n_outputs))


def _visits(group_sizes: Array, n_rows: int, n_tile_rows: int) -> tuple[Array, Array, Array, Array]:
    """Offsets of the groups [e + 1], the group and the tile of rows of each visit [V], and their number, at least 1."""
    n_groups = group_sizes.shape[0]
    ends = jnp.cumsum(group_sizes.astype(jnp.int32))
    starts = ends - group_sizes
    tiles = starts // n_tile_rows
    counts = jnp.where(group_sizes > 0, (ends - 1) // n_tile_rows - tiles + 1, 0)
    visit_ends = jnp.cumsum(counts)
    visit = jnp.arange(ceil(n_rows / n_tile_rows) + n_groups - 1, dtype=jnp.int32)
    group = jnp.minimum((visit_ends[None, :] <= visit[:, None]).sum(axis=1), n_groups - 1)
    is_group = group[:, None] == jnp.arange(n_groups)
    tile = jnp.where(is_group, tiles - visit_ends + counts, 0).sum(axis=1) + visit
    n_tiles = ceil(n_rows / n_tile_rows)
    offsets = jnp.concatenate([starts[:1], ends])
    return (
        offsets.astype(jnp.int32),
        group.astype(jnp.int32),
        jnp.clip(tile, 0, n_tiles - 1).astype(jnp.int32),
        jnp.maximum(visit_ends[-1], 1).astype(jnp.int32),
    )


def _kernel(
    *refs: Any, kernel: GroupedKernel, tiles: MatmulTiles, of_scale: int | None, n_blocks: int
) -> None:
    offsets, groups, row_tiles, _, rows, weights, *scales, out, total = refs
    tile, visit, k = (pl.program_id(axis) for axis in range(3))

    @pl.when(k == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    matrix = decoded_in_vmem(weights[...]) if kernel.has_codes else weights[...]
    if scales and kernel.block is not None:
        factors = _expanded(scales[0][...], kernel.block, tile * tiles.outputs, matrix.shape)
        matrix = matrix.astype(jnp.float32) * factors
    elif of_scale is not None:
        dtype = rows.dtype if kernel.has_bf16 else jnp.float32
        of_groups = wide_scales(scales[0][...]) * (FP8_FACTOR if kernel.has_codes else 1)
        matrix = matrix.astype(dtype) * jnp.repeat(of_groups.astype(dtype), of_scale, axis=0)
    total[...] += jnp.dot(rows[...], matrix.astype(rows.dtype), preferred_element_type=jnp.float32)

    @pl.when(k == n_blocks - 1)
    def _() -> None:
        outputs, group = total[...], groups[visit]
        if scales and kernel.block is None and of_scale is None:
            index = lax.rem(group, scales[0].shape[0])
            is_row = lax.broadcasted_iota(jnp.int32, scales[0].shape, 0) == index
            outputs *= jnp.where(is_row, scales[0][...], 0.0).sum(axis=0, keepdims=True)
        first = row_tiles[visit] * tiles.rows
        place = first + lax.broadcasted_iota(jnp.int32, outputs.shape, 0)
        is_of_group = (place >= offsets[group]) & (place < offsets[group + 1])
        out[...] = jnp.where(is_of_group, outputs, out[...].astype(jnp.float32)).astype(out.dtype)


def _expanded(scale: Array, block: int, first_output: Array, shape: tuple[int, ...]) -> Array:
    """Scales [K/block, N/block] of blocks as factors of the elements [K, N] from `first_output` on."""
    n_inputs, n_outputs = shape
    place = lax.div(first_output + lax.broadcasted_iota(jnp.int32, (1, n_outputs), 1), block)
    by_output = jnp.zeros((scale.shape[0], n_outputs), jnp.float32)
    for index in range(scale.shape[1]):
        by_output = jnp.where(place == index, scale[:, index : index + 1], by_output)
    by_input = jnp.broadcast_to(by_output[:, None, :], (scale.shape[0], block, n_outputs))
    return by_input.reshape(-1, n_outputs)[:n_inputs]
