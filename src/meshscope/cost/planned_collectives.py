"""Collectives of a plan's step: payload as a function of the workload, and alpha-beta lines.

Payloads are linear in the workload features. Two or three small reference workloads, run through the
prediction engine, determine the coefficients.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from meshscope.cost.features import FloatArray
from meshscope.cost.workload_features import Feature
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Part, Phase, wire_factor
from meshscope.interconnect import LinkConstants, collective_lines, geometry_of
from meshscope.prediction import planned_stages
from meshscope.prediction.planned_collective import PlannedCollective, PlannedStage, PlannedStep
from meshscope.spec.experiment import Experiment
from meshscope.spec.hardware.compiler_facts import compiler_facts
from meshscope.spec.plan.stages import n_ticks, stage_layers
from meshscope.spec.program import Engine
from meshscope.units import array_bytes

LANES = 128  # of a tile


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
    ahead.
    """
    if collective.kind is Kind.PERMUTE and collective.part is Part.ATTN:
        return HiddenBehind.ATTENTION
    facts = compiler_facts(experiment.topology.chip.name)
    is_ahead = facts.has_async_fsdp_gathers.value and phase is Phase.PREFILL
    is_gather = collective.axis == "fsdp" and collective.kind is Kind.ALL_GATHER
    return HiddenBehind.LAYERS if is_ahead and is_gather and is_in_layers else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """One collective of a plan's step: payload per feature, and the time of each strategy.

    A strategy takes `latency_s`, then the longer of `hops_s` and its bytes, if the payload is one of its
    `payloads`.

    It runs `n_tick` times per tick in the stage with the most layers, and `n_once` times per step outside
    the ticks. `hidden_behind` is None for a synchronous collective. `ranges` are the measured payloads.
    """

    part: Part
    kind: Kind
    axis: str
    payload: FloatArray  # [feature]
    latency_s: FloatArray  # [strategy]
    hops_s: FloatArray  # [strategy]
    s_per_byte: FloatArray  # [strategy]
    least_bytes: FloatArray  # [strategy]
    most_bytes: FloatArray  # [strategy]
    n_tick: float
    n_once: float
    wire_factor: float
    hidden_behind: HiddenBehind | None
    ranges: tuple[tuple[int, int], ...]


def collective_costs(
    experiment: Experiment, phase: Phase, constants: LinkConstants
) -> tuple[CollectiveCost, ...]:
    """The collectives of one phase of a plan."""
    references = _references(experiment, phase)
    runs = [list(_runs(_with_workload(experiment, phase, ref), phase)) for ref in references]
    features = [Feature.ONE, Feature.SEQUENCES, Feature.TOKENS][: len(references)]
    rows = [[1.0, ref.b, ref.b * ref.s][: len(references)] for ref in references]
    inverse = np.linalg.inv(np.array(rows))
    costs: list[CollectiveCost] = []
    for at, run in enumerate(runs[0]):
        payloads = [_payload_bytes(other[at].collective) for other in runs]
        payload = np.zeros(len(Feature))
        payload[features] = inverse @ np.array(payloads, dtype=float)
        costs.append(_cost(experiment, constants, run, payload, phase))
    return tuple(costs)


def _cost(
    experiment: Experiment,
    constants: LinkConstants,
    run: "_Run",
    payload: FloatArray,
    phase: Phase,
) -> CollectiveCost:
    collective = run.collective
    geometry = geometry_of(experiment.topology, collective.groups)
    lines = collective_lines(collective.kind, geometry, constants)
    return CollectiveCost(
        part=collective.part,
        kind=collective.kind,
        axis=collective.axis,
        payload=payload,
        latency_s=np.array([line.latency_s for line in lines] or [0.0]),
        hops_s=np.array([line.hops_s for line in lines] or [0.0]),
        s_per_byte=np.array([line.s_per_byte for line in lines] or [0.0]),
        least_bytes=np.array([line.payloads[0] for line in lines] or [0.0]),
        most_bytes=np.array([line.payloads[1] for line in lines] or [np.inf]),
        n_tick=run.n_tick,
        n_once=run.n_once,
        hidden_behind=hidden_behind(experiment, phase, collective, is_in_layers=run.n_tick > 0),
        wire_factor=float(wire_factor(collective.kind, geometry.group_size)),
        ranges=tuple(
            (measured.min_payload_bytes, measured.max_payload_bytes)
            for measured in constants.measured
            if measured.contains(collective.kind, measured.min_payload_bytes, geometry.group_size)
        ),
    )


def _payload_bytes(collective: PlannedCollective) -> int:
    return array_bytes(collective.dtype, collective.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reference:
    """A small workload: `b` sequences per device and micro-batch, prompts of `s` tokens per cp device."""

    b: int
    s: int


def _references(experiment: Experiment, phase: Phase) -> list[_Reference]:
    """Reference workloads in which sp splits the decode batch if and only if it does in the experiment."""
    plan = experiment.plan
    n_local = experiment.n_sequences(phase) // experiment.n_microbatches(phase)
    step = plan.tp if plan.sp and n_local % plan.tp == 0 else 1
    first = step if n_local % max(2, step) == 0 or step > 1 else 1
    second = first + (plan.tp if plan.sp else 1)
    s = LANES * plan.tp
    references = [_Reference(b=first, s=s), _Reference(b=second, s=s)]
    return references if phase is Phase.DECODE else [*references, _Reference(b=first, s=2 * s)]


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
    return replace(experiment, workload=workload, program=program)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A planned collective with its runs per tick and per step outside the ticks."""

    collective: PlannedCollective
    n_tick: float = 0.0
    n_once: float = 0.0


def _runs(experiment: Experiment, phase: Phase) -> Iterator[_Run]:
    """The collectives of one device in the stage with the most layers; equal layers merged."""
    n_tokens = experiment.workload.prompt if phase is Phase.PREFILL else 1
    pp = experiment.plan.pp
    sizes = [len(layers) for layers in stage_layers(experiment.model.n_layers, pp)]
    chosen = {0, sizes.index(max(sizes)), pp - 1}
    step = PlannedStep(phase=phase, n_tokens=n_tokens, n_steps=1)
    stages = planned_stages(experiment, step, chosen=chosen)
    if pp == 1:
        (stage,) = stages
        outside = (*stage.before, *stage.after)
        n_microbatches = 1
    else:
        yield from _stage_sends(experiment, phase, stages)
        # In meshscope's engine, the collectives of all stages follow the last stage.
        outside = tuple(c for s in stages[-2:] for c in s.after if c.part is not Part.STAGE)
        stage = max(stages, key=lambda stage: len(stage.layers))
        n_microbatches = experiment.n_microbatches(phase)
    for collective in outside:
        yield _Run(collective=collective, n_once=float(collective.count))
    yield from _layer_runs(stage, n_microbatches)


def _stage_sends(
    experiment: Experiment, phase: Phase, stages: tuple[PlannedStage, ...]
) -> Iterator[_Run]:
    """Sends between stages: meshscope's programs send in every tick, vLLM once per boundary."""
    pp, ticks = experiment.plan.pp, n_ticks(experiment.n_microbatches(phase), experiment.plan.pp)
    if experiment.engine is Engine.MESHSCOPE:
        sends, scale = stages[0].after, 1 / ticks
    else:
        sends, scale = (*stages[0].after, *stages[1].before), (pp - 1) / pp
    for send in sends:
        if send.part is Part.STAGE and send.kind is not Kind.RECV:
            yield _Run(collective=send, n_tick=send.count * scale)


def _layer_runs(stage: PlannedStage, n_microbatches: int) -> Iterator[_Run]:
    """The collectives of a stage's layers; layers with the same collectives are merged."""
    by_id = {id(collectives): collectives for _, collectives in stage.layers}  # spares hashing
    n_layers: Counter[tuple[PlannedCollective, ...]] = Counter()
    for key, n in Counter(id(collectives) for _, collectives in stage.layers).items():
        n_layers[by_id[key]] += n
    for collectives, n in n_layers.items():
        for collective in collectives:
            yield _Run(collective=collective, n_tick=n * collective.count / n_microbatches)
