"""Arrays of a model: weights and caches with logical dimensions, which `mesh_axes_of` maps to mesh axes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from math import prod
from typing import Protocol, assert_never

from meshscope.model.quantization import (
    UNQUANTIZED_DTYPE,
    Coverage,
    Quantization,
    quantization_of,
)
from meshscope.units import DTYPE_BITS, array_bytes

CACHED_WEIGHTS = 4096  # of models and plans: a search evaluates thousands of plans of one model


class Sharding(Protocol):
    """The axis sizes of a parallel plan."""

    @property
    def tp(self) -> int:
        """Devices that split heads and MLPs."""
        ...

    @property
    def dp(self) -> int:
        """Replicas, which may split experts."""
        ...

    @property
    def fsdp(self) -> int:
        """Devices that split matrices and gather them."""
        ...

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The mesh axes that shard the experts, outermost first."""
        ...


class Dim(StrEnum):
    """Logical axes of weights."""

    VOCAB = "vocab"
    HIDDEN = "hidden"  # residual width of a matrix, or the rank that feeds heads; split by fsdp
    NORM = "norm"  # width of a norm's scale, a bias or a latent; never split
    HEADS = "heads"
    KV_HEADS = "kv_heads"
    GROUPS = "groups"  # groups of heads in the output projection
    HEAD_DIM = "head_dim"
    FFN = "ffn"
    EXPERT = "expert"
    EXPERT_HIDDEN = "expert_hidden"  # like HIDDEN, but unsplit if fsdp shards the experts
    EXPERT_FFN = "expert_ffn"  # like FFN, but unsplit if tp shards the experts


_UNSPLIT = {Dim.HIDDEN: Dim.NORM, Dim.EXPERT_HIDDEN: Dim.NORM}  # fsdp does not split scales
EXPERT_IN = (Dim.EXPERT, Dim.EXPERT_HIDDEN, Dim.EXPERT_FFN)
EXPERT_OUT = (Dim.EXPERT, Dim.EXPERT_FFN, Dim.EXPERT_HIDDEN)


@lru_cache(maxsize=CACHED_WEIGHTS)
def mesh_axes_of(dim: Dim, plan: Sharding) -> tuple[str, ...]:
    """The mesh axes that split this logical axis, outermost first; () if none does."""
    match dim:
        case Dim.VOCAB | Dim.HEADS | Dim.KV_HEADS | Dim.GROUPS | Dim.FFN:
            return ("tp",)
        case Dim.HIDDEN:
            return ("fsdp",)
        case Dim.EXPERT:
            return plan.expert_axes
        case Dim.EXPERT_HIDDEN:
            return () if "fsdp" in plan.expert_axes else ("fsdp",)
        case Dim.EXPERT_FFN:
            return () if "tp" in plan.expert_axes else ("tp",)
        case Dim.NORM | Dim.HEAD_DIM:
            return ()
        case _:
            assert_never(dim)


@lru_cache(maxsize=CACHED_WEIGHTS)
def local_shape(dims: tuple[Dim, ...], shape: tuple[int, ...], plan: Sharding) -> tuple[int, ...]:
    """Shape of one device's shard, in elements."""
    sizes = {"tp": plan.tp, "dp": plan.dp, "fsdp": plan.fsdp}
    return tuple(
        size // prod(sizes[axis] for axis in mesh_axes_of(dim, plan))
        for dim, size in zip(dims, shape, strict=True)
    )


SCALE_SUFFIX = ".scale"
LINEAR_BASE = ".linear_attn."  # in the names of all tensors of linear attention


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSlice:
    """A slice of a tensor's dimension, of size `whole`, after transposing and reshaping.

    `dim` counts from the end: -1 is the last dimension, -2 the heads of a tensor [in, heads, width].
    With `is_flat`, it is a slice of the columns of a matrix [in, `whole`], which are reshaped afterwards.
    """

    whole: int
    start: int
    stop: int
    step: int = 1
    dim: int = -1
    is_flat: bool = False

    @property
    def size(self) -> int:
        """Number of selected elements."""
        return len(range(self.start, self.stop, self.step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One weight array as stored for a plan, with KV heads replicated and vocabulary padded.

    `checkpoint` is the name of the tensor in a Hugging Face checkpoint, with `{layer}` for the layer
    index and `{expert}` if each expert has a separate tensor. Matrices there are [out, in], and are
    transposed before they are reshaped to `shape`. `columns` selects a part of one dimension.
    `dtype` is set if it differs from the other weights (tables of integers). `is_vector` marks
    elementwise weights such as norm scales and biases, whatever their shape. `is_row_major` marks
    weights that lookups and grouped matmuls read row by row: their last dimension is contiguous in
    memory, whatever layout the compiler prefers for the shape. `is_absorbed` marks
    the up-projections of latents, which decode multiplies with queries and outputs: they take 16-bit
    activations. `inputs` are the dimensions that a product sums over; weights without them are never
    quantized.
    """

    name: str
    dims: tuple[Dim, ...]
    shape: tuple[int, ...]
    checkpoint: str
    is_transposed: bool = False
    columns: ColumnSlice | None = None
    dtype: str | None = None
    is_vector: bool = False
    is_row_major: bool = False
    is_absorbed: bool = False
    inputs: tuple[int, ...] = ()

    def __hash__(self) -> int:
        """A hash of a few fields: the key of caches of many plans."""
        return hash((self.name, self.shape))

    @property
    def outputs(self) -> tuple[int, ...]:
        """The dimensions that are not summed over: those of a scale per output channel."""
        return tuple(i for i in range(len(self.dims)) if i not in self.inputs)

    def stored_dtype(self, dtype: str) -> str:
        """The dtype of the array if weights are stored in `dtype`."""
        if self.dtype is not None:
            return self.dtype
        if quantization_of(dtype) is None:
            return dtype
        quantization = self.quantization(dtype)
        if quantization is None:
            return UNQUANTIZED_DTYPE
        return quantization.codes_dtype or quantization.values_dtype or dtype

    def quantization(self, dtype: str) -> Quantization | None:
        """The scales of the matrix if weights are stored in `dtype`; None if it has none."""
        quantization = quantization_of(dtype)
        if quantization is not None and quantization.experts and Dim.EXPERT in self.dims:
            quantization = quantization.experts
        is_covered = quantization is not None and self._is_covered(quantization)
        return quantization if is_covered else None

    def _is_covered(self, quantization: Quantization) -> bool:
        match quantization.coverage:
            case Coverage.ALL:
                is_covered = True
            case Coverage.LAYERS:
                is_covered = Dim.VOCAB not in self.dims
            case Coverage.NOT_LINEAR:
                is_covered = Dim.VOCAB not in self.dims and LINEAR_BASE not in self.checkpoint
            case Coverage.MLPS:
                is_covered = Dim.FFN in self.dims or Dim.EXPERT in self.dims
            case Coverage.EXPERTS:
                is_covered = Dim.EXPERT in self.dims
        return bool(self.inputs) and is_covered

    def scale(self, dtype: str) -> "Weight | None":
        """The array of scales if weights are stored in `dtype`; None if it has none."""
        quantization = self.quantization(dtype)
        if quantization is None:
            return None
        sizes, dims, last = list(self.shape), self.dims, max(self.inputs)
        kept = self.outputs
        if quantization.square_block is not None:
            return self._block_scale(quantization.square_block, quantization.scale_dtype)
        dims = tuple(_UNSPLIT.get(dim, dim) for dim in dims)
        if quantization.block is not None:
            sizes[last], kept = -(-sizes[last] // quantization.block), tuple(range(len(dims)))
        return Weight(
            name=self.name + SCALE_SUFFIX,
            dims=tuple(dims[i] for i in kept),
            shape=tuple(sizes[i] for i in kept),
            checkpoint=self.checkpoint,
            dtype=quantization.scale_dtype,
            is_row_major=self.is_row_major and quantization.has_groups,
        )

    def cut_blocks(self, plan: Sharding, block: int) -> tuple[str, int] | None:
        """The axes that split blocks of this many inputs and outputs, and the local size; None if none does."""
        for group in self.matrix_dims[1:]:
            first = self.dims[group[0]]
            whole, local = (
                prod(shape[i] for i in group) for shape in (self.shape, self.local_shape(plan))
            )
            if first not in _UNSPLIT and local < whole and local % block:
                return " and ".join(mesh_axes_of(first, plan)), local
        return None

    @property
    def matrix_dims(self) -> tuple[tuple[int, ...], ...]:
        """The dimensions of experts, of inputs and of outputs, each without the others."""
        experts = tuple(i for i in self.outputs if self.dims[i] is Dim.EXPERT)
        return experts, self.inputs, tuple(i for i in self.outputs if i not in experts)

    def _block_scale(self, block: int, dtype: str) -> "Weight":
        """Scales [*experts, input blocks, output blocks]; the first dimension of a group is the split one."""
        experts, *groups = self.matrix_dims
        sizes = [prod(self.shape[i] for i in group) for group in groups]
        first = [self.dims[group[0]] for group in groups]
        return Weight(
            name=self.name + SCALE_SUFFIX,
            dims=(*(self.dims[i] for i in experts), *(_UNSPLIT.get(dim, dim) for dim in first)),
            shape=(*(self.shape[i] for i in experts), *(-(-size // block) for size in sizes)),
            checkpoint=self.checkpoint,
            dtype=dtype,
        )

    def local_bytes(self, plan: Sharding, dtype: str) -> int:
        """Bytes on one device, with scales, if weights are stored in `dtype`."""
        scale = self.scale(dtype)
        scale_bytes = 0 if scale is None else scale.local_bytes(plan, dtype)
        return array_bytes(self.stored_dtype(dtype), self.local_shape(plan)) + scale_bytes

    def local_shape(self, plan: Sharding) -> tuple[int, ...]:
        """Shape of one device's shard, in elements."""
        return local_shape(self.dims, self.shape, plan)

    def gathered_shape(self, plan: Sharding) -> tuple[int, ...]:
        """Shape on one device after the fsdp all-gather."""
        at = self.fsdp_dim(plan)
        local = self.local_shape(plan)
        return tuple(self.shape[i] if i == at else size for i, size in enumerate(local))

    def fsdp_dim(self, plan: Sharding) -> int | None:
        """Index of the dimension that fsdp gathers; None if fsdp does not gather the weight."""
        for index, dim in enumerate(self.dims):
            if dim is not Dim.EXPERT and "fsdp" in mesh_axes_of(dim, plan):
                return index
        return None


@lru_cache(maxsize=CACHED_WEIGHTS)
def gathered_arrays(
    weights: tuple[Weight, ...], plan: Sharding, dtype: str
) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Shape and dtype of each array that fsdp gathers, if weights are stored in `dtype`."""
    return tuple(
        (weight.gathered_shape(plan), weight.stored_dtype(dtype))
        for weight in weights
        if weight.fsdp_dim(plan) is not None
    )


def stored_arrays(weights: Iterable[Weight], dtype: str) -> Iterator[Weight]:
    """The arrays that store these weights in `dtype`: each weight, followed by its scales."""
    for weight in weights:
        yield weight
        scale = weight.scale(dtype)
        if scale is not None:
            yield scale


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBuilder:
    """Builds the weights of one part of a layer, whose tensor names start with `base`."""

    base: str = "model.layers.{layer}."

    def matrix(  # noqa: PLR0913  the declaration of a weight
        self,
        name: str,
        dims: tuple[Dim, ...],
        shape: tuple[int, ...],
        tensor: str,
        *,
        columns: ColumnSlice | None = None,
        inputs: tuple[int, ...] = (0,),
    ) -> Weight:
        """A matrix, [out, in] in the checkpoint; `inputs` are the dimensions summed over."""
        vector = self.vector(name, dims, shape, tensor, columns=columns)
        return replace(vector, is_transposed=True, is_vector=False, inputs=inputs)

    def vector(
        self,
        name: str,
        dims: tuple[Dim, ...],
        shape: tuple[int, ...],
        tensor: str,
        *,
        columns: ColumnSlice | None = None,
    ) -> Weight:
        """A norm's scale or a bias."""
        return Weight(
            name=name,
            dims=dims,
            shape=shape,
            checkpoint=self.base + tensor,
            columns=columns,
            is_vector=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheArray:
    """One array of a layer's cache, [batch, *heads, slots, width]; `shape` is (*heads, width).

    `dims` are the logical axes of `shape`. It has one slot per `rate` positions, or a fixed number of slots that are reused cyclically.
    `dtype` is set if it differs from that of the cache.
    """

    name: str
    dims: tuple[Dim, ...]
    shape: tuple[int, ...]
    rate: int = 1
    n_fixed_slots: int | None = None
    dtype: str | None = None

    def bits(self, cache_dtype: str) -> int:
        """Bits of an element if the cache is stored in `cache_dtype`."""
        return DTYPE_BITS[self.dtype or cache_dtype]

    def n_slots(self, n_positions: int) -> int:
        """Slots for `n_positions` of one sequence; a fixed window counts in full."""
        return self.n_fixed_slots or -(-n_positions // self.rate)

    def local_shape(self, plan: Sharding) -> tuple[int, ...]:
        """Shape per position on one device, in elements."""
        return local_shape(self.dims, self.shape, plan)
