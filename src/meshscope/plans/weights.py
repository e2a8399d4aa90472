"""Weights of a model under a plan: shapes, shardings and checkpoint names.

Each dimension has a logical axis, which `mesh_axes_of` maps to mesh axes. Attention and MLP declare
their weights; `layer_weights` combines them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from math import prod
from typing import assert_never

from meshscope.model.model import (
    AttentionKind,
    CompressedAttention,
    Family,
    GroupedAttention,
    LatentAttention,
    Layer,
    LinearAttention,
    MixtureOfExperts,
    MlpKind,
    Model,
)
from meshscope.model.quantization import (
    UNQUANTIZED_DTYPE,
    Coverage,
    Quantization,
    quantization_of,
)
from meshscope.model.tensor_names import (
    POST_NORM_TENSORS,
    SIDE_NORM_TENSORS,
    correction_tensor,
    dense_tensors,
    expert_tensors,
    head_tensor,
    moe_block,
    norm_tensors,
    shared_tensors,
)
from meshscope.plans.plan import Plan
from meshscope.plans.stages import stored_layers
from meshscope.units import array_bytes

CACHED_WEIGHTS = 4096  # of models and plans: a search evaluates thousands of plans of one model


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
_EXPERT_IN = (Dim.EXPERT, Dim.EXPERT_HIDDEN, Dim.EXPERT_FFN)
_EXPERT_OUT = (Dim.EXPERT, Dim.EXPERT_FFN, Dim.EXPERT_HIDDEN)


@lru_cache(maxsize=CACHED_WEIGHTS)
def mesh_axes_of(dim: Dim, plan: Plan) -> tuple[str, ...]:
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
def local_shape(dims: tuple[Dim, ...], shape: tuple[int, ...], plan: Plan) -> tuple[int, ...]:
    """Shape of one device's shard, in elements."""
    sizes = dict(plan.mesh.axes)
    return tuple(
        size // prod(sizes.get(axis, 1) for axis in mesh_axes_of(dim, plan))
        for dim, size in zip(dims, shape, strict=True)
    )


SCALE_SUFFIX = ".scale"
LINEAR_BASE = ".linear_attn."  # in the names of all tensors of linear attention
# Weights that layers which share a cache do not have.
KEY_VALUE_WEIGHTS = frozenset({"wk", "wv", "bk", "bv", "k_norm"})


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

    def cut_blocks(self, plan: Plan, block: int) -> tuple[str, int] | None:
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

    def local_bytes(self, plan: Plan, dtype: str) -> int:
        """Bytes on one device, with scales, if weights are stored in `dtype`."""
        scale = self.scale(dtype)
        scale_bytes = 0 if scale is None else scale.local_bytes(plan, dtype)
        return array_bytes(self.stored_dtype(dtype), self.local_shape(plan)) + scale_bytes

    def local_shape(self, plan: Plan) -> tuple[int, ...]:
        """Shape of one device's shard, in elements."""
        return local_shape(self.dims, self.shape, plan)

    def gathered_shape(self, plan: Plan) -> tuple[int, ...]:
        """Shape on one device after the fsdp all-gather."""
        at = self.fsdp_dim(plan)
        local = self.local_shape(plan)
        return tuple(self.shape[i] if i == at else size for i, size in enumerate(local))

    def fsdp_dim(self, plan: Plan) -> int | None:
        """Index of the dimension that fsdp gathers; None if fsdp does not gather the weight."""
        for index, dim in enumerate(self.dims):
            if dim is not Dim.EXPERT and "fsdp" in mesh_axes_of(dim, plan):
                return index
        return None


@lru_cache(maxsize=CACHED_WEIGHTS)
def gathered_arrays(
    weights: tuple[Weight, ...], plan: Plan, dtype: str
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


def stored_kv_heads(attention: GroupedAttention, plan: Plan) -> int:
    """KV heads as stored: replicated up to tp if the model has fewer."""
    return max(attention.n_kv_heads, plan.tp)


def padded_vocab(model: Model, plan: Plan) -> int:
    """Rows of the stored embedding: the vocabulary padded to a multiple of tp."""
    return -(-model.vocab // plan.tp) * plan.tp


def layer_weights(model: Model, plan: Plan, layer: Layer) -> tuple[Weight, ...]:
    """The weights of one layer in program order."""
    return (*attention_weights(model, plan, layer), *mlp_weights(model, layer))


@lru_cache(maxsize=CACHED_WEIGHTS)
def outer_weights(model: Model, plan: Plan) -> tuple[Weight, ...]:
    """Embedding, final norm and, unless tied, the output head; both matrices are [vocab, hidden].

    Models with hyper-connections also have the weights that collapse the parallel streams, and a draft those
    that join its two inputs.
    """
    table = (padded_vocab(model, plan), model.hidden)
    matrix = (Dim.VOCAB, Dim.HIDDEN)
    embed = Weight(
        name="embed",
        dims=matrix,
        shape=table,
        checkpoint="model.embed_tokens.weight",
        is_row_major=True,
        inputs=(1,),
    )
    norm = Weight(
        name="final_norm",
        dims=(Dim.NORM,),
        shape=(model.hidden,),
        checkpoint="model.norm.weight",
        is_vector=True,
    )
    head = replace(embed, name="lm_head", checkpoint=head_tensor(model.family), is_row_major=False)
    heads = () if model.has_tied_embeddings else (head,)
    others = (*_collapse_weights(model), *_layer_tables(model, plan), *draft_head_weights(model))
    return (embed, norm, *heads, *others)


def draft_head_weights(model: Model) -> tuple[Weight, ...]:
    """The norms of both inputs of a draft, and the matrix that joins them, which every device of tp has.

    Named as in the checkpoints of DeepSeek-V3; the matrix is not quantized there.
    """
    if model.draft_head is None:
        return ()
    base = f"model.layers.{model.n_layers}."
    norms = tuple(
        Weight(
            name=f"draft_{name}_norm",
            dims=(Dim.NORM,),
            shape=(model.hidden,),
            checkpoint=f"{base}{tensor}.weight",
            is_vector=True,
        )
        for name, tensor in (("embed", "enorm"), ("hidden", "hnorm"))
        if model.draft_head.has_norms
    )
    join = Weight(
        name="draft_join",
        dims=(Dim.NORM, Dim.HIDDEN),
        shape=(2 * model.hidden, model.hidden),
        checkpoint=f"{base}eh_proj.weight",
        is_transposed=True,
    )
    return (*norms, join)


def head_weight(model: Model, plan: Plan) -> Weight:
    """The matrix of the output head: the embedding if the head is tied to it."""
    embed, _, *others = outer_weights(model, plan)
    return embed if model.has_tied_embeddings else others[0]


def _layer_tables(model: Model, plan: Plan) -> Iterator[Weight]:
    """The embeddings of all layers in one table, and a projection of the model's embedding to them, with its norm."""
    inputs = model.layer_inputs
    if inputs is None:
        return
    width, whole = inputs.width * model.n_layers, inputs.width * inputs.n_layers
    columns = None if width == whole else ColumnSlice(whole=whole, start=0, stop=width)
    builder, dims = WeightBuilder(base="model."), (Dim.VOCAB, Dim.HIDDEN)
    shape = (padded_vocab(model, plan), width)
    tensor = "embed_tokens_per_layer.weight"
    table = builder.vector("layer_embed", dims, shape, tensor, columns=columns)
    yield replace(table, is_vector=False, is_row_major=True, inputs=(1,))
    dims, shape = (Dim.HIDDEN, Dim.NORM), (model.hidden, width)
    tensor = "per_layer_model_projection.weight"
    yield builder.matrix("layer_embed_proj", dims, shape, tensor, columns=columns)
    tensor = "per_layer_projection_norm.weight"
    yield builder.vector("layer_embed_norm", (Dim.NORM,), (inputs.width,), tensor)


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


@lru_cache(maxsize=CACHED_WEIGHTS)
def attention_weights(model: Model, plan: Plan, layer: Layer) -> tuple[Weight, ...]:
    """The weights of one layer's attention, including the norm before it."""
    tensor = norm_tensors(model.family)[0]
    norm = WeightBuilder().vector("attn_norm", (Dim.NORM,), (model.hidden,), tensor)
    match model.attention:
        case GroupedAttention(linear=linear) if layer.attention is AttentionKind.LINEAR:
            assert linear is not None
            return (norm, *linear_weights(model.hidden, linear, model.family))
        case GroupedAttention():
            weights = _grouped_weights(model, model.attention.of(layer.attention), plan)
            if layer.shares_cache:
                weights = (w for w in weights if w.name not in KEY_VALUE_WEIGHTS)
            return (norm, *weights, *_post_norm(model, 0))
        case LatentAttention():
            is_shared = layer.attention is AttentionKind.SHARED
            return (norm, *_latent_weights(model.hidden, model.attention, is_shared=is_shared))
        case CompressedAttention():
            hyper = _hyper_weights(model, "attn", "attn")
            return (*hyper, norm, *_compressed_weights(model.hidden, model.attention, layer))
        case _:
            assert_never(model.attention)


def _post_norm(model: Model, block: int) -> Iterator[Weight]:
    """The norm after attention (block 0) or after the MLP (1), if the model has them."""
    if model.has_post_norms:
        name = ("attn_post_norm", "mlp_post_norm")[block]
        tensor = POST_NORM_TENSORS[block]
        yield WeightBuilder().vector(name, (Dim.NORM,), (model.hidden,), tensor)


def _layer_scale(model: Model) -> Iterator[Weight]:
    """The number that scales the output of a layer, if the model has it."""
    if model.has_layer_scale:
        yield WeightBuilder().vector("layer_scale", (Dim.NORM,), (1,), "layer_scalar")


def _grouped_weights(model: Model, attention: GroupedAttention, plan: Plan) -> Iterator[Weight]:
    builder, d = WeightBuilder(base="model.layers.{layer}.self_attn."), model.hidden
    n, k, h = attention.n_heads, stored_kv_heads(attention, plan), attention.head_dim
    heads, kv_heads = (Dim.HEADS, Dim.HEAD_DIM), (Dim.KV_HEADS, Dim.HEAD_DIM)
    fused = _fused_heads(attention) if model.family is Family.PHI3 else {}
    if attention.has_gate:  # each head's query, then its gate, in one tensor
        fused = {"q": ColumnSlice(whole=2 * h, start=0, stop=h)}
        gate = ColumnSlice(whole=2 * h, start=h, stop=2 * h)
        into = (Dim.HIDDEN, *heads)
        yield builder.matrix("wq_gate", into, (d, n, h), "q_proj.weight", columns=gate)
    for name, dims, size in (("q", heads, n), ("k", kv_heads, k), ("v", kv_heads, k)):
        is_fused = fused and not attention.has_gate
        tensor, columns = (
            ("qkv_proj.weight" if is_fused else f"{name}_proj.weight"),
            fused.get(name),
        )
        if name == "v" and attention.has_shared_values:
            continue
        shape = (d, size, h)
        yield builder.matrix(f"w{name}", (Dim.HIDDEN, *dims), shape, tensor, columns=columns)
    out = (*heads, Dim.HIDDEN)
    yield builder.matrix("wo", out, (n, h, d), "o_proj.weight", inputs=(0, 1))
    if attention.has_qkv_bias:
        yield builder.vector("bq", heads, (n, h), "q_proj.bias", columns=fused.get("q"))
        yield builder.vector("bk", kv_heads, (k, h), "k_proj.bias")
        yield builder.vector("bv", kv_heads, (k, h), "v_proj.bias")
    if attention.has_o_bias:
        yield builder.vector("bo", (Dim.NORM,), (d,), "o_proj.bias")
    if attention.has_qk_norm:
        yield builder.vector("q_norm", (Dim.HEAD_DIM,), (h,), "q_norm.weight")
        yield builder.vector("k_norm", (Dim.HEAD_DIM,), (h,), "k_norm.weight")
    if attention.has_sinks:
        yield builder.vector("sinks", (Dim.HEADS,), (n,), "sinks")


def linear_weights(d: int, linear: LinearAttention, family: Family) -> Iterator[Weight]:
    """Weights of linear attention, whose key heads are split over tp with the value heads that they serve.

    The convolution has all queries first, then all keys, then all values.
    """
    builder = WeightBuilder(base="model.layers.{layer}" + LINEAR_BASE)
    n, k, v, group = linear.n_key_heads, linear.key_dim, linear.value_dim, linear.group
    into = (Dim.HIDDEN, Dim.HEADS, Dim.HEAD_DIM)
    tensors = _fused_linear(linear) if family is Family.QWEN3_NEXT else _split_linear(linear)
    for name, width in (("wq", k), ("wk", k), ("wv", group * v), ("wz", group * v)):
        tensor, columns = tensors[name]
        yield builder.matrix(name, into, (d, n, width), tensor, columns=columns)
    for name in ("wb", "wa"):
        tensor, columns = tensors[name]
        yield builder.matrix(name, into, (d, n, group), tensor, columns=columns, inputs=())
    start = 0
    for name, size in (("q", n * k), ("k", n * k), ("v", n * group * v)):
        columns = ColumnSlice(whole=linear.n_channels, start=start, stop=start + size, dim=-2)
        shape, dims = (size, linear.conv_width), (Dim.HEADS, Dim.NORM)
        yield builder.vector(f"conv_{name}", dims, shape, "conv1d.weight", columns=columns)
        start += size
    for name, tensor in (("decay_log", "A_log"), ("decay_bias", "dt_bias")):
        yield builder.vector(name, (Dim.HEADS,), (linear.n_value_heads,), tensor)
    yield builder.vector("state_norm", (Dim.HEAD_DIM,), (v,), "norm.weight")
    out = (Dim.HEADS, Dim.HEAD_DIM, Dim.HIDDEN)
    shape = (linear.n_value_heads, v, d)
    yield builder.matrix("wo", out, shape, "out_proj.weight", inputs=(0, 1))


def _fused_linear(linear: LinearAttention) -> Mapping[str, tuple[str, ColumnSlice]]:
    """Tensors with queries, keys, values and gates of a key head together, and its rates b and decays a."""
    k, width, group = linear.key_dim, linear.group * linear.value_dim, linear.group
    whole, ends = 2 * (k + width), (0, k, 2 * k, 2 * k + width, 2 * (k + width))
    fused = {
        name: ("in_proj_qkvz.weight", ColumnSlice(whole=whole, start=start, stop=stop))
        for name, start, stop in zip(("wq", "wk", "wv", "wz"), ends[:-1], ends[1:], strict=True)
    }
    for name, start in (("wb", 0), ("wa", group)):
        columns = ColumnSlice(whole=2 * group, start=start, stop=start + group)
        fused[name] = ("in_proj_ba.weight", columns)
    return fused


def _split_linear(linear: LinearAttention) -> Mapping[str, tuple[str, ColumnSlice | None]]:
    """A tensor with all queries, then all keys, then all values; the others have their own (Qwen3.5)."""
    n_keys, whole = linear.n_key_heads * linear.key_dim, linear.n_channels
    split: dict[str, tuple[str, ColumnSlice | None]] = {
        f"w{name}": (f"in_proj_{name}.weight", None) for name in "zba"
    }
    for name, start, stop in (
        ("wq", 0, n_keys),
        ("wk", n_keys, 2 * n_keys),
        ("wv", 2 * n_keys, whole),
    ):
        columns = ColumnSlice(whole=whole, start=start, stop=stop, is_flat=True)
        split[name] = ("in_proj_qkv.weight", columns)
    return split


def _fused_heads(attention: GroupedAttention) -> dict[str, ColumnSlice]:
    """The heads of queries, keys and values in one tensor (Phi-3)."""
    n, k = attention.n_heads, attention.n_kv_heads
    bounds = {"q": (0, n), "k": (n, n + k), "v": (n + k, n + 2 * k)}
    return {
        name: ColumnSlice(whole=n + 2 * k, start=start, stop=stop, dim=-2)
        for name, (start, stop) in bounds.items()
    }


def _latent_weights(d: int, attention: LatentAttention, *, is_shared: bool) -> Iterator[Weight]:
    """Heads are split over tp; the projections to latents are replicated."""
    builder = WeightBuilder(base="model.layers.{layer}.self_attn.")
    n, rank = attention.n_heads, attention.kv_rank
    latent = rank + attention.rope_dim
    if attention.q_rank is None:
        shape = (d, n, attention.qk_dim)
        yield builder.matrix("wq", (Dim.HIDDEN, Dim.HEADS, Dim.HEAD_DIM), shape, "q_proj.weight")
    else:
        q = attention.q_rank
        yield builder.matrix("wq_a", (Dim.HIDDEN, Dim.NORM), (d, q), "q_a_proj.weight")
        if attention.has_bias:
            yield builder.vector("bq_a", (Dim.NORM,), (q,), "q_a_proj.bias")
        yield builder.vector("q_a_norm", (Dim.NORM,), (q,), "q_a_layernorm.weight")
        shape = (q, n, attention.qk_dim)
        yield builder.matrix(
            "wq_b", (Dim.HIDDEN, Dim.HEADS, Dim.HEAD_DIM), shape, "q_b_proj.weight"
        )
    yield builder.matrix("wkv_a", (Dim.HIDDEN, Dim.NORM), (d, latent), "kv_a_proj_with_mqa.weight")
    if attention.has_bias:
        yield builder.vector("bkv_a", (Dim.NORM,), (latent,), "kv_a_proj_with_mqa.bias")
    yield builder.vector("kv_a_norm", (Dim.NORM,), (rank,), "kv_a_layernorm.weight")
    whole = attention.nope_dim + attention.value_dim
    for name, start, stop in (
        ("w_uk", 0, attention.nope_dim),
        ("w_uv", attention.nope_dim, whole),
    ):
        up = builder.matrix(
            name,
            (Dim.HIDDEN, Dim.HEADS, Dim.HEAD_DIM),
            (rank, n, stop - start),
            "kv_b_proj.weight",
            columns=ColumnSlice(whole=whole, start=start, stop=stop),
        )
        yield replace(up, is_absorbed=True)
    shape = (n, attention.value_dim, d)
    out = (Dim.HEADS, Dim.HEAD_DIM, Dim.HIDDEN)
    yield builder.matrix("wo", out, shape, "o_proj.weight", inputs=(0, 1))
    if attention.has_bias:
        yield builder.vector("bo", (Dim.NORM,), (d,), "o_proj.bias")
    if not is_shared:
        yield from _indexer_weights(d, attention)


def _indexer_weights(d: int, attention: LatentAttention) -> Iterator[Weight]:
    """The indexer is small and replicated: its selection is the same for all heads."""
    indexer = attention.indexer
    if indexer is None:
        return
    assert attention.q_rank is not None
    builder = WeightBuilder(base="model.layers.{layer}.self_attn.indexer.")
    n, h = indexer.n_heads, indexer.head_dim
    shape = (attention.q_rank, n, h)
    yield builder.matrix("index_wq", (Dim.HIDDEN, Dim.NORM, Dim.NORM), shape, "wq_b.weight")
    yield builder.matrix("index_wk", (Dim.HIDDEN, Dim.NORM), (d, h), "wk.weight")
    yield builder.vector("index_k_norm", (Dim.NORM,), (h,), "k_norm.weight")
    yield builder.vector("index_k_norm_bias", (Dim.NORM,), (h,), "k_norm.bias")
    yield builder.matrix(
        "index_weights", (Dim.HIDDEN, Dim.NORM), (d, n), "weights_proj.weight", inputs=()
    )


def _compressed_weights(d: int, attention: CompressedAttention, layer: Layer) -> Iterator[Weight]:
    """Heads and output groups are split over tp; the other weights are replicated."""
    builder = WeightBuilder(base="model.layers.{layer}.attn.")
    n, h, q = attention.n_heads, attention.head_dim, attention.q_rank
    groups, rank = attention.n_groups, attention.group_rank
    yield builder.matrix("wq_a", (Dim.HIDDEN, Dim.NORM), (d, q), "wq_a.weight")
    yield builder.vector("q_a_norm", (Dim.NORM,), (q,), "q_norm.weight")
    yield builder.matrix("wq_b", (Dim.HIDDEN, Dim.HEADS, Dim.HEAD_DIM), (q, n, h), "wq_b.weight")
    yield builder.matrix("wkv", (Dim.HIDDEN, Dim.NORM), (d, h), "wkv.weight")
    yield builder.vector("kv_norm", (Dim.NORM,), (h,), "norm.weight")
    yield builder.vector("sinks", (Dim.HEADS,), (n,), "attn_sink")
    match layer.attention:
        case AttentionKind.COMPRESSED_SPARSE:
            yield from _entry_weights("entry_", "compressor.", d, attention.sparse_rate, (h, 2 * h))
            yield from _entry_indexer_weights(d, attention)
        case AttentionKind.HEAVILY_COMPRESSED:
            yield from _entry_weights("entry_", "compressor.", d, attention.heavy_rate, (h, h))
        case _:
            pass
    out = (Dim.HIDDEN, Dim.GROUPS, Dim.HEAD_DIM)
    yield builder.matrix("wo_a", out, (n // groups * h, groups, rank), "wo_a.weight")
    out = (Dim.GROUPS, Dim.HEAD_DIM, Dim.HIDDEN)
    yield builder.matrix("wo_b", out, (groups, rank, d), "wo_b.weight", inputs=(0, 1))


def _entry_weights(
    prefix: str, base: str, d: int, rate: int, widths: tuple[int, int]
) -> Iterator[Weight]:
    """Compresses `rate` positions into an entry; `widths` are those of an entry and of a position.

    The checkpoints of DeepSeek-V4 have these matrices in bf16, without scales.
    """
    builder = WeightBuilder(base="model.layers.{layer}.attn." + base)
    entry_width, position_width = widths
    shape = (d, position_width)
    into = (Dim.HIDDEN, Dim.NORM)
    for name in ("wkv", "wgate"):
        yield builder.matrix(f"{prefix}{name}", into, shape, f"{name}.weight", inputs=())
    yield builder.vector(f"{prefix}bias", (Dim.NORM, Dim.NORM), (rate, position_width), "ape")
    yield builder.vector(f"{prefix}norm", (Dim.NORM,), (entry_width,), "norm.weight")


def _entry_indexer_weights(d: int, attention: CompressedAttention) -> Iterator[Weight]:
    builder = WeightBuilder(base="model.layers.{layer}.attn.indexer.")
    n, h = attention.indexer.n_heads, attention.indexer.head_dim
    base = "indexer.compressor."
    yield from _entry_weights("index_", base, d, attention.sparse_rate, (h, 2 * h))
    shape = (attention.q_rank, n, h)
    yield builder.matrix("index_wq", (Dim.HIDDEN, Dim.NORM, Dim.NORM), shape, "wq_b.weight")
    yield builder.matrix(
        "index_weights", (Dim.HIDDEN, Dim.NORM), (d, n), "weights_proj.weight", inputs=()
    )


def _hyper_weights(model: Model, name: str, block: str) -> Iterator[Weight]:
    """Weights that mix parallel residual streams around a block; none without hyper-connections."""
    hyper = model.hyper
    if hyper is None:
        return
    builder, n = WeightBuilder(base=f"model.layers.{{layer}}.hc_{block}_"), hyper.n_coefficients
    shape = (hyper.n_streams * model.hidden, n)
    yield builder.matrix(f"{name}_mixing", (Dim.NORM, Dim.NORM), shape, "fn", inputs=())
    yield builder.vector(f"{name}_mixing_bias", (Dim.NORM,), (n,), "base")
    yield builder.vector(f"{name}_mixing_scale", (Dim.NORM,), (3,), "scale")


def _collapse_weights(model: Model) -> Iterator[Weight]:
    """Weights that collapse parallel residual streams after the last layer, if the model has any."""
    hyper = model.hyper
    if hyper is None:
        return
    builder, n = WeightBuilder(base="model.hc_head.hc_"), hyper.n_streams
    shape = (n * model.hidden, n)
    yield builder.matrix("collapse", (Dim.NORM, Dim.NORM), shape, "fn", inputs=())
    yield builder.vector("collapse_bias", (Dim.NORM,), (n,), "base")
    yield builder.vector("collapse_scale", (Dim.NORM,), (1,), "scale")


def mlp_weights(model: Model, layer: Layer) -> tuple[Weight, ...]:
    """The weights of a layer's feed-forward block, including the norm before it."""
    tensor = norm_tensors(model.family)[1]
    norm = WeightBuilder().vector("mlp_norm", (Dim.NORM,), (model.hidden,), tensor)
    before = (*_hyper_weights(model, "mlp", "ffn"), norm)
    match layer.mlp:
        case MlpKind.DENSE:
            blocks = dense_weights(model, layer)
        case MlpKind.DENSE_AND_MOE:
            experts = (*router_weights(model), *expert_weights(model), *_side_norms(model))
            blocks = (*dense_weights(model, layer), *experts)
        case MlpKind.MOE | MlpKind.HASH_MOE:
            router = router_weights(model, has_table=layer.mlp is MlpKind.HASH_MOE)
            blocks = (*router, *expert_weights(model), *shared_weights(model))
        case _:
            assert_never(layer.mlp)
    after = (*_post_norm(model, 1), *layer_input_weights(model), *_layer_scale(model))
    return (*before, *blocks, *after)


@lru_cache(maxsize=CACHED_WEIGHTS)
def layer_input_weights(model: Model) -> tuple[Weight, ...]:
    """The replicated weights that bring the embeddings of a layer into its output, with the norm after them."""
    if model.layer_inputs is None:
        return ()
    builder, d, width = WeightBuilder(), model.hidden, model.layer_inputs.width
    into, out, norm = (
        f"{name}.weight"
        for name in ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
    )
    return (
        builder.matrix("layer_input_gate", (Dim.HIDDEN, Dim.NORM), (d, width), into),
        builder.matrix("layer_input_out", (Dim.NORM, Dim.HIDDEN), (width, d), out),
        builder.vector("layer_input_norm", (Dim.NORM,), (d,), norm),
    )


def _side_norms(model: Model) -> Iterator[Weight]:
    """The norms of an MLP and of experts side by side."""
    for name, tensor in SIDE_NORM_TENSORS.items():
        yield WeightBuilder().vector(name, (Dim.NORM,), (model.hidden,), tensor)


@lru_cache(maxsize=CACHED_WEIGHTS)
def dense_weights(model: Model, layer: Layer) -> tuple[Weight, ...]:
    """The weights of a dense layer's gated MLP."""
    ffn, tensors = model.ffn_of(layer), dense_tensors(model.family)
    weights = _gated(model.hidden, ffn, "", tensors, has_bias=model.has_mlp_bias)
    return tuple(_fused_mlp(weights, ffn) if model.family is Family.PHI3 else weights)


def _fused_mlp(weights: Iterator[Weight], ffn: int) -> Iterator[Weight]:
    """The gate, then the up projection in one tensor (Phi-3)."""
    starts = {"w_gate": 0, "w_up": ffn}
    for weight in weights:
        if weight.name not in starts:
            yield weight
            continue
        start = starts[weight.name]
        columns = ColumnSlice(whole=2 * ffn, start=start, stop=start + ffn)
        tensor = "model.layers.{layer}.mlp.gate_up_proj.weight"
        yield replace(weight, checkpoint=tensor, columns=columns)


@lru_cache(maxsize=CACHED_WEIGHTS)
def shared_weights(model: Model) -> tuple[Weight, ...]:
    """The weights of the shared experts, stored as one gated MLP."""
    moe = model.moe
    if moe is None or moe.shared_ffn is None:
        return ()
    weights = _gated(model.hidden, moe.shared_ffn, "shared_", shared_tensors(model.family))
    return (*weights, *_shared_gate(model.hidden, moe))


def _shared_gate(d: int, moe: MixtureOfExperts) -> Iterator[Weight]:
    """The replicated gate of the shared experts, if they have one."""
    if moe.has_shared_gate:
        shape, tensor = (d, 1), "mlp.shared_expert_gate.weight"
        dims = (Dim.NORM, Dim.NORM)
        yield WeightBuilder().matrix("shared_gate", dims, shape, tensor, inputs=())


def _gated(
    d: int, f: int, prefix: str, tensors: Mapping[str, str], *, has_bias: bool = False
) -> Iterator[Weight]:
    builder = WeightBuilder()
    for name in ("gate", "up"):
        yield builder.matrix(f"{prefix}w_{name}", (Dim.HIDDEN, Dim.FFN), (d, f), tensors[name])
    yield builder.matrix(f"{prefix}w_down", (Dim.FFN, Dim.HIDDEN), (f, d), tensors["down"])
    if has_bias:
        biases = {role: tensor.replace(".weight", ".bias") for role, tensor in tensors.items()}
        for name in ("gate", "up"):
            yield builder.vector(f"{prefix}b_{name}", (Dim.FFN,), (f,), biases[name])
        yield builder.vector(f"{prefix}b_down", (Dim.NORM,), (d,), biases["down"])


@lru_cache(maxsize=CACHED_WEIGHTS)
def router_weights(model: Model, *, has_table: bool = False) -> tuple[Weight, ...]:
    """The replicated weights of the router.

    With `has_table`, a table maps each token id to its experts and there is no correction bias.
    """
    moe = model.moe
    assert moe is not None
    builder = WeightBuilder(base="model.layers.{layer}." + moe_block(model.family))
    shape = (model.hidden, moe.n_experts)
    weights = [builder.matrix("router", (Dim.NORM, Dim.NORM), shape, "weight", inputs=())]
    if has_table:
        shape = (model.vocab, moe.n_active)
        table = builder.vector("router_table", (Dim.NORM, Dim.NORM), shape, "tid2eid")
        weights.append(replace(table, dtype="s32"))
    elif moe.has_correction_bias:
        tensor = correction_tensor(model.family)
        shape = (moe.n_experts,)
        weights.append(builder.vector("router_correction", (Dim.NORM,), shape, tensor))
    if moe.has_bias:
        weights.append(builder.vector("router_bias", (Dim.NORM,), (moe.n_experts,), "bias"))
    if moe.has_scales:
        scales = {"router_scale": ("scale", model.hidden)}
        scales["expert_scale"] = ("per_expert_scale", moe.n_experts)
        beside = WeightBuilder(base="model.layers.{layer}.router.")
        for name, (tensor, size) in scales.items():
            weights.append(beside.vector(name, (Dim.NORM,), (size,), tensor))
    return tuple(weights)


@lru_cache(maxsize=CACHED_WEIGHTS)
def expert_weights(model: Model) -> tuple[Weight, ...]:
    """The weights of the routed experts, stacked over experts."""
    moe = model.moe
    assert moe is not None
    match model.family:
        case Family.GPT_OSS:
            weights = _fused_experts(model, moe, "mlp.experts.", step=2)
        case Family.LLAMA4:
            weights = _fused_experts(model, moe, "feed_forward.experts.", step=1)
        case Family.GEMMA4:
            weights = _fused_experts(model, moe, "experts.", step=1, is_transposed=True)
        case _:
            weights = _single_experts(model, moe)
    return tuple(
        weight if weight.is_vector else replace(weight, is_row_major=True) for weight in weights
    )


def _single_experts(model: Model, moe: MixtureOfExperts) -> Iterator[Weight]:
    builder, n, d, f = WeightBuilder(), moe.n_experts, model.hidden, moe.ffn
    tensors = expert_tensors(model.family)
    for name in ("gate", "up"):
        yield builder.matrix(f"experts_w_{name}", _EXPERT_IN, (n, d, f), tensors[name], inputs=(1,))
    yield builder.matrix("experts_w_down", _EXPERT_OUT, (n, f, d), tensors["down"], inputs=(1,))


def _fused_experts(
    model: Model, moe: MixtureOfExperts, block: str, *, step: int, is_transposed: bool = False
) -> Iterator[Weight]:
    """Gate and up columns in one tensor [E, D, 2F], or [E, 2F, D] if it `is_transposed` (Gemma 4).

    They alternate with `step` 2 (gpt-oss); with 1, those of the gate come first (Llama 4).
    """
    builder = WeightBuilder(base="model.layers.{layer}." + block)
    n, d, f = moe.n_experts, model.hidden, moe.ffn
    for number, name in enumerate(("gate", "up")):
        start = number if step > 1 else number * f
        columns = ColumnSlice(whole=2 * f, start=start, stop=start + step * (f - 1) + 1, step=step)
        into = builder.matrix(
            f"experts_w_{name}", _EXPERT_IN, (n, d, f), "gate_up_proj", inputs=(1,)
        )
        yield replace(into, columns=columns, is_transposed=is_transposed)
        if not moe.has_bias:
            continue
        bias = (Dim.EXPERT, Dim.EXPERT_FFN)
        tensor = "gate_up_proj_bias"
        yield builder.vector(f"experts_b_{name}", bias, (n, f), tensor, columns=columns)
    out = builder.matrix("experts_w_down", _EXPERT_OUT, (n, f, d), "down_proj", inputs=(1,))
    yield replace(out, is_transposed=is_transposed)
    if moe.has_bias:
        yield builder.vector("experts_b_down", (Dim.EXPERT, Dim.NORM), (n, d), "down_proj_bias")


def device_weight_bytes(model: Model, plan: Plan, dtype: str) -> int:
    """Weight bytes on one device.

    In a pipeline, every stage allocates the same number of layers, plus embedding and head.
    """
    outer = sum(weight.local_bytes(plan, dtype) for weight in outer_weights(model, plan))
    split = _layer_split(plan)
    layers = stored_layers(model, plan.pp).items()
    return outer + sum(n * layer_bytes(model, split, layer, dtype) for layer, n in layers)


def _layer_split(plan: Plan) -> Plan:
    """The plan with only the axes that split the weights of a layer."""
    dp = plan.dp if "dp" in plan.expert_axes else 1
    return replace(plan, pp=1, cp=1, dp=dp, sp=False)


@lru_cache(maxsize=CACHED_WEIGHTS)
def layer_bytes(model: Model, plan: Plan, layer: Layer, dtype: str) -> int:
    """Weight bytes of one layer on one device."""
    return sum(weight.local_bytes(plan, dtype) for weight in layer_weights(model, plan, layer))
