"""The weights and the cache of one layer."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshscope.model.arrays import SCALE_SUFFIX, Weight
from meshscope.model.quantization import UNQUANTIZED_DTYPE
from meshscope.programs.jax.collectives import MeshCollectives
from meshscope.programs.jax.matrix import Matrix
from meshscope.programs.jax.numerics import Array, Arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The weights of one layer by name."""

    arrays: Mapping[str, Array]
    specs: Mapping[str, Weight]
    collectives: MeshCollectives
    dtype: Any
    index: Array | int | None = None  # of stacked weights
    stored_as: str = UNQUANTIZED_DTYPE
    min_rows: int = 1  # of a dot with a small weight; see `at_least`
    kernel_dtypes: tuple[Any, ...] = ()  # of experts that their kernel reads as they are stored
    narrow_dtype: Any = None  # of activations in products with scaled matrices, if not `dtype`

    def __contains__(self, name: str) -> bool:
        """Whether the layer has this weight."""
        return name in self.arrays

    def __call__(self, name: str) -> Array:
        """The whole weight, gathered over fsdp, in its declared dtype or the activations'."""
        if self.specs[name].dtype is not None:
            return self._gathered(name)
        return self.matrix(name).whole()

    def matrix(self, name: str) -> Matrix:
        """The whole weight as it is stored, gathered over fsdp, for products that convert it."""
        spec = self.specs[name]
        quantization = spec.quantization(self.stored_as)
        return Matrix(
            values=self._gathered(name),
            scale=self.scale(name),
            outputs=spec.outputs,
            dtype=self.dtype,
            block=self.block(name),
            has_codes=quantization is not None and quantization.codes_dtype is not None,
            narrow_dtype=None if spec.is_absorbed else self.narrow_dtype,
        )

    def block(self, name: str) -> int | None:
        """The number of inputs and of outputs of the weight that share a scale; None if they do not."""
        quantization = self.specs[name].quantization(self.stored_as)
        return None if quantization is None else quantization.square_block

    def scale(self, name: str, *, of_stack: bool = False) -> Array | None:
        """The scales as stored; None if there are none. With `of_stack`, scales of groups cover all layers."""
        if name + SCALE_SUFFIX not in self.arrays:
            return None
        quantization = self.specs[name].quantization(self.stored_as)
        if of_stack and quantization is not None and quantization.has_groups:
            return _joined(self.arrays[name + SCALE_SUFFIX])
        return self._of_layer(name + SCALE_SUFFIX)

    def einsum(self, subscripts: str, x: Array, name: str) -> Array:
        """`jnp.einsum(subscripts, x, weight)`."""
        return self.matrix(name).einsum(subscripts, x)

    def dot(self, x: Array, name: str) -> Array:
        """`x @ weight`."""
        return self.matrix(name).dot(x)

    def _gathered(self, name: str) -> Array:
        array, spec = self._of_layer(name), self.specs[name]
        if isinstance(self.index, int) and self.collectives.gathers(spec):  # outside loops
            array = lax.optimization_barrier(array)  # else XLA gathers [1, ...]
        return self.collectives.weight(array, spec)

    def _of_layer(self, name: str) -> Array:
        array = self.arrays[name]
        if self.index is None:
            return array
        return lax.dynamic_index_in_dim(array, self.index, axis=0, keepdims=False)

    def kernel_operand(
        self, name: str, most: int = sys.maxsize
    ) -> tuple[Array, Array | int | None]:
        """What a kernel reads of a weight: the stack of all layers [layers * n, ...] and the start of this one's.

        Kernels that read a part of the stack in place avoid the copy of a slice. A stack of more than `most`
        entries, or one that is gathered or converted before use, is cut: then the weight itself, without its scales unless
        they are of inputs, which cannot scale sums, and None.
        """
        array, is_read = self.arrays[name], self.arrays[name].dtype in self.kernel_dtypes
        has_stack = is_read and self.collectives.gathers(self.specs[name]) is False
        if self.index is not None and has_stack and array.shape[0] * array.shape[1] <= most:
            return _joined(array), self.index * array.shape[1]
        values = self._gathered(name)
        if is_read:
            return values, None
        scale = self.scale(name)
        is_whole = scale is not None and scale.ndim == values.ndim
        return self.matrix(name).whole() if is_whole else values.astype(self.dtype), None

    def at_least(self, x: Array) -> Array:
        """[B, S, D], zero-padded along S to `min_rows` rows if the step has a single row."""
        n_batch, n_positions = x.shape[:2]
        n_missing = self.min_rows - n_positions if n_batch * n_positions == 1 else 0
        return x if n_missing <= 0 else jnp.pad(x, ((0, 0), (0, n_missing), (0, 0)))

    def biased(self, x: Array, name: str) -> Array:
        """`x` plus this bias, if the layer has it."""
        return x + self(name) if name in self else x


def _joined(stack: Array) -> Array:
    return stack.reshape(-1, *stack.shape[2:])


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """The cache of one layer: arrays [B, ..., T, H], or [layers, B, ..., T, H] indexed by `index`.

    New entries go to slot `start` of the sequences from `first_row` on, unless `is_local` is false.
    """

    arrays: Mapping[str, Array]
    start: Array | int
    index: Array | int | None = None
    is_local: Array | None = None
    first_row: Array | int = 0
    chosen: Any = None  # [B, S, T], the positions that the last indexer chose, or what layers share (`reused.py`)
    source: "LayerCache | None" = None  # of the layer whose entries this one chooses among

    def written(
        self, name: str, new: Array, *, at: Array | int | None = None, is_local: Array | None = None
    ) -> "LayerCache":
        """The cache with `new` [B, ..., S, H] from slot `start` on, or from `at` on unless `is_local` is false."""
        array = self.arrays[name]
        new = new.astype(array.dtype)
        if at is None:
            at, is_local = self.start, self.is_local
        offsets = self._offsets(new.ndim, at)
        new = new if self.index is None else new[None]
        if is_local is not None:
            new = jnp.where(is_local, new, lax.dynamic_slice(array, offsets, new.shape))
        updated = lax.dynamic_update_slice(array, new, offsets)
        return replace(self, arrays={**self.arrays, name: updated})

    def _offsets(self, n_dims: int, slot: Array | int) -> list[Array | int]:
        of_layer = [] if self.index is None else [self.index]
        return [*of_layer, self.first_row, *[0] * (n_dims - 3), slot, 0]

    def read(self, name: str, dtype: Any) -> Array:
        """All slots [B, ..., T, H], written or not."""
        array = self.arrays[name]
        if self.index is not None:
            array = lax.dynamic_index_in_dim(array, self.index, axis=0, keepdims=False)
        return array.astype(dtype)

    def part(
        self, name: str, dtype: Any, *, n_rows: int, slots: range, at: Array | int = 0
    ) -> Array:
        """These slots [B, ..., T, H], counted from `at`, of the `n_rows` sequences from `first_row` on."""
        array, n_lead = self.arrays[name], 0 if self.index is None else 1
        sizes = (n_rows, *array.shape[n_lead + 1 : -2], len(slots), array.shape[-1])
        offsets = self._offsets(len(sizes), at + slots.start)
        part = lax.dynamic_slice(array, offsets, (1,) * n_lead + sizes)
        return (part if self.index is None else part[0]).astype(dtype)

    def n_slots(self, name: str) -> int:
        """The slots of an array."""
        return self.arrays[name].shape[-2]

    def stacks(self, names: Sequence[str]) -> list[Array]:
        """The whole arrays [layers, B, K, T, H], for kernels that read one layer in place."""
        arrays = (self.arrays[name] for name in names)
        stacked = (array[None] if self.index is None else array for array in arrays)
        return [x if x.ndim == 5 else x[:, :, None] for x in stacked]  # K is 1 without heads

    def with_stacks(self, names: Sequence[str], stacks: Arrays) -> "LayerCache":
        """The cache with these arrays [layers, B, K, T, H]."""
        new = {n: x.reshape(self.arrays[n].shape) for n, x in zip(names, stacks, strict=True)}
        return replace(self, arrays={**self.arrays, **new})


Attended = tuple[Array, LayerCache]  # what attention returns
