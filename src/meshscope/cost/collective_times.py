"""Collectives of a plan's step: payload as a function of the workload, and alpha-beta lines.

Payloads are linear in the workload features. Two or three small reference workloads, run through the
prediction engine, determine the coefficients.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from msgspec import Struct, structs

from meshscope.cost.collectives import planned_stages
from meshscope.cost.expert_load import exchange_load, is_exchange
from meshscope.cost.features import Feature, FloatArray
from meshscope.cost.planned import NEVER_REDUCED, PlannedCollective, PlannedStage
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Part, Phase
from meshscope.hardware.compiler_facts import compiler_facts
from meshscope.hardware.interconnect.constants import LinkConstants
from meshscope.hardware.interconnect.lines import collective_lines
from meshscope.hardware.interconnect.strategies import GroupGeometry, geometry_of
from meshscope.model.arrays import CACHED_WEIGHTS, LANES, gathered_weights
from meshscope.model.layers import AttentionKind, Layer
from meshscope.model.model import Model
from meshscope.plans.dispatch import DispatchForm, exchange_axes
from meshscope.plans.experiment import Experiment
from meshscope.plans.plan import Plan
from meshscope.plans.program import Engine
from meshscope.plans.stages import layer_kinds, n_ticks, stage_layers
from meshscope.plans.weights import layer_weights
from meshscope.plans.workload import Workload
from meshscope.units import array_bytes

MASK = "pred"  # the dtype of masks, whose payload is not linear in tokens
CACHED_LINES = 1 << 15


class HiddenBehind(StrEnum):
    """Compute that overlaps an asynchronous collective."""

    ATTENTION = "attention"
    LAYERS = "layers"


def hidden_behind(
    experiment: Experiment,
    phase: Phase,
    collective: PlannedCollective | Collective,
    *,
    is_in_layers: bool,
) -> HiddenBehind | None:
    """Compute that overlaps a collective; None for a synchronous one.

    The ring of cp overlaps attention. On some chips, libtpu gathers the fsdp weights of prefill layers
    ahead. The rows of a fused kernel are in flight while it sends the next ones and multiplies.
    """
    if collective.kind is Kind.PERMUTE and collective.part is Part.ATTN:
        return HiddenBehind.ATTENTION
    if collective.kind is Kind.ALL_TO_ALL and experiment.dispatch_form is DispatchForm.FUSED:
        return HiddenBehind.LAYERS
    facts = compiler_facts(experiment.topology.chip.name)
    is_ahead = facts.has_async_fsdp_gathers and phase is Phase.PREFILL
    is_gather = collective.axis == "fsdp" and collective.kind is Kind.ALL_GATHER
    return HiddenBehind.LAYERS if is_ahead and is_gather and is_in_layers else None


class CollectiveRun(Struct, frozen=True, kw_only=True):
    """How often one collective of a plan's step runs.

    It runs `n_tick` times for a micro-batch in the stage with the most layers, `n_pass` times while a
    micro-batch passes through all stages, and `n_once` times per step outside of that. A send between stages
    has the `n_tick` of the slowest boundary; `array` numbers what stages send.
    """

    planned: PlannedCollective
    n_tick: float = 0.0
    n_pass: float = 0.0
    n_once: float = 0.0
    array: int | None = None


class CollectiveCost(CollectiveRun, frozen=True, kw_only=True, eq=False):
    """One collective of a plan's step: its runs, payload [feature] in bytes, and what a payload takes.

    It takes `factor` times as long as its `lines` [6, strategy]. `hidden_behind` is None for a synchronous
    collective.
    """

    payload: FloatArray
    lines: FloatArray
    factor: float
    hidden_behind: HiddenBehind | None


def collective_costs(
    experiment: Experiment, phase: Phase, constants: LinkConstants
) -> tuple[CollectiveCost, ...]:
    """The collectives of one phase of a plan."""
    references = _references(experiment, phase)
    runs = [list(_runs(experiment, phase, reference)) for reference in references]
    payloads = np.array([[run.planned.carried_bytes for run in of] for of in runs], float)
    coefficients = _coefficients(references, payloads)
    # By the identity of the groups: spares hashing.
    lines: dict[tuple[Kind, int, bool], FloatArray] = {}
    costs: list[CollectiveCost] = []
    load = exchange_load(experiment, phase)
    for run, payload in zip(runs[0], coefficients, strict=True):
        planned = run.planned
        is_own = planned.reduced_for == NEVER_REDUCED
        key = (planned.kind, id(planned.groups), is_own)
        if key not in lines:
            groups = experiment.mesh.devices_at(planned.groups)
            geometry = geometry_of(experiment.topology, groups)
            lines[key] = _lines(planned.kind, geometry, constants, is_own=is_own)
        # A mask has a byte for each query and each position that it may attend to.
        pairs = Feature.ALL_PAIRS if phase is Phase.PREFILL else Feature.CACHED_POSITIONS
        is_mask = planned.dtype == MASK
        values = _of_feature(pairs, array_bytes(MASK, (1,))) if is_mask else payload
        cost = CollectiveCost(
            **structs.asdict(run),
            payload=values,
            lines=lines[key],
            factor=load if is_exchange(planned.kind, planned.part) else 1.0,
            hidden_behind=hidden_behind(experiment, phase, planned, is_in_layers=run.n_pass > 0),
        )
        costs.append(cost)
    return tuple(_at_slowest_boundary(costs, references[-1]))


def decode_gathers_s(
    experiment: Experiment, weight_dtypes: Sequence[str], constants: LinkConstants
) -> FloatArray:
    """[weight dtype] seconds in which a decode step gathers the layers' weights over fsdp."""
    model, plan, pp = experiment.model, experiment.plan, experiment.plan.pp
    seconds, every = np.zeros(len(weight_dtypes)), experiment.plan.mesh.groups("fsdp")
    for at, _, n_layers in layer_kinds(model, pp)[1]:
        # Groups of stages follow one another, as pp is outermost.
        stage = next(n for n, of in enumerate(stage_layers(model.n_layers, pp)) if at in of)
        n_each = len(every) // pp
        groups = experiment.mesh.devices_at(every[stage * n_each : (stage + 1) * n_each])
        lines = _lines(
            Kind.ALL_GATHER, geometry_of(experiment.topology, groups), constants, is_own=True
        )
        for n, dtype in enumerate(weight_dtypes):
            of_one = (dtype, experiment.workload.activation_dtype)
            sizes = _gathered_bytes(model, plan.of_weights, model.layers[at], *of_one)
            seconds[n] += n_layers * _fastest_s(lines, sizes).sum()
    return seconds


@lru_cache(maxsize=CACHED_WEIGHTS)
def _gathered_bytes(
    model: Model, plan: Plan, layer: Layer, weight_dtype: str, activation_dtype: str
) -> FloatArray:
    """[gather] the least bytes of the weights of a layer, which may be converted first."""
    arrays = gathered_weights(layer_weights(model, plan, layer), plan)
    sizes = (
        (array_bytes(dtype, shape) for dtype in (w.stored_dtype(weight_dtype), activation_dtype))
        for w, shape in arrays
    )
    return np.array([min(of_dtypes) for of_dtypes in sizes], dtype=float)


def _fastest_s(lines: FloatArray, payload_bytes: FloatArray) -> FloatArray:
    """[n] seconds of the fastest of the lines that are taken for a payload."""
    latency_s, hops_s, s_per_byte, least, most, _ = lines[:, :, None]
    is_taken = (least <= payload_bytes) & (payload_bytes <= most)
    by_strategy = latency_s + np.maximum(hops_s, payload_bytes * s_per_byte)
    return np.where(is_taken, by_strategy, np.inf).min(axis=0)


def _at_slowest_boundary(
    costs: Sequence[CollectiveCost], reference: "_Reference"
) -> Iterator[CollectiveCost]:
    sizes = np.zeros(len(Feature))
    sizes[[Feature.ONE, Feature.SEQUENCES, Feature.TOKENS]] = 1, reference.b, reference.n_tokens
    slowest: dict[int, tuple[float, int]] = {}
    for at, cost in enumerate(costs):
        if cost.array is not None:
            seconds = float(_fastest_s(cost.lines, np.array([cost.payload @ sizes]))[0])
            slowest[cost.array] = max(slowest.get(cost.array, (seconds, at)), (seconds, at))
    kept = {at for _, at in slowest.values()}
    for at, cost in enumerate(costs):
        yield cost if cost.array is None or at in kept else structs.replace(cost, n_tick=0.0)


def with_weights_of(
    costs: Sequence[CollectiveCost], workload: Workload
) -> tuple[CollectiveCost, ...]:
    """The collectives of a plan with weights in another dtype, which changes the bytes of fsdp gathers."""
    planned = [cost.planned.with_weights_of(workload) for cost in costs]
    return tuple(
        structs.replace(cost, payload=_of_feature(Feature.ONE, one.payload_bytes))
        if one.weight is not None
        else cost
        for cost, one in zip(costs, planned, strict=True)
    )


def _of_feature(feature: Feature, value: float) -> FloatArray:
    payload = np.zeros(len(Feature))
    payload[feature] = value
    return payload


def _coefficients(references: Sequence["_Reference"], payloads: FloatArray) -> FloatArray:
    """[collective, feature] bytes by feature, from the payloads of the reference workloads [reference, collective].

    The second reference has more sequences than the first, the third longer prompts.
    """
    first, second, *longer = references
    tokens = np.zeros(payloads.shape[1])
    if longer:
        tokens = (payloads[2] - payloads[0]) / (longer[0].n_tokens - first.n_tokens)
    more = payloads[1] - payloads[0] - tokens * (second.n_tokens - first.n_tokens)
    sequences = more / (second.b - first.b)
    coefficients = np.zeros((payloads.shape[1], len(Feature)))
    coefficients[:, Feature.ONE] = payloads[0] - sequences * first.b - tokens * first.n_tokens
    coefficients[:, Feature.SEQUENCES] = sequences
    coefficients[:, Feature.TOKENS] = tokens
    return coefficients


@lru_cache(maxsize=CACHED_LINES)
def _lines(
    kind: Kind, geometry: GroupGeometry, constants: LinkConstants, *, is_own: bool
) -> FloatArray:
    """[6, strategy] the lines of a kind, and unless it always `is_own`, of the all-reduce that it may become.

    They are latency, seconds of hops, seconds per byte, least and most payload, and 1 for a strategy of the
    all-reduce. A strategy takes its latency, then the longer of hops and bytes.
    """
    lines = [
        (line.latency_s, line.hops_s, line.s_per_byte, *line.payloads, float(number))
        for number, one in enumerate((kind,) if is_own else (kind, Kind.ALL_REDUCE))
        for line in collective_lines(one, geometry, constants)
    ]
    return np.array(lines or [(0.0, 0.0, 0.0, 0.0, np.inf, 0.0)], dtype=float).T


class _Reference(NamedTuple):
    """A small workload: `b` sequences per device and micro-batch, prompts of `s` tokens per cp device."""

    b: int
    s: int

    @property
    def n_tokens(self) -> int:
        """Tokens per device and micro-batch."""
        return self.b * self.s


def batch_is_split(plan: Plan, n_local: int, form: DispatchForm = DispatchForm.AUTO) -> bool:
    """Whether tp divides the decode batch of a device that sp, or an exchange with experts, splits over tp.

    Otherwise sp uses plain tensor parallelism, and an exchange pads the tokens.
    """
    return (plan.sp or "tp" in exchange_axes(plan, form)) and n_local % plan.tp == 0


def _references(experiment: Experiment, phase: Phase) -> list[_Reference]:
    """Reference workloads whose decode batch is split over tp if and only if it is in the experiment."""
    plan, form = experiment.plan, experiment.dispatch_form
    n_local = experiment.n_sequences(phase) // experiment.n_microbatches(phase)
    first = plan.tp if batch_is_split(plan, n_local, form) else 1
    second = first + (plan.tp if batch_is_split(plan, plan.tp, form) else 1)
    # Prompts of more than the tokens that alone pass through all layers.
    s = LANES * plan.tp * ((experiment.model.n_replayed or 0) // (LANES * plan.tp) + 1)
    references = [_Reference(first, s), _Reference(second, s)]
    return references if phase is Phase.DECODE else [*references, _Reference(first, 2 * s)]


def _with_workload(experiment: Experiment, phase: Phase, reference: _Reference) -> Experiment:
    plan, n_microbatches = experiment.plan, experiment.n_microbatches(phase)
    workload = replace(
        experiment.workload,
        batch=reference.b * plan.data_size * n_microbatches,
        prompt=reference.s * plan.cp,
        prefill_chunk=None,
    )
    is_pipelined = plan.pp > 1 and phase is Phase.PREFILL
    program = replace(experiment.program, microbatches=n_microbatches if is_pipelined else None)
    scaled = replace(experiment, workload=workload, program=program)
    attention = experiment.model.attention
    window = attention.window_of(AttentionKind.SLIDING)
    if plan.cp == 1 or window is None:
        return scaled
    # The steps of a ring depend on how many blocks a window spans: as many as in the experiment.
    span = -(-(window - 1) * workload.prompt // experiment.workload.prompt)
    attention = replace(attention, window=span + 1)
    return replace(scaled, model=replace(experiment.model, attention=attention))


def _runs(of_plan: Experiment, phase: Phase, reference: _Reference) -> Iterator[CollectiveRun]:
    """The collectives of a step with their runs; equal layers merged, and stage boundaries over equal links."""
    experiment = _with_workload(of_plan, phase, reference)
    pp, is_cut = experiment.plan.pp, of_plan.prefill_chunks.is_cut
    fullest, kinds = layer_kinds(experiment.model, pp)
    stages = planned_stages(experiment, phase, is_cut=is_cut, chosen=[at for at, _, _ in kinds])
    if pp == 1:
        (stage,) = stages
        outside = (*stage.before, *stage.after)
        n_microbatches = 1
    else:
        n_microbatches = experiment.n_microbatches(phase)
        yield from _stage_sends(experiment, phase, stages)
        # In meshscope's engine, the collectives of all stages follow the last stage.
        ends = (*stages[-1].before, *(c for s in stages[-2:] for c in s.after))
        outside = tuple(c for c in ends if c.part is not Part.STAGE)
        for collective in stages[0].before:
            yield CollectiveRun(
                planned=collective,
                n_tick=collective.count / n_microbatches if fullest == 0 else 0.0,
                n_pass=collective.count / n_microbatches,
            )
    for collective in outside:
        yield CollectiveRun(planned=collective, n_once=float(collective.count))
    of_layer = dict(pair for stage in stages for pair in stage.layers)
    # Kinds of layers with the same collectives in a stage share a tuple of them.
    counts: dict[int, tuple[int, int]] = {}
    for layer, *n_layers in kinds:
        n_tick, n_pass = counts.get(id(of_layer[layer]), (0, 0))
        counts[id(of_layer[layer])] = (n_tick + n_layers[0], n_pass + n_layers[1])
    by_id = {id(of_layer[layer]): of_layer[layer] for layer, _, _ in kinds}
    for key, (n_tick, n_pass) in counts.items():
        for collective in by_id[key]:
            n = collective.count / n_microbatches
            yield CollectiveRun(planned=collective, n_tick=n_tick * n, n_pass=n_pass * n)


def _stage_sends(
    experiment: Experiment, phase: Phase, stages: tuple[PlannedStage, ...]
) -> Iterator[CollectiveRun]:
    """Sends between stages: a micro-batch crosses every boundary once.

    JAX programs of meshscope's engine also send after the last tick.
    """
    pp, ticks = experiment.plan.pp, n_ticks(experiment.n_microbatches(phase), experiment.plan.pp)
    is_own = experiment.engine is Engine.MESHSCOPE
    merged: dict[Hashable, CollectiveRun] = {}
    for boundary in range(pp - 1):
        sends = (*stages[boundary].after, *(() if is_own else stages[boundary + 1].before))
        counted = (s for s in sends if s.part is Part.STAGE and s.kind is not Kind.RECV)
        for array, send in enumerate(counted):
            n = 1 if is_own else send.count
            n_last = send.count - (ticks - 1) if is_own and boundary == pp - 2 else 0
            groups = experiment.mesh.devices_at(send.groups)
            demands = geometry_of(experiment.topology, groups).demands(send.kind)
            links = tuple(demand.legs for demand in demands)
            run = merged.setdefault(
                (array, links), CollectiveRun(planned=send, n_tick=n, array=array)
            )
            merged[array, links] = structs.replace(run, n_pass=run.n_pass + n + n_last)
    yield from merged.values()
