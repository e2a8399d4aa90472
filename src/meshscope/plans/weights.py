"""Weights of a model under a plan, in each layer and outside the layers.

Attention, MLPs and residual streams declare their weights in `model.mechanisms`; `layer_weights` combines them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

from meshscope.errors import SpecError
from meshscope.model.arrays import (
    CACHED_WEIGHTS,
    LAYER_BASE,
    ColumnSlice,
    Dim,
    Weight,
    WeightBuilder,
    letters,
)
from meshscope.model.families import SIDE_NORM_TENSORS
from meshscope.model.layers import AttentionKind, Layer, MlpKind
from meshscope.model.mechanisms.mixture import Activation, mlp_weights, xielu_numbers
from meshscope.model.model import Model
from meshscope.plans.plan import Plan, Tables
from meshscope.plans.stages import stored_layers
from meshscope.units import format_bytes


def padded_vocab(model: Model, plan: Plan) -> int:
    """Rows of the stored embedding: the vocabulary padded to a multiple of tp."""
    return -(-model.vocab // plan.tp) * plan.tp


@lru_cache(maxsize=CACHED_WEIGHTS)
def outer_weights(model: Model, plan: Plan) -> tuple[Weight, ...]:
    """Embedding, final norm and, unless tied, the output head; both matrices are [vocab, hidden].

    Also what collapses parallel streams, embeddings of layers and of n-grams, and what joins the two inputs of a draft.
    """
    vocab, streams, inputs = padded_vocab(model, plan), model.hyper, model.layer_inputs
    engram, split = model.engram, prod(getattr(plan, axis) for axis in plan.table_axes)
    n_parts = 0 if plan.tables is Tables.HOST else split
    n_streams = 1 if streams is None else streams.n_streams
    embed = Weight(
        name="embed",
        dims=(Dim.VOCAB, Dim.HIDDEN),
        shape=(vocab, model.hidden),
        checkpoint="model.embed_tokens.weight",
        is_row_major=True,
        inputs=(1,),
    )
    head = replace(embed, name="lm_head", checkpoint=model.family.traits.head, is_row_major=False)
    weights = (
        embed,
        *((_norm(model, "final_norm", "model.norm.weight", base=""),) * model.has_final_norm),
        *(() if model.has_tied_embeddings else (head,)),
        *(() if streams is None else streams.collapse_weights(model.hidden)),
        *(() if inputs is None else inputs.tables(model.hidden, vocab, model.n_layers)),
        *(
            ()
            if engram is None
            else engram.weights(model.hidden, n_streams, model.n_layers, n_parts)
        ),
        *draft_head_weights(model),
    )
    return _as_stored(model, weights)


def _as_stored(model: Model, weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """The weights with the names of the family's checkpoints."""
    names = model.family.traits.names
    parts = {w: next((one for one in names if one in w.checkpoint), None) for w in weights}
    return tuple(
        w if part is None else replace(w, checkpoint=w.checkpoint.replace(part, names[part]))
        for w, part in parts.items()
    )


def _norm(model: Model, name: str, tensor: str, *, base: str = LAYER_BASE, size: int = 0) -> Weight:
    builder = WeightBuilder(base, letters(Dim.NORM, d=size or model.hidden))
    return builder.vector(name, "d", tensor)


def draft_head_weights(model: Model) -> tuple[Weight, ...]:
    """The weights that join both inputs of a draft; none for other models."""
    head = model.draft_head
    return () if head is None else tuple(head.weights(model.hidden, model.vocab, model.n_layers))


def head_weight(model: Model, plan: Plan) -> Weight:
    """The matrix of the output head: the embedding if the head is tied to it."""
    name = "embed" if model.has_tied_embeddings else "lm_head"
    return next(weight for weight in outer_weights(model, plan) if weight.name == name)


def attention_weights(model: Model, plan: Plan, layer: Layer) -> tuple[Weight, ...]:
    """The weights of one layer's attention, including the norms around it."""
    return _attention_weights(model, plan.tp, layer)


@lru_cache(maxsize=CACHED_WEIGHTS)
def _attention_weights(model: Model, tp: int, layer: Layer) -> tuple[Weight, ...]:
    if not layer.has_attention:
        return ()
    row, hidden, attention = model.family.traits, model.hidden, model.attention_of(layer)
    streams = () if model.hyper is None else model.hyper.weights(hidden, "attn", "attn")
    before = (_norm(model, "attn_norm", row.attn_norm),) if model.has_input_norms else ()
    after = (_norm(model, "attn_post_norm", row.post_norms[0]),) if model.has_post_norms else ()
    weights = attention.weights(hidden, tp, layer, is_fused=row.is_fused)
    if layer.attention.is_linear:
        weights = (replace(weight, is_linear=True) for weight in weights)
    return _in_formats(model, layer, (*streams, *before, *weights, *after))


def _in_formats(model: Model, layer: Layer, weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """The weights, some in the formats in which the checkpoint stores their modules."""
    most, formats = model.stored_dtype or model.nearest_dtype, list[Weight]()
    is_mixed = most is not None and layer.formats
    for weight, stored in zip(weights, _as_stored(model, weights), strict=True) if is_mixed else ():
        tensor = stored.checkpoint.replace("{expert}", "0") + "."
        special = next((dtype for module, dtype in layer.formats if f".{module}." in tensor), None)
        formats.append(weight if special is None else replace(weight, own_dtype=(most, special)))
    return tuple(formats) or weights


def layer_weights(model: Model, plan: Plan, layer: Layer) -> tuple[Weight, ...]:
    """The weights of one layer in program order: attention, then its feed-forward block with the norms around it."""
    return _layer_weights(model, plan.tp, layer)


@lru_cache(maxsize=CACHED_WEIGHTS)
def _layer_weights(model: Model, tp: int, layer: Layer) -> tuple[Weight, ...]:
    row, blocks = model.family.traits, dense_weights(model, layer) if layer.has_mlp else ()
    has_norm = model.has_input_norms and not model.is_parallel and layer.mlp is not MlpKind.NONE
    before = (_norm(model, "mlp_norm", row.mlp_norm),) if has_norm else ()
    if layer.has_experts:
        router = router_weights(model, has_table=layer.mlp is MlpKind.HASH_MOE)
        blocks = (*blocks, *router, *latent_weights(model), *expert_weights(model, layer))
        is_beside = layer.mlp is MlpKind.DENSE_AND_MOE
        norms = tuple(_norm(model, name, tensor) for name, tensor in SIDE_NORM_TENSORS.items())
        blocks = (*blocks, *(norms if is_beside else shared_weights(model, layer)))
    streams = () if model.hyper is None else model.hyper.weights(model.hidden, "mlp", "ffn")
    weights = (
        *_attention_weights(model, tp, layer),
        *streams,
        *before,
        *blocks,
        *((_norm(model, "mlp_post_norm", row.post_norms[1]),) if model.has_post_norms else ()),
        *layer_input_weights(model),
        *((_norm(model, "layer_scale", "layer_scalar", size=1),) if model.has_layer_scale else ()),
    )
    return _as_stored(model, weights) if row.names else weights


@lru_cache(maxsize=CACHED_WEIGHTS)
def layer_input_weights(model: Model) -> tuple[Weight, ...]:
    """The weights that bring the embeddings of a layer into its output; none for most models."""
    inputs = model.layer_inputs
    return () if inputs is None else tuple(inputs.weights(model.hidden))


@lru_cache(maxsize=CACHED_WEIGHTS)
def dense_weights(model: Model, layer: Layer) -> tuple[Weight, ...]:
    """The weights of a dense layer's gated MLP; Phi-3 has the gate, then the up projection in one tensor."""
    row, ffn, has_bias = model.family.traits, model.ffn_of(layer), model.has_mlp_bias
    sizes = (model.hidden, ffn, "", row.tensors("mlp"))
    if not model.activation.is_gated:
        numbers = xielu_numbers() if model.activation is Activation.XIELU else ()
        plain = (*mlp_weights(*sizes, has_gate=False), *numbers)
        return _in_formats(model, layer, plain)
    gate, up, *others = mlp_weights(*sizes, has_bias=has_bias)
    if row.is_fused_mlp:
        tensor, whole = f"{LAYER_BASE}mlp.gate_up_proj.weight", 2 * ffn
        columns = ColumnSlice(whole=whole, start=0, stop=ffn)
        gate = replace(gate, checkpoint=tensor, columns=columns)
        columns = ColumnSlice(whole=whole, start=ffn, stop=whole)
        up = replace(up, checkpoint=tensor, columns=columns)
    return _in_formats(model, layer, (gate, up, *others))


@lru_cache(maxsize=CACHED_WEIGHTS)
def shared_weights(model: Model, layer: Layer) -> tuple[Weight, ...]:
    """The weights of a layer's shared experts, stored as one gated MLP; none without them."""
    moe = model.moe
    weights = () if moe is None else moe.shared_weights(model.hidden, model.family.traits)
    return _in_formats(model, layer, tuple(weights))


@lru_cache(maxsize=CACHED_WEIGHTS)
def router_weights(model: Model, *, has_table: bool = False) -> tuple[Weight, ...]:
    """The replicated weights of the router; `has_table` is whether a table maps token ids to experts."""
    assert model.moe is not None
    row = model.family.traits
    return tuple(model.moe.router_weights(model.hidden, model.vocab, row, has_table=has_table))


@lru_cache(maxsize=CACHED_WEIGHTS)
def latent_weights(model: Model) -> tuple[Weight, ...]:
    """The matrices around routed experts of another width; none for most models."""
    moe = model.moe
    return () if moe is None else tuple(moe.latent_weights(model.hidden, model.family.traits))


@lru_cache(maxsize=CACHED_WEIGHTS)
def expert_weights(model: Model, layer: Layer | None = None) -> tuple[Weight, ...]:
    """The weights of the routed experts, stacked over experts; without `layer`, of most layers."""
    assert model.moe is not None
    weights = tuple(model.moe.expert_weights(model.hidden, model.family.traits))
    return weights if layer is None else _in_formats(model, layer, weights)


def tables_notes(model: Model, plan: Plan | None) -> Iterator[str]:
    """Where the tables of n-grams are, with their bytes in the checkpoint's format; nothing without tables."""
    if model.engram is None or plan is None:
        return
    one = [w for w in outer_weights(model, Plan()) if Dim.TABLE in w.dims]
    stored = sum(w.local_bytes(Plan(), model.default_weight_dtype) for w in one)
    places = {
        Tables.ALL: "split by rows over all devices",
        Tables.TP: f"split by rows over tp, with {plan.n_devices // plan.tp} copies",
        Tables.DP: f"split by rows over {plan.data_axis}, with {plan.n_devices // plan.data_size} copies",
        Tables.HOST: "in the memory of each host; the transfer of rows over PCIe is counted without overlap and latency",
    }
    yield f"the tables of n-grams ({format_bytes(stored)}) are {places[plan.tables]}"


def draft_block_weights(model: Model) -> tuple[Weight, ...]:
    """The weights of blocks that draft tokens, which no step of the model itself reads; none for most models."""
    drafts = model.drafts
    if drafts is None or model.moe is None:
        return ()
    blocks = block_drafts(model)
    of_blocks = (w for layer in blocks.layers for w in layer_weights(blocks, Plan(), layer))
    return (*drafts.weights(model.hidden, model.vocab, model.n_layers), *of_blocks)


def block_drafts(model: Model) -> Model:
    """The model whose pass drafts tokens: blocks with windows and fewer experts, between embedding and head of `model`."""
    drafts = model.drafts
    assert drafts is not None
    assert model.moe is not None
    block = Layer(attention=AttentionKind.SLIDING, mlp=MlpKind.MOE)
    moe = replace(model.moe, n_experts=drafts.n_experts, n_active=drafts.n_active)
    return replace(model, layers=(block,) * drafts.n_blocks, moe=moe, engram=None)


def device_weight_bytes(model: Model, plan: Plan, dtype: str) -> int:
    """Weight bytes on one device; in a pipeline, every stage has as many layers, plus embedding and head."""
    split, layers = plan.of_weights, stored_layers(model, plan.pp).items()
    outer = _outer_bytes(model, split if model.engram is None else plan, dtype)
    return outer + sum(n * layer_bytes(model, split, layer, dtype) for layer, n in layers)


@lru_cache(maxsize=CACHED_WEIGHTS)
def _outer_bytes(model: Model, plan: Plan, dtype: str) -> int:
    """Weight bytes outside the layers on one device; only tables of n-grams are split over more axes than layers."""
    return sum(weight.local_bytes(plan, dtype) for weight in outer_weights(model, plan))


@lru_cache(maxsize=CACHED_WEIGHTS)
def layer_bytes(model: Model, plan: Plan, layer: Layer, dtype: str) -> int:
    """Weight bytes of one layer on one device."""
    return sum(weight.local_bytes(plan, dtype) for weight in layer_weights(model, plan, layer))


def tensors_of(model: Model, plan: Plan) -> Iterator[tuple[str, Weight]]:
    """Every checkpoint tensor by name, with the weight it provides, of one expert if each has a separate tensor."""
    for weight in outer_weights(model, plan):
        for part in range(weight.n_tensors):
            yield weight.checkpoint.format(part=part), weight
    for index, layer in enumerate(model.layers):
        for weight in layer_weights(model, plan, layer):
            if "{expert}" not in weight.checkpoint:
                yield weight.checkpoint.format(layer=index), weight
                continue
            at = weight.dims.index(Dim.EXPERT)
            dims = weight.dims[:at] + weight.dims[at + 1 :]
            one = replace(weight, dims=dims, shape=weight.shape[:at] + weight.shape[at + 1 :])
            for expert in range(weight.shape[at]):
                yield weight.checkpoint.format(layer=index, expert=expert), one


def reshaped(weight: Weight, tensor: Sequence[int], name: str) -> tuple[int, ...]:
    """The shape of the tensor before KV heads are repeated, vocabulary padded or columns selected.

    `tensor` is its shape in the checkpoint, where a matrix is [out, in] and adjacent dimensions may
    be merged. It may have fewer KV heads and a smaller vocabulary than the plan stores. SpecError if
    the shape does not match the weight.
    """
    is_flat = len(tensor) < 2 and (weight.is_transposed or Dim.VOCAB in weight.dims)
    is_turned = weight.is_transposed and not is_flat
    tensor_shape = [*tensor[:-2], tensor[-1], tensor[-2]] if is_turned else tensor
    columns = weight.columns
    shape = list(weight.shape)
    if columns is not None and columns.is_flat:
        shape = [shape[0], columns.whole]
    elif columns is not None:
        shape[columns.dim] = columns.whole
    for at, dim in enumerate(weight.dims[: len(shape)]):
        if columns is not None and at - len(shape) == columns.dim:
            continue
        n_heads = prod(tensor_shape) // (prod(shape) // shape[at])
        if dim is Dim.KV_HEADS and n_heads and shape[at] % n_heads == 0:
            shape[at] = n_heads
        elif (
            dim in {Dim.VOCAB, Dim.TABLE}
            and at < len(tensor_shape)
            and 0 < tensor_shape[at] <= shape[at]
        ):
            shape[at] = tensor_shape[at]
    if (
        is_flat
        or prod(tensor_shape) != prod(shape)
        or not _products(tensor_shape) <= _products(shape)
    ):
        raise SpecError(
            f"tensor '{name}' has shape {list(tensor)}, which does not match {weight.name} "
            f"{list(weight.shape)}{' (transposed)' if weight.is_transposed else ''}. "
            "Use the checkpoint of this config."
        )
    return tuple(shape)


def _products(shape: Sequence[int]) -> set[int]:
    """Products of leading dimensions; merging dimensions yields a subset."""
    return {prod(shape[:i]) for i in range(len(shape) + 1)}
