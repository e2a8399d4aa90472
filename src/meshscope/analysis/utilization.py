"""How much of the chips' peaks a step uses: MFU over model FLOPs, MBU over the bytes it must read."""

from collections import Counter
from math import prod
from typing import assert_never

from meshscope.events.enums import Phase
from meshscope.spec.hardware.chips import Chip
from meshscope.spec.model.model import (
    AttentionKind,
    CompressedAttention,
    GroupedAttention,
    Indexer,
    LatentAttention,
    Layer,
    Model,
)
from meshscope.spec.plan.memory import Memory
from meshscope.spec.plan.plan import Plan
from meshscope.spec.plan.weights import Dim, Weight, layer_weights, outer_weights
from meshscope.spec.workload import Workload


def model_flops(model: Model, workload: Workload, phase: Phase) -> float:
    """FLOPs that one step of the phase needs for the whole batch, whatever the program computes.

    Two for each weight of a matrix that a token meets (of routed experts its own share; of the
    embedding none; the output head for the last position of each sequence alone), and for attention two
    for each product of a query with a key, and of a weight with a value, over the context that a layer
    sees: all of it, at most a window, or what an indexer chooses; that half of a causal context is masked
    is not taken off. The indexer's own products, with every position or entry, count, too. Compressed
    entries count as positions; what pools them and mixes residual streams, element by element, does not
    count. A decode step is the mean one.

    Source: Chowdhery et al., "PaLM" (arXiv 2204.02311), appendix B, the forward pass of it; the indexer:
    DeepSeek-V3.2-Exp, "Boosting Long-Context Efficiency with DeepSeek Sparse Attention", equation 1;
    entries: transformers' DeepSeek-V4, of sections 2.3.1 and 2.3.2 of its report.
    """
    contexts = _contexts(workload, phase)
    n_new = workload.prompt if phase is Phase.PREFILL else 1
    per_token = sum(
        n * (2.0 * _met_weights(model, layer) + _mean_attention_flops(model, layer, contexts))
        for layer, n in Counter(model.layers).items()
    )
    head = 2.0 * sum(prod(weight.shape) for weight in _met_once(model))
    return workload.batch * (n_new * per_token + head)


def _contexts(workload: Workload, phase: Phase) -> range:
    """Positions that a query attends to in each step of the phase."""
    if phase is Phase.PREFILL:
        return range(workload.prompt, workload.prompt + 1)
    return range(workload.prompt + 1, workload.prompt + max(workload.n_decode_steps, 1) + 1)


def _met_once(model: Model) -> list[Weight]:
    """The matrices behind the last layer, which the last position of a sequence alone meets."""
    embed, *others = outer_weights(model, Plan())
    matrices = [weight for weight in others if not weight.is_vector]
    return [embed, *matrices] if model.has_tied_embeddings else matrices


def _met_weights(model: Model, layer: Layer) -> float:
    """Elements of the matrices that one token is multiplied with in a layer."""
    return sum(
        prod(weight.shape) * _share(model, weight)
        for weight in layer_weights(model, Plan(), layer)
        if not weight.is_vector and weight.dtype is None  # a table of integers multiplies nothing
    )


def _share(model: Model, weight: Weight) -> float:
    if Dim.EXPERT not in weight.dims or model.moe is None:
        return 1.0
    return model.moe.n_active / model.moe.n_experts


def _mean_attention_flops(model: Model, layer: Layer, contexts: range) -> float:
    """Of one query token in one layer, the mean over the contexts."""
    return sum(_attention_flops(model, layer, context) for context in contexts) / len(contexts)


def _attention_flops(model: Model, layer: Layer, context: int) -> float:
    """Of one query token, products with keys and values, all heads, and those of the indexer."""
    match model.attention:
        case GroupedAttention() as grouped:
            seen = context
            if layer.attention is AttentionKind.SLIDING and grouped.window is not None:
                seen = min(context, grouped.window)
            return 4.0 * grouped.n_heads * grouped.head_dim * seen
        case LatentAttention() as latent:
            widths = latent.qk_dim + latent.value_dim
            if latent.indexer is None:
                return 2.0 * latent.n_heads * widths * context
            seen = min(context, latent.indexer.top_k)
            return 2.0 * latent.n_heads * widths * seen + _indexer_flops(latent.indexer, context)
        case CompressedAttention() as compressed:
            return _compressed_flops(compressed, layer.attention, context)
        case _:
            assert_never(model.attention)


def _compressed_flops(attention: CompressedAttention, kind: AttentionKind, context: int) -> float:
    """Products with the window's keys and with the entries of all full windows before, or their choice."""
    seen, choosing_flops = min(context, attention.window), 0.0
    match kind:
        case AttentionKind.COMPRESSED_SPARSE:
            n_entries = context // attention.sparse_rate
            seen += min(n_entries, attention.indexer.top_k)
            choosing_flops = _indexer_flops(attention.indexer, n_entries)
        case AttentionKind.HEAVILY_COMPRESSED:
            seen += context // attention.heavy_rate
        case AttentionKind.FULL | AttentionKind.SLIDING:
            pass
        case _:
            assert_never(kind)
    return 4.0 * attention.n_heads * attention.head_dim * seen + choosing_flops


def _indexer_flops(indexer: Indexer, n_positions: int) -> float:
    """Of one query: its heads' products with the key of each position, and their weighted sum."""
    return 2.0 * indexer.n_heads * (indexer.head_dim + 1) * n_positions


def n_parameters(model: Model) -> tuple[int, int, int]:
    """Parameters of the model: all, those that a token meets (its experts only), and of the embedding.

    Source: shapes of the checkpoint as `meshscope.spec.plan.weights` declares them.
    """
    outer = sum(prod(weight.shape) for weight in outer_weights(model, Plan()))
    total, met = float(outer), float(outer)
    for layer in model.layers:
        for weight in layer_weights(model, Plan(), layer):
            total += prod(weight.shape)
            met += prod(weight.shape) * _share(model, weight)
    return round(total), round(met), model.vocab * model.hidden


def mfu(flops: float, step_s: float, n_chips: int, chip: Chip) -> float | None:
    """Model FLOPs utilisation: model FLOPs of a step over what all chips could do in its time in bf16.

    The time is the whole step, idle and communication included.

    Source: Chowdhery et al., "PaLM" (arXiv 2204.02311), section 4.1 and appendix B; peaks:
    `meshscope.spec.hardware.chips`.
    """
    if chip.bf16_flops_per_s is None:
        return None
    return flops / (step_s * n_chips * chip.bf16_flops_per_s)


def mbu(memory: Memory, step_s: float, chip: Chip) -> float | None:
    """Model bandwidth utilisation: weights and KV cache of a device over what its HBM gives in a step.

    Meant for decode, where each step reads both once. The cache counts as it is stored, full; of experts
    all count, whether a token met them or not, so that a small batch of a mixture of experts is overstated.

    Source: Agarwal et al., "LLM Inference Performance Engineering: Best Practices" (Databricks, 2023):
    (total model parameter size + KV cache size) / TPOT over peak bandwidth.
    """
    if chip.hbm_bytes_per_s is None:
        return None
    read_bytes = memory.weights_bytes + memory.kv_cache_bytes
    return read_bytes / (step_s * chip.hbm_bytes_per_s / chip.devices_per_chip)


def bubble_frac(n_stages: int, n_microbatches: int) -> float:
    """Share of a pipelined step in which a stage has nothing to do: (p - 1) / (m + p - 1).

    For p stages of equal length and m micro-batches that follow each other, forward only.

    Source: Huang et al., "GPipe" (arXiv 1811.06965), section 2.3; Narayanan et al. (arXiv 2104.04473),
    section 2.2.1, give it over the ideal time, (p - 1) / m.
    """
    return (n_stages - 1) / (n_microbatches + n_stages - 1)
