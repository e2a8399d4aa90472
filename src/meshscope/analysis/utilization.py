"""Utilization of a step: MFU, MBU, model FLOPs, parameter counts and the pipeline bubble."""

from collections import Counter
from math import prod

from meshscope.events.enums import Phase
from meshscope.spec.hardware.chips import Chip
from meshscope.spec.model.flops import attention_flops
from meshscope.spec.model.model import Layer, Model
from meshscope.spec.plan.memory import Memory
from meshscope.spec.plan.plan import Plan
from meshscope.spec.plan.weights import Dim, Weight, head_weight, layer_weights, outer_weights
from meshscope.spec.workload import Workload

# Whether a matrix outside the layers multiplies every token; tables are looked up.
OUTER_MATRICES = {"layer_embed_proj": True, "draft_join": True, "collapse": False}


def model_flops(model: Model, workload: Workload, phase: Phase) -> float:
    """FLOPs that the model needs for one step of the whole batch, independent of the program.

    Matrix products count two FLOPs per weight and token: all matrices of a layer, the chosen experts only,
    no embedding, and the output head for the last position of each sequence. Attention counts two FLOPs per
    element of each query-key product and of each weight-value product over the context of the layer: full,
    a window, or the positions that an indexer selects. The causal mask is not subtracted. The products of
    the indexer with every position or entry are included. Compressed entries count as positions; elementwise
    work such as pooling is excluded. A decode step is the mean over all decode steps.

    Source: Chowdhery et al., "PaLM" (arXiv 2204.02311), appendix B, forward pass only; the indexer:
    DeepSeek-V3.2-Exp, "Boosting Long-Context Efficiency with DeepSeek Sparse Attention", equation 1;
    entries: the DeepSeek-V4 of transformers, which implements sections 2.3.1 and 2.3.2 of its report.
    """
    contexts = _contexts(workload, phase)
    n_new = workload.prompt if phase is Phase.PREFILL else workload.decode_tokens
    n_logits = 1 if phase is Phase.PREFILL else n_new
    per_token = sum(
        n * (2.0 * _active_weights(model, layer) + _mean_attention_flops(model, layer, contexts))
        for layer, n in Counter(model.layers).items()
    )
    of_tokens, of_last = _outer_matrices(model)
    per_token += 2.0 * sum(prod(weight.shape) for weight in of_tokens)
    head = 2.0 * sum(prod(weight.shape) for weight in of_last)
    return workload.batch * (n_new * per_token + n_logits * head)


def _contexts(workload: Workload, phase: Phase) -> range:
    """Context length of each step of the phase."""
    if phase is Phase.PREFILL:
        return range(workload.prompt, workload.prompt + 1)
    return range(workload.prompt + 1, workload.prompt + max(workload.output - 1, 1) + 1)


def _outer_matrices(model: Model) -> tuple[list[Weight], list[Weight]]:
    """The matrices outside the layers for every token, and those for the last position of a sequence."""
    matrices = [weight for weight in outer_weights(model, Plan()) if weight.name in OUTER_MATRICES]
    of_tokens = [weight for weight in matrices if OUTER_MATRICES[weight.name]]
    of_last = [weight for weight in matrices if not OUTER_MATRICES[weight.name]]
    return of_tokens, [head_weight(model, Plan()), *of_last]


def _active_weights(model: Model, layer: Layer) -> float:
    """Weights of a layer that multiply one token."""
    return sum(
        prod(weight.shape) * _share(model, weight)
        for weight in layer_weights(model, Plan(), layer)
        if not weight.is_vector
        and weight.dtype is None  # an integer table is no factor of a product
    )


def _share(model: Model, weight: Weight) -> float:
    if Dim.EXPERT not in weight.dims or model.moe is None:
        return 1.0
    return model.moe.n_active / model.moe.n_experts


def _mean_attention_flops(model: Model, layer: Layer, contexts: range) -> float:
    """FLOPs of one query token in one layer, averaged over the contexts."""
    flops = sum(attention_flops(model.attention, layer.attention, n) for n in contexts)
    return flops / len(contexts)


def n_parameters(model: Model) -> tuple[int, int, int]:
    """Parameters of the model: total, active per token (chosen experts only), and of the embedding.

    Source: shapes of the checkpoint as `meshscope.spec.plan.weights` declares them.
    """
    outer = sum(prod(weight.shape) for weight in outer_weights(model, Plan()))
    total, active = float(outer), float(outer)
    for layer in model.layers:
        for weight in layer_weights(model, Plan(), layer):
            total += prod(weight.shape)
            active += prod(weight.shape) * _share(model, weight)
    return round(total), round(active), model.vocab * model.hidden


def mfu(flops: float, step_s: float, n_chips: int, chip: Chip) -> float | None:
    """Model FLOPs utilization (MFU): achieved model FLOP rate over the bf16 peak of all chips.

    MFU = model FLOPs / (step time * chips * peak FLOP rate of a chip). The step time includes idle time and
    communication.

    Source: Chowdhery et al., "PaLM" (arXiv 2204.02311), section 4.1 and appendix B; peaks:
    `meshscope.spec.hardware.chips`.
    """
    if chip.bf16_flops_per_s is None:
        return None
    return flops / (step_s * n_chips * chip.bf16_flops_per_s)


def mbu(memory: Memory, step_s: float, chip: Chip) -> float | None:
    """Model bandwidth utilization (MBU): required over available HBM bandwidth of a device in a step.

    MBU = (weight bytes + KV cache bytes) / (step time * peak HBM bandwidth of a device). MBU applies to
    decode, where each step reads both once. The cache counts at its full allocated size and all experts
    count, so MBU overstates small batches of a mixture of experts.

    Source: Agarwal et al., "LLM Inference Performance Engineering: Best Practices" (Databricks, 2023):
    (total model parameter size + KV cache size) / TPOT over peak bandwidth.
    """
    if chip.hbm_bytes_per_s is None:
        return None
    read_bytes = memory.known_bytes
    return read_bytes / (step_s * chip.hbm_bytes_per_s / chip.devices_per_chip)


def bubble_frac(n_stages: int, n_microbatches: int) -> float:
    """Bubble fraction of a pipelined step: the idle fraction of a stage, (p - 1) / (m + p - 1).

    This holds for p stages of equal duration and m sequential microbatches, forward only.

    Source: Huang et al., "GPipe" (arXiv 1811.06965), section 2.3. Narayanan et al. (arXiv 2104.04473),
    section 2.2.1, relate the bubble to the ideal time instead, (p - 1) / m.
    """
    return (n_stages - 1) / (n_microbatches + n_stages - 1)
