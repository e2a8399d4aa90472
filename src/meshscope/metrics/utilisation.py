"""How much of the chips' peaks a step uses: MFU over model FLOPs, MBU over the bytes it must read."""

from math import prod

from meshscope.arch.model import (
    AttentionKind,
    CompressedAttention,
    GroupedAttention,
    LatentAttention,
    Layer,
    Model,
)
from meshscope.hardware.chips import Chip
from meshscope.plan.memory import Memory
from meshscope.plan.plan import Plan
from meshscope.plan.weights import Dim, Weight, layer_weights, outer_weights
from meshscope.plan.workload import Workload
from meshscope.table.kinds import Phase


def model_flops(model: Model, workload: Workload, phase: Phase) -> float | None:
    """FLOPs that one step of the phase needs for the whole batch, whatever the program computes.

    Two for each weight of a matrix that a token meets (of routed experts its own share; of the
    embedding none; the output head for the last position of each sequence alone), and for attention two
    for each product of a query with a key, and of a weight with a value, over the whole context: that half
    of a causal context is masked is not taken off. A decode step is the mean one. Null for attention whose
    context is chosen (an indexer, compressed entries), for which no convention exists.

    Source: Chowdhery et al., "PaLM" (arXiv 2204.02311), appendix B, the forward pass of it.
    """
    attention = [
        _attention_flops(model, layer, _context(workload, phase)) for layer in model.layers
    ]
    if None in attention:
        return None
    n_new = workload.prompt if phase is Phase.PREFILL else 1
    layers = sum(2.0 * _met_weights(model, layer) for layer in model.layers)
    head = 2.0 * model.vocab * model.hidden
    per_token = layers + sum(flops for flops in attention if flops is not None)
    return workload.batch * (n_new * per_token + head)


def _context(workload: Workload, phase: Phase) -> float:
    """Positions that a query attends to, by the mean over the decode steps."""
    if phase is Phase.PREFILL:
        return workload.prompt
    return workload.prompt + (workload.n_decode_steps + 1) / 2


def _met_weights(model: Model, layer: Layer) -> float:
    """Elements of the matrices that one token is multiplied with in a layer."""
    return sum(
        prod(weight.shape) * _share(model, weight)
        for weight in layer_weights(model, Plan(), layer)
        if len(weight.shape) > 1 and weight.dtype is None  # a table of integers multiplies nothing
    )


def _share(model: Model, weight: Weight) -> float:
    if Dim.EXPERT not in weight.dims or model.moe is None:
        return 1.0
    return model.moe.n_active / model.moe.n_experts


def _attention_flops(model: Model, layer: Layer, context: float) -> float | None:
    """Of one query token, products with keys and values, all heads."""
    match model.attention:
        case GroupedAttention() as grouped:
            seen = context
            if layer.attention is AttentionKind.SLIDING and grouped.window is not None:
                seen = min(context, grouped.window)
            return 4.0 * grouped.n_heads * grouped.head_dim * seen
        case LatentAttention() as latent:
            widths = latent.qk_dim + latent.value_dim
            return None if latent.indexer else 2.0 * latent.n_heads * widths * context
        case CompressedAttention():
            return None


def n_parameters(model: Model) -> tuple[int, int, int]:
    """Parameters of the model: all, those that a token meets (its experts only), and of the embedding.

    Source: shapes of the checkpoint as `meshscope.plan.weights` declares them.
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
    `meshscope.hardware.chips`.
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
