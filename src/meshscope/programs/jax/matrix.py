"""A weight matrix as it is stored, 8-bit values with scales or plain ones, and its products.

The values are converted inside the product, so the device reads them as they are stored.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshscope.programs.jax.numerics import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A matrix in its stored dtype; `scale` has a factor for each index of the dims `outputs`.

    `dtype` is that of products.
    """

    values: Array
    scale: Array | None
    outputs: tuple[int, ...]
    dtype: Any

    def einsum(self, subscripts: str, x: Array) -> Array:
        """`jnp.einsum(subscripts, x, matrix)` in `dtype`.

        Scales multiply the product, or `x` if the product sums over output channels.
        """
        values = self.values.astype(self.dtype)
        if self.scale is None:
            return jnp.einsum(subscripts, x, values)
        operands, of_product = subscripts.split("->")
        of_x, of_matrix = operands.split(",")
        channels = [of_matrix[i] for i in self.outputs]
        if set(channels) <= set(of_product):
            return self._scaled(jnp.einsum(subscripts, x, values), of_product, channels)
        return jnp.einsum(subscripts, self._scaled(x, of_x, channels), values)

    def dot(self, x: Array) -> Array:
        """`x @ matrix`, of two dims."""
        product = x @ self.values.astype(self.dtype)
        return product if self.scale is None else _times(product, self.scale)

    def rows(self, index: Array) -> Array:
        """The rows at `index` in `dtype`; only these are converted."""
        rows = self.values[index].astype(self.dtype)
        return rows if self.scale is None else _times(rows, self.scale[index][..., None])

    def whole(self) -> Array:
        """The matrix in `dtype`, multiplied by its scales."""
        values = self.values.astype(self.dtype)
        if self.scale is None:
            return values
        return _times(values, lax.broadcast_in_dim(self.scale, values.shape, self.outputs))

    def _scaled(self, x: Array, letters: str, channels: list[str]) -> Array:
        """`x`, whose dims have these letters, times the scales of its channels."""
        assert self.scale is not None
        at = [letters.index(letter) for letter in channels]
        return _times(x, lax.broadcast_in_dim(self.scale, x.shape, at))


def _times(x: Array, scale: Array) -> Array:
    """The product in float32, in the dtype of `x`."""
    return (x.astype(jnp.float32) * scale).astype(x.dtype)
