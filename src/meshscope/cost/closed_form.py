"""Step time in closed form, for many plans and workloads at once.

Compute: for each model part, the longer of its matrix products and its weight reads, then kernels, cache,
activations and a constant per run, at fitted efficiencies. Communication: the alpha-beta lines of the
interconnect model. Collectives stall the core, as in libtpu's code for these programs, with two
exceptions: the ring of cp overlaps attention, and on v5e and tpu7x the gathers of fsdp weights overlap
the layers. A pipeline takes M + P - 1 ticks of the stage with the most layers.

Left out: indexers of attention, pipeline fill and drain of partial stages, and compiler transformations
beyond `compiler_facts`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshscope.cost.efficiency import PEAKS, ChipEfficiency, efficiency_of
from meshscope.cost.expert_load import routed_tokens_per_token
from meshscope.cost.features import PARTS, Cost, FloatArray, PlanCosts, plan_costs
from meshscope.cost.planned_collectives import CollectiveCost, HiddenBehind, collective_costs
from meshscope.cost.rates import ELEMENTWISE_FRAC, KERNEL_FRAC, Rates, rates_of
from meshscope.cost.workload_features import Feature
from meshscope.events.enums import Part, Phase
from meshscope.interconnect import LinkConstants, constants_of
from meshscope.interconnect.profile import ChipProfile
from meshscope.spec.experiment import Experiment
from meshscope.spec.hardware.topology import Topology
from meshscope.spec.model.flops import causal_blocks, window_blocks
from meshscope.spec.model.model import GroupedAttention
from meshscope.spec.plan.kernel_choice import SPLASH_BLOCKS

IntArray = NDArray[np.int64]
NO_WINDOW = float(1 << 40)  # longer than any prompt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanForm:
    """The closed form of one phase of a plan, for any workload.

    Valid for workloads with the same number of micro-batches, whose decode batch sp splits if and only
    if it does in the original experiment.
    """

    phase: Phase
    topology: Topology
    costs: PlanCosts
    collectives: tuple[CollectiveCost, ...]
    rates: Rates
    efficiency: ChipEfficiency
    constants: LinkConstants
    data_size: int
    cp: int
    n_stages: int
    n_microbatches: int
    has_kernel: bool
    window: float
    miss_frac: float  # of tokens that do not choose a given expert; 1 for a dense model
    routed_tokens: float  # tokens that may choose a device's experts, per token of its tp group


def plan_form(
    experiment: Experiment,
    phase: Phase,
    *,
    profile: ChipProfile | None = None,
    efficiency: ChipEfficiency | None = None,
) -> PlanForm:
    """The closed form of one phase of a plan; SpecError for a chip without published figures or profile."""
    chip, plan, moe = experiment.topology.chip, experiment.plan, experiment.model.moe
    rates = rates_of(chip, profile)
    constants = constants_of(chip) if profile is None else profile.constants
    return PlanForm(
        phase=phase,
        topology=experiment.topology,
        costs=plan_costs(experiment, phase),
        collectives=collective_costs(experiment, phase, constants),
        rates=rates,
        efficiency=efficiency or (efficiency_of(chip) if rates.measured is None else PEAKS),
        constants=constants,
        data_size=plan.data_size,
        cp=plan.cp,
        n_stages=plan.pp,
        n_microbatches=experiment.n_microbatches(phase),
        has_kernel=experiment.kernels.prefill_attention.kernel is not None,
        window=_window(experiment),
        miss_frac=1.0 if moe is None else 1 - moe.n_active / moe.n_experts,
        routed_tokens=0.0 if moe is None else routed_tokens_per_token(experiment.model, plan),
    )


def _window(experiment: Experiment) -> float:
    attention = experiment.model.attention
    window = attention.window if isinstance(attention, GroupedAttention) else None
    return NO_WINDOW if window is None else float(window)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClosedSteps:
    """Times of [n] steps in seconds, by [n, part] and [n, collective].

    `collectives_s` and `exposed_s` cover the whole step, and so do `costs` [n, part, cost]. Collectives
    beyond those of a plan are 0.
    """

    step_s: FloatArray
    compute_s: FloatArray
    bubble_s: FloatArray
    parts_s: FloatArray
    collectives_s: FloatArray
    exposed_s: FloatArray
    payload_bytes: FloatArray
    costs: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanBatch:
    """The closed forms of several plans as arrays over [plan]; collectives and strategies are padded."""

    coefficients: FloatArray  # [plan, part, cost, feature]
    cost_s: FloatArray  # [plan, part, cost] seconds per unit of cost
    matvec_s: FloatArray  # [plan, part] seconds per weight byte of a single token
    is_once: FloatArray  # [part]
    payload: FloatArray  # [plan, collective, feature]
    latency_s: FloatArray  # [plan, collective, strategy]
    hops_s: FloatArray
    s_per_byte: FloatArray
    least_bytes: FloatArray
    most_bytes: FloatArray
    n_tick: FloatArray  # [plan, collective]
    n_once: FloatArray
    behind_attention: FloatArray  # [plan, collective]
    behind_layers: FloatArray
    data_size: FloatArray
    cp: FloatArray
    n_microbatches: FloatArray
    n_stages: FloatArray
    has_kernel: FloatArray
    window: FloatArray
    miss_frac: FloatArray
    routed_tokens: FloatArray
    is_decode: FloatArray


def plan_batch(forms: Sequence[PlanForm]) -> PlanBatch:
    """The closed forms as arrays, for joint evaluation."""

    def by_plan(value: Callable[[PlanForm], float]) -> FloatArray:
        return np.array([value(form) for form in forms], dtype=float)

    def by_collective(
        value: Callable[[CollectiveCost], float | FloatArray], *shape: int, fill: float = 0.0
    ) -> FloatArray:
        return _padded([[value(c) for c in form.collectives] for form in forms], shape, fill)

    n_strategies = max((len(c.latency_s) for form in forms for c in form.collectives), default=1)
    matvec = [[form.efficiency.of_part(part).matvec for part in PARTS] for form in forms]
    return PlanBatch(
        coefficients=np.array([form.costs.coefficients for form in forms]),
        cost_s=np.array([_cost_s(form) for form in forms]),
        matvec_s=1 / by_plan(lambda f: f.rates.hbm_bytes_per_s)[:, None] / np.array(matvec),
        is_once=forms[0].costs.is_once if forms else np.zeros(len(PARTS)),
        payload=by_collective(lambda c: c.payload, len(Feature)),
        latency_s=by_collective(lambda c: c.latency_s, n_strategies, fill=np.inf),
        hops_s=by_collective(lambda c: c.hops_s, n_strategies),
        s_per_byte=by_collective(lambda c: c.s_per_byte, n_strategies),
        least_bytes=by_collective(lambda c: c.least_bytes, n_strategies),
        most_bytes=by_collective(lambda c: c.most_bytes, n_strategies, fill=np.inf),
        n_tick=by_collective(lambda c: c.n_tick),
        n_once=by_collective(lambda c: c.n_once),
        behind_attention=by_collective(lambda c: c.hidden_behind is HiddenBehind.ATTENTION),
        behind_layers=by_collective(lambda c: c.hidden_behind is HiddenBehind.LAYERS),
        data_size=by_plan(lambda f: f.data_size),
        cp=by_plan(lambda f: f.cp),
        n_microbatches=by_plan(lambda f: f.n_microbatches),
        n_stages=by_plan(lambda f: f.n_stages),
        has_kernel=by_plan(lambda f: f.has_kernel),
        window=by_plan(lambda f: f.window),
        miss_frac=by_plan(lambda f: f.miss_frac),
        routed_tokens=by_plan(lambda f: f.routed_tokens),
        is_decode=by_plan(lambda f: f.phase is Phase.DECODE),
    )


def _cost_s(form: PlanForm) -> FloatArray:
    """[part, cost] seconds per unit of cost, at the efficiency of the part."""
    rates = form.rates
    flop_s, byte_s = 1 / rates.flops_per_s, 1 / rates.hbm_bytes_per_s
    clock_hz = rates.clock_hz or np.inf
    cost_s = np.zeros((len(PARTS), len(Cost)))
    for at, part in enumerate(PARTS):
        efficiency = form.efficiency.of_part(part)
        by_cost = {
            Cost.MATMUL_FLOPS: flop_s / efficiency.matmul,
            Cost.KERNEL_FLOPS: flop_s / KERNEL_FRAC,
            Cost.VECTOR_FLOPS: flop_s / efficiency.vector,
            Cost.WEIGHT_BYTES: byte_s / efficiency.weight,
            Cost.CACHE_BYTES: byte_s / efficiency.cache,
            Cost.RESIDUAL_BYTES: byte_s / efficiency.act,
            Cost.WIDE_BYTES: byte_s / efficiency.wide,
            Cost.RUNS: efficiency.run_cycles / clock_hz,
            Cost.TILES: efficiency.tile_cycles / clock_hz,
            Cost.MOVED_BYTES: byte_s / ELEMENTWISE_FRAC,
        }
        for cost, seconds in by_cost.items():
            cost_s[at, cost] = seconds
    return cost_s


def _padded(
    rows: Sequence[Sequence[float | FloatArray]], shape: tuple[int, ...], fill: float
) -> FloatArray:
    """[plan, collective, *shape] of ragged rows; strategies are padded with `fill`, collectives with 0."""
    padded = np.zeros((len(rows), max(map(len, rows), default=0), *shape))
    for p, row in enumerate(rows):
        for m, value in enumerate(row):
            array = np.asarray(value, dtype=float)
            padded[p, m] = fill
            padded[(p, m, *(slice(size) for size in array.shape))] = array
    return padded


def closed_steps(
    plans: PlanBatch,
    at: IntArray,
    *,
    batch: FloatArray,
    prompt: FloatArray,
    output: FloatArray,
) -> ClosedSteps:
    """The steps of [n] workloads; `at` [n] is the plan of each."""
    features = _features(plans, at, batch, prompt, output)
    # [n, part, cost] = [n, part, cost, feature] x [n, feature], as one product of small matrices
    costs = (plans.coefficients[at] @ features[:, None, :, None])[..., 0]
    tick_parts_s = _parts_s(plans, at, costs, is_single=_is_single(plans, features))
    payload = (plans.payload[at] @ features[:, :, None])[..., 0]
    once_s, tick_s, exposed_tick_s = _collectives_s(plans, at, payload, tick_parts_s)

    ticks = (plans.n_microbatches + plans.n_stages - 1)[at][:, None]
    busy_frac = plans.n_microbatches[at][:, None] / ticks
    is_once = plans.is_once[None, :] > 0
    busy_ticks = np.where(is_once, 1.0, ticks * busy_frac)
    parts_s = tick_parts_s * busy_ticks
    exposed_s = exposed_tick_s * ticks * busy_frac + once_s
    step_s = (tick_parts_s * np.where(is_once, 1.0, ticks)).sum(axis=1)
    step_s = step_s + (exposed_tick_s * ticks + once_s).sum(axis=1)
    return ClosedSteps(
        step_s=step_s,
        compute_s=parts_s.sum(axis=1),
        bubble_s=step_s - parts_s.sum(axis=1) - exposed_s.sum(axis=1),
        parts_s=parts_s,
        collectives_s=tick_s * ticks * busy_frac + once_s,
        exposed_s=exposed_s,
        payload_bytes=payload,
        costs=costs * busy_ticks[..., None],
    )


def _collectives_s(
    plans: PlanBatch, at: IntArray, payload: FloatArray, tick_parts_s: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """[n, collective] seconds outside the ticks, per tick, and exposed per tick."""
    run_s = _strategy_s(plans, at, payload[..., None])
    tick_s = run_s * plans.n_tick[at]
    layers_s = np.where(plans.is_once > 0, 0.0, tick_parts_s).sum(axis=1)
    attention_s = tick_parts_s[:, PARTS.index(Part.ATTN)]
    exposed_s = _exposed(plans.behind_attention[at], tick_s, attention_s)
    exposed_s = _exposed(plans.behind_layers[at], exposed_s, layers_s)
    return run_s * plans.n_once[at], tick_s, exposed_s


def _features(
    plans: PlanBatch, at: IntArray, batch: FloatArray, prompt: FloatArray, output: FloatArray
) -> FloatArray:
    """[n, feature] workload sizes on one device."""
    is_decode = plans.is_decode[at] > 0
    cp = plans.cp[at]
    all_sequences = batch / plans.data_size[at]
    sequences = all_sequences / plans.n_microbatches[at]
    n_queries = np.where(is_decode, 1.0, prompt / cp)
    tokens = sequences * n_queries
    block = _splash_block(prompt)
    is_kernel = (plans.has_kernel[at] > 0) & (block > 0) & ~is_decode
    causal_pairs, window_pairs = _block_pairs(prompt, block, plans.window[at])
    per_pair = np.where(is_kernel, sequences * n_queries / prompt, 0.0)
    cached = sequences * (np.floor(prompt / cp) + np.ceil(output / cp))
    features = np.zeros((len(prompt), len(Feature)))
    features[:, Feature.ONE] = 1.0
    features[:, Feature.SEQUENCES] = sequences
    features[:, Feature.TOKENS] = tokens
    features[:, Feature.CAUSAL_PAIRS] = per_pair * causal_pairs
    features[:, Feature.WINDOW_PAIRS] = per_pair * window_pairs
    features[:, Feature.ALL_PAIRS] = np.where(is_kernel | is_decode, 0.0, tokens * prompt)
    features[:, Feature.CACHED_POSITIONS] = np.where(is_decode, cached, 0.0)
    features[:, Feature.ALL_SEQUENCES] = all_sequences
    features[:, Feature.HIT_FRAC] = 1 - plans.miss_frac[at] ** (tokens * plans.routed_tokens[at])
    is_lone = (sequences <= 1) & ~is_decode
    features[:, Feature.LONE_SEQUENCE_TOKENS] = np.where(is_lone, n_queries, 0.0)
    features[:, Feature.SEVERAL_TOKENS] = tokens > 1
    return features


def _splash_block(prompt: FloatArray) -> FloatArray:
    """[n] the largest block of splash attention that divides the prompt; 0 if none does."""
    block = np.zeros(len(prompt))
    for size in SPLASH_BLOCKS:
        block = np.where((block == 0) & (prompt % size == 0), float(size), block)
    return block


def _block_pairs(
    prompt: FloatArray, block: FloatArray, window: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """[n] query-key pairs of one sequence in the blocks of a causal mask, and of a windowed one."""
    size = np.where(block > 0, block, prompt)
    n_rows = prompt / size
    width = np.minimum(n_rows, window_blocks(window, size))
    return size**2 * causal_blocks(n_rows, n_rows), size**2 * causal_blocks(n_rows, width)


def _is_single(plans: PlanBatch, features: FloatArray) -> NDArray[np.bool_]:
    """[n, part] whether the part multiplies a single token."""
    tokens = features[:, [Feature.TOKENS]]
    n_tokens = np.where(plans.is_once > 0, features[:, [Feature.ALL_SEQUENCES]], tokens)
    return n_tokens <= 1


def _parts_s(
    plans: PlanBatch, at: IntArray, costs: FloatArray, *, is_single: NDArray[np.bool_]
) -> FloatArray:
    """[n, part] seconds of one run of the part: products or weight reads, then all other costs."""
    seconds = costs * plans.cost_s[at]
    # A single token reads a prefetched table like any weight; several tokens find it in VMEM.
    single_bytes = costs[..., Cost.WEIGHT_BYTES] + costs[..., Cost.PREFETCHED_BYTES]
    single_s = single_bytes * plans.matvec_s[at]
    weights_s = np.where(is_single, single_s, seconds[..., Cost.WEIGHT_BYTES])
    products_s = np.maximum(seconds[..., Cost.MATMUL_FLOPS], weights_s)
    others = [cost for cost in Cost if cost not in {Cost.MATMUL_FLOPS, Cost.WEIGHT_BYTES}]
    return products_s + seconds[..., others].sum(axis=-1)


def _strategy_s(plans: PlanBatch, at: IntArray, payload: FloatArray) -> FloatArray:
    """[n, collective] seconds of the fastest strategy that the compiler takes for the payload."""
    if not plans.latency_s.shape[-1]:
        return np.zeros(payload.shape[:-1])
    bytes_s = payload * plans.s_per_byte[at]
    whole = np.rint(payload)
    is_taken = (plans.least_bytes[at] <= whole) & (whole <= plans.most_bytes[at])
    by_strategy = plans.latency_s[at] + np.maximum(plans.hops_s[at], bytes_s)
    return np.where(is_taken, by_strategy, np.inf).min(axis=-1)


def _exposed(is_hidden: FloatArray, seconds: FloatArray, compute_s: FloatArray) -> FloatArray:
    """[n, collective] the seconds, with the hidden ones scaled to what exceeds the compute they overlap."""
    hidden_s = (seconds * is_hidden).sum(axis=1)
    excess = np.maximum(0.0, hidden_s - compute_s)
    frac = np.divide(excess, hidden_s, out=np.zeros_like(excess), where=hidden_s > 0)
    return seconds * np.where(is_hidden > 0, frac[:, None], 1.0)
