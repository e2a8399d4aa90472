"""Cost features of one step: FLOPs, bytes and operations of each model part, linear in a few workload sizes.

The coefficients depend on the model and the plan only. They are computed once per plan and hold for
every workload.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache, partial
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshscope.cost.expert_load import (
    FUSED_ROW_PASSES,
    TILE_ROWS,
    device_load,
    fused_cycles,
    rows_per_token,
    sorted_rows_per_token,
)
from meshscope.cost.paged import VLLM, PagedBlocks, blocks_of, local_heads
from meshscope.cost.rates import ModeledProgram, Rates, row_s
from meshscope.events.enums import Part, Phase
from meshscope.hardware.chips import ChipKind, product_speedup
from meshscope.hardware.compiler_facts import OPERATIONS, ServedExperts
from meshscope.model.arrays import CacheArray, Dim, Weight
from meshscope.model.layers import AttentionKind, Layer, MlpKind
from meshscope.model.mechanisms import attention as mechanism
from meshscope.model.mechanisms.mixture import Activation
from meshscope.model.mechanisms.ngrams import ENGRAM
from meshscope.model.model import Model
from meshscope.model.quantization import UNQUANTIZED_DTYPE, activation_dtype_of
from meshscope.plans import weights as stored
from meshscope.plans.dispatch import (
    ROUND_ROOM,
    DispatchForm,
    exchange_axes,
    fills_tiles,
    gathered_ranks,
)
from meshscope.plans.experiment import Experiment
from meshscope.plans.kernel_choice import Kernels
from meshscope.plans.plan import Plan, Tables
from meshscope.plans.stages import layer_kinds
from meshscope.units import DTYPE_BITS

FloatArray = NDArray[np.float64]
F32_BYTES = DTYPE_BITS["f32"] / 8

# Passes over activations besides the products, each a read or a write of the whole array: the residual
# stream is added to the output of a block. Norms of the residual stream and the gated product of a dense MLP are
# fused with products, which write their outputs while they compute. Counted in simulated prefills of meshscope's
# Llama-3.1-8B, Qwen3-8B and Qwen3-32B on v6e, and of Llama-3.1-8B in vLLM 0.12 (libtpu 0.0.42.1).
RESIDUAL_PASSES = 2
FUSED_RESIDUAL_PASSES = 2  # the norms of the residual stream
GATED_PASSES = 2  # fused in an MLP; kernels of experts leave them to a pass
UNGATED_PASSES = 1
# Passes over the rows that an exchange sends: gathered (2), and summed for their token (3); and over its
# buffers: into the layout of a matrix (2) and back (2), in the same program.
SENT_PASSES = 5
# The embeddings of all layers, each step a read and a write: lookup, norm of the projection, sum. Assumed,
# not counted in a program.
LAYER_TABLE_PASSES = 6
LOOKUP_PASSES = 2  # rows of other devices are masked. Assumed, not counted in a program
RECEIVED_PASSES = 4
CACHED_COSTS = 4096  # of plans that differ in more than the number of replicas
VLLM_EXPERTS = "vllm-2026.06"  # whose layers were published
SPLIT_FRAC = 0.6  # share of residual-stream passes that sp splits: norms and additions

# Small operations of a layer besides products and attention, counted in decode programs of libtpu 0.0.42.1:
# 30 in Llama-3.1-70B (jax-llm-examples), 35 in Qwen3-30B-A3B (meshscope). Routing by groups is a cost of its own.
MLP_OPS = 10
LAYER_INPUT_OPS = 5  # assumed, not counted in a program: half of MLP_OPS
ROUTER_OPS = 10
EXPERT_OPS = 5


class Feature(IntEnum):
    """Index of a workload size of one device and micro-batch."""

    ONE = 0
    SEQUENCES = 1
    TOKENS = 2
    CAUSAL_PAIRS = 3  # query-key pairs in the blocks of a causal mask; 0 without a kernel
    WINDOW_PAIRS = 4  # the same for the model's sliding window
    ALL_PAIRS = 5  # all query-key pairs, of plain attention
    CACHED_POSITIONS = 6  # that a decode step reads, over all sequences
    WINDOW_POSITIONS = 7  # the same in layers with a sliding window
    CHOSEN_POSITIONS = 8  # the same with an indexer
    ALL_SEQUENCES = 9  # of all micro-batches
    # Fraction of the device's experts that get a row, summed over the blocks of tokens of a fused kernel
    HIT_FRAC = 10
    EMPTY_TILES = 11  # what the last tiles of a fused kernel lack, for each expert of the device
    CHOSEN_PAIRS = 12  # of prompts: queries with the positions that an indexer may choose
    CANDIDATE_POSITIONS = 13  # that a decode step reads of those among which it chooses again
    # The same of the last tokens of prompts, if only they pass through a layer
    END_TOKENS = 14
    END_PAIRS = 15
    END_CHOSEN_PAIRS = 16
    END_HIT_FRAC = 17
    END_EMPTY_TILES = 18
    END_ONE = 19  # per chunk of prompts
    END_SEQUENCES = 20  # of all micro-batches
    PAGED_BLOCKS = 21  # pairs of a block of queries and one of keys in a server's prefill
    WINDOW_BLOCKS = 22  # the same in layers with a sliding window


OF_END = {
    Feature.ONE: Feature.END_ONE,
    Feature.TOKENS: Feature.END_TOKENS,
    Feature.ALL_PAIRS: Feature.END_PAIRS,
    Feature.CHOSEN_PAIRS: Feature.END_CHOSEN_PAIRS,
    Feature.HIT_FRAC: Feature.END_HIT_FRAC,
    Feature.EMPTY_TILES: Feature.END_EMPTY_TILES,
}


class Cost(IntEnum):
    """Index of a cost of one part."""

    MATMUL_FLOPS = 0
    KERNEL_FLOPS = 1  # of attention kernels over prompts
    GROUPED_FLOPS = 2  # of kernels that multiply rows with the weights of their experts
    WEIGHT_BYTES = 3
    CHOSEN_BYTES = 4  # weights of experts, which a kernel reads once it knows which
    CACHE_BYTES = 5
    PASS_BYTES = 6  # element-wise passes over activations, and over exchanged rows
    SORTED_S = 7  # seconds to gather rows in the order of their experts, from HBM
    RETURNED_S = 8  # and back, in the order of their tokens, and to add them up
    SMALL_OPS = 9
    NARROW_FLOPS = 10  # products of 8-bit operands at the peak of their dtype
    FUSED_BYTES = 11  # activations that products read and write while they compute
    SENT_S = 12  # seconds in which a fused kernel of experts sends, fetches and adds up rows, and of lookups in tables
    KERNEL_S = 13  # in which it multiplies tiles
    CONVERTED_S = 14  # to convert and multiply weights of experts, beyond the time of their bytes
    GROUPED_LAYERS = 15  # whose routers choose groups of experts first
    CHOSEN_ROWS = 16  # of the kernel for few rows of int8 experts
    PAGED_S = 17  # seconds of paged attention by its bundles
    PAGED_FLOPS = 18  # FLOPs of paged attention, whose time is PAGED_S
    SERVED_S = 19  # seconds in which a server moves the rows of its experts
    ONE_HOT_S = 20  # of its products with one-hot masks instead, per token and token of a step


PARTS = (
    Part.EMBED,
    Part.ATTN,
    Part.MLP,
    Part.MOE_ROUTER,
    Part.MOE_EXPERTS,
    Part.MOE_SHARED,
    Part.LM_HEAD,
)


IS_ONCE = np.array([part is Part.LM_HEAD for part in PARTS], dtype=float)  # after all micro-batches


class PlanCosts(NamedTuple):
    """Coefficients [part, cost, feature] of one phase, of the pipeline stage with the most layers and of all stages."""

    coefficients: FloatArray
    all_stages: FloatArray


def reads_int8_blocks(weight_dtype: str, phase: Phase, program: ModeledProgram) -> bool:
    """Whether the kernel of a decode step reads int8 experts in blocks, as in the published program of DeepSeek-R1."""
    is_int8 = weight_dtype.startswith("s8") and program is ModeledProgram.PUBLISHED
    return is_int8 and phase is Phase.DECODE


def served_experts(
    experiment: Experiment,
    program: ModeledProgram = ModeledProgram.PUBLISHED,
    version: str = VLLM_EXPERTS,
) -> ServedExperts | None:
    """What a version of a server's kernels of experts was measured to take on this chip, if it was."""
    if experiment.model.moe is None or program is not ModeledProgram.PUBLISHED:
        return None
    is_fused = experiment.dispatch_form is DispatchForm.FUSED
    if is_fused and DTYPE_BITS.get(experiment.workload.weight_dtype) != 8:
        return None
    by_chip = OPERATIONS.fused_experts if is_fused else OPERATIONS.grouped_experts[version]
    return by_chip.get(experiment.topology.chip.name)


def one_hot_tokens(experiment: Experiment, served: ServedExperts) -> float:
    """Tokens of a device's tp group up to which its server sorts rows by products with one-hot masks."""
    plan, form, moe = experiment.plan, experiment.dispatch_form, experiment.model.moe
    assert moe is not None
    if exchange_axes(plan, form):
        return 0.0
    return served.one_hot_rows / moe.n_active / gathered_ranks(plan, form)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """One device of a plan in one phase, with its number formats."""

    model: Model
    plan: Plan
    phase: Phase
    weight_dtype: str
    has_narrow_unit: bool  # for 8-bit activations in products with these weights
    act_bytes: float
    cache_dtype: str
    has_expert_kernel: bool
    row_s: float  # to gather a row of the residual stream from HBM
    row_read_s: float  # to read one in order
    program: ModeledProgram
    is_served: bool  # by an engine on TPU, with the layouts of its attention kernel
    conversion_s: tuple[float, float] = (0.0, 0.0)  # of a weight of an expert: int4, mxfp4
    cycle_s: float = 0.0  # 0 without a clock
    flops_per_cycle: float = 0.0
    paged: PagedBlocks | None = None  # of a server's attention
    fused: tuple[float, float] | None = None  # cycles of a row and a tile in a fused kernel
    served: ServedExperts | None = None
    n_tokens: int = 1  # of a sequence in a decode step
    form: DispatchForm = DispatchForm.AUTO
    load: float = 1.0  # rows of its experts over the mean of the devices
    n_looked_up: int = 1  # ranks whose rows of n-gram tables each device looks up
    table_row_s: float = 0.0  # to gather one
    n_blocks: int = 1  # into which cp splits the prompts of linear attention

    def read_bytes(self, weight: Weight) -> float:
        """Bytes of a weight and its scales as the device uses them: sharded over tp, gathered over fsdp."""
        scale = weight.scale(self.weight_dtype)
        arrays = (weight,) if scale is None else (weight, scale)
        bits = (self.elements(a) * DTYPE_BITS[a.stored_dtype(self.weight_dtype)] for a in arrays)
        return sum(bits) / 8

    def converted_s(self, weight: Weight) -> float:
        """Seconds to convert an element of a weight of experts in VMEM; 0 for dtypes that take no longer."""
        of_int4, of_mxfp4 = self.conversion_s
        quantization = weight.quantization(self.weight_dtype)
        if quantization is None or weight.stored_dtype(self.weight_dtype) != "s4":
            return 0.0
        return of_int4 if quantization.codes_dtype is None else of_mxfp4

    @property
    def has_int8_blocks(self) -> bool:
        """Whether a decode step reads blocks of int8 experts, as the published programs do."""
        return reads_int8_blocks(self.weight_dtype, self.phase, self.program)

    def paged_block_s(self, layer: Layer, score_flops: float) -> float:
        """Seconds of a pair of blocks of paged attention in a layer."""
        assert self.paged is not None
        attention = self.model.attention
        n_heads, n_kv_heads = local_heads(
            attention.query_heads(layer.attention),
            attention.kv_heads(layer.attention),
            self.plan.tp,
        )
        cycles = self.paged.cycles(
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            score_flops=score_flops,
            flops_per_cycle=self.flops_per_cycle,
        )
        return cycles * self.cycle_s

    def elements(self, weight: Weight) -> float:
        return float(prod(weight.gathered_shape(self.plan)))


def served_blocks(experiment: Experiment, version: str) -> PagedBlocks:
    """The blocks of a server's attention over prompts, with a version of the kernel."""
    attention, first = experiment.model.attention, experiment.model.layers[0]
    n_kv_heads = attention.kv_heads(first.attention)
    heads = local_heads(attention.query_heads(first.attention), n_kv_heads, experiment.plan.tp)
    return blocks_of(version, experiment.topology.chip.name, *heads)


def plan_costs(  # noqa: PLR0913  what the costs depend on
    experiment: Experiment,
    phase: Phase,
    rates: Rates,
    program: ModeledProgram = ModeledProgram.PUBLISHED,
    *,
    served: ServedExperts | None,
    n_tokens: int = 1,
    blocks: PagedBlocks | None = None,
) -> PlanCosts:
    """The coefficients of one phase; `blocks` are a server's blocks of attention, by default vLLM's.

    `served` are the experts of a server.

    In a decode step with `n_tokens` per sequence, cache bytes are per sequence, not per token.
    """
    workload, plan, model = experiment.workload, experiment.plan, experiment.model
    act_bytes, clock_hz = DTYPE_BITS[workload.activation_dtype] / 8, rates.clock_hz
    int4, mxfp4 = rates.facts.four_bit_cycles
    # Work of a device in a layer does not depend on the other axes: they split layers, sequences and positions, which
    # are features, and weights that fsdp gathers.
    has_experts = plan.data_axis in plan.expert_axes
    one = replace(plan, pp=1, cp=1) if has_experts else Plan(tp=plan.tp, ep=plan.ep, sp=plan.sp)
    is_tpu, fused = experiment.topology.chip.kind is ChipKind.TPU, None
    if model.moe is not None and experiment.dispatch_form is DispatchForm.FUSED:
        fused = fused_cycles(
            rates.facts, (2 + model.moe.activation.is_gated) * model.row_width * model.moe.ffn
        )
    is_served = program is ModeledProgram.PUBLISHED and is_tpu
    is_paged = is_served and experiment.program.kernels is Kernels.AUTO
    device = _Device(
        model=model,
        plan=one,
        phase=phase,
        weight_dtype=workload.weight_dtype,
        has_narrow_unit=product_speedup(workload.weight_dtype, experiment.topology.chip) > 1,
        act_bytes=act_bytes,
        cache_dtype=workload.cache_dtype,
        has_expert_kernel=experiment.kernels.has_expert_kernel,
        row_s=row_s(rates, model.row_width, act_bytes),
        row_read_s=model.row_width * act_bytes / rates.hbm_bytes_per_s,
        program=program,
        conversion_s=(int4 / clock_hz, mxfp4 / clock_hz) if clock_hz else (0.0, 0.0),
        cycle_s=1 / clock_hz if clock_hz else 0.0,
        flops_per_cycle=rates.flops_per_s / clock_hz if clock_hz else 0.0,
        paged=(blocks or served_blocks(experiment, VLLM)) if is_paged else None,
        fused=fused,
        served=served,
        n_blocks=plan.cp if model.has(AttentionKind.LINEAR) else 1,
        is_served=is_served,
        n_tokens=n_tokens,
        load=device_load(experiment, phase),
        form=experiment.dispatch_form,
    )
    if model.engram is not None:
        chip = experiment.topology.chip
        table_row_s = row_s(rates, model.engram.head_dim, act_bytes)
        if plan.tables is Tables.HOST and chip.pcie_bytes_per_s is not None:
            tables = (w for w in stored.outer_weights(model, Plan()) if Dim.TABLE in w.dims)
            row = (replace(w, shape=(1, w.shape[1])) for w in tables)
            row_bytes = max((w.local_bytes(Plan(), workload.weight_dtype) for w in row), default=0)
            n_parts = plan.tp if plan.sp else 1  # of the tokens
            table_row_s = row_bytes * chip.devices_per_chip / chip.pcie_bytes_per_s / n_parts
        device = replace(device, n_looked_up=plan.n_looked_up, table_row_s=table_row_s)
    all_stages = _stage_costs(device, 1)
    return PlanCosts(_stage_costs(device, plan.pp) if plan.pp > 1 else all_stages, all_stages)


@lru_cache(maxsize=CACHED_COSTS)
def _stage_costs(device: _Device, n_stages: int) -> FloatArray:
    """[part, cost, feature] of the stage with the most layers, and of what precedes and follows all layers."""
    model, plan = device.model, Plan(tp=device.plan.tp, sp=device.plan.sp)
    # Plans share what does not depend on the axes of experts, and experts do not depend on the cache.
    shared = replace(device, plan=plan, has_expert_kernel=False, fused=None, served=None, load=1.0)
    of_experts = replace(device, cache_dtype=UNQUANTIZED_DTYPE, n_blocks=1)
    total = _costs(shared, _outer, None)
    for at, n, _ in layer_kinds(model, n_stages)[1]:
        layer = model.layers[at]
        if layer.has_attention:
            total = total + n * _costs(shared, _attention, layer)
        total += n * _costs(of_experts if layer.has_experts else shared, _feed_forward, layer)
    return total


_Entry = tuple[Part, Cost, Feature, float]


@lru_cache(maxsize=CACHED_COSTS)
def _costs(
    device: _Device, block: Callable[[_Device, Any], Iterator[_Entry]], layer: Layer | None
) -> FloatArray:
    """[part, cost, feature] of a block of a layer, or of what precedes and follows all layers."""
    coefficients = np.zeros((len(PARTS), len(Cost), len(Feature)))
    for part, cost, feature, value in block(device, layer):
        coefficients[PARTS.index(part), cost, feature] += value
    if device.phase is Phase.DECODE or device.model.n_replayed is None:
        return coefficients
    if layer is None:  # a head for the last tokens of prompts
        head = coefficients[PARTS.index(Part.LM_HEAD)]
        of_end = {Feature.ONE: Feature.END_ONE, Feature.ALL_SEQUENCES: Feature.END_SEQUENCES}
        for of_all, end in of_end.items():
            head[:, end], head[:, of_all] = head[:, of_all], 0.0
        return coefficients
    attention = device.model.attention_of(layer)
    if attention.n_replayed(layer.attention, 1) is None:
        return coefficients
    for of_all, of_end in OF_END.items():
        coefficients[..., of_end] = coefficients[..., of_all]
        coefficients[..., of_all] = 0.0
    for weight in stored.attention_weights(device.model, device.plan, layer):
        # Products of all tokens, and the norm before them.
        if block is _attention and weight.name in attention.prompt_weights:
            at, elements = PARTS.index(Part.ATTN), device.elements(weight)
            coefficients[at, Cost.MATMUL_FLOPS, Feature.TOKENS] += 2 * elements
            passed = FUSED_RESIDUAL_PASSES * device.model.hidden * device.act_bytes
            coefficients[at, Cost.PASS_BYTES, Feature.TOKENS] += passed / 2
    return coefficients


def _lookups(device: _Device) -> Iterator[_Entry]:
    """Rows of n-gram tables, which each device looks up for all tokens, and what takes them in."""
    engram = device.model.engram
    if engram is None:
        return
    n_rows = engram.n_read * device.n_looked_up * len(device.model.tables)
    yield Part.EMBED, Cost.SENT_S, Feature.TOKENS, n_rows * device.table_row_s
    row_bytes = n_rows * engram.head_dim * device.act_bytes
    yield Part.EMBED, Cost.PASS_BYTES, Feature.TOKENS, LOOKUP_PASSES * row_bytes
    yield Part.EMBED, Cost.SMALL_OPS, Feature.ONE, LAYER_INPUT_OPS * len(device.model.tables)
    for weight in stored.outer_weights(device.model, device.plan):
        if weight.name.startswith(ENGRAM) and not weight.is_row_major:
            yield Part.ATTN, Cost.WEIGHT_BYTES, Feature.ONE, device.read_bytes(weight)
            if not weight.is_vector:
                flops = 2 * device.elements(weight)
                products = Cost.NARROW_FLOPS if device.has_narrow_unit else Cost.MATMUL_FLOPS
                yield Part.ATTN, products, Feature.TOKENS, flops


def _embedding(device: _Device) -> Iterator[_Entry]:
    row_bytes = device.model.hidden * device.act_bytes
    yield Part.EMBED, Cost.PASS_BYTES, Feature.TOKENS, 2 * row_bytes
    yield Part.EMBED, Cost.SMALL_OPS, Feature.ONE, 1
    for weight in stored.draft_head_weights(device.model):
        assert device.model.draft_head is not None
        if not weight.is_vector:
            yield Part.EMBED, Cost.MATMUL_FLOPS, Feature.TOKENS, 2 * device.elements(weight)
        read_bytes = device.model.draft_head.n_reads(weight) * device.read_bytes(weight)
        yield Part.EMBED, Cost.WEIGHT_BYTES, Feature.ONE, read_bytes
    inputs = device.model.layer_inputs
    if inputs is None:
        return
    weights = {weight.name: weight for weight in stored.outer_weights(device.model, device.plan)}
    projection = weights["layer_embed_proj"]
    row_bytes = inputs.width * device.model.n_layers * device.act_bytes
    yield Part.EMBED, Cost.MATMUL_FLOPS, Feature.TOKENS, 2 * device.elements(projection)
    yield Part.EMBED, Cost.WEIGHT_BYTES, Feature.ONE, device.read_bytes(projection)
    yield Part.EMBED, Cost.PASS_BYTES, Feature.TOKENS, LAYER_TABLE_PASSES * row_bytes
    yield Part.EMBED, Cost.SMALL_OPS, Feature.ONE, LAYER_INPUT_OPS


def _head(device: _Device) -> Iterator[_Entry]:
    """Product of the last token of every sequence with the vocabulary."""
    table = stored.head_weight(device.model, device.plan)
    yield Part.LM_HEAD, Cost.MATMUL_FLOPS, Feature.ALL_SEQUENCES, 2 * device.elements(table)
    yield Part.LM_HEAD, Cost.WEIGHT_BYTES, Feature.ONE, device.read_bytes(table)
    logits_bytes = table.gathered_shape(device.plan)[0] * device.plan.tp * device.act_bytes
    yield Part.LM_HEAD, Cost.PASS_BYTES, Feature.ALL_SEQUENCES, logits_bytes
    yield Part.LM_HEAD, Cost.SMALL_OPS, Feature.ONE, 2


def _outer(device: _Device, _layer: None) -> Iterator[_Entry]:
    yield from _embedding(device)
    yield from _lookups(device)
    yield from _head(device)


def _feed_forward(device: _Device, layer: Layer) -> Iterator[_Entry]:
    model = device.model
    if layer.has_mlp:
        width = _passes(model.activation) * model.ffn_of(layer) / device.plan.tp
        yield from _mlp(device, Part.MLP, stored.dense_weights(model, layer), width)
    if layer.has_experts:
        yield from _mixture(device, layer)
    if model.hyper is not None and model.hyper.is_gated:  # other streams have a few columns
        part = Part.MLP if layer.has_mlp else Part.MOE_ROUTER
        weights = tuple(model.hyper.weights(model.hidden, "mlp", ""))
        yield part, Cost.WEIGHT_BYTES, Feature.ONE, sum(map(device.read_bytes, weights))
        flops = 2 * sum(device.elements(weight) for weight in weights if not weight.is_vector)
        yield part, Cost.MATMUL_FLOPS, Feature.TOKENS, flops
    if model.layer_inputs is not None:  # a gate for the embeddings of the layer, and the way back
        width = (1 + GATED_PASSES) * model.layer_inputs.width
        yield from _mlp(device, Part.MLP, stored.layer_input_weights(model), width, LAYER_INPUT_OPS)


def _passes(activation: Activation) -> int:
    return GATED_PASSES if activation.is_gated else UNGATED_PASSES


def _mlp(
    device: _Device, part: Part, weights: tuple[Weight, ...], width: float, n_ops: int = MLP_OPS
) -> Iterator[_Entry]:
    yield from _block(device, part, weights)
    yield part, Cost.FUSED_BYTES, Feature.TOKENS, width * device.act_bytes
    yield part, Cost.SMALL_OPS, Feature.ONE, n_ops


def _block(device: _Device, part: Part, weights: tuple[Weight, ...]) -> Iterator[_Entry]:
    matrices = [weight for weight in weights if len(weight.shape) > 1 and weight.is_transposed]
    narrow = [weight for weight in matrices if weight.inputs and not weight.is_absorbed]
    wide = [weight for weight in matrices if weight.is_absorbed or not weight.inputs]
    products = Cost.NARROW_FLOPS if device.has_narrow_unit else Cost.MATMUL_FLOPS
    yield part, products, Feature.TOKENS, 2 * sum(map(device.elements, narrow))
    yield part, Cost.MATMUL_FLOPS, Feature.TOKENS, 2 * sum(map(device.elements, wide))
    yield from _narrowing(device, part, narrow)
    yield part, Cost.WEIGHT_BYTES, Feature.ONE, sum(map(device.read_bytes, weights))
    split_frac = SPLIT_FRAC if device.plan.sp else 0.0
    post_norm_passes = mechanism.NORM_PASSES * device.model.has_post_norms
    passes = (RESIDUAL_PASSES + post_norm_passes) * ((1 - split_frac) + split_frac / device.plan.tp)
    hyper = device.model.hyper
    has_copies = hyper is not None and (hyper.is_delayed or hyper.is_gated)
    if hyper is not None and has_copies and part is not Part.MLP:
        passes += 2 * hyper.n_streams - 2
    if device.model.is_parallel and part is Part.MLP:  # adds to the sum of attention
        return
    residual_bytes = passes * device.model.hidden * device.act_bytes
    yield part, Cost.PASS_BYTES, Feature.TOKENS, residual_bytes
    fused_bytes = FUSED_RESIDUAL_PASSES * device.model.hidden * device.act_bytes
    yield part, Cost.FUSED_BYTES, Feature.TOKENS, fused_bytes


def _narrowing(
    device: _Device, part: Part, matrices: Iterable[Weight], *, n_rows: float = 1.0
) -> Iterator[_Entry]:
    """Rounding of each input of the products to 8 bits, if the format has 8-bit activations.

    A token has `n_rows` inputs of each product.
    """
    dtype = activation_dtype_of(device.weight_dtype)
    if dtype is None:
        return
    # Matrices with equal dims of their inputs share the rounding; groups of heads have separate inputs.
    widths = {
        tuple(
            (dim, size)
            for i, (dim, size) in enumerate(
                zip(weight.dims, weight.gathered_shape(device.plan), strict=True)
            )
            if i in weight.inputs or dim is Dim.GROUPS
        )
        for weight in matrices
    }
    n_numbers = n_rows * sum(prod(size for _, size in dims) for dims in widths)
    n_bytes = device.act_bytes + DTYPE_BITS[dtype] / 8
    yield part, Cost.PASS_BYTES, Feature.TOKENS, n_numbers * n_bytes
    yield part, Cost.SMALL_OPS, Feature.ONE, len(widths)


def _attention(device: _Device, layer: Layer) -> Iterator[_Entry]:
    model, plan, kind = device.model, device.plan, layer.attention
    attention = model.attention_of(layer)
    yield from _block(device, Part.ATTN, stored.attention_weights(model, plan, layer))
    yield Part.ATTN, Cost.SMALL_OPS, Feature.ONE, attention.n_small_ops
    is_prefill = device.phase is Phase.PREFILL
    passed = attention.passed_elements(plan.tp, is_prefill=is_prefill, is_served=device.is_served)
    yield Part.ATTN, Cost.PASS_BYTES, Feature.TOKENS, passed * device.act_bytes
    if is_prefill:
        yield from _prompt(device, attention.prompt_work(kind, device.n_blocks), layer)
        return
    cache_of = partial(model.attention_of(layer).cache, layer.attention, plan.tp)
    arrays, written = (tuple(cache_of(n)) for n in (1, device.n_tokens))
    for before, array in zip(arrays, written, strict=True):
        feature, n_slots = _positions(device, layer, array)
        if kind.is_linear and array.dtype is not None:
            # A state is read, and written after each token.
            n_slots += _positions(device, layer, before)[1]
        elements = prod(array.local_shape(plan)) * n_slots
        yield Part.ATTN, Cost.CACHE_BYTES, feature, elements * array.bits(device.cache_dtype) / 8
    scored = Feature.CACHED_POSITIONS
    for array in attention.shared_arrays(kind):
        feature, n_slots = Feature.CHOSEN_POSITIONS, 1.0 / model.attention.chosen_rate
        if array.name in mechanism.INDEX_ARRAYS:
            feature, n_slots = Feature.CANDIDATE_POSITIONS, 1.0 / array.rate
            scored = feature
        n_bytes = prod(array.local_shape(plan)) * n_slots * array.bits(device.cache_dtype) / 8
        yield Part.ATTN, Cost.CACHE_BYTES, feature, n_bytes
    work = attention.prompt_work(kind, 1)  # of each token with the entries that it scores
    yield Part.ATTN, Cost.MATMUL_FLOPS, scored, work.index_flops / work.rate
    yield Part.ATTN, Cost.PASS_BYTES, scored, work.index_f32 / work.rate * F32_BYTES


def _positions(device: _Device, layer: Layer, array: CacheArray) -> tuple[Feature, float]:
    """The feature that counts the slots of an array that decode reads, and slots per unit."""
    attention, kind = device.model.attention_of(layer), layer.attention
    if array.n_fixed_slots is not None:
        return Feature.SEQUENCES, array.n_fixed_slots
    if attention.window_of(kind) is not None:
        return Feature.WINDOW_POSITIONS, 1.0
    is_scored = array.name in mechanism.INDEX_ARRAYS  # an indexer scores every position
    if attention.chosen_by(kind) is not None and not is_scored:
        return Feature.CHOSEN_POSITIONS, 1.0 / device.model.attention.chosen_rate
    return Feature.CACHED_POSITIONS, 1.0 / array.rate


def _prompt(device: _Device, work: mechanism.PromptWork, layer: Layer) -> Iterator[_Entry]:
    """Scores and weighted values: in kernels the causal or windowed blocks, in plain attention all pairs."""
    tp, part = device.plan.tp, Part.ATTN
    yield part, Cost.MATMUL_FLOPS, Feature.TOKENS, work.token_flops / tp
    yield part, Cost.MATMUL_FLOPS, Feature.TOKENS, work.split_flops / tp
    yield part, Cost.MATMUL_FLOPS, Feature.SEQUENCES, work.sequence_flops / tp
    yield part, Cost.PASS_BYTES, Feature.TOKENS, work.token_f32 / tp * F32_BYTES
    window = device.model.attention_of(layer).window_of(layer.attention)
    pairs = Feature.CAUSAL_PAIRS if window is None else Feature.WINDOW_PAIRS
    pair_flops = work.pair_flops / tp / work.rate
    if device.paged is not None and work.pair_scores and work.rate == 1:
        blocks = Feature.PAGED_BLOCKS if window is None else Feature.WINDOW_BLOCKS
        block_s = device.paged_block_s(layer, work.pair_flops / work.pair_scores)
        yield part, Cost.PAGED_S, blocks, block_s
        for feature in (pairs, Feature.ALL_PAIRS):
            yield part, Cost.PAGED_FLOPS, feature, pair_flops
    else:
        yield part, Cost.KERNEL_FLOPS, pairs, pair_flops
        yield part, Cost.MATMUL_FLOPS, Feature.ALL_PAIRS, pair_flops
        # Plain attention writes and reads the scores in float32, and their weights as activations.
        score_bytes = work.pair_scores / tp / work.rate * 2 * (4 + device.act_bytes)
        yield part, Cost.PASS_BYTES, Feature.ALL_PAIRS, score_bytes
    # An indexer is replicated over tp.
    yield part, Cost.MATMUL_FLOPS, Feature.ALL_PAIRS, work.index_flops / work.rate
    yield part, Cost.PASS_BYTES, Feature.ALL_PAIRS, work.index_f32 / work.rate * F32_BYTES
    chosen_flops = work.chosen_flops / tp / device.model.attention.chosen_rate
    yield part, Cost.MATMUL_FLOPS, Feature.CHOSEN_PAIRS, chosen_flops


def _mixture(device: _Device, layer: Layer) -> Iterator[_Entry]:
    model = device.model
    assert model.moe is not None
    weights = stored.router_weights(model, has_table=layer.mlp is MlpKind.HASH_MOE)
    yield Part.MOE_ROUTER, Cost.MATMUL_FLOPS, Feature.TOKENS, 2 * model.hidden * model.moe.n_experts
    yield Part.MOE_ROUTER, Cost.WEIGHT_BYTES, Feature.ONE, sum(map(device.read_bytes, weights))
    yield Part.MOE_ROUTER, Cost.PASS_BYTES, Feature.TOKENS, model.moe.n_experts * 4
    yield Part.MOE_ROUTER, Cost.SMALL_OPS, Feature.ONE, ROUTER_OPS
    yield Part.MOE_ROUTER, Cost.GROUPED_LAYERS, Feature.ONE, float(model.moe.n_groups > 1)
    for weight in stored.latent_weights(model):
        flops = 2 * device.elements(weight)
        yield Part.MOE_EXPERTS, Cost.MATMUL_FLOPS, Feature.TOKENS, flops
        yield Part.MOE_EXPERTS, Cost.WEIGHT_BYTES, Feature.ONE, device.read_bytes(weight)
    yield from _experts(device, layer)
    if model.moe.shared_ffn is not None:
        width = _passes(model.moe.activation) * model.moe.shared_ffn / device.plan.tp
        yield from _mlp(device, Part.MOE_SHARED, stored.shared_weights(model, layer), width)
    else:
        # The norm before the experts, and the sum after them.
        passes = RESIDUAL_PASSES + mechanism.NORM_PASSES * model.has_post_norms
        residual = passes * model.hidden * device.act_bytes
        yield Part.MOE_EXPERTS, Cost.PASS_BYTES, Feature.TOKENS, residual


def _experts(device: _Device, layer: Layer) -> Iterator[_Entry]:
    """Routed experts: the kernel reads experts that have rows, a plain product reads all.

    A device sorts the rows that its tokens choose, and after an exchange also the rows it receives.
    """
    model, plan, part = device.model, device.plan, Part.MOE_EXPERTS
    assert model.moe is not None
    if device.served is not None:
        yield from _served_experts(device, layer, device.served)
        return
    if device.fused is not None:
        yield from _fused_experts(device, layer, *(n * device.cycle_s for n in device.fused))
        return
    weights = stored.expert_weights(model, layer)
    matrices = [weight for weight in weights if len(weight.shape) > 2]
    matrix_elements = sum(map(device.elements, matrices))
    rows = rows_per_token(model, plan) * device.load
    flops = 2 * rows * matrix_elements / (model.moe.n_experts / plan.ep)
    n_bytes = sum(map(device.read_bytes, weights))
    if device.has_expert_kernel:
        yield part, Cost.GROUPED_FLOPS, Feature.TOKENS, flops
        copied = OPERATIONS.int8_experts.copied_frac if device.has_int8_blocks else 0.0
        yield part, Cost.CHOSEN_BYTES, Feature.HIT_FRAC, n_bytes * (1 - copied)
        yield part, Cost.CHOSEN_BYTES, Feature.ONE, n_bytes * copied
        if device.has_int8_blocks:
            n_rows = sorted_rows_per_token(model, plan, device.load)
            yield part, Cost.CHOSEN_ROWS, Feature.TOKENS, n_rows
        converted_s = sum(device.elements(w) * device.converted_s(w) for w in weights)
        yield part, Cost.CONVERTED_S, Feature.HIT_FRAC, converted_s
    else:
        yield part, Cost.MATMUL_FLOPS, Feature.TOKENS, flops
        yield part, Cost.WEIGHT_BYTES, Feature.ONE, n_bytes
    yield from _sorted_rows(device)
    width = weights[0].gathered_shape(plan)[-1]
    buffer_rows = rows if exchange_axes(plan) else model.moe.n_active  # the gated product reads all
    wide_bytes = _passes(model.moe.activation) * buffer_rows * width * device.act_bytes
    yield part, Cost.PASS_BYTES, Feature.TOKENS, wide_bytes
    yield from _narrowing(device, part, matrices, n_rows=buffer_rows)
    yield part, Cost.SMALL_OPS, Feature.ONE, EXPERT_OPS


def _served_experts(device: _Device, layer: Layer, served: ServedExperts) -> Iterator[_Entry]:
    """Kernels of a server, which overlap products with reading the experts.

    A fused kernel sends rows to other devices. Else SparseCores gather the rows of the device's own experts,
    and add what they return to the tokens, in float32. For few rows, two products with one-hot masks of all tokens
    and rows do both.
    """
    model, plan, part = device.model, device.plan, Part.MOE_EXPERTS
    assert model.moe is not None
    weights = stored.expert_weights(model, layer)
    n_local, rows = model.moe.n_experts / plan.ep, rows_per_token(model, plan) * device.load
    yield part, Cost.CHOSEN_BYTES, Feature.HIT_FRAC, sum(map(device.read_bytes, weights))
    yield part, Cost.KERNEL_S, Feature.HIT_FRAC, n_local * served.expert_s
    yield part, Cost.KERNEL_S, Feature.ONE, served.start_s
    elements = sum(device.elements(weight) for weight in weights if len(weight.shape) > 2)
    products_s = 2 * rows * elements / n_local / served.flops_per_s
    yield part, Cost.CONVERTED_S, Feature.TOKENS, products_s
    converted_s = sum(device.elements(w) * device.converted_s(w) for w in weights)
    yield part, Cost.CONVERTED_S, Feature.HIT_FRAC, converted_s
    if device.form is DispatchForm.FUSED:
        row_bytes = rows * device.act_bytes * (plan.ep - 1) / plan.ep
    else:
        has_rows = exchange_axes(plan, device.form)
        n_summed = rows if has_rows else float(gathered_ranks(plan, device.form))
        row_bytes = 3 * rows * device.act_bytes + 4 * n_summed
        n_ranks = gathered_ranks(plan, device.form)
        flops = 4 * n_ranks**2 * model.moe.n_active * model.row_width
        yield part, Cost.ONE_HOT_S, Feature.TOKENS, flops / served.one_hot_flops_per_s
    rows_s = row_bytes * model.row_width / served.row_bytes_per_s
    yield part, Cost.SERVED_S, Feature.TOKENS, rows_s
    yield part, Cost.SMALL_OPS, Feature.ONE, EXPERT_OPS


def _fused_experts(device: _Device, layer: Layer, row_s: float, tile_s: float) -> Iterator[_Entry]:
    """A kernel that sends rows to their experts, multiplies them tile by tile, and sends them back.

    Its loops over rows run before and after the products. The last tile of an expert is partly empty.
    """
    model, plan, part = device.model, device.plan, Part.MOE_EXPERTS
    assert model.moe is not None
    rows = rows_per_token(model, plan) * device.load
    n_bytes = sum(map(device.read_bytes, stored.expert_weights(model, layer)))
    yield part, Cost.SENT_S, Feature.TOKENS, rows * row_s
    yield part, Cost.KERNEL_S, Feature.TOKENS, rows / TILE_ROWS * tile_s
    n_local = model.moe.n_experts / plan.ep
    yield part, Cost.KERNEL_S, Feature.EMPTY_TILES, n_local * tile_s
    yield part, Cost.CHOSEN_BYTES, Feature.HIT_FRAC, n_bytes
    row_bytes = FUSED_ROW_PASSES * model.row_width * device.act_bytes
    yield part, Cost.PASS_BYTES, Feature.TOKENS, rows * row_bytes
    yield part, Cost.SMALL_OPS, Feature.ONE, EXPERT_OPS


def _sorted_rows(device: _Device) -> Iterator[_Entry]:
    """Rows that are brought into the order of their experts, and back.

    Rows of an exchange are contiguous in memory if they fill tiles, and move at the rate of their bytes.
    """
    model, plan, part = device.model, device.plan, Part.MOE_EXPERTS
    sorted_rows = sorted_rows_per_token(model, plan, device.load)
    if exchange_axes(plan) and fills_tiles(model.row_width):
        received_rows, room = rows_per_token(model, plan), float(ROUND_ROOM)
        buffer_rows = room * ceil(device.load / room) * received_rows  # of all rounds
        sent_rows = sorted_rows - received_rows * device.load
        passes = SENT_PASSES * sent_rows + RECEIVED_PASSES * buffer_rows
        yield part, Cost.PASS_BYTES, Feature.TOKENS, passes * model.row_width * device.act_bytes
        return
    yield part, Cost.SORTED_S, Feature.TOKENS, sorted_rows * device.row_s
    yield part, Cost.RETURNED_S, Feature.TOKENS, sorted_rows * (device.row_s + device.row_read_s)
