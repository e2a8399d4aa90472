"""The weights of a model under a plan: one declaration gives shapes, shardings and checkpoint names.

A dimension carries a logical axis; `mesh_axis_of` maps it to a mesh axis, so that a plan is data.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import prod

from meshscope.arch.model import Model
from meshscope.plan.plan import Plan
from meshscope.plan.workload import Workload
from meshscope.units import DTYPE_BITS


class Dim(StrEnum):
    """Logical axes of weights."""

    VOCAB = "vocab"
    HIDDEN = "hidden"  # the residual width of a matrix; fsdp splits it
    NORM = "norm"  # the width of a norm's scale or of a bias; never split by fsdp
    HEADS = "heads"
    KV_HEADS = "kv_heads"
    HEAD_DIM = "head_dim"
    FFN = "ffn"


def mesh_axis_of(dim: Dim) -> str | None:
    """The mesh axis that splits this logical axis; None when none does."""
    match dim:
        case Dim.VOCAB | Dim.HEADS | Dim.KV_HEADS | Dim.FFN:
            return "tp"
        case Dim.HIDDEN:
            return "fsdp"
        case Dim.NORM | Dim.HEAD_DIM:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One weight array, as stored for a plan: KV heads replicated and vocabulary padded where needed.

    `checkpoint` is the tensor's name in a Hugging Face checkpoint, with `{layer}` for the index; a
    matrix there is [out, in] and is transposed before it is reshaped to `shape`.
    """

    name: str
    dims: tuple[Dim, ...]
    shape: tuple[int, ...]
    checkpoint: str
    is_transposed: bool = False

    def local_shape(self, plan: Plan) -> tuple[int, ...]:
        """What one device holds, in elements."""
        sizes = dict(plan.mesh.axes)
        return tuple(
            size // sizes.get(mesh_axis_of(dim) or "", 1)
            for dim, size in zip(self.dims, self.shape, strict=True)
        )

    def gathered_shape(self, plan: Plan) -> tuple[int, ...]:
        """What one device holds while fsdp has it gathered: the tp share of the whole."""
        return tuple(
            size // plan.tp if mesh_axis_of(dim) == "tp" else size
            for dim, size in zip(self.dims, self.shape, strict=True)
        )

    @property
    def fsdp_dim(self) -> int | None:
        """Index of the dimension that fsdp splits; None when the weight is replicated over fsdp."""
        return self.dims.index(Dim.HIDDEN) if Dim.HIDDEN in self.dims else None


def stored_kv_heads(model: Model, plan: Plan) -> int:
    """KV heads as stored: replicated up to tp when there are fewer heads than tp."""
    return max(model.attention.n_kv_heads, plan.tp)


def padded_vocab(model: Model, plan: Plan) -> int:
    """Rows of the embedding as stored: the vocabulary padded to a multiple of tp."""
    return -(-model.vocab // plan.tp) * plan.tp


def layer_weights(model: Model, plan: Plan) -> tuple[Weight, ...]:
    """The weights of one layer, in the order in which the program meets them."""
    return (*attention_weights(model, plan), *mlp_weights(model))


def outer_weights(model: Model, plan: Plan) -> tuple[Weight, ...]:
    """Embedding, final norm and, unless tied, the output head; both matrices are [vocab, hidden]."""
    table = (padded_vocab(model, plan), model.hidden)
    embed = Weight(
        name="embed",
        dims=(Dim.VOCAB, Dim.HIDDEN),
        shape=table,
        checkpoint="model.embed_tokens.weight",
    )
    norm = Weight(
        name="final_norm", dims=(Dim.NORM,), shape=(model.hidden,), checkpoint="model.norm.weight"
    )
    head = Weight(
        name="lm_head", dims=(Dim.VOCAB, Dim.HIDDEN), shape=table, checkpoint="lm_head.weight"
    )
    return (embed, norm) if model.has_tied_embeddings else (embed, norm, head)


def attention_weights(model: Model, plan: Plan) -> tuple[Weight, ...]:
    """The weights of one layer's attention with the norm before it."""
    attention, base = model.attention, "model.layers.{layer}."
    d, n, h = model.hidden, attention.n_heads, attention.head_dim
    k = stored_kv_heads(model, plan)

    def matrix(name: str, dims: tuple[Dim, ...], shape: tuple[int, ...], tensor: str) -> Weight:
        return Weight(
            name=name, dims=dims, shape=shape, checkpoint=base + tensor, is_transposed=True
        )

    def vector(name: str, dims: tuple[Dim, ...], shape: tuple[int, ...], tensor: str) -> Weight:
        return Weight(name=name, dims=dims, shape=shape, checkpoint=base + tensor)

    weights = [
        vector("attn_norm", (Dim.NORM,), (d,), "input_layernorm.weight"),
        matrix("wq", (Dim.HIDDEN, Dim.HEADS, Dim.HEAD_DIM), (d, n, h), "self_attn.q_proj.weight"),
        matrix(
            "wk", (Dim.HIDDEN, Dim.KV_HEADS, Dim.HEAD_DIM), (d, k, h), "self_attn.k_proj.weight"
        ),
        matrix(
            "wv", (Dim.HIDDEN, Dim.KV_HEADS, Dim.HEAD_DIM), (d, k, h), "self_attn.v_proj.weight"
        ),
        matrix("wo", (Dim.HEADS, Dim.HEAD_DIM, Dim.HIDDEN), (n, h, d), "self_attn.o_proj.weight"),
    ]
    if attention.has_qkv_bias:
        weights += [
            vector("bq", (Dim.HEADS, Dim.HEAD_DIM), (n, h), "self_attn.q_proj.bias"),
            vector("bk", (Dim.KV_HEADS, Dim.HEAD_DIM), (k, h), "self_attn.k_proj.bias"),
            vector("bv", (Dim.KV_HEADS, Dim.HEAD_DIM), (k, h), "self_attn.v_proj.bias"),
        ]
    if attention.has_o_bias:
        weights.append(vector("bo", (Dim.NORM,), (d,), "self_attn.o_proj.bias"))
    if attention.has_qk_norm:
        weights += [
            vector("q_norm", (Dim.HEAD_DIM,), (h,), "self_attn.q_norm.weight"),
            vector("k_norm", (Dim.HEAD_DIM,), (h,), "self_attn.k_norm.weight"),
        ]
    return tuple(weights)


def mlp_weights(model: Model) -> tuple[Weight, ...]:
    """The weights of one layer's gated MLP with the norm before it."""
    base, d, f = "model.layers.{layer}.", model.hidden, model.ffn
    weights = [
        Weight(
            name="mlp_norm",
            dims=(Dim.NORM,),
            shape=(d,),
            checkpoint=base + "post_attention_layernorm.weight",
        ),
        Weight(
            name="w_gate",
            dims=(Dim.HIDDEN, Dim.FFN),
            shape=(d, f),
            checkpoint=base + "mlp.gate_proj.weight",
            is_transposed=True,
        ),
        Weight(
            name="w_up",
            dims=(Dim.HIDDEN, Dim.FFN),
            shape=(d, f),
            checkpoint=base + "mlp.up_proj.weight",
            is_transposed=True,
        ),
        Weight(
            name="w_down",
            dims=(Dim.FFN, Dim.HIDDEN),
            shape=(f, d),
            checkpoint=base + "mlp.down_proj.weight",
            is_transposed=True,
        ),
    ]
    if model.has_mlp_bias:
        weights += [
            Weight(
                name="b_gate", dims=(Dim.FFN,), shape=(f,), checkpoint=base + "mlp.gate_proj.bias"
            ),
            Weight(name="b_up", dims=(Dim.FFN,), shape=(f,), checkpoint=base + "mlp.up_proj.bias"),
            Weight(
                name="b_down", dims=(Dim.NORM,), shape=(d,), checkpoint=base + "mlp.down_proj.bias"
            ),
        ]
    return tuple(weights)


def device_weight_bytes(model: Model, plan: Plan, dtype: str) -> int:
    """Bytes of weights that one device holds."""
    elements = sum(prod(w.local_shape(plan)) for w in outer_weights(model, plan))
    elements += model.n_layers * sum(prod(w.local_shape(plan)) for w in layer_weights(model, plan))
    return elements * DTYPE_BITS[dtype] // 8


def device_cache_bytes(model: Model, plan: Plan, workload: Workload) -> int:
    """Bytes of the key and value cache that one device holds, for prompt and output."""
    heads = stored_kv_heads(model, plan) // plan.tp
    positions = workload.batch // plan.data_size * workload.context
    elements = 2 * model.n_layers * positions * heads * model.attention.head_dim
    return elements * DTYPE_BITS[workload.cache_dtype] // 8
