"""The collectives of a plan as lines: seconds of each by the size of the workload.

Payloads are linear in the terms of `meshscope.cost.features`: two or three small workloads tell the
coefficients, by the same engine that predicts the rows of the table.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from meshscope.cost.features import BS, ONE, TERMS, B, FloatArray
from meshscope.events.enums import Kind, Part, Phase, wire_factor
from meshscope.interconnect import (
    LinkConstants,
    collective_lines,
    constants_of,
    geometry_of,
)
from meshscope.prediction.meshscope_engine import meshscope_stages
from meshscope.prediction.planned_collective import PlannedCollective, PlannedStage, PlannedStep
from meshscope.prediction.vllm_engine import vllm_stages
from meshscope.spec.experiment import Experiment
from meshscope.spec.hardware.compiler_facts import compiler_facts
from meshscope.spec.plan.stages import n_ticks
from meshscope.spec.program import Engine
from meshscope.units import array_bytes

LANE = 128  # tokens of the reference prompts are multiples of this and of what splits a prompt


class Hides(StrEnum):
    """Behind what a collective runs that does not stop the core."""

    ATTENTION = "attention"  # the ring of cp
    LAYERS = "layers"  # weights that fsdp gathers ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """One collective of a plan's step: payload by terms, and the lines of its strategies.

    It runs `n_ticks` times in the layers of the fullest stage (in every micro-batch), and `n_once`
    times outside of them. `hides` says behind what it runs; None: it stops the core. `ranges` are the payloads between which such collectives were measured.
    """

    part: Part
    kind: Kind
    axis: str
    payload: FloatArray  # [term]
    latency_s: FloatArray  # [strategy]
    s_per_byte: FloatArray  # [strategy]
    n_tick: float
    n_once: float
    wire_factor: float
    hides: Hides | None
    ranges: tuple[tuple[int, int], ...]


def collective_costs(
    experiment: Experiment, phase: Phase, constants: LinkConstants | None = None
) -> tuple[CollectiveCost, ...]:
    """The collectives of one phase of a plan; SpecError for a chip without published figures."""
    counted = _counted(experiment, phase)
    if not counted:
        return ()
    constants = constants or constants_of(experiment.topology.chip)
    return tuple(_line(experiment, constants, entry, phase) for entry in counted)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reference:
    """A small workload: `b` sequences on a device in each micro-batch, prompts of `s` on a device of cp."""

    b: int
    s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    """A meeting with its payload by terms, how often it is met in a tick, and how often outside."""

    meeting: PlannedCollective
    payload: FloatArray
    n_tick: float
    n_once: float


def _counted(experiment: Experiment, phase: Phase) -> list[_Counted]:
    """Each meeting with its payload by terms, how often it is met in a tick, and how often outside."""
    references = _references(experiment, phase)
    seen = [_meetings(_with(experiment, phase, reference), phase) for reference in references]
    terms = [ONE, B] if phase is Phase.DECODE else [ONE, B, BS]
    rows = [[1.0, r.b, r.b * r.s][: len(terms)] for r in references]
    inverse = np.linalg.inv(np.array(rows))
    found: list[_Counted] = []
    for at, (meeting, n_tick, n_once) in enumerate(seen[0]):
        sizes = [_payload_bytes(same[at][0]) for same in seen]
        payload = np.zeros(len(TERMS))
        payload[terms] = inverse @ np.array(sizes, dtype=float)
        found.append(_Counted(meeting=meeting, payload=payload, n_tick=n_tick, n_once=n_once))
    return found


def _references(experiment: Experiment, phase: Phase) -> list[_Reference]:
    """Workloads of the same sort as the experiment's: whether sp splits the batch of decode stays as it is."""
    plan = experiment.plan
    n_local = experiment.workload.batch // plan.data_size // experiment.n_microbatches(phase)
    step = plan.tp if plan.sp and n_local % plan.tp == 0 else 1
    first = step if n_local % max(2, step) == 0 or step > 1 else 1
    second = first + (plan.tp if plan.sp else 1)
    s = LANE * plan.tp
    if phase is Phase.DECODE:
        return [_Reference(b=first, s=s), _Reference(b=second, s=s)]
    return [
        _Reference(b=first, s=s),
        _Reference(b=second, s=s),
        _Reference(b=first, s=2 * s),
    ]


def _with(experiment: Experiment, phase: Phase, reference: _Reference) -> Experiment:
    plan, n_microbatches = experiment.plan, experiment.n_microbatches(phase)
    workload = replace(
        experiment.workload,
        batch=reference.b * plan.data_size * n_microbatches,
        prompt=reference.s * plan.cp,
    )
    is_piped = plan.pp > 1 and phase is Phase.PREFILL
    program = replace(experiment.program, microbatches=n_microbatches if is_piped else None)
    return replace(experiment, workload=workload, program=program)


def _meetings(experiment: Experiment, phase: Phase) -> list[tuple[PlannedCollective, float, float]]:
    """What a device of the fullest stage meets, equal layers once with their number."""
    workload = experiment.workload
    step = PlannedStep(
        phase=phase, n_tokens=workload.prompt if phase is Phase.PREFILL else 1, n_steps=1
    )
    engine = meshscope_stages if experiment.engine is Engine.MESHSCOPE else vllm_stages
    stages = engine(experiment, step)
    if experiment.plan.pp == 1:
        (stage,) = stages
        outside = [(m, 0.0, float(m.count)) for m in (*stage.before, *stage.after)]
        return [*outside, *_of_layers(stage, 1)]
    n_microbatches = experiment.n_microbatches(phase)
    fullest = max(stages, key=lambda stage: len(stage.layers))
    # Behind our stages comes what they do together.
    last = [m for stage in stages[-2:] for m in stage.after if m.part is not Part.STAGE]
    outside = [(m, 0.0, float(m.count)) for m in last]
    handed = _handed_on(experiment, phase, stages)
    return [*handed, *outside, *_of_layers(fullest, n_microbatches)]


def _handed_on(
    experiment: Experiment, phase: Phase, stages: tuple[PlannedStage, ...]
) -> list[tuple[PlannedCollective, float, float]]:
    """What goes from stage to stage in each tick: ours in all of them, vLLM's over each boundary once."""
    pp, ticks = experiment.plan.pp, n_ticks(experiment.n_microbatches(phase), experiment.plan.pp)
    if experiment.engine is Engine.MESHSCOPE:
        return [(m, m.count / ticks, 0.0) for m in stages[0].after if m.part is Part.STAGE]
    met = [m for m in (*stages[0].after, *stages[1].before) if m.part is Part.STAGE]
    sent = [m for m in met if m.kind is not Kind.RECV]
    return [(m, m.count * (pp - 1) / pp, 0.0) for m in sent]


def _of_layers(
    stage: PlannedStage, n_microbatches: int
) -> list[tuple[PlannedCollective, float, float]]:
    """The meetings of a stage's layers; layers that meet alike are taken together."""
    kinds: dict[tuple[PlannedCollective, ...], int] = {}
    by_id: dict[int, tuple[PlannedCollective, ...]] = {}
    for _, meetings in stage.layers:
        known = by_id.setdefault(id(meetings), meetings)
        kinds[known] = kinds.get(known, 0) + 1
    return [
        (meeting, n * meeting.count / n_microbatches, 0.0)
        for meetings, n in kinds.items()
        for meeting in meetings
    ]


def _payload_bytes(meeting: PlannedCollective) -> int:
    return array_bytes(meeting.dtype, meeting.shape)


def _hides(experiment: Experiment, phase: Phase, counted: _Counted) -> Hides | None:
    """What libtpu 0.0.42.1 makes asynchronous of our programs.

    On v5e and tpu7x the gathers of a layer's weights in prefill, and on v5e in decode those of the MLP's
    last matrix, which are left out here; on other chips none.
    """
    meeting = counted.meeting
    if meeting.kind is Kind.PERMUTE and meeting.part is Part.ATTN:
        return Hides.ATTENTION
    facts = compiler_facts(experiment.topology.chip.name)
    is_ahead = facts.has_async_fsdp_gathers.value and phase is Phase.PREFILL
    is_gather = meeting.axis == "fsdp" and meeting.kind is Kind.ALL_GATHER
    return Hides.LAYERS if is_ahead and is_gather and counted.n_tick else None


def _line(
    experiment: Experiment,
    constants: LinkConstants,
    counted: _Counted,
    phase: Phase,
) -> CollectiveCost:
    meeting = counted.meeting
    geometry = geometry_of(experiment.topology, meeting.groups)
    lines = collective_lines(meeting.kind, geometry, constants)
    return CollectiveCost(
        part=meeting.part,
        kind=meeting.kind,
        axis=meeting.axis,
        payload=counted.payload,
        latency_s=np.array([line.latency_s for line in lines] or [0.0]),
        s_per_byte=np.array([line.s_per_byte for line in lines] or [0.0]),
        n_tick=counted.n_tick,
        n_once=counted.n_once,
        hides=_hides(experiment, phase, counted),
        wire_factor=float(wire_factor(meeting.kind, geometry.group_size)),
        ranges=tuple(
            (known.min_payload_bytes, known.max_payload_bytes)
            for known in constants.measured
            if known.contains(meeting.kind, known.min_payload_bytes, geometry.group_size)
        ),
    )
