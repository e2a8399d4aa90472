"""The time of a step in closed form, for many plans and workloads at once.

Compute: for each part of the model the longer of its products at a share of the peak and its weights
at a share of the HBM's rate, then kernels, the cache, activations, and a constant each time it runs.
Communication: the lines of the interconnect model. Collectives stop the core, as they do in what
libtpu makes of our programs; the ring of cp hides behind attention, and on v5e and tpu7x
weights that fsdp gathers behind the layers. A pipeline takes M + P - 1 ticks of its fullest stage.

Left out: windows and indexers of attention, what fills and drains around the ticks of a pipeline,
and everything that the compiler does otherwise than the program says.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshscope.cost.efficiency import PEAKS, Efficiency, efficiency_of
from meshscope.cost.features import (
    ACTS,
    B_ALL,
    BS,
    CACHE,
    KERNEL,
    MATMUL,
    MOVED,
    PARTS,
    PREFETCHED,
    RUNS,
    TERMS,
    TILES,
    VECTOR,
    WEIGHTS,
    WIDE,
    FloatArray,
    PlanTerms,
    expert_tokens_of_token,
    plan_terms,
)
from meshscope.cost.planned_collectives import CollectiveCost, Hides, collective_costs
from meshscope.cost.rates import KERNEL_FRAC, PASS_FRAC, Rates, rates_of
from meshscope.events.enums import Part, Phase
from meshscope.interconnect import LinkConstants, constants_of
from meshscope.interconnect.profile import ChipProfile
from meshscope.spec.experiment import Experiment
from meshscope.spec.hardware.topology import Topology
from meshscope.spec.plan.kernel_choice import SPLASH_BLOCKS

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanForm:
    """A plan's step in closed form, whatever the workload: one for each phase.

    It holds for workloads that are cut into as many micro-batches, and whose batch sp splits (or
    does not) in decode as it does that of the experiment it was made of.
    """

    phase: Phase
    topology: Topology
    terms: PlanTerms
    lines: tuple[CollectiveCost, ...]
    rates: Rates
    efficiency: Efficiency
    constants: LinkConstants | None
    data_size: int
    cp: int
    n_stages: int
    n_microbatches: int
    has_kernel: bool
    missed_frac: float  # of tokens, those that do not choose a given expert; 1 without experts
    expert_tokens: float  # that may choose a device's experts, for each token that it holds


def plan_form(
    experiment: Experiment,
    phase: Phase,
    *,
    profile: ChipProfile | None = None,
    efficiency: Efficiency | None = None,
) -> PlanForm:
    """The closed form of one phase of a plan; SpecError for a chip without published figures or profile."""
    chip, plan, moe = experiment.topology.chip, experiment.plan, experiment.model.moe
    constants = None if profile is None else profile.constants
    rates = rates_of(chip, profile)
    lines = collective_costs(experiment, phase, constants)
    if lines and constants is None:
        constants = constants_of(chip)
    return PlanForm(
        phase=phase,
        topology=experiment.topology,
        terms=plan_terms(experiment, phase),
        lines=lines,
        rates=rates,
        efficiency=efficiency or (efficiency_of(chip) if rates.measured is None else PEAKS),
        constants=constants,
        data_size=plan.data_size,
        cp=plan.cp,
        n_stages=plan.pp,
        n_microbatches=experiment.n_microbatches(phase),
        has_kernel=experiment.kernels.prefill_attention.kernel is not None,
        missed_frac=1.0 if moe is None else 1 - moe.n_active / moe.n_experts,
        expert_tokens=0.0 if moe is None else expert_tokens_of_token(experiment.model, plan),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClosedSteps:
    """Steps of [n] plans and workloads, in seconds; of each part [n, part] and collective [n, line].

    `lines_s` and `exposed_s` are seconds of the whole step. `quantities` [n, part, quantity] are
    flops and bytes of the step. Lines beyond those of a plan are 0.
    """

    step_s: FloatArray
    compute_s: FloatArray
    bubble_s: FloatArray
    parts_s: FloatArray
    lines_s: FloatArray
    exposed_s: FloatArray
    payload_bytes: FloatArray
    quantities: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stacked:
    """The forms of a batch of plans as arrays over [plan]; lines and strategies are padded."""

    coefficients: FloatArray  # [plan, part, quantity, term]
    matmul_s: FloatArray  # [plan, part] seconds a flop
    vector_s: FloatArray
    kernel_s: FloatArray  # [plan, 1]
    weight_s: FloatArray  # [plan, part] seconds a byte
    matvec_s: FloatArray
    cache_s: FloatArray
    act_s: FloatArray
    wide_s: FloatArray
    moved_s: FloatArray  # [plan, 1]
    tile_s: FloatArray  # [plan, part] seconds a tile
    run_s: FloatArray  # [plan, part]
    is_once: FloatArray  # [part]
    payload: FloatArray  # [plan, line, term]
    latency_s: FloatArray  # [plan, line, strategy]
    s_per_byte: FloatArray
    n_tick: FloatArray  # [plan, line]
    n_once: FloatArray
    behind_attention: FloatArray  # [plan, line]
    behind_layers: FloatArray
    data_size: FloatArray
    cp: FloatArray
    n_microbatches: FloatArray
    n_stages: FloatArray
    has_kernel: FloatArray
    missed_frac: FloatArray
    expert_tokens: FloatArray
    is_decode: FloatArray


def stacked(forms: Sequence[PlanForm]) -> _Stacked:
    """Forms as arrays, to be evaluated together."""
    n_lines = max((len(form.lines) for form in forms), default=0)
    n_strategies = max((len(line.latency_s) for form in forms for line in form.lines), default=1)
    shape = (len(forms), n_lines)
    payload = np.zeros((*shape, len(TERMS)))
    latency_s = np.zeros((*shape, n_strategies))
    s_per_byte = np.zeros((*shape, n_strategies))
    n_tick, n_once = np.zeros(shape), np.zeros(shape)
    behind = {hides: np.zeros(shape) for hides in Hides}
    for p, form in enumerate(forms):
        for m, line in enumerate(form.lines):
            payload[p, m] = line.payload
            latency_s[p, m] = np.inf
            latency_s[p, m, : len(line.latency_s)] = line.latency_s
            s_per_byte[p, m, : len(line.latency_s)] = line.s_per_byte
            n_tick[p, m], n_once[p, m] = line.n_tick, line.n_once
            if line.hides is not None:
                behind[line.hides][p, m] = 1.0

    def of(values: Sequence[float]) -> FloatArray:
        return np.array(values, dtype=float)

    shares = [[form.efficiency.of(part) for part in PARTS] for form in forms]
    flop_s = 1 / of([form.rates.flops_per_s for form in forms])[:, None]
    byte_s = 1 / of([form.rates.hbm_bytes_per_s for form in forms])[:, None]
    clock_hz = of([form.rates.clock_hz or np.inf for form in forms])[:, None]

    def share(name: str) -> FloatArray:
        return np.array([[getattr(one, name) for one in row] for row in shares])

    return _Stacked(
        coefficients=np.array([form.terms.coefficients for form in forms]),
        matmul_s=flop_s / share("matmul"),
        vector_s=flop_s / share("vector"),
        kernel_s=flop_s / KERNEL_FRAC,
        weight_s=byte_s / share("weight"),
        matvec_s=byte_s / share("matvec"),
        cache_s=byte_s / share("cache"),
        act_s=byte_s / share("act"),
        wide_s=byte_s / share("wide"),
        moved_s=byte_s / PASS_FRAC,
        tile_s=share("tile_cycles") / clock_hz,
        run_s=share("run_cycles") / clock_hz,
        is_once=forms[0].terms.is_once if forms else np.zeros(len(PARTS)),
        payload=payload,
        latency_s=latency_s,
        s_per_byte=s_per_byte,
        n_tick=n_tick,
        n_once=n_once,
        behind_attention=behind[Hides.ATTENTION],
        behind_layers=behind[Hides.LAYERS],
        data_size=of([f.data_size for f in forms]),
        cp=of([f.cp for f in forms]),
        n_microbatches=of([f.n_microbatches for f in forms]),
        n_stages=of([f.n_stages for f in forms]),
        has_kernel=of([f.has_kernel for f in forms]),
        missed_frac=of([f.missed_frac for f in forms]),
        expert_tokens=of([f.expert_tokens for f in forms]),
        is_decode=of([f.phase is Phase.DECODE for f in forms]),
    )


def closed_steps(
    forms: _Stacked, at: IntArray, *, batch: FloatArray, prompt: FloatArray, output: FloatArray
) -> ClosedSteps:
    """Steps of [n] workloads; `at` [n] says which of the stacked plans each is for."""
    terms = _terms(forms, at, batch, prompt, output)
    # [n, part, quantity] = [n, part, quantity, term] x [n, term], as one product of small matrices
    quantities = (forms.coefficients[at] @ terms[:, None, :, None])[..., 0]
    parts_s = _parts_s(forms, at, quantities, is_single=_is_single(forms, terms))
    ticks = (forms.n_microbatches + forms.n_stages - 1)[at]
    times = np.where(forms.is_once[None, :] > 0, 1.0, ticks[:, None])
    payload = (forms.payload[at] @ terms[:, :, None])[..., 0]
    strategies = forms.latency_s[at] + payload[..., None] * forms.s_per_byte[at]
    each_s = strategies.min(axis=-1) if strategies.shape[-1] else np.zeros(payload.shape)
    n_tick, n_once = forms.n_tick[at], forms.n_once[at]
    tick_s = each_s * n_tick
    in_layers_s = np.where(forms.is_once > 0, 0.0, parts_s).sum(axis=1)
    exposed_tick_s = _exposed(
        forms.behind_attention[at], tick_s, parts_s[:, PARTS.index(Part.ATTN)]
    )
    exposed_tick_s = _exposed(forms.behind_layers[at], exposed_tick_s, in_layers_s)
    lines_s = tick_s * ticks[:, None] + each_s * n_once
    exposed_s = exposed_tick_s * ticks[:, None] + each_s * n_once
    busy = (forms.n_microbatches[at] / ticks)[:, None]
    whole_parts_s = parts_s * times
    step_s = whole_parts_s.sum(axis=1) + exposed_s.sum(axis=1)
    own_parts_s = np.where(forms.is_once[None, :] > 0, whole_parts_s, whole_parts_s * busy)
    own_exposed_s = exposed_tick_s * ticks[:, None] * busy + each_s * n_once
    return ClosedSteps(
        step_s=step_s,
        compute_s=own_parts_s.sum(axis=1),
        bubble_s=step_s - own_parts_s.sum(axis=1) - own_exposed_s.sum(axis=1),
        parts_s=own_parts_s,
        lines_s=lines_s * busy + each_s * n_once * (1 - busy),
        exposed_s=own_exposed_s,
        payload_bytes=payload,
        quantities=quantities * np.where(forms.is_once[None, :] > 0, 1.0, times * busy)[..., None],
    )


def _terms(
    forms: _Stacked, at: IntArray, batch: FloatArray, prompt: FloatArray, output: FloatArray
) -> FloatArray:
    """[n, term], see TERMS: sizes on one device."""
    is_decode = forms.is_decode[at]
    b_all = batch / forms.data_size[at]
    b = b_all / forms.n_microbatches[at]
    cp = forms.cp[at]
    s = np.where(is_decode, 1.0, prompt / cp)
    block = np.zeros(len(prompt))
    for size in SPLASH_BLOCKS:
        block = np.where((block == 0) & (prompt % size == 0), float(size), block)
    is_kernel = (forms.has_kernel[at] > 0) & (block > 0) & (is_decode == 0)
    is_plain = ~is_kernel & (is_decode == 0)
    causal = np.where(is_kernel, b * s * (prompt + block) / 2, 0.0)
    scores = np.where(is_plain, b * s * prompt, 0.0)
    cached = b * (np.floor(prompt / cp) + np.ceil(output / cp))
    one = np.ones(len(prompt))
    positions = np.where(is_decode > 0, cached, 0.0)
    hit_frac = 1 - forms.missed_frac[at] ** (b * s * forms.expert_tokens[at])
    return np.stack(
        [
            *(one, b, b * s, causal, scores, positions, b_all, hit_frac),
            np.where((b <= 1) & (is_decode == 0), s, 0.0),
            np.where(b * s > 1, one, 0.0),
        ],
        axis=1,
    )


def _is_single(forms: _Stacked, terms: FloatArray) -> NDArray[np.bool_]:
    """[n, part] where the part's products are of one token."""
    n_tokens = np.where(forms.is_once > 0, terms[:, [B_ALL]], terms[:, [BS]])
    return n_tokens <= 1


def _parts_s(
    forms: _Stacked, at: IntArray, quantities: FloatArray, *, is_single: NDArray[np.bool_]
) -> FloatArray:
    """[n, part] seconds each time that the part runs."""

    def of(quantity: int, per: FloatArray) -> FloatArray:
        return quantities[..., quantity] * per[at]

    # A single token reads the table as it comes; several have it fetched ahead.
    alone_s = of(WEIGHTS, forms.matvec_s) + of(PREFETCHED, forms.matvec_s)
    weights_s = np.where(is_single, alone_s, of(WEIGHTS, forms.weight_s))
    products_s = np.maximum(of(MATMUL, forms.matmul_s), weights_s)
    moved_s = of(CACHE, forms.cache_s) + of(ACTS, forms.act_s) + of(WIDE, forms.wide_s)
    moved_s = moved_s + of(MOVED, forms.moved_s) + of(TILES, forms.tile_s)
    computed_s = products_s + of(KERNEL, forms.kernel_s) + of(VECTOR, forms.vector_s)
    return computed_s + moved_s + quantities[..., RUNS] * forms.run_s[at]


def _exposed(hides: FloatArray, lines_s: FloatArray, compute_s: FloatArray) -> FloatArray:
    """The lines with those that hide cut down to what is longer than the compute behind which they run."""
    hidden_s = (lines_s * hides).sum(axis=1)
    shown = np.maximum(0.0, hidden_s - compute_s)
    frac = np.divide(shown, hidden_s, out=np.zeros_like(shown), where=hidden_s > 0)
    return lines_s * np.where(hides > 0, frac[:, None], 1.0)
