"""Utilization of a step and of devices: MFU, MBU, the pipeline bubble, load, idle time and waiting."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import prod

import polars as pl

from meshscope.analysis.overlap import ratio
from meshscope.events.enums import Phase
from meshscope.events.measured import CollectiveTime, DeviceLoad
from meshscope.hardware.chips import Chip, product_speedup
from meshscope.model.arrays import Dim, Weight
from meshscope.model.layers import Layer
from meshscope.model.mechanisms.ngrams import ENGRAM
from meshscope.model.model import Model
from meshscope.plans.plan import Plan
from meshscope.plans.weights import draft_block_weights, head_weight, layer_weights, outer_weights
from meshscope.plans.workload import Workload

# Whether a matrix outside the layers multiplies every token; tables are looked up.
_OUTER_MATRICES = {"layer_embed_proj": True, "draft_join": True, ENGRAM: True, "collapse": False}


def model_flops(model: Model, workload: Workload, phase: Phase) -> float:
    """FLOPs that the model needs for one step of the whole batch, independent of the program.

    Matrix products count two FLOPs per weight and token: all matrices of a layer, the chosen experts only,
    no embedding, and the output head for the last position of each sequence. Attention counts two FLOPs per
    element of each query-key product and of each weight-value product, for the keys that a query sees: of a
    prompt the positions up to its own (half of the square), of those its window or chunk, or the positions
    that an indexer selects; in decode the whole context. The products of the indexer with every position or
    entry before the query are included. Compressed entries count as positions; elementwise work such as
    pooling is excluded. A decode step is the mean over all decode steps.

    Source: Chowdhery et al., "PaLM" (arXiv 2204.02311), appendix B, forward pass only; causal attention as in
    MaxText (AI-Hypercomputer/maxtext, pull request 1988, July 2025) and Megatron-LM; the indexer:
    DeepSeek-V3.2-Exp, "Boosting Long-Context Efficiency with DeepSeek Sparse Attention", equation 1;
    entries: the DeepSeek-V4 of transformers, which implements sections 2.3.1 and 2.3.2 of its report.
    """
    is_prefill = phase is Phase.PREFILL
    n_new = workload.prompt if is_prefill else workload.decode_tokens
    first, last = 0, workload.prompt  # of the query positions; their mean token counts
    if not is_prefill:
        first, last = last, last + max(workload.output - 1, 1)
    per_token, of_end = 0.0, 0.0  # of the last tokens of a prompt alone
    for layer, n_layers in Counter(model.layers).items():
        n_weights, n_prompt = (_n_active(model, layer, of_prompt=of) for of in (False, is_prefill))
        attention = model.attention_of(layer)
        n_end = attention.n_replayed(layer.attention, last) if is_prefill else None
        if n_end is not None:
            per_token += n_layers * 2.0 * n_prompt
            flops = attention.replay_flops(layer.attention, last)
            of_end += n_layers * (2.0 * n_end * (n_weights - n_prompt) + flops)
            continue
        flops = attention.flops(layer.attention, last) - attention.flops(layer.attention, first)
        per_token += n_layers * (2.0 * n_weights + flops / (last - first))
    per_token += 2.0 * sum(_n_outer(model, of_tokens=True))
    head = prod(head_weight(model, Plan()).shape) + sum(_n_outer(model, of_tokens=False))
    n_heads = 1 if is_prefill else n_new
    return workload.batch * (n_new * per_token + of_end + n_heads * 2.0 * head)


def active_parameters(model: Model, phase: Phase) -> int:
    """Elements of the matrices that multiply each token of a phase: chosen experts only, the head in decode only.

    In prefill without the layers that only the last tokens of a prompt pass through.
    """
    is_prefill = phase is Phase.PREFILL
    total = sum(
        n * _n_active(model, layer, of_prompt=is_prefill)
        for layer, n in Counter(model.layers).items()
    )
    head = 0 if is_prefill else prod(head_weight(model, Plan()).shape)
    return round(total + sum(_n_outer(model, of_tokens=True)) + head)


def _n_active(model: Model, layer: Layer, *, of_prompt: bool) -> float:
    """Elements of the matrices of a layer that multiply a token, or all tokens `of_prompt`."""
    attention = model.attention_of(layer)
    is_replayed = of_prompt and attention.n_replayed(layer.attention, 1) is not None
    return sum(
        prod(weight.shape) * _share(model, weight)
        for weight in layer_weights(model, Plan(), layer)
        if not weight.is_vector
        and weight.dtype in {None, "f32"}  # an integer table is no factor of a product
        and (not is_replayed or weight.name in attention.prompt_weights)
    )


def _n_outer(model: Model, *, of_tokens: bool) -> Iterator[int]:
    """Elements of matrices outside the layers that multiply every token, or only the last one like the head."""
    for weight in outer_weights(model, Plan()):
        name = ENGRAM if weight.name.startswith(ENGRAM) and weight.is_transposed else weight.name
        if not weight.is_vector and _OUTER_MATRICES.get(name) is of_tokens:
            yield prod(weight.shape)


def _share(model: Model, weight: Weight) -> float:
    if Dim.EXPERT not in weight.dims or model.moe is None:
        return 1.0
    return model.moe.n_active / model.moe.n_experts


def n_parameters(model: Model) -> tuple[int, int, int]:
    """Parameters of the model: total, active per token (chosen experts only), and of the embedding.

    With tables of n-grams, the total counts the whole checkpoint with drafts and the encoder of images, and the active
    parameters are what a decoded token uses, as DeepSeek counts them. Source: shapes of the checkpoint as
    `meshscope.plans.weights` declares them.
    """
    outer = sum(prod(weight.shape) for weight in outer_weights(model, Plan()))
    total, active = float(outer), float(outer)
    for layer, n_layers in Counter(model.layers).items():
        for weight in layer_weights(model, Plan(), layer):
            total += n_layers * prod(weight.shape)
            active += n_layers * prod(weight.shape) * _share(model, weight)
    if model.engram is not None:
        total += sum(prod(weight.shape) for weight in draft_block_weights(model))
        total += 0 if model.images is None else model.images.n_parameters(model.hidden)
        active = active_parameters(model, Phase.DECODE)
    return round(total), round(active), model.vocab * model.hidden


def mfu(
    flops: float, step_s: float, n_chips: int, chip: Chip, weight_dtype: str | None = None
) -> float | None:
    """Model FLOPs utilization (MFU): achieved model FLOP rate over the matrix peak of all chips.

    MFU = model FLOPs / (step time * chips * peak FLOP rate of a chip). Model FLOPs are what the model
    needs: attention is causal, so a query of a prompt counts the keys up to its own position, in its window or of
    its indexer's choice, and one of decode its whole context; masked blocks, padding and recomputation are not in
    them. The peak is the chip's for bf16 products, or for 8-bit products if weights and activations have 8 bits and
    the chip multiplies them faster. The step time includes idle time and communication.

    Source: Chowdhery et al., "PaLM" (arXiv 2204.02311), section 4.1 and appendix B; peaks:
    `meshscope.hardware.chips`.
    """
    if chip.bf16_flops_per_s is None:
        return None
    speedup = 1.0 if weight_dtype is None else product_speedup(weight_dtype, chip)
    return flops / (step_s * n_chips * chip.bf16_flops_per_s * speedup)


def mbu(read_bytes: float, step_s: float, chip: Chip) -> float | None:
    """Model bandwidth utilization (MBU): achieved over peak HBM bandwidth of a device in a decode step.

    MBU = bytes that the modeled step reads and writes in HBM / (step time * peak HBM bandwidth of a device).
    These are the weights that the step reads (of experts, the chosen ones), the cache up to the mean context and
    the activations that leave VMEM. A measured step has the bytes of its compiled program, or of the prediction.

    Source: Agarwal et al., "LLM Inference Performance Engineering: Best Practices" (Databricks, 2023), where the
    bytes are the size of all parameters and the cache; a mixture does not read all of them.
    """
    if chip.hbm_bytes_per_s is None:
        return None
    return read_bytes / (step_s * chip.hbm_bytes_per_s / chip.devices_per_chip)


def bubble_frac(n_stages: int, n_microbatches: int) -> float:
    """Bubble fraction of a pipelined step: the idle fraction of a stage, (p - 1) / (m + p - 1).

    This holds for p stages of equal duration and m sequential microbatches, forward only.

    Source: Huang et al., "GPipe" (arXiv 1811.06965), section 2.3. Narayanan et al. (arXiv 2104.04473),
    section 2.2.1, relate the bubble to the ideal time instead, (p - 1) / m.
    """
    return (n_stages - 1) / (n_microbatches + n_stages - 1)


_LOADS = {
    "phase": pl.String,
    "device": pl.Int32,
    **dict.fromkeys(("busy_s", "collective_s", "wait_s", "idle_s", "window_s"), pl.Float64),
}


def device_idle(loads: Sequence[DeviceLoad]) -> pl.DataFrame:
    """Seconds of each device in the profiled steps: busy, in collectives, waiting in collectives, and idle.

    `window_s` = `busy_s` + `idle_s`. `idle_frac` = idle / window, `collective_frac` = collective / busy.

    Source: busy time is a union of intervals, as in XProf's device idle time. Containers such as loops
    are excluded, because their bodies are counted.
    """
    return pl.DataFrame([asdict(load) for load in loads], schema=_LOADS).with_columns(
        ratio("idle_s", "window_s").alias("idle_frac"),
        ratio("collective_s", "busy_s").alias("collective_frac"),
    )


def load_imbalance(loads: Sequence[DeviceLoad]) -> pl.DataFrame:
    """Load imbalance of a phase: busy time of the busiest device over the mean of all devices.

    1 is balanced. `imbalance_without_wait` subtracts the time that devices wait in collectives, because a
    device that waits for a slower one is not loaded. It is null if waiting is unknown.

    Source: Pearce et al., "Quantifying the Effectiveness of Load Balance Algorithms" (ICS 2012), whose
    load imbalance metric subtracts 1.
    """
    table = pl.DataFrame([asdict(load) for load in loads], schema=_LOADS)
    working = pl.col("busy_s") - pl.col("wait_s")
    return table.group_by("phase", maintain_order=True).agg(
        pl.len().cast(pl.Int64).alias("n_devices"),
        (pl.col("busy_s").max() / pl.col("busy_s").mean()).alias("imbalance"),
        pl.when(pl.col("wait_s").is_not_null().all())
        .then(working.max() / working.mean())
        .alias("imbalance_without_wait"),
    )


def waiting(times: Sequence[CollectiveTime]) -> pl.DataFrame:
    """Mean seconds of collectives in transfer, and waiting for the last participant.

    `wire_s` is the duration of the fastest participant, `wait_s` the mean time that the others spend
    beyond it, `wait_frac` = wait / duration. `wait_s` is null if only one device is recorded.

    Source: TraceLens, "NcclAnalyser" (minimum over ranks); nsys-jax also takes the fastest device. The
    split underestimates waiting if even the last participant waits.
    """
    schema = dict.fromkeys(("phase", "part", "kind", "axis"), pl.String)
    schema |= {"n_executions": pl.Int64} | dict.fromkeys(("dur_s", "wire_s", "wait_s"), pl.Float64)
    table = pl.DataFrame([asdict(time) for time in times], schema=schema)
    return table.with_columns(ratio("wait_s", "dur_s").alias("wait_frac"))
