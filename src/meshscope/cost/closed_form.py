"""Step time in closed form, for many plans and workloads at once.

One HBM serves a step; docs/time.md explains each term. While the core waits in a collective or works through
small operations, and during products, weights of the coming products arrive:

    step = products + attention + passes + gathers + collectives + small operations + waits
    waits = max(0, weights from HBM - collectives - small operations - overlap x products)

The overlap is 1 for prefill, as no compiled schedule of one waits for weights, and fitted for decode.
GPUs and measured devices overlap each product with its own weights and activations only.

M equal micro-batches pass through the stages in turn. The first one takes every stage and every boundary
once, and each further one follows after the slowest stage and boundary:

    step of a pipeline = sum(stages) + sum(boundaries) + (M - 1) x (max(stages) + max(boundaries))

The slowest stage is the one with the most layers. If it is not at the slowest boundary, a stage with its
boundary takes less than this.

Left out: relayouts, products that are fused with others, arrays that stay in VMEM between layers, the most
loaded expert, and indexers of attention.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshscope.cost import expert_load
from meshscope.cost.collective_times import CollectiveCost, HiddenBehind, collective_costs
from meshscope.cost.features import (
    IS_ONCE,
    PARTS,
    VLLM_EXPERTS,
    Cost,
    Feature,
    FloatArray,
    PlanCosts,
    one_hot_tokens,
    plan_costs,
    reads_int8_blocks,
    served_blocks,
    served_experts,
)
from meshscope.cost.paged import VLLM, PagedBlocks, n_blocks
from meshscope.cost.rates import (
    ChipEfficiency,
    ModeledProgram,
    Rates,
    efficiency_of,
    rates_of,
    row_s,
)
from meshscope.events.enums import Part, Phase
from meshscope.hardware.chips import product_speedup
from meshscope.hardware.compiler_facts import OPERATIONS
from meshscope.hardware.interconnect.constants import LinkConstants, constants_of
from meshscope.hardware.interconnect.profile import ChipProfile
from meshscope.hardware.topology import Topology
from meshscope.model.layers import AttentionKind
from meshscope.model.mechanisms.attention import causal_blocks, window_blocks
from meshscope.plans.dispatch import FUSED_BLOCK_TOKENS, DispatchForm
from meshscope.plans.experiment import Experiment
from meshscope.plans.kernel_choice import splash_block
from meshscope.units import DTYPE_BITS

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
Number = Any  # a number for one plan, or an array for several
NO_LIMIT = float(1 << 40)  # longer than any prompt
# Arrays of activations up to this size stay in VMEM: half of the 16 MiB that libtpu gives one operation
# by default (xla_tpu_scoped_vmem_limit_kib), as an operation reads one and writes one.
VMEM_ARRAY_BYTES = 8 << 20
# Tokens from which rows are gathered stay in VMEM up to this size (seen for 16 MiB of Qwen3-30B-A3B, v6e),
# and what kernels of experts return up to a smaller one (seen for 2 MiB there).
VMEM_TOKENS_BYTES = 16 << 20
VMEM_RETURNED_BYTES = 4 << 20
_STREAMED = {Cost.MATMUL_FLOPS, Cost.NARROW_FLOPS, Cost.WEIGHT_BYTES, Cost.FUSED_BYTES}
OTHER_COSTS = [cost for cost in Cost if cost not in _STREAMED]  # than of products with weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanNumbers:
    """What a step depends on besides costs and collectives, for one phase of one or several plans."""

    data_size: Number
    cp: Number
    n_stages: Number
    n_microbatches: Number
    is_decode: Number
    has_kernel: Number
    reads_static_cache: Number  # decode without a kernel reads all slots, filled or not
    window: Number
    chosen: Number  # positions that an indexer chooses; entries count with those they compress
    candidates: Number  # positions among which some layers choose
    n_end: Number  # last tokens of a prompt that alone pass through some layers, if there are such
    miss_frac: Number  # of tokens that do not choose a given expert; 1 for a dense model
    hit_spread: Number  # of the experts with rows over the devices; see `expert_load`
    popularity: Number  # variance of the probabilities of experts over their squared mean
    routed_tokens: Number  # tokens that may choose a device's experts, per token of its tp group
    sorted_rows: Number  # by expert, per token
    one_hot_tokens: Number  # up to which a server sorts rows by products with one-hot masks
    block_tokens: Number  # of a tp group in a block of a fused kernel of experts
    vmem_gather_frac: Number  # time to gather rows from VMEM, relative to HBM
    residual_bytes: Number  # residual stream of one token
    fetches_late: Number  # with a single row, weights only with the product
    block_queries: Number  # of paged attention
    block_keys: Number
    skips_masked: Number  # blocks of keys after the last query of a block

    def at(self, plan: IntArray) -> "PlanNumbers":
        """The numbers of the plans at these positions."""
        return PlanNumbers(**{name: getattr(self, name)[plan] for name in NUMBERS})


NUMBERS = tuple(field.name for field in fields(PlanNumbers))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanForm(PlanNumbers):
    """The closed form of one phase of a plan, for any workload.

    Valid for workloads with the same number of micro-batches, whose decode batch is split over tp if and
    only if it is in the original experiment.
    """

    phase: Phase
    topology: Topology
    costs: PlanCosts
    collectives: tuple[CollectiveCost, ...]
    rates: Rates
    efficiency: ChipEfficiency
    constants: LinkConstants
    narrow_speedup: float = 1.0  # peak of products of 8-bit operands, relative to bf16
    n_tokens: int = 1  # of a sequence in a decode step; each counts as a sequence of a workload


def plan_form(  # noqa: PLR0913  what a form depends on
    experiment: Experiment,
    phase: Phase,
    *,
    profile: ChipProfile | None = None,
    efficiency: ChipEfficiency | None = None,
    program: ModeledProgram = ModeledProgram.PUBLISHED,
    attention: str | PagedBlocks = VLLM,
    experts: str = VLLM_EXPERTS,
    offloads_from: int | None = None,
    expert_popularity: float = 0.0,
    has_collectives: bool = True,
) -> PlanForm:
    """The closed form of one phase of a plan; SpecError for a chip without figures or profile.

    Without collectives, steps take no longer than with them.

    `attention` is the version of a server's attention kernel, or its blocks, and `experts` that of its kernels of
    experts. SparseCores run all-reduces from `offloads_from` bytes on, if its compiler options say so, and experts
    are as unequally popular as `expert_popularity` says.

    In a decode step with several tokens per sequence, each token counts as a sequence, and they share one read
    of the cache.
    """
    n_tokens = experiment.workload.decode_tokens if phase is Phase.DECODE else 1
    by_token = experiment if n_tokens == 1 else experiment.by_token
    chip, plan, model = experiment.topology.chip, by_token.plan, by_token.model
    rates = rates_of(chip, profile)
    constants = constants_of(chip) if profile is None else profile.constants
    if offloads_from is not None:
        constants = replace(constants, offloads_from=offloads_from)
    is_known = isinstance(attention, PagedBlocks)
    blocks = attention if is_known else served_blocks(by_token, attention)
    served = served_experts(by_token, program, experts)
    costs = plan_costs(
        by_token, phase, rates, program, n_tokens=n_tokens, blocks=blocks, served=served
    )
    if n_tokens > 1:
        divisors = np.ones((len(Cost), 1))
        divisors[Cost.CACHE_BYTES] = n_tokens
        costs = PlanCosts(
            coefficients=costs.coefficients / divisors, all_stages=costs.all_stages / divisors
        )
    moe, load = model.moe, expert_load.device_load(by_token, phase)
    in_vmem, in_hbm = (
        row_s(rates, model.row_width, 1.0, is_in_hbm=is_hbm) for is_hbm in (False, True)
    )
    is_fused = by_token.dispatch_form is DispatchForm.FUSED and served is None
    of_weights = fields_of_weights(by_token, phase, program)
    taken = efficiency or of_weights["efficiency"]
    of_weights["efficiency"] = taken.of_own_program if program is ModeledProgram.OWN else taken
    return PlanForm(
        phase=phase,
        topology=experiment.topology,
        costs=costs,
        collectives=collective_costs(by_token, phase, constants) if has_collectives else (),
        rates=rates,
        constants=constants,
        data_size=plan.data_size,
        cp=1 if phase is Phase.DECODE and model.attention.has_whole_caches else plan.cp,
        n_stages=plan.pp,
        n_microbatches=by_token.n_microbatches(phase),
        is_decode=phase is Phase.DECODE,
        has_kernel=by_token.kernels.prefill_attention.kernel is not None,
        reads_static_cache=experiment.kernels.decode_attention.kernel is None,
        window=float(model.attention.window_of(AttentionKind.SLIDING) or NO_LIMIT),
        chosen=float(model.attention.chosen_positions or NO_LIMIT),
        candidates=float(model.attention.candidate_positions or NO_LIMIT),
        n_end=float(model.n_replayed or 0),
        popularity=expert_popularity,
        routed_tokens=0.0 if moe is None else expert_load.routed_tokens_per_token(model, plan),
        sorted_rows=0.0 if moe is None else expert_load.sorted_rows_per_token(model, plan, load),
        one_hot_tokens=0.0 if served is None else one_hot_tokens(by_token, served),
        block_tokens=float(FUSED_BLOCK_TOKENS * plan.tp) if is_fused else NO_LIMIT,
        vmem_gather_frac=in_vmem / in_hbm,
        residual_bytes=model.hidden * DTYPE_BITS[by_token.workload.activation_dtype] / 8,
        fetches_late=phase is Phase.DECODE and not rates.facts.fetches_ahead_of_rows,
        n_tokens=n_tokens,
        block_queries=blocks.queries,
        block_keys=blocks.keys,
        skips_masked=blocks.facts.skips_masked,
        **of_weights,
    )


def fields_of_weights(
    experiment: Experiment,
    phase: Phase,
    program: ModeledProgram = ModeledProgram.PUBLISHED,
) -> dict[str, Any]:
    """The fields of a form that differ between formats of the weights, besides its costs and collectives."""
    chip, moe = experiment.topology.chip, experiment.model.moe
    dtype, miss_frac, spread = experiment.workload.weight_dtype, 1.0, 0.0
    if moe is not None:
        n_experts = float(moe.n_experts)
        miss_frac = moe.miss_frac(expert_load.device_load(experiment, phase))
        if reads_int8_blocks(dtype, phase, program):
            miss_frac **= OPERATIONS.int8_experts.n_together
            n_experts /= OPERATIONS.int8_experts.n_together
        spread = expert_load.hit_spread(n_experts, experiment.plan.ep)
    efficiency = efficiency_of(chip)
    return {
        "miss_frac": miss_frac,
        "hit_spread": spread,
        "efficiency": efficiency.for_kind(phase.value, dtype, has_experts=moe is not None),
        "narrow_speedup": product_speedup(dtype, chip),
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClosedSteps:
    """Times of [n] steps in seconds, by [n, part] and [n, collective].

    `collectives_s` and `exposed_s` cover the whole step, and so do `costs` [n, part, cost]. Entries
    beyond a plan's collectives are 0. A pipeline's figures except `step_s` are means over its stages.
    """

    step_s: FloatArray
    compute_s: FloatArray
    bubble_s: FloatArray
    parts_s: FloatArray
    collectives_s: FloatArray
    exposed_s: FloatArray
    payload_bytes: FloatArray
    is_reduced: BoolArray
    costs: FloatArray
    n_chunks: FloatArray


class _Collectives(NamedTuple):
    """Arrays [row, collective] of what `CollectiveCost` says of each; `line` is the place of its lines."""

    n_tick: FloatArray
    n_pass: FloatArray
    n_once: FloatArray
    line: FloatArray
    factor: FloatArray
    is_send: FloatArray
    is_head: FloatArray
    is_of_end: FloatArray
    behind_attention: FloatArray
    behind_layers: FloatArray
    reduced_for: FloatArray
    reduced_over_bytes: FloatArray
    reduced_multiple: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanBatch:
    """The closed forms of several plans as arrays over [plan].

    Plans with the same collectives share a `row` of them, and collectives with the same groups a line.
    Collectives and strategies are padded; line 0 takes no time.
    """

    numbers: PlanNumbers
    is_used: BoolArray  # [part, cost] whether any plan has the cost
    coefficients: FloatArray  # [plan, used part and cost, feature] of the largest stage
    all_stages: FloatArray  # and of all stages
    cost_s: FloatArray  # [plan, cost] seconds per unit of cost
    streams_weights: BoolArray  # [plan]
    overlap: FloatArray  # [plan] share of products during which later weights arrive; 1 in prefill
    row: IntArray  # [plan]
    payload: FloatArray  # [row, collective, feature]
    collectives: _Collectives
    lines: FloatArray  # [field, line, strategy]


def plan_batch(forms: Sequence[PlanForm]) -> PlanBatch:
    """The closed forms as arrays, for joint evaluation."""

    def by_plan(value: Callable[[PlanForm], float]) -> FloatArray:
        return np.array([value(form) for form in forms], dtype=float)

    kinds_behind = tuple(HiddenBehind)
    sets = {id(form.collectives): form.collectives for form in forms}
    row_of = {key: row for row, key in enumerate(sets)}
    collectives = [c for of_row in sets.values() for c in of_row]
    transfers = {id(c.lines): c.lines for c in collectives}
    line_of = {key: line for line, key in enumerate(transfers, start=1)}
    sizes = [len(of_row) for of_row in sets.values()]
    # NumPy sums eights: a plan has the same sums, to the last digit, in any batch.
    shape = (len(sizes), -8 * (-max(sizes, default=0) // 8))
    place = (np.repeat(np.arange(len(sizes)), sizes), [m for n in sizes for m in range(n)])
    payload = np.zeros((*shape, len(Feature)))
    values = np.zeros((*shape, len(_Collectives._fields)))
    if collectives:
        payload[place] = [c.payload for c in collectives]
        values[place] = [
            (
                *(c.n_tick, c.n_pass, c.n_once, line_of[id(c.lines)], c.factor),
                *(c.planned.part is Part.STAGE, c.planned.part is Part.LM_HEAD),
                c.planned.is_of_end,
                *(c.hidden_behind is behind for behind in kinds_behind),
                *(reduced.n_sequences, reduced.over_bytes, reduced.multiple),
            )
            for c in collectives
            for reduced in (c.planned.reduced_for,)
        ]
    n_strategies = max([1, *(transfer.shape[1] for transfer in transfers.values())])
    lines = np.zeros((6, 1 + len(transfers), n_strategies))
    lines[0] = np.inf  # strategies that a line does not have take forever
    lines[0, 0, 0] = 0.0
    for at, transfer in enumerate(transfers.values(), start=1):
        lines[:, at, : transfer.shape[1]] = transfer
    # Forms share arrays of costs, most of which are zeros.
    costs = {id(each): each for form in forms for each in form.costs}
    is_used = np.zeros((len(PARTS), len(Cost)), dtype=np.bool_)
    for each in costs.values():
        is_used |= each.any(axis=-1)
    used = {key: each[is_used] for key, each in costs.items()}
    coefficients, all_stages = (
        np.array([used[id(form.costs[at])] for form in forms]).reshape(
            len(forms), -1 if forms else 0, len(Feature)
        )
        for at in range(2)
    )
    return PlanBatch(
        numbers=PlanNumbers(**{name: by_plan(attrgetter(name)) for name in NUMBERS}),
        is_used=is_used,
        coefficients=coefficients,
        all_stages=all_stages,
        cost_s=np.array([cost_s(form) for form in forms]),
        streams_weights=by_plan(lambda f: f.efficiency.streams_weights) > 0,
        overlap=by_plan(lambda f: f.efficiency.constants.overlap if f.is_decode else 1.0),
        row=np.array([row_of[id(form.collectives)] for form in forms], dtype=int),
        payload=payload,
        collectives=_Collectives(*np.ascontiguousarray(np.moveaxis(values, -1, 0))),
        lines=lines,
    )


def cost_s(form: PlanForm) -> FloatArray:
    """[cost] seconds per unit of cost, at what the chip reaches of its peaks."""
    constants = form.efficiency.constants
    flop_s, byte_s = 1 / form.rates.flops_per_s, 1 / form.rates.hbm_bytes_per_s
    by_cost = {
        Cost.MATMUL_FLOPS: flop_s / constants.matmul,
        Cost.KERNEL_FLOPS: flop_s / constants.attention,
        Cost.GROUPED_FLOPS: flop_s / constants.experts / form.narrow_speedup,
        Cost.WEIGHT_BYTES: byte_s / constants.weights,
        Cost.CHOSEN_BYTES: byte_s / constants.weights,
        Cost.CACHE_BYTES: byte_s / constants.cache,
        Cost.PASS_BYTES: byte_s / constants.passes,
        Cost.SORTED_S: 1 / constants.gathers,
        Cost.RETURNED_S: 1 / constants.gathers,
        Cost.SMALL_OPS: constants.op_s,
        Cost.NARROW_FLOPS: flop_s / constants.matmul / form.narrow_speedup,
        Cost.FUSED_BYTES: byte_s / constants.passes,
        Cost.SENT_S: 1 / constants.gathers,
        Cost.KERNEL_S: 1.0,
        Cost.CONVERTED_S: 1.0,
        Cost.GROUPED_LAYERS: constants.groups_s,
        Cost.CHOSEN_ROWS: constants.row_s,
        Cost.PAGED_S: 1 / constants.paged,
        Cost.PAGED_FLOPS: 0.0,
        Cost.SERVED_S: 1.0,
        Cost.ONE_HOT_S: 1.0,
    }
    return np.array([by_cost[cost] for cost in Cost])


def closed_steps(  # noqa: PLR0913  the sizes of a workload
    plans: PlanBatch,
    at: IntArray,
    *,
    batch: FloatArray,
    prompt: FloatArray,
    output: FloatArray,
    chunk: FloatArray | None = None,
) -> ClosedSteps:
    """The steps of [n] workloads; `at` [n] is the plan of each.

    `chunk` [n] are the tokens of a prefill chunk on one data-parallel rank. A prefill step has
    all its chunks.
    """
    of, row = plans.numbers.at(at), plans.row[at]
    limit = np.full(len(at), NO_LIMIT) if chunk is None else chunk
    n_chunks, n_sequences, n_positions = _chunks(of, batch, prompt, limit)
    features = _features(of, n_sequences, n_positions, prompt, output)
    payload = (plans.payload[row] @ features[:, :, None])[..., 0]
    is_reduced = _is_reduced(plans, row, features, payload)
    is_end = (plans.collectives.is_of_end[row] > 0) & (of.is_decode[:, None] == 0)
    end_frac = np.where(is_end, (n_positions / prompt)[:, None], 1.0)
    run_s = _strategy_s(plans, row, payload, is_reduced)
    run_s = run_s * end_frac
    tick = _tick(plans, at, features, run_s, (plans.coefficients, plans.collectives.n_tick))
    mean, first_s = tick, tick.ticks_s
    is_piped = of.n_stages > 1
    if is_piped.any():
        each = (plans.all_stages, plans.collectives.n_pass)
        of_piped = _tick(plans, at[is_piped], features[is_piped], run_s[is_piped], each)
        first_s[is_piped] = of_piped.ticks_s
        mean = _Tick(*(value.copy() for value in tick))
        for of_mean, total in zip(mean, of_piped, strict=True):
            n_each = of.n_stages[is_piped].reshape(-1, *[1] * (total.ndim - 1))
            of_mean[is_piped] = total / n_each

    n_stages = of.n_stages[:, None]
    n_busy = (of.n_microbatches * n_chunks)[:, None]
    part_busy = np.where(IS_ONCE > 0, n_chunks[:, None], n_busy)
    parts_s = mean.parts_s * part_busy
    once_s = run_s * plans.collectives.n_once[row] * n_chunks[:, None]
    step_s = (tick.parts_s * IS_ONCE).sum(axis=1) * n_chunks + once_s.sum(axis=1)
    step_s = step_s + n_chunks * (first_s + (of.n_microbatches - 1) * tick.ticks_s)
    # All stages wait for the sends of every tick, and one has the collectives of the head.
    once_s = np.where(plans.collectives.is_head[row] > 0, once_s / n_stages, once_s)
    sends = plans.collectives.is_send[row] > 0
    collectives_s, exposed_s = (
        np.where(
            sends,
            n_stages * of_mean * n_chunks[:, None] + of_tick * (n_busy - n_chunks[:, None]),
            of_mean * n_busy,
        )
        + once_s
        for of_mean, of_tick in (
            (mean.collectives_s, tick.collectives_s),
            (mean.exposed_s, tick.exposed_s),
        )
    )
    return ClosedSteps(
        step_s=step_s,
        compute_s=parts_s.sum(axis=1),
        bubble_s=step_s - parts_s.sum(axis=1) - exposed_s.sum(axis=1),
        parts_s=parts_s,
        collectives_s=collectives_s,
        exposed_s=exposed_s,
        payload_bytes=payload,
        is_reduced=is_reduced,
        costs=mean.costs * part_busy[..., None],
        n_chunks=n_chunks,
    )


class _Tick(NamedTuple):
    """What a micro-batch takes in one stage or in all: by [n, part] and [n, collective].

    Parts outside the ticks have the time of all micro-batches.
    """

    costs: FloatArray
    parts_s: FloatArray
    collectives_s: FloatArray
    exposed_s: FloatArray

    @property
    def ticks_s(self) -> FloatArray:
        """[n] seconds without the parts outside the ticks."""
        return (self.parts_s * (1 - IS_ONCE)).sum(axis=1) + self.exposed_s.sum(axis=1)


def _tick(
    plans: PlanBatch,
    at: IntArray,
    features: FloatArray,
    run_s: FloatArray,
    each: tuple[FloatArray, FloatArray],
) -> _Tick:
    """The micro-batch of `each`: the coefficients [plan, used], and the runs [row, collective].

    Products wait for weights that nothing before them hid. Nothing hides the weights of parts outside the layers,
    and collectives hide none in steps that fetch them late.
    """
    coefficients, n_runs = each
    row, streams = plans.row[at], plans.streams_weights[at][:, None]
    costs = np.zeros((len(at), *plans.is_used.shape))
    costs[:, plans.is_used] = (coefficients[at] @ features[:, :, None])[..., 0]
    costs = _in_hbm(plans, at, costs, features)
    read_s = costs[..., Cost.CHOSEN_BYTES] * plans.cost_s[at][:, None, Cost.CHOSEN_BYTES]
    costs[..., Cost.CONVERTED_S] = np.maximum(0.0, costs[..., Cost.CONVERTED_S] - read_s)
    seconds = costs * plans.cost_s[at][:, None, :]
    products_s = seconds[..., [Cost.MATMUL_FLOPS, Cost.NARROW_FLOPS]].sum(axis=-1)
    weights_s = seconds[..., Cost.WEIGHT_BYTES]
    moved_s = weights_s + seconds[..., Cost.FUSED_BYTES]
    core_s = np.where(streams, products_s, np.maximum(products_s, moved_s))
    core_s = core_s + seconds[..., OTHER_COSTS].sum(axis=-1)
    collectives_s = run_s * n_runs[row]
    layers_s = np.where(IS_ONCE > 0, 0.0, core_s).sum(axis=1)
    attention_s = core_s[:, PARTS.index(Part.ATTN)]
    exposed_s = _exposed(plans.collectives.behind_attention[row], collectives_s, attention_s)
    exposed_s = _exposed(plans.collectives.behind_layers[row], exposed_s, layers_s)

    in_layers = IS_ONCE[None, :] == 0
    stream_s = np.where(streams, weights_s, 0.0)
    hiding_s = seconds[..., [Cost.SMALL_OPS, Cost.GROUPED_LAYERS]].sum(axis=-1)
    hiding_s = hiding_s + plans.overlap[at][:, None] * products_s
    is_late = (features[:, Feature.TOKENS] <= 1) & (plans.numbers.fetches_late[at] > 0)
    hidden_s = np.where(in_layers, hiding_s, 0.0).sum(axis=1)
    hidden_s = hidden_s + np.where(is_late, 0.0, exposed_s.sum(axis=1))
    streamed_s = np.where(in_layers, stream_s, 0.0).sum(axis=1)
    waits_s = np.maximum(0.0, streamed_s - hidden_s)
    frac = np.divide(waits_s, streamed_s, out=np.zeros_like(waits_s), where=streamed_s > 0)
    parts_s = core_s + stream_s * np.where(in_layers, frac[:, None], 1.0)
    return _Tick(costs=costs, parts_s=parts_s, collectives_s=collectives_s, exposed_s=exposed_s)


def _chunks(
    of: PlanNumbers, batch: FloatArray, prompt: FloatArray, chunk: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """[n] the number of chunks of a step, and the sequences and positions of the mean one.

    Decode steps and prefill without chunks are one chunk. See `plans.chunks`.
    """
    is_decode, n_sequences = of.is_decode > 0, batch / of.data_size
    is_whole = is_decode | (n_sequences * prompt <= chunk)
    fitting = np.where(is_whole, n_sequences, np.maximum(1.0, chunk // prompt))
    n_sequence_chunks = np.ceil(n_sequences / fitting)
    n_position_chunks = np.where(is_whole, 1.0, np.ceil(prompt / chunk))
    n_positions = np.where(is_decode, 1.0, prompt / n_position_chunks)
    return n_sequence_chunks * n_position_chunks, n_sequences / n_sequence_chunks, n_positions


def _in_hbm(plans: PlanBatch, at: IntArray, costs: FloatArray, features: FloatArray) -> FloatArray:
    """The costs with passes over arrays in VMEM, and gathers from it, as the HBM's that take as long.

    Rows of a server's experts are gathered, or multiplied with one-hot masks.
    """
    of = plans.numbers
    array_bytes = features[:, Feature.TOKENS] * of.residual_bytes[at]
    in_vmem = (array_bytes <= VMEM_ARRAY_BYTES) & plans.streams_weights[at]
    passes = [Cost.PASS_BYTES, Cost.FUSED_BYTES]
    costs[..., passes] /= np.where(in_vmem, OPERATIONS.vmem_over_hbm, 1.0)[:, None, None]
    for cost, is_in_vmem in (
        (Cost.SORTED_S, array_bytes <= VMEM_TOKENS_BYTES),
        (Cost.RETURNED_S, array_bytes * of.sorted_rows[at] <= VMEM_RETURNED_BYTES),
    ):
        costs[..., cost] *= np.where(is_in_vmem, of.vmem_gather_frac[at], 1.0)[:, None]
    n_tokens = features[:, Feature.TOKENS]
    is_one_hot = n_tokens <= of.one_hot_tokens[at]
    costs[..., Cost.SERVED_S] *= np.where(is_one_hot, 0.0, 1.0)[:, None]
    costs[..., Cost.ONE_HOT_S] *= np.where(is_one_hot, n_tokens, 0.0)[:, None]
    return costs


def _features(
    of: PlanNumbers,
    n_sequences: FloatArray,
    n_positions: FloatArray,
    prompt: FloatArray,
    output: FloatArray,
) -> FloatArray:
    """[n, feature] workload sizes of the mean chunk on one device."""
    is_decode, cp, is_static = of.is_decode > 0, of.cp, of.reads_static_cache > 0
    sequences, local = n_sequences / of.n_microbatches, n_positions / cp
    n_queries = np.where(is_decode, 1.0, local)
    tokens = sequences * n_queries
    lengths, at = np.unique(local, return_inverse=True)
    block = np.array([float(splash_block(length) or 0) for length in lengths])[at]
    is_kernel = (of.has_kernel > 0) & (block > 0) & ~is_decode
    # Pairs of one sequence in the blocks of a causal mask, and of a windowed one, over whole blocks of positions.
    of_block = np.where(block > 0, block, local)
    padded = prompt * (np.ceil(local / of_block) * of_block / local)
    size = np.where(block > 0, block, padded)
    n_rows = padded / size
    width = np.minimum(n_rows, window_blocks(of.window, size))
    keys = (prompt + n_positions) / 2  # of the mean chunk: its positions and those before it
    per_pair = np.where(is_kernel, sequences * n_queries / prompt, 0.0)
    features = np.zeros((len(prompt), len(Feature)))
    features[:, Feature.ONE] = 1.0
    features[:, Feature.SEQUENCES] = sequences
    features[:, Feature.TOKENS] = tokens
    # The last device of cp attends to all blocks before its own: (2 cp - 1) / cp of the mean device's pairs.
    # In chunks, this is true of the pairs within a chunk.
    n_parts = np.where(is_decode, 1.0, prompt / n_positions)
    causal_pairs = size**2 * causal_blocks(n_rows, n_rows)
    features[:, Feature.CAUSAL_PAIRS] = per_pair * causal_pairs * (1 + (cp - 1) / cp / n_parts)
    features[:, Feature.WINDOW_PAIRS] = per_pair * (size**2 * causal_blocks(n_rows, width))
    blocks_of = partial(n_blocks, of, prompt, np.where(is_decode, prompt, n_positions))
    for feature, limit in ((Feature.PAGED_BLOCKS, NO_LIMIT), (Feature.WINDOW_BLOCKS, of.window)):
        of_mean = blocks_of(np.minimum(limit, prompt)) * (1 + (cp - 1) / cp / n_parts)
        features[:, feature] = np.where(is_decode, 0.0, sequences * n_queries / prompt * of_mean)
    features[:, Feature.ALL_PAIRS] = np.where(is_kernel | is_decode, 0.0, tokens * keys)
    features[:, Feature.ALL_SEQUENCES] = n_sequences
    features[:, Feature.HIT_FRAC], features[:, Feature.EMPTY_TILES] = _hits(of, tokens)
    features[:, Feature.CHOSEN_PAIRS] = np.where(
        is_decode, 0.0, tokens * np.minimum(keys, of.chosen)
    )
    if np.any(of.n_end > 0):  # the last tokens of a prompt come with one of its chunks
        end = np.where(is_decode, 0.0, sequences * np.minimum(prompt, of.n_end) / n_parts)
        features[:, Feature.END_TOKENS], features[:, Feature.END_PAIRS] = end, end * prompt
        is_end = of.n_end > 0
        features[:, Feature.END_ONE] = np.where(is_end, 1.0 / n_parts, 0.0)
        features[:, Feature.END_SEQUENCES] = np.where(is_end, n_sequences / n_parts, 0.0)
        features[:, Feature.END_CHOSEN_PAIRS] = end * np.minimum(prompt, of.chosen)
        features[:, Feature.END_HIT_FRAC], features[:, Feature.END_EMPTY_TILES] = _hits(of, end)
    # Positions of a sequence on a device: in the static cache, or in the mean decode step.
    static = np.floor(prompt / cp) + np.ceil(output / cp)
    positions = np.where(is_static, static, (prompt + output / 2) / cp)
    for feature, limit in (
        (Feature.CACHED_POSITIONS, NO_LIMIT),
        (Feature.WINDOW_POSITIONS, of.window),
        (Feature.CHOSEN_POSITIONS, of.chosen),
        (Feature.CANDIDATE_POSITIONS, of.candidates),
    ):
        n_read = np.where(is_static, positions, np.minimum(positions, limit))
        features[:, feature] = np.where(is_decode, sequences * n_read, 0.0)
    return features


def _hits(of: PlanNumbers, tokens: FloatArray) -> tuple[FloatArray, FloatArray]:
    """[n] fraction of the experts that get rows, summed over blocks of tokens, and what their tiles lack.

    A tile of a fused kernel has no more rows than a block has tokens on a device. An expert with several tiles
    has half an empty tile on average, and an expert with a single one what its rows do not fill.
    """
    n_blocks = np.ceil(tokens / of.block_tokens)
    block_tokens = tokens / np.maximum(1.0, n_blocks)
    n_routed = block_tokens * of.routed_tokens
    miss_frac = expert_load.miss_frac(of.miss_frac, n_routed, of.popularity)
    hit_frac = expert_load.most_hit_frac(miss_frac, of.hit_spread)
    of_tile = np.minimum(
        1.0, block_tokens / of.block_tokens * FUSED_BLOCK_TOKENS / expert_load.TILE_ROWS
    )
    filled = n_routed * (1 - of.miss_frac) / expert_load.TILE_ROWS
    empty = np.maximum(of_tile * hit_frac / 2, of_tile * hit_frac - filled)
    return n_blocks * hit_frac, n_blocks * empty


def _is_reduced(
    plans: PlanBatch, row: IntArray, features: FloatArray, payload: FloatArray
) -> BoolArray:
    """[n, collective] whether the compiler makes an all-reduce of it, by the sequences that it has."""
    of = plans.collectives
    of_tick, of_all = features[:, Feature.SEQUENCES, None], features[:, Feature.ALL_SEQUENCES, None]
    n_sequences = np.where(of.n_once[row] > 0, of_all, of_tick)
    is_few = (n_sequences <= of.reduced_for[row]) & (payload > of.reduced_over_bytes[row])
    return is_few | (n_sequences % np.maximum(of.reduced_multiple[row], 1) > 0)


def _strategy_s(
    plans: PlanBatch, row: IntArray, payload: FloatArray, is_reduced: BoolArray
) -> FloatArray:
    """[n, collective] seconds of the fastest strategy that the compiler takes for the payload.

    One strategy after the other: numpy is slow along short axes.
    """
    line = plans.collectives.line[row].astype(int)
    whole, seconds = np.rint(payload), np.full(payload.shape, np.inf)
    for strategy in range(plans.lines.shape[2]):
        latency_s, hops_s, s_per_byte, least, most, of_reduced = (
            np.take(values, line) for values in plans.lines[:, :, strategy]
        )
        by_strategy = latency_s + np.maximum(hops_s, payload * s_per_byte)
        by_strategy[(whole < least) | (whole > most) | (of_reduced != is_reduced)] = np.inf
        np.minimum(seconds, by_strategy, out=seconds)
    return seconds * plans.collectives.factor[row]


def _exposed(is_hidden: FloatArray, seconds: FloatArray, compute_s: FloatArray) -> FloatArray:
    """[n, collective] the seconds, with the hidden ones scaled to what exceeds the compute they overlap."""
    hidden_s = (seconds * is_hidden).sum(axis=1)
    excess = np.maximum(0.0, hidden_s - compute_s)
    frac = np.divide(excess, hidden_s, out=np.zeros_like(excess), where=hidden_s > 0)
    return seconds * np.where(is_hidden > 0, frac[:, None], 1.0)
