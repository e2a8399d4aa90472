"""What one step of a plan asks of a device, as sums over a few sizes of the workload.

Every quantity of a part of the model is linear in the terms of TERMS. The coefficients depend on the
model and the plan alone, so that they are found once for a plan and hold for every workload.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil, prod
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from meshscope.cost.kernel_cost import ExpertLoad
from meshscope.cost.rates import PASS_FRAC, USUAL_REACH
from meshscope.cost.relayout import (
    LANES,
    of_expert_columns,
    of_projections,
    of_residual,
    of_room,
)
from meshscope.events.enums import Part, Phase
from meshscope.spec.experiment import Experiment
from meshscope.spec.hardware.compiler_facts import CompilerFacts, compiler_facts
from meshscope.spec.model.model import (
    AttentionKind,
    CompressedAttention,
    GroupedAttention,
    LatentAttention,
    Layer,
    MlpKind,
    Model,
)
from meshscope.spec.plan.caches import layer_cache
from meshscope.spec.plan.context_form import local_tokens
from meshscope.spec.plan.dispatch import exchange_axes
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

# 1; sequences b of one device (of one micro-batch); tokens b s of a step on one device; scores that
# the blocks of a causal mask leave, or all of them where attention is plain; cached positions b c;
# sequences of all micro-batches; the share of a device's experts that some token chooses. Then what decides
# how arrays are laid out: tokens of a prompt that a device has alone; and 1 where it has several tokens.
TERMS = (
    *("one", "b", "bs", "causal", "scores", "bc", "b_all", "hit"),
    *("tokens_single", "several"),
)
ONE, B, BS, CAUSAL, SCORES, BC, B_ALL, HIT, _, SEVERAL = range(len(TERMS))
# Flops of products of matrices, of attention kernels, and of what the vector units multiply and add
# (attention of one token); bytes of weights, of the cache, of the residual stream once, and of what is
# as wide as heads or experts; how often a part runs; bytes of weights that come while others compute;
# tiles that the vector unit lays out anew, and bytes that pass through memory for the same reason.
QUANTITIES = (
    *("matmul_flops", "kernel_flops", "vector_flops"),
    *("weight_bytes", "cache_bytes", "act_bytes", "wide_bytes", "n_runs", "prefetched_bytes"),
    *("n_tiles", "moved_bytes"),
)
MATMUL, KERNEL, VECTOR, WEIGHTS, CACHE, ACTS, WIDE, RUNS, PREFETCHED, TILES, MOVED = range(
    len(QUANTITIES)
)
PARTS = (
    Part.EMBED,
    Part.ATTN,
    Part.MLP,
    Part.MOE_ROUTER,
    Part.MOE_EXPERTS,
    Part.MOE_SHARED,
    Part.LM_HEAD,
)
# What sp splits of the passes over the residual stream: norms and sums; products read it whole.
SPLIT_FRAC = 0.6
# What brings rows to experts and back counts and places them in operations of a microsecond each: 39 us a
# layer in decode of Mixtral on v5e, 41 us of DeepSeek-V2-Lite on v6e. As this many runs of the experts, at
# the fitted 2,070 and 2,720 cycles, it is 26 and 30 us: the fit gives way to what else the steps hold.
RUNS_OF_EXCHANGE = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTerms:
    """Coefficients [part, quantity, term] of one phase; `is_once`: the part runs after all micro-batches."""

    coefficients: FloatArray
    is_once: FloatArray = field(
        default_factory=lambda: np.array([part is Part.LM_HEAD for part in PARTS], dtype=float)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """One device of a plan in one phase, with the widths of what it computes on."""

    facts: CompilerFacts
    model: Model
    plan: Plan
    phase: Phase
    weight_dtype: str
    act_bytes: float
    cache_bytes: float
    room_rows: float  # of rows from others, for each token; 0 where no row travels
    has_expert_kernel: bool
    is_scanned: bool

    def read(self, weight: Weight) -> float:
        """Bytes of a weight as the device uses it: its share over tp, gathered over fsdp."""
        return self.elements(weight) * DTYPE_BITS[weight.dtype or self.weight_dtype] / 8

    @property
    def converts(self) -> bool:
        """Whether weights are held in another format than the one that is computed in."""
        return DTYPE_BITS[self.weight_dtype] / 8 != self.act_bytes

    def elements(self, weight: Weight) -> float:
        return float(prod(weight.gathered_shape(self.plan)))


def plan_terms(experiment: Experiment, phase: Phase) -> PlanTerms:
    """The coefficients of one phase, for the fullest stage of a pipeline."""
    workload = experiment.workload
    device = _Device(
        facts=compiler_facts(experiment.topology.chip.name),
        model=experiment.model,
        plan=experiment.plan,
        phase=phase,
        weight_dtype=workload.weight_dtype,
        act_bytes=DTYPE_BITS[workload.activation_dtype] / 8,
        cache_bytes=DTYPE_BITS[workload.cache_dtype] / 8,
        room_rows=_room_of_token(experiment, phase),
        has_expert_kernel=experiment.kernels.has_expert_kernel,
        is_scanned=experiment.is_scanned,
    )
    found = np.zeros((len(PARTS), len(QUANTITIES), len(TERMS)))
    for part, quantity, term, value in _all(device):
        found[PARTS.index(part), quantity, term] += value
    return PlanTerms(coefficients=found)


def _room_of_token(experiment: Experiment, phase: Phase) -> float:
    dispatch = experiment.dispatch(phase)
    if dispatch is None:
        return 0.0
    over_tp = (
        experiment.plan.tp if "tp" in dispatch.axes else 1
    )  # each device of tp routes its share
    return dispatch.n_buffer_rows / dispatch.n_tokens / over_tp


_Entry = tuple[Part, int, int, float]


def _all(device: _Device) -> Iterator[_Entry]:
    yield from _embedding(device)
    yield from _head(device)
    for layer, n in _stage_kinds(device.model, device.plan).items():
        for part, quantity, term, value in _layer(device, layer):
            yield part, quantity, term, n * value


def _stage_kinds(model: Model, plan: Plan) -> dict[Layer, int]:
    """How many layers of each kind the fullest stage has."""
    stages = stage_layers(model.n_layers, plan.pp)
    fullest = max(stages, key=len)
    kinds: dict[Layer, int] = {}
    for layer in model.layers[fullest.start : fullest.stop]:
        kinds[layer] = kinds.get(layer, 0) + 1
    return kinds


def _embedding(device: _Device) -> Iterator[_Entry]:
    """Rows of the table.

    Where fsdp cuts it to no whole lanes, what is gathered is laid out anew, in decode if it is the head's,
    too. A table that is the head's, too, and comes into VMEM ahead is waited for.
    """
    hidden, is_tied = device.model.hidden, device.model.has_tied_embeddings
    read = device.read(outer_weights(device.model, device.plan)[0])
    yield Part.EMBED, ACTS, BS, 2 * hidden * device.act_bytes
    if hidden // device.plan.fsdp % LANES and (is_tied or device.phase is Phase.PREFILL):
        yield Part.EMBED, ACTS, ONE, 2 * read
    if is_tied and read <= device.facts.vmem_prefetch_bytes.value:
        # A copy into VMEM goes at the HBM's rate, faster than the passes by which MOVED is priced.
        yield Part.EMBED, MOVED, SEVERAL, read * PASS_FRAC / USUAL_REACH.hbm
    yield Part.EMBED, RUNS, ONE, 1


def _head(device: _Device) -> Iterator[_Entry]:
    """The last token of every sequence against the vocabulary."""
    table = outer_weights(device.model, device.plan)[0]
    yield Part.LM_HEAD, MATMUL, B_ALL, 2 * device.elements(table)
    read = device.read(table)
    is_ahead = read <= device.facts.vmem_prefetch_bytes.value
    yield Part.LM_HEAD, PREFETCHED if is_ahead else WEIGHTS, ONE, read
    logits = table.gathered_shape(device.plan)[0] * device.plan.tp
    yield Part.LM_HEAD, ACTS, B_ALL, logits * device.act_bytes
    yield Part.LM_HEAD, RUNS, ONE, 1


def _layer(device: _Device, layer: Layer) -> Iterator[_Entry]:
    yield from _attention(device, layer)
    if layer.mlp is MlpKind.DENSE:
        assert device.model.ffn is not None
        width = device.model.ffn / device.plan.tp
        yield from _block(device, Part.MLP, dense_weights(device.model), BS, 3 * width)
    else:
        yield from _mixture(device, layer)


def _block(
    device: _Device, part: Part, weights: tuple[Weight, ...], term: int, width: float
) -> Iterator[_Entry]:
    """Products of tokens with weights; between them `width` numbers a token, around them the residual."""
    matrices = [weight for weight in weights if len(weight.shape) > 1 and weight.is_transposed]
    yield part, MATMUL, term, 2 * sum(map(device.elements, matrices))
    yield part, WEIGHTS, ONE, sum(map(device.read, weights))
    whole, split = (1 - SPLIT_FRAC), SPLIT_FRAC / (device.plan.tp if device.plan.sp else 1)
    yield part, ACTS, BS, (whole + split) * device.model.hidden * device.act_bytes
    yield part, WIDE, BS, width * device.act_bytes
    yield part, RUNS, ONE, 1


def _attention(device: _Device, layer: Layer) -> Iterator[_Entry]:
    model, plan = device.model, device.plan
    weights = attention_weights(model, plan, layer)
    width = sum(device.elements(w) for w in weights if w.name.startswith(("wq", "wk", "wv")))
    yield from _laid_out(device)
    # Norms of queries and keys are computed in float32, in passes of their own.
    has_norm = isinstance(model.attention, GroupedAttention) and model.attention.has_qk_norm
    passes = 2 if has_norm else 1
    yield from _block(device, Part.ATTN, weights, BS, passes * width / model.hidden)
    scores, term = _scores(device, layer)
    if device.phase is Phase.PREFILL:
        yield Part.ATTN, KERNEL, term, 2 * scores
        yield Part.ATTN, MATMUL, SCORES, 2 * scores
        # Plain attention writes scores and reads them, in float32 and as activations.
        heads = scores / _width(device)
        yield Part.ATTN, WIDE, SCORES, heads * (4 + device.act_bytes)
        return
    yield Part.ATTN, VECTOR, BC, 2 * scores
    positions = sum(
        prod(array.local_shape(plan)) / array.rate for array in layer_cache(model, plan, layer)
    )
    yield Part.ATTN, CACHE, BC, positions * device.cache_bytes


def _laid_out(device: _Device) -> Iterator[_Entry]:
    """Tiles and bytes of one layer that are laid out anew; of grouped attention alone is known which."""
    model, plan = device.model, device.plan
    if not isinstance(model.attention, GroupedAttention):
        return
    local_heads = model.attention.n_heads // plan.tp
    local_kv_heads = stored_kv_heads(model.attention, plan) // plan.tp
    head_dim = model.attention.head_dim
    found = [of_projections(model.hidden, local_heads, local_kv_heads, head_dim)]
    if device.phase is Phase.PREFILL:
        found += [of_residual(device.facts, is_split=plan.sp, hidden=model.hidden)]
    for moved in found:
        yield Part.ATTN, TILES, TERMS.index(moved.size), moved.n_tiles
        yield Part.ATTN, MOVED, TERMS.index(moved.size), moved.n_elements * device.act_bytes


def _scores(device: _Device, layer: Layer) -> tuple[float, int]:
    """Multiplications for one query and one key on one device, and the term that counts such pairs.

    Windows and indexers are left out: a layer with either counts as one that sees everything.
    """
    attention, tp = device.model.attention, device.plan.tp
    match attention:
        case GroupedAttention():
            return attention.n_heads / tp * 2 * attention.head_dim, CAUSAL
        case LatentAttention():
            is_decode = device.phase is Phase.DECODE
            absorbed = 2 * attention.kv_rank + attention.rope_dim
            plain = attention.qk_dim + attention.value_dim
            return attention.n_heads / tp * (absorbed if is_decode else plain), CAUSAL
        case CompressedAttention():
            every = attention.sparse_rate
            if layer.attention is AttentionKind.HEAVILY_COMPRESSED:
                every = attention.heavy_rate
            return attention.n_heads / tp * 2 * attention.head_dim / every, CAUSAL
        case _:
            assert_never(attention)


def _width(device: _Device) -> float:
    """Multiplications of one head for one pair."""
    attention = device.model.attention
    if isinstance(attention, LatentAttention):
        return attention.qk_dim + attention.value_dim
    return 2 * attention.head_dim


def _mixture(device: _Device, layer: Layer) -> Iterator[_Entry]:
    """Router and shared experts for every token; of the routed experts' rows a device has its share.

    Balanced routing: each device of the experts' axes has as many rows as any other. What passes over rows
    passes over all that a device has room for; kernels skip those that routing does not fill.
    """
    model, plan = device.model, device.plan
    moe = model.moe
    assert moe is not None
    router = router_weights(model, has_table=layer.mlp is MlpKind.HASH_MOE)
    yield Part.MOE_ROUTER, MATMUL, BS, 2 * model.hidden * moe.n_experts
    yield Part.MOE_ROUTER, WEIGHTS, ONE, sum(map(device.read, router))
    yield Part.MOE_ROUTER, WIDE, BS, moe.n_experts * 4
    yield Part.MOE_ROUTER, RUNS, ONE, 1
    experts = expert_weights(model)
    in_experts = sum(device.elements(w) for w in experts if len(w.shape) > 2)
    rows = rows_of_token(model, plan)
    n_local = moe.n_experts / plan.ep
    yield Part.MOE_EXPERTS, MATMUL, BS, 2 * rows * in_experts / n_local
    yield from _expert_reads(device, experts)
    if device.has_expert_kernel:
        n_columns = experts[0].gathered_shape(plan)[-1]
        turned = of_expert_columns(hidden=model.hidden, local_ffn=n_columns, local_experts=n_local)
        n_bytes = turned.n_elements * DTYPE_BITS[device.weight_dtype] / 8
        yield Part.MOE_EXPERTS, MOVED, TERMS.index(turned.size), n_bytes
    room = max(rows, device.room_rows)
    is_exchanged = device.room_rows > 0
    passed = of_room(hidden=model.hidden, ffn=moe.ffn, is_exchanged=is_exchanged)
    yield Part.MOE_EXPERTS, TILES, BS, room * passed.n_tiles
    yield Part.MOE_EXPERTS, MOVED, BS, room * passed.n_elements * device.act_bytes
    yield Part.MOE_EXPERTS, RUNS, ONE, RUNS_OF_EXCHANGE if is_exchanged else 1
    if moe.shared_ffn is not None:
        width = moe.shared_ffn / plan.tp
        yield from _block(device, Part.MOE_SHARED, shared_weights(model), BS, 3 * width)


def _expert_reads(device: _Device, experts: tuple[Weight, ...]) -> Iterator[_Entry]:
    """Weights of experts: the kernel reads those that have rows, a plain product all of them.

    It reads them where they lie, but for those that are converted first, or that fsdp gathers of what
    is taken out of a stack of layers, and where the stack is too long.
    """
    held = sum(map(device.read, experts))
    if not device.has_expert_kernel:
        yield Part.MOE_EXPERTS, WEIGHTS, ONE, held
        return
    assert device.model.moe is not None
    n_stacked = device.model.moe.n_experts // device.plan.ep * device.model.n_layers
    used = sum(map(device.elements, experts)) * device.act_bytes if device.converts else held
    yield Part.MOE_EXPERTS, WEIGHTS, HIT, used
    if device.converts:
        yield Part.MOE_EXPERTS, MOVED, ONE, held + used
    elif device.is_scanned and device.plan.fsdp > 1:
        yield Part.MOE_EXPERTS, MOVED, ONE, held / device.plan.fsdp
    elif device.is_scanned and n_stacked > MAX_STACKED_EXPERTS:
        yield Part.MOE_EXPERTS, MOVED, ONE, held


def rows_of_token(model: Model, plan: Plan) -> float:
    """Rows of experts that a device computes for each token that its tp group holds, routing balanced."""
    assert model.moe is not None
    if "tp" in exchange_axes(plan):  # each device of tp routes its share
        return model.moe.n_active / plan.tp
    over_tp = plan.ep if plan.expert_axes == ("tp",) else 1
    return model.moe.n_active / over_tp


def expert_tokens_of_token(model: Model, plan: Plan) -> float:
    """Tokens that may choose an expert of a device, for each token that its tp group holds."""
    assert model.moe is not None
    return rows_of_token(model, plan) * plan.ep / model.moe.n_active


def expert_load(experiment: Experiment, phase: Phase) -> ExpertLoad | None:
    """What balanced routing brings to one device's experts in a layer; None without experts.

    Every token chooses K of E experts, all equally likely and each token by itself: of T tokens, none
    chooses a given expert with the probability (1 - K/E)^T.
    """
    model, plan, workload = experiment.model, experiment.plan, experiment.workload
    if model.moe is None:
        return None
    n_tokens = local_tokens(plan, phase, workload.prompt if phase is Phase.PREFILL else 1)
    n_held = n_tokens * (workload.batch // plan.data_size // experiment.n_microbatches(phase))
    missed = (1 - model.moe.n_active / model.moe.n_experts) ** (
        n_held * expert_tokens_of_token(model, plan)
    )
    return ExpertLoad(
        rows=ceil(n_held * rows_of_token(model, plan)),
        experts=model.moe.n_experts / plan.ep * (1 - missed),
    )
