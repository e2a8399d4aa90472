"""A weight matrix as stored, narrow values with scales or plain ones, and its products.

The values are converted inside the product, so the device reads them as they are stored. XLA has no array
of mxfp4 on a TPU: its codes (e2m1) are in int4 arrays, its scales are exponents in uint8 arrays (OCP
Microscaling Formats Specification v1.0, sections 5.3.3 and 5.4.1).
"""

from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from meshscope.programs.jax.numerics import Array

EXPONENT_BIAS = 127  # of e8m0
FP8_FACTOR = 2.0**14  # e5m2 has a bias of 15, e2m1 one of 1
LARGEST_EXPONENT = 2  # of e2m1, whose largest number is 6
FLOAT_EXPONENTS = {"f4e2m1fn": LARGEST_EXPONENT, "f8e4m3fn": 8}  # the largest of each


def decoded(codes: Array) -> Array:
    """The float32 values of int4 `codes`: a sign bit, then 0, 0.5, 1, 1.5, 2, 3, 4 or 6."""
    signed = codes.astype(jnp.float32)
    is_negative = signed < 0
    m = jnp.where(is_negative, signed + 8, signed)
    magnitude = jnp.maximum(jnp.maximum(m * 0.5, m - 2), m * 2 - 8)
    return jnp.where(is_negative, -magnitude, magnitude)


def decoded_in_vmem(codes: Array) -> Array:
    """As `decoded`, in a kernel: e5m2 values, with the same bits but for sign and bias; times `FP8_FACTOR`, the codes' values."""
    words = pltpu.bitcast(codes.astype(jnp.int8), jnp.uint32)
    magnitude = (words & jnp.uint32(0x07070707)) << 1
    return pltpu.bitcast(magnitude | (words & jnp.uint32(0x80808080)), jnp.float8_e5m2)


def wide_scales(stored: Array) -> Array:
    """Scales in float32: powers of two for uint8 exponents; 0 gives 0, and 255 infinity."""
    if stored.dtype != jnp.uint8:
        return stored.astype(jnp.float32)
    return lax.bitcast_convert_type(stored.astype(jnp.int32) << 23, jnp.float32)


def shared_exponents(maxima: np.ndarray) -> np.ndarray:
    """The stored exponents, as uint8, of groups whose largest magnitudes are `maxima`.

    The largest number becomes one with the largest exponent of e2m1 (section 6.3), so it may round to 6.
    """
    exponents = np.frexp(maxima)[1] - 1 - LARGEST_EXPONENT + EXPONENT_BIAS
    return np.where(maxima == 0, EXPONENT_BIAS, np.clip(exponents, 1, 254)).astype(np.uint8)


def encoded(values: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """The int4 codes of `values` over two to the power of `exponents`, rounded to nearest even."""
    scaled = np.ldexp(values.astype(np.float32), EXPONENT_BIAS - exponents.astype(np.int32))
    codes = np.clip(scaled, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.int8)
    return np.where(codes > 7, codes - 16, codes).astype(ml_dtypes.int4)


MAX_BLOCK_ROWS = 256  # of a product as sums of blocks, which are written in float32
# XLA turns the product of a single row into a multiply and a reduce, and does not fuse the conversion of
# grouped values into it: libtpu 0.0.42.1 then writes the matrix in float32 in each step.
MIN_BLOCK_ROWS = 2
# Inputs of a matrix unit of v4, v5e and v5p. A tile of 4-bit values has 64: libtpu 0.0.42.1 copies a matrix
# into another layout in each step if a product splits its tiles.
BLOCK_INPUTS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A matrix in its stored dtype; `scale` has a factor for each index of the dims `outputs`.

    With `block`, `scale` [*experts, input blocks, output blocks] has a factor for that many inputs and
    outputs. A scale with as many dims as the values has a factor for each group of the last input dim.
    """

    values: Array
    scale: Array | None
    outputs: tuple[int, ...]
    dtype: Any  # of products
    block: int | None = None
    has_codes: bool = False  # values and scales are mxfp4
    narrow_dtype: Any = None  # activations with a scale for each token

    @property
    def has_groups(self) -> bool:
        """Whether groups of inputs have scales, for each output."""
        if self.scale is None or self.block is not None:
            return False
        return self.scale.ndim == self.values.ndim > len(self.outputs)

    def einsum(self, subscripts: str, x: Array) -> Array:
        """`jnp.einsum(subscripts, x, matrix)` in `dtype`; scales multiply the product, or `x` if it sums over output channels."""
        if self.scale is not None and (self.block is not None or self.has_groups):
            return self._einsum_of_parts(subscripts, x)
        values = self.values.astype(self.dtype)
        if self.scale is None:
            return _product(subscripts, x, values)
        of_x, of_matrix, of_product = _letters(subscripts)
        channels = [of_matrix[i] for i in self.outputs]
        if not set(channels) <= set(of_product):
            return jnp.einsum(subscripts, self._scaled(x, of_x, channels), values)
        if self.narrow_dtype is not None:
            return self._narrow_einsum(subscripts, x, channels)
        return self._scaled(_product(subscripts, x, values), of_product, channels)

    def dot(self, x: Array) -> Array:
        """`x @ matrix`, of two dims."""
        rows = "abcdefgh"[: x.ndim - 1]
        return self.einsum(f"{rows}x,xy->{rows}y", x)

    def _narrow_einsum(self, subscripts: str, x: Array, channels: list[str]) -> Array:
        """`jnp.einsum(subscripts, x, matrix)` of 8-bit operands, summed in int32 or float32.

        Under tp, a token has a scale for the inputs on each device, so that scales need no collective.
        """
        assert self.scale is not None
        of_x, _, of_product = _letters(subscripts)
        summed = tuple(i for i, letter in enumerate(of_x) if letter not in of_product)
        rounded, factors = narrowed(x, summed, self.narrow_dtype)
        total = total_dtype(self.narrow_dtype)
        product = jnp.einsum(subscripts, rounded, self.values, preferred_element_type=total)
        kept = [of_product.index(letter) for letter in of_x if letter in of_product]
        of_token = lax.broadcast_in_dim(factors, product.shape, kept)
        at = [of_product.index(letter) for letter in channels]
        of_channel = lax.broadcast_in_dim(self.scale, product.shape, at)
        return (product.astype(jnp.float32) * of_token * of_channel).astype(x.dtype)

    def rows(self, index: Array) -> Array:
        """The rows at `index` in `dtype`; only these are converted."""
        values = self.values
        if index.size > 1 or values.dtype.itemsize > 1:
            rows = values[index]
        else:
            # XLA turns the gather of a single row into a slice, for which libtpu 0.0.42.1 copies a table of 8-bit values into
            # another layout in every step (tpu7x, both tables of Gemma 4 E4B under `dp`: 2.2 ms), so take another one, too.
            rows = values[jnp.pad(index.reshape(1), (0, 1))][:1].reshape(*index.shape, -1)
        rows = rows.astype(self.dtype)
        if self.scale is None:
            return rows
        n_packed = len(values) // len(self.scale)
        factors = wide_scales(self.scale[index // n_packed])
        if not self.has_groups:
            return _times(rows, factors[..., None])
        width, n_factors = rows.shape[-1], factors.shape[-1] // n_packed
        if n_packed == 1:
            return _times(rows, factors.repeat(width // n_factors, axis=-1))
        # Products with powers of two are exact in bfloat16. One of them spreads the factors of a row over its columns.
        wide = jnp.promote_types(self.dtype, jnp.bfloat16)
        of_row, of_factor = np.divmod(np.arange(factors.shape[-1]), n_factors)
        factors = jnp.where(of_row == index[..., None] % n_packed, factors.astype(wide), 0)
        spread = of_factor[:, None] == np.arange(width) // (width // n_factors)
        return (rows.astype(wide) * (factors @ jnp.asarray(spread, wide))).astype(self.dtype)

    def whole(self) -> Array:
        """The matrix in `dtype`, multiplied by its scales."""
        values, scale = self._converted(self.values), self.scale
        if scale is None:
            return values
        if self.block is not None:
            by_output = self._by_output(scale)
            n_inputs = values.size // prod(scale.shape[:-2]) // by_output.shape[-1]
            by_input = jnp.repeat(by_output, self.block, axis=-2)[..., :n_inputs, :]
            return _times(values, by_input.reshape(values.shape))
        if self.has_groups:
            last = max(set(range(values.ndim)) - set(self.outputs))
            n_inputs = values.shape[last] // scale.shape[last]
            return _times(values, wide_scales(scale).repeat(n_inputs, axis=last))
        return _times(values, lax.broadcast_in_dim(scale, values.shape, self.outputs))

    def _converted(self, values: Array) -> Array:
        return (decoded(values) if self.has_codes else values).astype(self.dtype)

    def _einsum_of_parts(self, subscripts: str, x: Array) -> Array:
        """`jnp.einsum(subscripts, x, matrix)`: scaled sums of blocks or groups for few rows, else of the whole matrix.

        XLA fuses the factors of blocks into the sum over products of blocks, which a TPU computes slowly for many rows, and the
        conversion of 4-bit values and the sum over groups into one pass over the stored values (v5e and v6e, libtpu 0.0.42.1).
        """
        assert self.scale is not None
        of_x, of_matrix, of_product = _letters(subscripts)
        shape, n_dims = self.values.shape, self.outputs[0]  # inputs are the leading dims
        summed, outputs = of_matrix[:n_dims], of_matrix[n_dims:]
        n_inputs = prod(shape[:n_dims])
        size = self.block or n_inputs // prod(self.scale.shape[:n_dims])
        is_sum = n_dims > 0 and of_x.endswith(summed) and not set(summed) & set(of_product)
        if not is_sum or n_inputs % size or x.size > MAX_BLOCK_ROWS * n_inputs:
            return jnp.einsum(subscripts, x, self.whole())
        factors = wide_scales(self.scale) if self.block is None else self._by_output(self.scale)
        products = self._products(x, size, of_x, outputs, of_product)
        at = [0, *(1 + of_product.index(letter) for letter in outputs)]
        factors = factors.reshape(-1, *shape[n_dims:])
        return (products * lax.broadcast_in_dim(factors, products.shape, at)).sum(0).astype(x.dtype)

    def _products(self, x: Array, n: int, of_x: str, outputs: str, of_product: str) -> Array:
        """The products over each `n` inputs [inputs / n, *product] in float32.

        Smaller groups share a block of inputs, which multiplies a copy of each row for every group: no tile is split.
        """
        n_dims = self.outputs[0]
        rows = x.shape[: x.ndim - n_dims]
        n_inputs = prod(x.shape[x.ndim - n_dims :])
        block = max(n, gcd(n_inputs, BLOCK_INPUTS))
        n_groups = block // n
        n_copies = max(n_groups, MIN_BLOCK_ROWS) if prod(rows) == 1 else n_groups
        is_in_group = np.repeat(np.eye(n_copies, n_groups), n, axis=1)
        products = jnp.einsum(
            f"{of_x[:-n_dims]}YXZ,YZ{outputs}->YX{of_product}",
            x.reshape(*rows, -1, 1, block) * jnp.asarray(is_in_group, x.dtype),
            self._converted(self.values.reshape(-1, block, *self.values.shape[n_dims:])),
            preferred_element_type=jnp.float32,
        )[:, :n_groups]
        return products.reshape(-1, *products.shape[2:])

    def _by_output(self, scale: Array) -> Array:
        """The factors of each output, [..., input blocks, outputs]."""
        assert self.block is not None
        n_experts = scale.ndim - 2
        n_outputs = prod(self.values.shape[i] for i in self.outputs[n_experts:])
        return jnp.repeat(wide_scales(scale), self.block, axis=-1)[..., :n_outputs]

    def _scaled(self, x: Array, letters: str, channels: list[str]) -> Array:
        assert self.scale is not None
        at = [letters.index(letter) for letter in channels]
        return _times(x, lax.broadcast_in_dim(self.scale, x.shape, at))


def _letters(subscripts: str) -> tuple[str, str, str]:
    operands, of_product = subscripts.split("->")
    of_x, of_matrix = operands.split(",")
    return of_x, of_matrix, of_product


def _product(subscripts: str, x: Array, matrix: Array) -> Array:
    """`jnp.einsum(subscripts, x, matrix)`; with one row, of the matrix with its outputs as one dim.

    The vector units of a TPU multiply a single row. For outputs [8, 128] they take 25,200 bundles, and for
    1,024 outputs 4,900 (v6e, 4,096 inputs, libtpu 0.0.42.1); the stored matrix is the same.
    """
    of_x, of_matrix, of_product = _letters(subscripts)
    is_row = x.size == x.shape[-1] and of_product == of_x[:-1] + of_matrix[1:]
    if not is_row or matrix.ndim < 3:
        return jnp.einsum(subscripts, x, matrix)
    return (x @ matrix.reshape(len(matrix), -1)).reshape(*x.shape[:-1], *matrix.shape[1:])


def total_dtype(dtype: Any) -> Any:
    """The dtype of sums of products of 8-bit operands."""
    return jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32


def narrowed(x: Array, summed: tuple[int, ...], dtype: Any) -> tuple[Array, Array]:
    """`x` in an 8-bit `dtype`, whose largest number the largest magnitude becomes, and factors of the dims not `summed` over."""
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    largest = float((jnp.iinfo if is_integer else jnp.finfo)(dtype).max)
    wide = x.astype(jnp.float32)
    factors = jnp.abs(wide).max(axis=summed, keepdims=True) / largest
    scaled = wide / jnp.where(factors == 0, 1.0, factors)
    rounded = jnp.rint(scaled) if is_integer else scaled
    return rounded.astype(dtype), factors.squeeze(summed)


def _times(x: Array, scale: Array) -> Array:
    return (x.astype(jnp.float32) * scale).astype(x.dtype)
