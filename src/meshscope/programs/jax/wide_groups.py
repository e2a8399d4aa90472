"""Grouped matrix product for groups of many rows, as in prefill: a tile of weights is converted once.

The grid goes over tiles of columns and visits. A visit is a group together with a tile of rows of which at
least one belongs to the group. The first visit of a group converts all inputs of a tile of columns in VMEM,
with the scales of their blocks; its other visits use them again. A tile of rows that belongs to one group is
multiplied as a whole; other tiles only in the halves that the group reaches.

Shapes: R rows, K inputs, N outputs, G groups in the weights, e groups of the rows, V visits at most.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from meshscope.plans.kernel_choice import WIDE_BLOCK_ROWS, WIDE_TILE_ROWS
from meshscope.programs.jax.mxfp4 import FP8_FACTOR as CODES_FACTOR
from meshscope.programs.jax.mxfp4 import decoded_in_vmem, wide_scales
from meshscope.programs.jax.numerics import Array

LANES = 128
SCALE_GROUPS = 8  # groups of a tile of scales in float32
STEP_INPUTS = (
    1792  # of one product; more of them make the schedule longer, and not much shorter in time
)
MAX_OUTPUTS = 1024  # of a tile
MARGIN_BYTES = 8 << 20  # VMEM for what the compiler spills
FP8_FACTOR = 16.0  # e4m3fn has a bias of 7, e4m3b11fnuz one of 11


@dataclass(frozen=True, slots=True, kw_only=True)
class WideKernel:
    """The kernel, for at most `vmem_bytes` of blocks.

    `has_fp8` is true on chips that convert e4m3fn in hardware.
    """

    vmem_bytes: int
    has_fp8: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WideTiles:
    """Outputs of a tile, and the inputs of one step of its sum."""

    outputs: int
    step_inputs: int


def wide_tiles(
    kernel: WideKernel, rows: Array, weights: Array, n_groups: int, of_scale: int | None
) -> WideTiles | None:
    """Tiles that fit into VMEM; None for groups that do not fill a tile of rows on average.

    `of_scale` inputs share a scale; None if all inputs of a channel do.
    """
    n_inputs, n_outputs = weights.shape[1:]
    steps = range(LANES, min(n_inputs, STEP_INPUTS) + 1, LANES)
    step = max((size for size in steps if n_inputs % size == 0), default=None)
    is_block = of_scale is None or LANES % of_scale == 0
    if rows.shape[0] < n_groups * WIDE_TILE_ROWS or step is None or not is_block:
        return None
    row_bytes, weight_bytes = rows.dtype.itemsize, weights.dtype.itemsize
    for outputs in range(min(n_outputs, MAX_OUTPUTS) // LANES * LANES, LANES, -LANES):
        fetched = (WIDE_TILE_ROWS * row_bytes + outputs * weight_bytes) * n_inputs
        results = WIDE_TILE_ROWS * outputs * (2 * row_bytes + 4)
        kept = n_inputs * outputs * row_bytes
        if n_outputs % outputs == 0 and 2 * fetched + results + kept <= kernel.vmem_bytes:
            return WideTiles(outputs=outputs, step_inputs=step)
    return None


def wide_product(  # noqa: PLR0913  the operands of the product and how it is cut
    kernel: WideKernel,
    rows: Array,
    weights: Array,
    visits: tuple[Array, Array, Array, Array],
    first: Array,
    *,
    scale: Array | None,
    block: int | None,
    has_codes: bool,
    tiles: WideTiles,
    is_interpreted: bool,
) -> Array:
    """[R, N] of rows [R, K] and weights [G, K, N]; `visits` are those of `grouped_matmul`.

    `scale` is [e, N], or [e, K/block, N/block], or [G, K/n, N]. With `has_codes`, weights are codes of mxfp4.
    """
    n_inputs, n_outputs = weights.shape[1:]
    *scalars, n_visits = visits
    is_coded = weights.dtype == jnp.float8_e4m3fn and not kernel.has_fp8
    scales: list[Array] = []
    if scale is not None:
        by_output = scale if block is None else jnp.repeat(scale, block, axis=2)[:, :, :n_outputs]
        if scale.ndim == 3 and block is None:
            n_groups = visits[0].shape[0] - 1
            by_output = lax.dynamic_slice_in_dim(scale, first[0], n_groups)
        by_output = wide_scales(by_output) * (CODES_FACTOR if has_codes else 1)
        scales = [by_output * FP8_FACTOR if is_coded else by_output]
    convert = decoded_in_vmem if has_codes else from_code if is_coded else _plain
    n_scales = 0 if scale is None or scale.ndim == 2 else scale.shape[1] * LANES // n_inputs
    body = partial(_kernel, tiles=tiles, n_scales=n_scales, convert=convert)
    call = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(n_outputs // tiles.outputs, n_visits),
            in_specs=[
                pl.BlockSpec((WIDE_TILE_ROWS, n_inputs), lambda _n, v, _o, _g, t, _f: (t[v], 0)),
                pl.BlockSpec(
                    (None, n_inputs, tiles.outputs), lambda n, v, _o, g, _t, f: (g[v] + f[0], 0, n)
                ),
                *(_scale_spec(x, tiles) for x in scales),
            ],
            out_specs=pl.BlockSpec(
                (WIDE_TILE_ROWS, tiles.outputs), lambda n, v, _o, _g, t, _f: (t[v], n)
            ),
            scratch_shapes=[
                pltpu.VMEM((n_inputs, tiles.outputs), rows.dtype),
                pltpu.VMEM((WIDE_TILE_ROWS, tiles.outputs), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((rows.shape[0], n_outputs), rows.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=kernel.vmem_bytes + MARGIN_BYTES,
        ),
        name=f"grouped_matmul_wide_m{WIDE_TILE_ROWS}_k{tiles.step_inputs}_n{tiles.outputs}",
        interpret=is_interpreted,
    )
    return call(*scalars, first, rows, weights, *scales)


def _scale_spec(scale: Array, tiles: WideTiles) -> pl.BlockSpec:
    """A tile of groups and output channels, or of the blocks of a group."""
    if scale.ndim == 2:
        n_groups = min(SCALE_GROUPS, scale.shape[0])
        return pl.BlockSpec(
            (n_groups, tiles.outputs), lambda n, v, _o, g, _t, _f: (lax.div(g[v], n_groups), n)
        )
    return pl.BlockSpec(
        (None, scale.shape[1], tiles.outputs), lambda n, v, _o, g, _t, _f: (g[v], 0, n)
    )


def _kernel(*refs: Any, tiles: WideTiles, n_scales: int, convert: Callable[[Array], Array]) -> None:
    """Converts the weights of a new group, and multiplies the rows of a tile that it reaches.

    The inputs that fill lanes have `n_scales` scales for each output; 0 if all inputs have one.
    """
    offsets, groups, row_tiles, _, rows, weights, *scales, out, converted, total = refs
    visit = pl.program_id(1)
    group = groups[visit]
    begin, end = offsets[group], offsets[group + 1]
    first = row_tiles[visit] * WIDE_TILE_ROWS

    @pl.when((visit == 0) | (group != groups[jnp.maximum(visit - 1, 0)]))
    def _() -> None:
        def one_block(index: Array, carry: None) -> None:
            at = pl.ds(pl.multiple_of(index * LANES, LANES), LANES)
            matrix = convert(weights[at, :])
            if n_scales:
                parts = jnp.split(matrix.astype(jnp.float32), n_scales)
                scaled = [
                    part * scales[0][pl.ds(index * n_scales + number, 1), :]
                    for number, part in enumerate(parts)
                ]
                matrix = jnp.concatenate(scaled)
            converted[at, :] = matrix.astype(converted.dtype)
            return carry

        lax.fori_loop(0, converted.shape[0] // LANES, one_block, None)

    def multiply(start: Array | int, n_rows: int) -> None:
        at = pl.ds(start, n_rows)
        total[at, :] = jnp.zeros((n_rows, tiles.outputs), jnp.float32)

        def add(step: Array, carry: None) -> None:
            n_inputs = tiles.step_inputs
            inputs = pl.ds(pl.multiple_of(step * n_inputs, LANES), n_inputs)
            total[at, :] += jnp.dot(
                rows[at, inputs], converted[inputs, :], preferred_element_type=jnp.float32
            )
            return carry

        lax.fori_loop(0, rows.shape[1] // tiles.step_inputs, add, None)
        outputs = total[at, :]
        if scales and not n_scales:
            outputs *= _row(scales[0][...], lax.rem(group, scales[0].shape[0]))
        place = first + start + lax.broadcasted_iota(jnp.int32, outputs.shape, 0)
        is_of_group = (place >= begin) & (place < end)
        kept = out[at, :].astype(jnp.float32)
        out[at, :] = jnp.where(is_of_group, outputs, kept).astype(out.dtype)

    is_whole = (begin <= first) & (end >= first + WIDE_TILE_ROWS)

    @pl.when(is_whole)
    def _() -> None:
        multiply(0, WIDE_TILE_ROWS)

    @pl.when(~is_whole)
    def _() -> None:
        low = lax.div(jnp.maximum(begin - first, 0), WIDE_BLOCK_ROWS)
        last = jnp.minimum(end - first, WIDE_TILE_ROWS) + WIDE_BLOCK_ROWS - 1
        high = lax.div(last, WIDE_BLOCK_ROWS)

        def one_part(index: Array, carry: None) -> None:
            multiply(pl.multiple_of(index * WIDE_BLOCK_ROWS, WIDE_BLOCK_ROWS), WIDE_BLOCK_ROWS)
            return carry

        lax.fori_loop(low, high, one_part, None)


def _row(values: Array, index: Array) -> Array:
    """The row [1, N] of this index; TPUs load rows of a tile together."""
    is_row = lax.broadcasted_iota(jnp.int32, values.shape, 0) == index
    return jnp.where(is_row, values, 0.0).sum(axis=0, keepdims=True)


def _plain(values: Array) -> Array:
    """The stored values, which the chip converts by itself."""
    return values


def from_code(values: Array) -> Array:
    """Values of e4m3fn in float32, divided by `FP8_FACTOR`.

    Before tpu7x, TPUs convert e4m3b11fnuz in hardware, and e4m3fn in twice as many operations. The codes mean
    the same numbers but for the factor, and two: the code of -0 means NaN, so it becomes 0, and the codes of
    NaN, which no checkpoint has, mean numbers.
    """
    code = pltpu.bitcast(values, jnp.uint32)
    magnitude = code & jnp.uint32(0x7F7F7F7F)
    sign_of_nonzero = (magnitude + jnp.uint32(0x7F7F7F7F)) & jnp.uint32(0x80808080)
    code = magnitude | (code & sign_of_nonzero)
    return pltpu.bitcast(code, jnp.float8_e4m3b11fnuz).astype(jnp.float32)
