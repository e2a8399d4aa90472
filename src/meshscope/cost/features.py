"""Cost features of one step: FLOPs, bytes and runs of each model part, linear in a few workload sizes.

The coefficients depend on the model and the plan only. They are computed once per plan and hold for
every workload.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from math import prod

import numpy as np
from numpy.typing import NDArray

from meshscope.cost.expert_load import rows_per_token
from meshscope.cost.rates import ELEMENTWISE_FRAC, TPU_EFFICIENCY
from meshscope.cost.relayout import (
    LANES,
    Relayout,
    expert_buffer_relayout,
    expert_weight_relayout,
    projection_relayout,
    residual_relayout,
)
from meshscope.cost.workload_features import Feature
from meshscope.events.enums import Part, Phase
from meshscope.spec.experiment import Experiment
from meshscope.spec.hardware.compiler_facts import CompilerFacts, compiler_facts
from meshscope.spec.model.flops import entry_rate, pair_flops, window_of
from meshscope.spec.model.model import (
    CompressedAttention,
    GroupedAttention,
    Layer,
    MlpKind,
    Model,
)
from meshscope.spec.plan.caches import layer_cache
from meshscope.spec.plan.kernel_choice import MAX_STACKED_EXPERTS
from meshscope.spec.plan.plan import Plan
from meshscope.spec.plan.stages import stage_layers
from meshscope.spec.plan.weights import (
    Weight,
    attention_weights,
    dense_weights,
    expert_weights,
    outer_weights,
    router_weights,
    shared_weights,
    stored_kv_heads,
)
from meshscope.units import DTYPE_BITS

FloatArray = NDArray[np.float64]


class Cost(IntEnum):
    """Index of a cost of one part."""

    MATMUL_FLOPS = 0
    KERNEL_FLOPS = 1  # of attention kernels
    VECTOR_FLOPS = 2  # of the vector units: attention of one token
    WEIGHT_BYTES = 3
    CACHE_BYTES = 4
    RESIDUAL_BYTES = 5  # the residual stream, once
    WIDE_BYTES = 6  # activations as wide as the heads or experts
    RUNS = 7  # times that the part runs
    PREFETCHED_BYTES = 8  # weights copied into VMEM while other parts compute
    TILES = 9  # tiles that the vector unit shuffles
    MOVED_BYTES = 10  # bytes of relayouts and copies through memory


PARTS = (
    Part.EMBED,
    Part.ATTN,
    Part.MLP,
    Part.MOE_ROUTER,
    Part.MOE_EXPERTS,
    Part.MOE_SHARED,
    Part.LM_HEAD,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCosts:
    """Coefficients [part, cost, feature] of one phase; `is_once` marks parts after all micro-batches."""

    coefficients: FloatArray
    is_once: FloatArray = field(
        default_factory=lambda: np.array([part is Part.LM_HEAD for part in PARTS], dtype=float)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """One device of a plan in one phase, with its number formats."""

    facts: CompilerFacts
    model: Model
    plan: Plan
    phase: Phase
    weight_dtype: str
    act_bytes: float
    cache_bytes: float
    buffer_rows: float  # receive buffer rows per token; 0 without an exchange of rows
    has_expert_kernel: bool
    is_scanned: bool

    def read_bytes(self, weight: Weight) -> float:
        """Bytes of a weight as the device uses it: sharded over tp, gathered over fsdp."""
        return self.elements(weight) * DTYPE_BITS[weight.stored_dtype(self.weight_dtype)] / 8

    def elements(self, weight: Weight) -> float:
        return float(prod(weight.gathered_shape(self.plan)))

    @property
    def converts_weights(self) -> bool:
        """Whether the weights are stored in another format than the activations."""
        return DTYPE_BITS[self.weight_dtype] / 8 != self.act_bytes


def plan_costs(experiment: Experiment, phase: Phase) -> PlanCosts:
    """The coefficients of one phase, for the pipeline stage with the most layers."""
    workload = experiment.workload
    device = _Device(
        facts=compiler_facts(experiment.topology.chip.name),
        model=experiment.model,
        plan=experiment.plan,
        phase=phase,
        weight_dtype=workload.weight_dtype,
        act_bytes=DTYPE_BITS[workload.activation_dtype] / 8,
        cache_bytes=DTYPE_BITS[workload.cache_dtype] / 8,
        buffer_rows=_buffer_rows_per_token(experiment, phase),
        has_expert_kernel=experiment.kernels.has_expert_kernel,
        is_scanned=experiment.is_scanned,
    )
    coefficients = np.zeros((len(PARTS), len(Cost), len(Feature)))
    for part, cost, feature, value in _entries(device):
        coefficients[PARTS.index(part), cost, feature] += value
    return PlanCosts(coefficients=coefficients)


def _buffer_rows_per_token(experiment: Experiment, phase: Phase) -> float:
    dispatch = experiment.dispatch(phase)
    if dispatch is None:
        return 0.0
    # Each tp device routes its share of the tokens.
    over_tp = experiment.plan.tp if "tp" in dispatch.axes else 1
    return dispatch.n_buffer_rows / dispatch.n_tokens / over_tp


_Entry = tuple[Part, Cost, Feature, float]


def _entries(device: _Device) -> Iterator[_Entry]:
    yield from _embedding(device)
    yield from _head(device)
    for layer, n in _layer_counts(device.model, device.plan).items():
        for part, cost, feature, value in _layer(device, layer):
            yield part, cost, feature, n * value


def _layer_counts(model: Model, plan: Plan) -> dict[Layer, int]:
    """The number of layers of each kind in the stage with the most layers."""
    fullest = max(stage_layers(model.n_layers, plan.pp), key=len)
    counts: dict[Layer, int] = {}
    for layer in model.layers[fullest.start : fullest.stop]:
        counts[layer] = counts.get(layer, 0) + 1
    return counts


def _embedding(device: _Device) -> Iterator[_Entry]:
    """Lookup of table rows.

    A table that fsdp splits into partial lanes is relaid out after its gather, in decode only if it is
    tied to the head. A tied table prefetched into VMEM stalls the step until the copy finishes.
    """
    hidden, is_tied = device.model.hidden, device.model.has_tied_embeddings
    table_bytes = device.read_bytes(outer_weights(device.model, device.plan)[0])
    yield Part.EMBED, Cost.RESIDUAL_BYTES, Feature.TOKENS, 2 * hidden * device.act_bytes
    if hidden // device.plan.fsdp % LANES and (is_tied or device.phase is Phase.PREFILL):
        yield Part.EMBED, Cost.RESIDUAL_BYTES, Feature.ONE, 2 * table_bytes
    if is_tied and table_bytes <= device.facts.vmem_prefetch_bytes.value:
        # A copy into VMEM runs at the HBM rate; MOVED_BYTES assume the lower elementwise rate.
        moved = table_bytes * ELEMENTWISE_FRAC / TPU_EFFICIENCY.hbm
        yield Part.EMBED, Cost.MOVED_BYTES, Feature.SEVERAL_TOKENS, moved
    yield Part.EMBED, Cost.RUNS, Feature.ONE, 1


def _head(device: _Device) -> Iterator[_Entry]:
    """Product of the last token of every sequence with the vocabulary."""
    table = outer_weights(device.model, device.plan)[0]
    yield Part.LM_HEAD, Cost.MATMUL_FLOPS, Feature.ALL_SEQUENCES, 2 * device.elements(table)
    table_bytes = device.read_bytes(table)
    is_prefetched = table_bytes <= device.facts.vmem_prefetch_bytes.value
    cost = Cost.PREFETCHED_BYTES if is_prefetched else Cost.WEIGHT_BYTES
    yield Part.LM_HEAD, cost, Feature.ONE, table_bytes
    logits_bytes = table.gathered_shape(device.plan)[0] * device.plan.tp * device.act_bytes
    yield Part.LM_HEAD, Cost.RESIDUAL_BYTES, Feature.ALL_SEQUENCES, logits_bytes
    yield Part.LM_HEAD, Cost.RUNS, Feature.ONE, 1


def _layer(device: _Device, layer: Layer) -> Iterator[_Entry]:
    yield from _attention(device, layer)
    if layer.mlp is not MlpKind.DENSE:
        yield from _mixture(device, layer)
        return
    assert device.model.ffn is not None
    width = 3 * device.model.ffn / device.plan.tp
    yield from _block(device, Part.MLP, dense_weights(device.model), width)


def _block(
    device: _Device, part: Part, weights: tuple[Weight, ...], width: float
) -> Iterator[_Entry]:
    """Products of tokens with weights, `width` intermediate numbers per token, and the residual stream."""
    matrices = [weight for weight in weights if len(weight.shape) > 1 and weight.is_transposed]
    yield part, Cost.MATMUL_FLOPS, Feature.TOKENS, 2 * sum(map(device.elements, matrices))
    yield part, Cost.WEIGHT_BYTES, Feature.ONE, sum(map(device.read_bytes, weights))
    split_frac = device.facts.split_norm_frac.value
    residual = (1 - split_frac) + split_frac / (device.plan.tp if device.plan.sp else 1)
    residual_bytes = residual * device.model.hidden * device.act_bytes
    yield part, Cost.RESIDUAL_BYTES, Feature.TOKENS, residual_bytes
    yield part, Cost.WIDE_BYTES, Feature.TOKENS, width * device.act_bytes
    yield part, Cost.RUNS, Feature.ONE, 1


def _attention(device: _Device, layer: Layer) -> Iterator[_Entry]:
    model, plan = device.model, device.plan
    weights = attention_weights(model, plan, layer)
    for relayout in _attention_relayouts(device):
        yield from _relaid(device, Part.ATTN, relayout)
    width = sum(device.elements(w) for w in weights if w.name.startswith(("wq", "wk", "wv")))
    # Norms of queries and keys are separate passes in float32.
    has_norm = isinstance(model.attention, GroupedAttention) and model.attention.has_qk_norm
    yield from _block(device, Part.ATTN, weights, (2 if has_norm else 1) * width / model.hidden)
    if device.phase is Phase.PREFILL:
        yield from _prefill_scores(device, layer)
        return
    flops = pair_flops(model.attention, is_absorbed=True) / plan.tp / _rate(device, layer)
    yield Part.ATTN, Cost.VECTOR_FLOPS, Feature.CACHED_POSITIONS, flops
    elements = sum(
        prod(array.local_shape(plan)) / array.rate for array in layer_cache(model, plan, layer)
    )
    cache_bytes = elements * device.cache_bytes
    yield Part.ATTN, Cost.CACHE_BYTES, Feature.CACHED_POSITIONS, cache_bytes


def _prefill_scores(device: _Device, layer: Layer) -> Iterator[_Entry]:
    """Scores and weighted values: in kernels the causal or windowed blocks, in plain attention all pairs.

    An indexer saves nothing here: its layers count as full attention. The decode programs read the
    whole static cache, so a window saves nothing there either.
    """
    attention = device.model.attention
    local_heads = attention.n_heads / device.plan.tp / _rate(device, layer)
    flops = pair_flops(attention) / device.plan.tp / _rate(device, layer)
    is_windowed = window_of(attention, layer.attention) is not None
    pairs = Feature.WINDOW_PAIRS if is_windowed else Feature.CAUSAL_PAIRS
    yield Part.ATTN, Cost.KERNEL_FLOPS, pairs, flops
    yield Part.ATTN, Cost.MATMUL_FLOPS, Feature.ALL_PAIRS, flops
    # Plain attention writes the scores in float32 and reads them as activations.
    score_bytes = local_heads * (4 + device.act_bytes)
    yield Part.ATTN, Cost.WIDE_BYTES, Feature.ALL_PAIRS, score_bytes


def _rate(device: _Device, layer: Layer) -> int:
    """Positions per key: those of a compressed entry, else 1."""
    attention = device.model.attention
    is_compressed = isinstance(attention, CompressedAttention)
    return entry_rate(attention, layer.attention) if is_compressed else 1


def _attention_relayouts(device: _Device) -> Iterator[Relayout]:
    """Relayouts of one layer, known for grouped attention only."""
    model, plan = device.model, device.plan
    if not isinstance(model.attention, GroupedAttention):
        return
    yield projection_relayout(
        hidden=model.hidden,
        local_heads=model.attention.n_heads // plan.tp,
        local_kv_heads=stored_kv_heads(model.attention, plan) // plan.tp,
        head_dim=model.attention.head_dim,
    )
    if device.phase is Phase.PREFILL:
        yield residual_relayout(device.facts, is_split=plan.sp, hidden=model.hidden)


def _relaid(
    device: _Device, part: Part, relayout: Relayout, *, scale: float = 1.0
) -> Iterator[_Entry]:
    yield part, Cost.TILES, relayout.feature, scale * relayout.n_tiles
    moved_bytes = scale * relayout.n_elements * device.act_bytes
    yield part, Cost.MOVED_BYTES, relayout.feature, moved_bytes


def _mixture(device: _Device, layer: Layer) -> Iterator[_Entry]:
    """Router, routed experts and shared experts, under balanced routing.

    Elementwise ops process every row of the receive buffer; kernels skip the unused rows.
    """
    model, plan = device.model, device.plan
    assert model.moe is not None
    yield from _router(device, layer)
    experts = expert_weights(model)
    matrix_elements = sum(device.elements(w) for w in experts if len(w.shape) > 2)
    rows = rows_per_token(model, plan)
    n_local = model.moe.n_experts / plan.ep
    flops = 2 * rows * matrix_elements / n_local
    yield Part.MOE_EXPERTS, Cost.MATMUL_FLOPS, Feature.TOKENS, flops
    yield from _expert_reads(device, experts)
    if device.has_expert_kernel:
        yield from _expert_columns(device, experts, n_local)
    is_exchanged = device.buffer_rows > 0
    relayout = expert_buffer_relayout(
        device.facts, hidden=model.hidden, ffn=model.moe.ffn, is_exchanged=is_exchanged
    )
    yield from _relaid(device, Part.MOE_EXPERTS, relayout, scale=max(rows, device.buffer_rows))
    n_runs = device.facts.exchange_runs.value if is_exchanged else 1
    yield Part.MOE_EXPERTS, Cost.RUNS, Feature.ONE, n_runs
    if model.moe.shared_ffn is not None:
        width = 3 * model.moe.shared_ffn / plan.tp
        yield from _block(device, Part.MOE_SHARED, shared_weights(model), width)


def _router(device: _Device, layer: Layer) -> Iterator[_Entry]:
    model, part = device.model, Part.MOE_ROUTER
    assert model.moe is not None
    weights = router_weights(model, has_table=layer.mlp is MlpKind.HASH_MOE)
    yield part, Cost.MATMUL_FLOPS, Feature.TOKENS, 2 * model.hidden * model.moe.n_experts
    yield part, Cost.WEIGHT_BYTES, Feature.ONE, sum(map(device.read_bytes, weights))
    yield part, Cost.WIDE_BYTES, Feature.TOKENS, model.moe.n_experts * 4
    yield part, Cost.RUNS, Feature.ONE, 1


def _expert_columns(
    device: _Device, experts: tuple[Weight, ...], n_local: float
) -> Iterator[_Entry]:
    """Transpose of gate and up matrices whose local columns do not fill tiles."""
    relayout = expert_weight_relayout(
        device.facts,
        hidden=device.model.hidden,
        local_ffn=experts[0].gathered_shape(device.plan)[-1],
        local_experts=n_local,
    )
    moved_bytes = relayout.n_elements * DTYPE_BITS[device.weight_dtype] / 8
    yield Part.MOE_EXPERTS, Cost.MOVED_BYTES, relayout.feature, moved_bytes


def _expert_reads(device: _Device, experts: tuple[Weight, ...]) -> Iterator[_Entry]:
    """Expert weights: the kernel reads the experts that have rows, a plain product reads all.

    Weights are copied first if they are converted, if fsdp gathers them out of a stack of scanned
    layers, or if that stack is too long for the kernel.
    """
    stored_bytes = sum(map(device.read_bytes, experts))
    if not device.has_expert_kernel:
        yield Part.MOE_EXPERTS, Cost.WEIGHT_BYTES, Feature.ONE, stored_bytes
        return
    assert device.model.moe is not None
    n_stacked = device.model.moe.n_experts // device.plan.ep * device.model.n_layers
    used_bytes = stored_bytes
    if device.converts_weights:
        used_bytes = sum(map(device.elements, experts)) * device.act_bytes
    yield Part.MOE_EXPERTS, Cost.WEIGHT_BYTES, Feature.HIT_FRAC, used_bytes
    moved_bytes = 0.0
    if device.converts_weights:
        moved_bytes = stored_bytes + used_bytes
    elif device.is_scanned and device.plan.fsdp > 1:
        moved_bytes = stored_bytes / device.plan.fsdp
    elif device.is_scanned and n_stacked > MAX_STACKED_EXPERTS:
        moved_bytes = stored_bytes
    yield Part.MOE_EXPERTS, Cost.MOVED_BYTES, Feature.ONE, moved_bytes
