"""Arrays of a model: weights and caches with logical dimensions, which `mesh_axes_of` maps to mesh axes."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from meshscope.model.quantization import (
    TABLE_QUANTIZATION,
    UNQUANTIZED_DTYPE,
    Coverage,
    Quantization,
    quantization_of,
)
from meshscope.units import DTYPE_BITS, array_bytes

if TYPE_CHECKING:
    from meshscope.plans.plan import Plan

CACHED_WEIGHTS = 4096  # of models and plans: a search evaluates thousands of plans of one model


class Dim(StrEnum):
    """Logical axes of weights."""

    VOCAB = "vocab"
    TABLE = "table"  # rows of a table of n-grams
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


_MESH_AXES = {
    **dict.fromkeys(
        (Dim.VOCAB, Dim.HEADS, Dim.KV_HEADS, Dim.GROUPS, Dim.FFN, Dim.EXPERT_FFN), "tp"
    ),
    **dict.fromkeys((Dim.HIDDEN, Dim.EXPERT_HIDDEN), "fsdp"),
}


@lru_cache(maxsize=CACHED_WEIGHTS)
def mesh_axes_of(dim: Dim, plan: "Plan") -> tuple[str, ...]:
    """The mesh axes that split this logical axis, outermost first; () if none does."""
    if dim is Dim.EXPERT:
        return plan.expert_axes
    if dim is Dim.TABLE:
        return plan.table_axes
    axis = _MESH_AXES.get(dim)
    is_taken = dim in {Dim.EXPERT_HIDDEN, Dim.EXPERT_FFN} and axis in plan.expert_axes
    return () if axis is None or is_taken else (axis,)


@lru_cache(maxsize=CACHED_WEIGHTS)
def local_shape(dims: tuple[Dim, ...], shape: tuple[int, ...], plan: "Plan") -> tuple[int, ...]:
    """Shape of one device's shard, in elements."""
    sizes = {"tp": plan.tp, "dp": plan.dp, "fsdp": plan.fsdp, "pp": plan.pp, "cp": plan.cp}
    return tuple(
        size // prod(sizes[axis] for axis in mesh_axes_of(dim, plan))
        for dim, size in zip(dims, shape, strict=True)
    )


SCALE_SUFFIX = ".scale"
LANES = 128  # of a register; a TPU pads the rows of an array in memory to a multiple of them


def packed_rows(width: int) -> int:
    """The rows of a table whose scales share a row of 128: a TPU looks up whole rows, which it pads to 128."""
    assert TABLE_QUANTIZATION.block is not None
    return max(1, LANES // -(-width // TABLE_QUANTIZATION.block))


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSlice:
    """A slice of a tensor's dimension, of size `whole`, after transposing and reshaping."""

    whole: int
    start: int
    stop: int
    step: int = 1
    dim: int = -1  # -1 is the last dimension, -2 the heads of a tensor [in, heads, width]
    is_flat: bool = False  # of the columns of a matrix [in, whole], which are reshaped afterwards

    @property
    def size(self) -> int:
        """Number of selected elements."""
        return len(range(self.start, self.stop, self.step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One weight array as stored for a plan, with KV heads replicated and vocabulary padded.

    `checkpoint` is the name of the tensor in a Hugging Face checkpoint, with `{layer}` for the layer
    index and `{expert}` if each expert has a separate tensor. Matrices there are [out, in], and are
    transposed before they are reshaped to `shape`.
    """

    name: str
    dims: tuple[Dim, ...]
    shape: tuple[int, ...]
    checkpoint: str
    is_transposed: bool = False
    columns: ColumnSlice | None = None  # the part of one dimension
    dtype: str | None = None  # if it differs from other weights' (tables of integers)
    is_vector: bool = False  # elementwise, such as norm scales and biases
    is_row_major: bool = False  # for lookups and grouped matmuls: rows are contiguous in memory
    is_linear: bool = False  # of linear attention or a state space
    is_absorbed: bool = False  # up-projections of latents, whose activations decode keeps wide
    inputs: tuple[int, ...] = ()  # dimensions that a product sums over; without, never quantized
    # In a checkpoint of the first weight dtype, this weight is stored in the second one.
    own_dtype: tuple[str, str] | None = None
    n_tensors: int = 1  # along the first dimension, with `{part}` in `checkpoint` for their numbers

    def __hash__(self) -> int:
        """A hash of a few fields: the key of caches of many plans."""
        return hash((self.name, self.shape))

    @property
    def outputs(self) -> tuple[int, ...]:
        """The dimensions that are not summed over, as in a scale per output channel."""
        return tuple(i for i in range(len(self.dims)) if i not in self.inputs)

    def stored_dtype(self, dtype: str) -> str:
        """The dtype of the array if weights are stored in `dtype`."""
        if self.dtype is not None:
            return self.dtype
        dtype = self.format_in(dtype)
        if quantization_of(dtype) is None:
            return dtype
        quantization = self.quantization(dtype)
        if quantization is None:
            return UNQUANTIZED_DTYPE
        return quantization.codes_dtype or quantization.values_dtype or dtype

    def format_in(self, dtype: str) -> str:
        """The weight dtype of this weight if most are stored in `dtype`."""
        most, special = self.own_dtype or (None, dtype)
        return special if dtype == most else dtype

    def quantization(self, dtype: str) -> Quantization | None:
        """The scales of the matrix if weights are stored in `dtype`; None if it has none."""
        of_dtype, is_expert = quantization_of(self.format_in(dtype)), Dim.EXPERT in self.dims
        if of_dtype is None or not self.inputs:
            return None
        if Dim.TABLE in self.dims:  # keeps the format of its checkpoint
            return TABLE_QUANTIZATION
        quantization = of_dtype.experts if is_expert and of_dtype.experts else of_dtype
        is_of_layer = Dim.VOCAB not in self.dims
        is_covered = {
            Coverage.ALL: True,
            Coverage.LAYERS: is_of_layer,
            Coverage.NOT_LINEAR: is_of_layer and not self.is_linear,
            Coverage.MLPS: is_expert or Dim.FFN in self.dims,
            Coverage.EXPERTS: is_expert,
        }
        return quantization if is_covered[quantization.coverage] else None

    def scale(self, dtype: str) -> "Weight | None":
        """The array of scales if weights are stored in `dtype`; None if it has none.

        Square blocks have [*experts, blocks, blocks], tables the scales of `packed_rows` rows in one, if they divide all.
        """
        quantization = self.quantization(dtype)
        if quantization is None:
            return None
        block, last = quantization.block, max(self.inputs)
        kept, sizes = self.outputs, dict(enumerate(self.shape))
        if block is not None and quantization.has_square_blocks:
            experts, *groups = self.matrix_dims
            kept = (*experts, *(group[0] for group in groups))
            sizes |= {g[0]: -(-prod(self.shape[i] for i in g) // block) for g in groups}
        elif block is not None:
            kept, sizes[last] = tuple(sizes), -(-sizes[last] // block)
        if Dim.TABLE in self.dims and self.shape[0] % (n_rows := packed_rows(self.shape[1])) == 0:
            sizes = {0: sizes[0] // n_rows, 1: sizes[1] * n_rows}
        return Weight(
            name=self.name + SCALE_SUFFIX,
            dims=tuple(_UNSPLIT.get(self.dims[i], self.dims[i]) for i in kept),
            shape=tuple(sizes[i] for i in kept),
            checkpoint=self.checkpoint,
            dtype=quantization.scale_dtype,
            is_row_major=self.is_row_major and quantization.has_groups,
        )

    def cut_blocks(self, plan: "Plan", block: int) -> tuple[str, int] | None:
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

    def local_bytes(self, plan: "Plan", dtype: str) -> int:
        """Bytes on one device, with scales, if weights are stored in `dtype`."""
        scale = self.scale(dtype)
        scale_bytes = 0 if scale is None else scale.local_bytes(plan, dtype)
        return array_bytes(self.stored_dtype(dtype), self.local_shape(plan)) + scale_bytes

    def local_shape(self, plan: "Plan") -> tuple[int, ...]:
        """Shape of one device's shard, in elements."""
        return local_shape(self.dims, self.shape, plan)

    def gathered_shape(self, plan: "Plan") -> tuple[int, ...]:
        """Shape on one device after the fsdp all-gather."""
        at = self.fsdp_dim(plan)
        local = self.local_shape(plan)
        return tuple(self.shape[i] if i == at else size for i, size in enumerate(local))

    def fsdp_dim(self, plan: "Plan") -> int | None:
        """Index of the dimension that fsdp gathers; None if fsdp does not gather the weight."""
        for index, dim in enumerate(self.dims):
            if dim not in {Dim.EXPERT, Dim.TABLE} and "fsdp" in mesh_axes_of(dim, plan):
                return index
        return None


@lru_cache(maxsize=CACHED_WEIGHTS)
def gathered_weights(
    weights: tuple[Weight, ...], plan: "Plan"
) -> tuple[tuple[Weight, tuple[int, ...]], ...]:
    """The weights that fsdp gathers, with their shapes on one device afterwards."""
    split = (weight for weight in weights if weight.fsdp_dim(plan) is not None)
    return tuple((weight, weight.gathered_shape(plan)) for weight in split)


def stored_arrays(weights: Iterable[Weight], dtype: str) -> Iterator[Weight]:
    """The arrays that store these weights in `dtype`: each weight, followed by its scales."""
    for weight in weights:
        yield weight
        scale = weight.scale(dtype)
        if scale is not None:
            yield scale


LAYER_BASE = "model.layers.{layer}."


def letters(dim: Dim, **sizes: int) -> dict[str, tuple[Dim, int]]:
    """Letters of shapes: sizes of one logical axis."""
    return {letter: (dim, size) for letter, size in sizes.items()}


@dataclass(frozen=True, slots=True)
class WeightBuilder:
    """Builds the weights of one part of a layer, whose tensor names start with `base`."""

    base: str
    dims: Mapping[
        str, tuple[Dim, int]
    ]  # the logical axis and the size of each letter of a shape such as "DNH"

    def matrix(
        self,
        name: str,
        shape: str,
        tensor: str,
        *,
        columns: ColumnSlice | None = None,
        inputs: tuple[int, ...] = (0,),
    ) -> Weight:
        """A matrix, [out, in] in the checkpoint; `inputs` are the dimensions summed over."""
        vector = self.vector(name, shape, tensor, columns=columns)
        return replace(vector, is_transposed=True, is_vector=False, inputs=inputs)

    def vector(
        self, name: str, shape: str, tensor: str, *, columns: ColumnSlice | None = None
    ) -> Weight:
        """A norm's scale or a bias."""
        dims, sizes = zip(*(self.dims[letter] for letter in shape), strict=True)
        weight = Weight(name=name, dims=dims, shape=sizes, checkpoint=self.base + tensor)
        return replace(weight, columns=columns, is_vector=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheArray:
    """One array of a layer's cache, [batch, *heads, slots, width]."""

    name: str
    dims: tuple[Dim, ...]
    shape: tuple[int, ...]  # (*heads, width)
    rate: int = 1  # positions of a slot
    n_fixed_slots: int | None = None  # reused cyclically
    dtype: str | None = None  # if it differs from the cache's

    def bits(self, cache_dtype: str) -> int:
        """Bits of an element if the cache is stored in `cache_dtype`."""
        return DTYPE_BITS[self.dtype or cache_dtype]

    def n_slots(self, n_positions: int) -> int:
        """Slots for `n_positions` of one sequence; a fixed window counts in full."""
        return self.n_fixed_slots or -(-n_positions // self.rate)

    def local_shape(self, plan: "Plan") -> tuple[int, ...]:
        """Shape per position on one device, in elements."""
        return local_shape(self.dims, self.shape, plan)
